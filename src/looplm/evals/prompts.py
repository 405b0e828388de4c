"""How a problem is asked: the papers' zero-shot boxed prompt, and worked examples before it."""

from collections.abc import Sequence
from dataclasses import dataclass

from looplm.tasks.answers import BOX_INSTRUCTION

Prompt = str | list[dict[str, str]]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A question with its answer; `id` is the same for every model, and `category` sorts problems of one task."""

    id: str
    question: str
    answer: str
    category: str | None = None


@dataclass(frozen=True, kw_only=True)
class Worked:
    """A question solved, as an example: `solution` is all that is written, its box included."""

    question: str
    solution: str


@dataclass(frozen=True, kw_only=True)
class Prompting:
    r"""`instruction`, an empty line, the question: as a user's turn if `chat`, else as text.

    Without examples this is RLTT's evaluation (arXiv 2602.10520: reason step by step, the answer in `\boxed{}`, then
    stop), word for word what training by looplm's math environment asks. `examples` come before it: each as a user's
    and an assistant's turn, every question under the instruction; as text, the instruction once and empty lines
    between.
    """

    instruction: str = BOX_INSTRUCTION
    examples: tuple[Worked, ...] = ()
    chat: bool = True

    def ask(self, question: str) -> Prompt:
        """What the model reads: turns of role and content, or text."""
        if not self.chat:
            examples = [part for each in self.examples for part in (each.question, each.solution)]
            return "".join(f"{part}\n\n" for part in [self.instruction, *examples, question] if part)
        turns = [
            {"role": role, "content": content}
            for each in self.examples
            for role, content in (("user", self._under(each.question)), ("assistant", each.solution))
        ]
        return [*turns, {"role": "user", "content": self._under(question)}]

    def _under(self, question: str) -> str:
        return f"{self.instruction}\n\n{question}" if self.instruction else question


def check_problems(problems: Sequence[Problem]) -> None:
    """Refuse none at all, or two under one id.

    Raises:
        ValueError: in these cases.
    """
    if not problems:
        raise ValueError("there is no problem to solve; give at least one")
    met: set[str] = set()
    for problem in problems:
        if problem.id in met:
            raise ValueError(f"two problems have the id '{problem.id}'; results are paired by id, so give each its own")
        met.add(problem.id)
