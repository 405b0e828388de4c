"""Is there a path from s to t in a directed graph given as shuffled edges? By distance; degrees say nothing."""

import hashlib
import itertools
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from looplm.tasks.example import Example

_ASK = "<ask>"
_ATTEMPTS = 10_000
_SWAPS = 16
Edge = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Reachability:
    """`<3><0><5><3> … <ask><5><0>` -> `<yes>`: edges 3 -> 0, 5 -> 3, …; is 0 reached from 5?

    A question draws its answer by a fair coin and a distance d ~ U{1 … `farthest`}. A path of d edges from s to t is
    laid through random nodes, and random edges are added up to `edges`, all drawn again until t lies at distance d
    and some exchange of two edges' ends, (u -> v), (x -> y) to (u -> y), (x -> v), takes t out of reach. "yes" asks for
    the graph as it is, "no" after the exchange: every node keeps its degrees, so degrees alone say nothing. The
    difficulty is d; of a "no" it is the distance before the exchange. Questions whose hash falls into the share
    `held_out` are never in "train" and are all that "test" asks.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}  # for recipes

    kind: Literal["reachability"] = "reachability"
    nodes: int = 16
    edges: int = 20
    farthest: int = 8
    held_out: float = 0.05
    split: Literal["train", "test"] = "train"

    def __post_init__(self) -> None:
        if not 1 <= self.farthest < self.nodes:
            raise ValueError(f"reachability needs farthest from 1 to nodes - 1 = {self.nodes - 1}, got {self.farthest}")
        if not self.farthest < self.edges <= self.nodes * (self.nodes - 1) // 2:
            raise ValueError(
                f"reachability needs edges above farthest = {self.farthest} and up to half of all pairs = "
                f"{self.nodes * (self.nodes - 1) // 2}, got {self.edges}"
            )
        if not 0 < self.held_out < 1:
            raise ValueError(f"reachability needs held_out between 0 and 1, got {self.held_out}")

    def words(self) -> list[str]:
        """Every token of the task."""
        return [*(f"<{node}>" for node in range(self.nodes)), _ASK, "<yes>", "<no>"]

    def example(self, seed: int) -> Example:
        """The question number `seed` of this split.

        Raises:
            ValueError: if graphs of so many edges at the drawn distance are too rare to be found.
        """
        generator = random.Random(f"reachability/{self.nodes}/{self.edges}/{self.farthest}/{self.split}/{seed}")
        distance = generator.randint(1, self.farthest)
        reached = generator.random() < 0.5
        for _ in range(_ATTEMPTS):
            drawn = self._draw(generator, distance)
            if drawn is None:
                continue
            graph, cut, start, end = drawn
            edges = graph if reached else cut
            generator.shuffle(edges)
            if self.is_held_out(edges, start, end) == (self.split == "test"):
                return self.question(edges, start, end, distance)
        raise ValueError(
            f"reachability finds no {self.split} graph of {self.edges} edges with a pair at distance {distance}; "
            "take fewer edges or a smaller farthest"
        )

    def question(self, edges: Iterable[Edge], start: int, end: int, difficulty: int) -> Example:
        """The question whether `end` is reached from `start`."""
        edges = list(edges)
        text = "".join(f"<{source}><{target}>" for source, target in edges)
        reached = distance(edges, start, end) is not None
        return Example(
            prompt=f"{text}{_ASK}<{start}><{end}>", answer="<yes>" if reached else "<no>", difficulty=difficulty
        )

    def read(self, example: Example) -> tuple[list[Edge], int, int]:
        """The edges, s and t of a question."""
        *ends, start, end = (int(word) for word in re.findall(r"<(\d+)>", example.prompt))
        return list(zip(ends[::2], ends[1::2], strict=True)), start, end

    def is_held_out(self, edges: Iterable[Edge], start: int, end: int) -> bool:
        """Whether the question, in whichever order its edges are told, belongs to the test split."""
        digest = hashlib.sha256(f"{sorted(edges)} {start} {end}".encode()).digest()
        return int.from_bytes(digest[:4], "big") < self.held_out * 2**32

    def grade(self, example: Example, text: str) -> float:
        """1.0 if `text` begins with the answer, else 0.0."""
        return float(text.startswith(example.answer))

    def _draw(self, generator: random.Random, far: int) -> tuple[list[Edge], list[Edge], int, int] | None:
        """A graph with t at distance `far` from s, the same without a path, s, t; None where the draw has no such."""
        path = generator.sample(range(self.nodes), far + 1)
        graph = set(itertools.pairwise(path))
        while len(graph) < self.edges:
            source, target = int(generator.random() * self.nodes), int(generator.random() * self.nodes)
            if source != target:
                graph.add((source, target))
        if distance(graph, path[0], path[-1]) != far:
            return None
        edges = sorted(graph)
        for _ in range(_SWAPS):
            hop = generator.randrange(far)
            u, v, (x, y) = path[hop], path[hop + 1], edges[int(generator.random() * self.edges)]
            if u == y or x == v or (u, y) in graph or (x, v) in graph:
                continue
            cut = graph - {(u, v), (x, y)} | {(u, y), (x, v)}
            if distance(cut, path[0], path[-1]) is None:
                return edges, sorted(cut), path[0], path[-1]
        return None


def distance(edges: Iterable[Edge], start: int, end: int) -> int | None:
    """The least number of edges from `start` to `end`, None where there is no path."""
    following: dict[int, list[int]] = {}
    for source, target in edges:
        following.setdefault(source, []).append(target)
    seen, front, far = {start}, {start}, 0
    while front:
        if end in seen:
            return far
        front = {target for node in front for target in following.get(node, ())} - seen
        seen |= front
        far += 1
    return None
