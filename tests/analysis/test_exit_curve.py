"""Exit curves and exit decoding against brute force."""

import pytest
import torch

from conftest import random_ids, tiny_model
from looplm.analysis.exit_curve import DepthPoint, exit_curve, fixed_depth_points, height_over_fixed, worst_gap
from looplm.analysis.exit_decoding import decode_with_exits
from looplm.analysis.plots import as_svg, exit_curves, lines_by_loop
from looplm.analysis.report import Report


def test_the_curve_by_brute_force():
    generator = torch.Generator().manual_seed(3)
    gates = torch.randn(50, 4, generator=generator)
    correct = torch.rand(50, 4, generator=generator) > 0.5
    weights = torch.rand(50, generator=generator).double()
    weights /= weights.sum()
    for point in exit_curve(gates, correct, weights):
        mean, accuracy = 0.0, 0.0
        for row in range(50):
            survival, left = 1.0, 4
            for loop in range(1, 4):
                survival *= 1 - torch.sigmoid(gates[row, loop - 1].double()).item()
                if point.q < 1 and 1 - survival >= point.q:
                    left = loop
                    break
            mean += weights[row].item() * left
            accuracy += weights[row].item() * correct[row, left - 1].item()
        assert point.mean_loops == pytest.approx(mean)
        assert point.accuracy == pytest.approx(accuracy)
    fixed = fixed_depth_points(correct, weights)
    assert [p.mean_loops for p in fixed] == [1, 2, 3, 4]
    assert fixed[2].accuracy == pytest.approx((weights * correct[:, 2]).sum().item())


def test_heights_by_hand():
    fixed = [DepthPoint(mean_loops=1, accuracy=0.2), DepthPoint(mean_loops=2, accuracy=0.6)]
    curve = [DepthPoint(mean_loops=1.0, accuracy=0.25), DepthPoint(mean_loops=1.5, accuracy=0.35)]
    assert worst_gap(curve, fixed) == pytest.approx(0.35 - 0.4)
    assert height_over_fixed(curve, fixed) == pytest.approx(0.35 - 0.6)
    full = [*curve, DepthPoint(mean_loops=2.5, accuracy=0.95)]
    assert height_over_fixed(full, fixed) == pytest.approx(0.25 - 0.2)  # at loop 2: (0.35 + 0.95) / 2 = 0.65
    assert height_over_fixed(full[1:], fixed[1:]) == pytest.approx(0.65 - 0.6)


@pytest.mark.parametrize("q", [0.2, 0.5, 1.0])
@torch.no_grad()
def test_decoding_reads_each_token_at_its_own_exit(q):
    model, ids = tiny_model(), random_ids(1, 6)
    model.config.eos_token_id = None
    made = decode_with_exits(model, ids, q, 8)
    for token in made:
        out = model(ids, keep_loops="all", use_cache=False)
        assert token.loop == model.exit_loops(out, q)[0, -1]
        assert token.token == model.logits_at(out, token.loop)[0, -1].argmax()
        ids = torch.cat([ids, torch.tensor([[token.token]])], 1)
    assert len(made) == 8


@torch.no_grad()
def test_decoding_stops_at_the_end_token_and_samples_by_seed():
    model, ids = tiny_model(), random_ids(1, 6)
    first = decode_with_exits(model, ids, 0.5, 1)[0].token
    model.config.eos_token_id = first
    assert [token.token for token in decode_with_exits(model, ids, 0.5, 8)] == [first]
    model.config.eos_token_id = None
    model.generation_config.eos_token_id = [60, first]
    assert [token.token for token in decode_with_exits(model, ids, 0.5, 8)] == [first]
    model.generation_config.eos_token_id = None

    def sample(seed):
        generator = torch.Generator().manual_seed(seed)
        return decode_with_exits(model, ids, 0.5, 12, temperature=1.0, generator=generator)

    assert sample(1) == sample(1) != sample(2)


def test_the_page_is_self_contained_and_escapes_text():
    fixed = [DepthPoint(mean_loops=loop, accuracy=loop / 4) for loop in (1, 2, 3, 4)]
    page = Report("A <title>")
    page.figures(
        [(as_svg(exit_curves({"gate": fixed}, fixed)), "one"), (as_svg(lines_by_loop({"a": [1, 2]}, 1, "y")), "2")]
    )
    page.table(["a", "b"], [["<b>", "2"]])
    page.depth_key(4)
    page.depth_text("<e1>", [("<e2>", 1), ("x", 4)])
    text = page.html()
    assert "A &lt;title&gt;" in text
    assert "<td>&lt;b&gt;</td>" in text
    assert "&lt;e2&gt;" in text
    assert text.count("<svg") == 2
    for outside in ("src=", 'href="http', "<script", "@import", "<link"):
        assert outside not in text
