"""Tasks with verifiable answers: `example(seed)` makes a question, `grade(example, text)` marks an answer."""

from looplm.tasks.addition import Addition
from looplm.tasks.capo import Capo
from looplm.tasks.compose import Compose
from looplm.tasks.example import Example
from looplm.tasks.mano import Mano
from looplm.tasks.multi_hop import MultiHop

__all__ = ["Addition", "Capo", "Compose", "Example", "Mano", "MultiHop", "Task"]

Task = Compose | Addition | Mano | Capo | MultiHop
