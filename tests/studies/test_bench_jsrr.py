"""The benchmark of the stability term: what it runs, and the price of the recommended form counted in products."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from looplm.cli.main import app
from looplm.studies.bench_jsrr import FORMS, RECOMMENDED, JsrrProblem, bench_jsrr, training_step

TINY = JsrrProblem(width=8, layers=1, loops=3, vocab=32, length=8, rows=2)


def flops(form):
    step = training_step(JsrrProblem(), FORMS[form])
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


def test_the_recommended_form_is_cheap_in_products():
    """Two rows in place of one in eight, through one loop more: below the bar of 1.15 with room for everything else."""
    plain = flops("plain")
    assert 1.02 * plain < flops(RECOMMENDED) < 1.08 * plain
    assert flops("finite difference") > 1.2 * plain
    assert flops("secant ratio") == flops("adjacent L2") == plain


def test_every_form_is_timed_and_named():
    rows = bench_jsrr(TINY, repeats=1)
    assert [row.form for row in rows] == list(FORMS)
    assert (rows[0].time_ratio, rows[0].memory_ratio, rows[0].estimates) == (1.0, 1.0, "")
    assert all(row.seconds > 0 and row.time_ratio > 0 and row.estimates for row in rows[1:])
    assert next(row for row in rows if row.form == "vector-jacobian (code)").memory_ratio > 1


@pytest.mark.parametrize("form", [form for form in FORMS if form != "plain"])
def test_a_step_under_a_form_learns_something_else(form, monkeypatch):
    moved = []
    for name in ("plain", form):
        model = TINY.model()
        monkeypatch.setattr(JsrrProblem, "model", lambda self, model=model: model)
        training_step(TINY, FORMS[name])()
        moved.append(torch.cat([parameter.detach().flatten() for parameter in model.model.core.parameters()]))
        monkeypatch.undo()
    assert not torch.equal(*moved)


def test_the_verb_prints_json_and_a_table():
    sizes = ["--width", "8", "--layers", "1", "--vocab", "32", "--length", "8", "--rows", "2", "--repeats", "1"]
    found = json.loads(CliRunner().invoke(app, ["bench", "jsrr", *sizes, "--loops", "3", "--json"]).output)
    assert found["problem"] == {"width": 8, "layers": 1, "loops": 3, "vocab": 32, "length": 8, "rows": 2}
    assert found["recommended"] in [row["form"] for row in found["rows"]]
    printed = CliRunner().invoke(app, ["bench", "jsrr", *sizes]).output
    assert "recommended: finite difference, 1 row in 8" in printed
    assert "jacobian-vector (paper) estimates ||J||_F^2 / n" in printed
    refused = CliRunner().invoke(app, ["bench", "jsrr", "--width", "100"])
    assert refused.exit_code == 1
    assert refused.output == "looplm: --width 100 must be a multiple of 64, the width of an attention head\n"
