"""Tasks with verifiable answers: `example(seed)` makes a question, `grade(example, text)` marks an answer."""

from looplm.tasks.addition import Addition
from looplm.tasks.compose import Compose
from looplm.tasks.example import Example

__all__ = ["Addition", "Compose", "Example", "Task"]

Task = Compose | Addition
