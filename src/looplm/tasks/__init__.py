"""Tasks with verifiable answers: `example(seed)` makes a question, `grade(example, text)` marks an answer."""

from looplm.tasks.addition import Addition
from looplm.tasks.capo import Capo
from looplm.tasks.chain import Chain
from looplm.tasks.compose import Compose
from looplm.tasks.example import Example
from looplm.tasks.mano import Mano
from looplm.tasks.multi_hop import MultiHop
from looplm.tasks.reachability import Reachability
from looplm.tasks.running_sum import RunningSum

__all__ = [
    "Addition",
    "Capo",
    "Chain",
    "Compose",
    "Example",
    "Mano",
    "MultiHop",
    "Reachability",
    "RunningSum",
    "Task",
]

Task = Addition | Capo | Chain | Compose | Mano | MultiHop | Reachability | RunningSum
