"""The hand-set layer against networkx: every pair of every graph, at exactly the loops that the theorem allows."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import networkx
import torch
from torch import Tensor

from looplm.studies.path_doubling import Edge, doubling_model, loops_needed, prompts, reached
from looplm.studies.study import Outcome

_FAR = 2**30  # the distance of what is out of reach
_AT_ONCE = 256


@dataclass(frozen=True, kw_only=True)
class DoublingCheck:
    """`stored` graphs in weights, each with `contexts` graphs in context; None is every directed graph there is.

    distinct: of stored graphs that differ in their nodes' names alone, one.

    Random graphs: a path through all nodes, each of its edges stored, given in context or left out, with up to n / 4
    further edges stored and up to n / 2 in context.
    """

    nodes: int
    stored: int | None = None
    contexts: int | None = None
    distinct: bool = False
    seed: int = 0

    def steps(self) -> int:
        """Nothing is trained."""
        return 0

    def __call__(self, folder: Path) -> Outcome:
        """Count the pairs that the model gets wrong."""
        wrong = {"wrong pairs": 0, "wrong pairs, float32": 0, "wrong pairs, no reader": 0}
        graphs = deep = missed = parameters = 0
        for stored, contexts in self._cases():
            models = {
                "wrong pairs": doubling_model(self.nodes, stored),
                "wrong pairs, float32": doubling_model(self.nodes, stored).float(),
                "wrong pairs, no reader": doubling_model(self.nodes, stored, reader=False),
            }
            parameters = sum(parameter.numel() for parameter in models["wrong pairs"].parameters())
            for first in range(0, len(contexts), _AT_ONCE):
                part = contexts[first : first + _AT_ONCE]
                truth = torch.stack([_distances(self.nodes, [*stored, *context]) for context in part])
                ids = prompts(self.nodes, part)
                for name, model in models.items():
                    needed = _needed(truth, reader=model.config.prelude_layers > 0)
                    found = reached(model, ids, int(needed.max()))
                    says = found[needed - 1, torch.arange(len(part))]
                    wrong[name] += int((says != (truth < _FAR)).sum())
                    if name == "wrong pairs":
                        two = needed > 1
                        early = found[needed[two] - 2, torch.arange(len(part))[two]]
                        deep += int(two.sum())
                        missed += int((early != (truth[two] < _FAR)).flatten(1).any(1).sum())
                graphs += len(part)
        return Outcome(
            values={"graphs": graphs, **wrong} | ({"missed a loop earlier": missed / deep} if deep else {}),
            facts={"parameters": parameters},
        )

    def _cases(self) -> Iterator[tuple[list[Edge], list[list[Edge]]]]:
        """Graphs for the weights, each with those for the context."""
        generator = random.Random(f"{self.nodes}/{self.seed}")
        every = _every_graph(self.nodes) if self.contexts is None else []
        if self.stored is None:
            yield from ((stored, every) for stored in every if not self.distinct or _is_first(self.nodes, stored))
            return
        for _ in range(self.stored):
            path = generator.sample(range(self.nodes), self.nodes)
            hops = list(itertools.pairwise(path))
            stored = [hop for hop in hops if generator.random() < 0.4]
            stored = sorted({*stored, *self._edges(generator, self.nodes // 4)})
            rest = [hop for hop in hops if hop not in stored]
            yield stored, every or [self._context(generator, rest) for _ in range(self.contexts or 0)]

    def _context(self, generator: random.Random, hops: list[Edge]) -> list[Edge]:
        kept = generator.choice([0.5, 0.9, 1.0])
        hops = [hop for hop in hops if generator.random() < kept]
        return sorted({*hops, *self._edges(generator, self.nodes // 2)})

    def _edges(self, generator: random.Random, most: int) -> list[Edge]:
        ends = [generator.sample(range(self.nodes), 2) for _ in range(generator.randint(0, most))]
        return [(source, target) for source, target in ends]


def _every_graph(nodes: int) -> list[list[Edge]]:
    pairs = list(itertools.permutations(range(nodes), 2))
    return [
        [pair for pair, there in zip(pairs, chosen, strict=True) if there]
        for chosen in itertools.product((False, True), repeat=len(pairs))
    ]


def _is_first(nodes: int, edges: list[Edge]) -> bool:
    """Whether no renaming of the nodes makes an earlier list of these edges."""
    return all(
        edges <= sorted((names[source], names[target]) for source, target in edges)
        for names in itertools.permutations(range(nodes))
    )


def _distances(nodes: int, edges: list[Edge]) -> Tensor:
    """[n, n] by networkx."""
    graph = networkx.DiGraph()
    graph.add_nodes_from(range(nodes))
    graph.add_edges_from(edges)
    lengths = dict(networkx.all_pairs_shortest_path_length(graph))
    return torch.tensor([[lengths[source].get(target, _FAR) for target in range(nodes)] for source in range(nodes)])


def _needed(distances: Tensor, reader: bool) -> Tensor:
    """[B]: ceil(log2 D) loops for the longest of each graph's distances, or floor(log2 D) + 1 without a reader."""
    farthest = torch.where(distances < _FAR, distances, 0).flatten(1).amax(1).tolist()
    return torch.tensor([loops_needed(far) if reader else max(1, far.bit_length()) for far in farthest])
