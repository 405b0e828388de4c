"""The layer set by hand: rows are exactly what lies within 2^k edges, for every pair of graphs of three nodes."""

import itertools

import networkx
import pytest
import torch

from looplm.studies.path_doubling import doubling_model, loops_needed, prompts, reached
from looplm.studies.path_doubling_check import DoublingCheck, _is_first


def distances(nodes, edges):
    graph = networkx.DiGraph()
    graph.add_nodes_from(range(nodes))
    graph.add_edges_from(edges)
    found = torch.full((nodes, nodes), 1000)
    for source, lengths in networkx.all_pairs_shortest_path_length(graph):
        for target, length in lengths.items():
            found[source, target] = length
    return found


def every_graph(nodes):
    pairs = [(u, v) for u in range(nodes) for v in range(nodes) if u != v]
    return [list(itertools.compress(pairs, chosen)) for chosen in itertools.product((0, 1), repeat=len(pairs))]


def test_every_stored_graph_with_every_context_of_three_nodes():
    graphs = every_graph(3)
    ids = prompts(3, graphs)
    far_apart = {frozenset(edges): distances(3, edges) for edges in graphs}
    for stored in graphs:
        truth = torch.stack([far_apart[frozenset(stored + context)] for context in graphs])
        assert torch.equal(reached(doubling_model(3, stored), ids, 1)[0], truth <= 2)
        assert torch.equal(reached(doubling_model(3, stored, reader=False), ids, 2)[1], truth <= 2)


@pytest.mark.parametrize(("reader", "reach"), [(True, [2, 4, 8, 16]), (False, [1, 3, 7, 15])])
def test_each_loop_doubles_the_paths(reader, reach):
    # A path of 16 edges given in context, its edges told in an order that helps nobody.
    path = [(node, node + 1) for node in range(16)]
    truth = distances(17, path)
    found = reached(doubling_model(17, [], reader), prompts(17, [path[::-1]]), 4)
    for rows, far in zip(found[:, 0], reach, strict=True):
        assert torch.equal(rows, truth <= far)


def test_paths_run_through_stored_and_given_edges_in_turn():
    path = [(node, node + 1) for node in range(8)]
    model = doubling_model(9, path[::2])
    assert torch.equal(reached(model, prompts(9, [path[1::2]]), 3)[2, 0], distances(9, path) <= 8)
    # Without the context the stored edges alone remain.
    assert torch.equal(reached(model, prompts(9, [[]]), 3)[2, 0], distances(9, path[::2]) <= 8)


def test_row_entries_stay_0_or_1_loop_after_loop():
    path = [(node, node + 1) for node in range(31)]
    model, ids = doubling_model(32, path[::3]), prompts(32, [path])
    mask = torch.zeros(1, 1, ids.shape[1], ids.shape[1], dtype=torch.float64)
    with torch.no_grad():
        out = model.model(input_ids=ids, attention_mask=mask, loops=50, keep_loops="all", use_cache=False)
    for state in out.states.values():
        rows = state[..., 32:64]
        assert (rows - rows.round()).abs().max() < 1e-9


def test_needed_loops_are_the_logarithm_rounded_up():
    assert [loops_needed(far) for far in (0, 1, 2, 3, 4, 5, 8, 9, 16)] == [1, 1, 1, 2, 2, 3, 3, 4, 4]


def test_the_check_counts_what_the_model_gets_wrong(monkeypatch, tmp_path):
    check = DoublingCheck(nodes=6, stored=2, contexts=20)
    right = check(tmp_path).values
    assert right["graphs"] == 40
    assert right["wrong pairs"] == right["wrong pairs, float32"] == right["wrong pairs, no reader"] == 0
    assert right["missed a loop earlier"] == 1
    monkeypatch.setattr("looplm.studies.path_doubling_check.reached", lambda *given: ~reached(*given))
    assert check(tmp_path).values["wrong pairs"] == 40 * 36


def test_graphs_that_differ_in_names_alone_are_taken_once():
    # Directed graphs up to renaming: 1, 3, 16, 218 (OEIS A000273).
    for nodes, count in ((1, 1), (2, 3), (3, 16), (4, 218)):
        assert sum(_is_first(nodes, edges) for edges in every_graph(nodes)) == count
