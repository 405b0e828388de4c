"""Tasks with verifiable answers: `example(seed)` makes a question, `grade(example, text)` marks an answer."""

from looplm.tasks.addition import Addition
from looplm.tasks.compose import Compose
from looplm.tasks.example import Example
from looplm.tasks.mano import Mano
from looplm.tasks.reachability import Reachability

__all__ = ["Addition", "Compose", "Example", "Mano", "Reachability", "Task"]

Task = Compose | Addition | Mano | Reachability
