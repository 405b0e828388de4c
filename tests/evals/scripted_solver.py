"""A solver whose answers a test writes: a token a character, `loops` of its depth each."""

from collections.abc import Callable, Sequence

from looplm.engine import FixedLoops
from looplm.evals.prompts import Prompt
from looplm.evals.solvers import Attempt
from looplm.tasks.answers import last_boxed


class Scripted:
    """Answers `script(prompt, loops, number of the sample)`; counts how often it is asked."""

    def __init__(self, script: Callable[[str, int, int], str]) -> None:
        self.script, self.calls, self.seeds = script, 0, []
        self.settings = {"temperature": 0.5}

    def complete(
        self, prompts: Sequence[Prompt], seeds: Sequence[Sequence[int]], depth: FixedLoops, limit: int
    ) -> list[list[Attempt]]:  # fmt: skip
        self.calls += 1
        self.seeds.append(seeds)
        return [
            [self._attempt(str(prompt), depth.loops, number, limit) for number in range(len(each))]
            for prompt, each in zip(prompts, seeds, strict=True)
        ]

    def text(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def _attempt(self, prompt: str, loops: int, number: int, limit: int) -> Attempt:
        text = self.script(prompt, loops, number)
        tokens = [ord(letter) for letter in text[:limit]]
        return Attempt(token_ids=tokens, loops=[loops] * len(tokens), finished=len(text) <= limit)


def same_box(golds: Sequence[str], texts: Sequence[str]) -> list[float | None]:
    """1 where the last box is the gold to the letter; no mark for the gold "?"."""
    return [None if gold == "?" else float(last_boxed(text) == gold) for gold, text in zip(golds, texts, strict=True)]
