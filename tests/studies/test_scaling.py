"""The scaling study on losses that a law of known exponent made: what it fits, judges and draws."""

import pytest

from looplm.studies.scaling import SHAPES, ScalingStudy
from looplm.studies.study import Outcome


def results(phi, loop_gain=0.3):
    """Every run of the grid under L = 1.5 + 0.8 N^-0.45 + 0.6 D^-0.35, each loop before the last reading worse."""
    found = {}
    for shape, (layers, loops) in SHAPES.items():
        for width in (48, 64, 96, 128):
            for steps in (400, 800, 1600):
                once, recurrent, tokens = 512 * width, 12 * layers * width**2, 512 * steps
                size = (once + loops**phi * recurrent) / 1e5
                last = 1.5 + 0.8 * size**-0.45 + 0.6 * (tokens / 1e5) ** -0.35
                losses = [last + loop_gain * (1 / loop - 1 / loops) for loop in range(1, loops + 1)]
                found[f"{shape}, width {width}, {steps} steps"] = [
                    Outcome(
                        values={"loss": last, **{f"loss at loop {t}": x for t, x in enumerate(losses, start=1)}},
                        series={"loops": [(float(t), x) for t, x in enumerate(losses, start=1)]},
                        facts={"once": once, "recurrent": recurrent, "tokens": tokens, "loops": float(loops),
                               "parameters": 2 * once + recurrent},
                    )
                ]  # fmt: skip
    return found


def test_the_exponent_that_made_the_losses_is_found_and_judged():
    verdicts = ScalingStudy().verdicts(results(0.46))
    assert all(verdict.holds for verdict in verdicts[:2] + verdicts[3:])
    assert verdicts[0].effect == pytest.approx(0.46, abs=0.01)
    assert verdicts[2].effect == pytest.approx(0.0, abs=0.01)
    assert verdicts[-1].effect == pytest.approx(-0.3 * (1 - 1 / 4))


def test_loops_that_are_worth_nothing_are_told_so():
    worthless = ScalingStudy().verdicts(results(-0.1, loop_gain=-0.1))
    assert [verdict.holds for verdict in worthless] == [False, True, False, False, False, False]
    assert worthless[0].effect == pytest.approx(-0.1, abs=0.01)


def test_rows_are_shapes_and_widths_and_the_effective_parameters_fall_on_one_line():
    study, found = ScalingStudy(), results(0.46)
    rows = study.rows(found)
    assert len(rows) == 4 * 4
    row = rows["1x4, width 64"][0]
    assert list(row.values) == ["loss at 0.2M tokens", "loss at 0.41M tokens", "loss at 0.82M tokens"]
    assert row.values["loss at 0.82M tokens"] == found["1x4, width 64, 1600 steps"][0].values["loss"]
    axes = study.figures(found)["effective"][0].axes[0]
    points = sorted(
        (x, y) for line in axes.get_lines() for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
    )
    assert len(points) == 16
    heights = [y for _, y in points]
    assert heights == sorted(heights, reverse=True)  # by unique parameters they are not
    assert all(len(jobs) == 1 for jobs in study.jobs("cpu", 3).values())
