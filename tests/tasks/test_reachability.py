"""Reachability against networkx: answers, distances, degrees that are equal by construction, and splits."""

import random
from collections import Counter
from dataclasses import replace

import networkx
import pytest

from looplm.tasks import Reachability
from looplm.tasks.reachability import distance

TASK = Reachability(nodes=10, edges=13, farthest=5)
EXAMPLES = [TASK.example(seed) for seed in range(1000)]


def graph_of(example):
    edges, start, end = TASK.read(example)
    graph = networkx.DiGraph()
    graph.add_nodes_from(range(TASK.nodes))
    graph.add_edges_from(edges)
    assert len(edges) == graph.number_of_edges() == 13  # none is told twice
    return graph, start, end


def test_answers_and_distances_are_those_of_networkx():
    for example in EXAMPLES:
        graph, start, end = graph_of(example)
        assert start != end
        assert networkx.number_of_selfloops(graph) == 0
        assert (example.answer == "<yes>") == networkx.has_path(graph, start, end)
        if example.answer == "<yes>":
            assert networkx.shortest_path_length(graph, start, end) == example.difficulty
        found = distance(graph.edges, start, end)
        assert found == (example.difficulty if example.answer == "<yes>" else None)


def test_answers_are_balanced_at_every_distance():
    counts = Counter((example.difficulty, example.answer) for example in EXAMPLES)
    assert sorted(counts) == [(far, answer) for far in range(1, 6) for answer in ("<no>", "<yes>")]
    assert all(abs(count - 100) < 40 for count in counts.values())  # four standard deviations


def test_both_answers_ask_of_graphs_with_the_same_degrees():
    # The two graphs that a draw gives differ by one exchange of two edges' ends.
    generator, drawn = random.Random(0), []
    while len(drawn) < 50:
        found = TASK._draw(generator, 3)
        if found is not None:
            drawn.append(found)
    for graph, cut, start, end in drawn:
        assert (distance(graph, start, end), distance(cut, start, end)) == (3, None)
        assert len(set(graph) - set(cut)) == len(set(cut) - set(graph)) == 2
        for side in (0, 1):
            assert Counter(edge[side] for edge in graph) == Counter(edge[side] for edge in cut)


def test_the_splits_share_no_question_whatever_the_order_of_edges():
    def key(example):
        edges, start, end = TASK.read(example)
        return (*sorted(edges), start, end)

    test = [replace(TASK, split="test").example(seed) for seed in range(50)]
    assert all(TASK.is_held_out(*TASK.read(example)) for example in test)
    assert not {key(example) for example in test} & {key(example) for example in EXAMPLES}
    edges, start, end = TASK.read(test[0])
    assert TASK.is_held_out(edges[::-1], start, end)


def test_grading_and_words():
    example = EXAMPLES[0]
    other = {"<yes>": "<no>", "<no>": "<yes>"}[example.answer]
    assert TASK.grade(example, example.answer) == 1
    assert TASK.grade(example, other) == TASK.grade(example, "") == 0
    words = set((example.prompt + example.answer)[1:-1].split("><"))
    assert words <= {word[1:-1] for word in TASK.words()}


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"farthest": 0}, "farthest"), ({"farthest": 16}, "farthest"), ({"edges": 8}, "edges"),
     ({"edges": 121}, "edges"), ({"held_out": 1.0}, "held_out")],
)  # fmt: skip
def test_settings_without_sense_are_refused(settings, named):
    with pytest.raises(ValueError, match=named):
        Reachability(**settings)


def test_graphs_too_rare_to_be_found_say_so(monkeypatch):
    monkeypatch.setattr("looplm.tasks.reachability._ATTEMPTS", 3)
    crowded = Reachability(nodes=12, edges=66, farthest=11)
    far = next(seed for seed in range(100) if random.Random(f"reachability/12/66/11/train/{seed}").randint(1, 11) == 11)
    with pytest.raises(ValueError, match="finds no train graph of 66 edges with a pair at distance 11"):
        crowded.example(far)
