"""The benchmark of depth policies: loss, accuracy and depths are those that reading every loop afterwards shows."""

import json
import statistics

import pytest
import torch
from torch.nn import functional as F
from typer.testing import CliRunner

import looplm
from conftest import random_ids, tiny_config, tiny_model
from looplm.analysis.exit_curve import exit_curve
from looplm.cli.main import app
from looplm.data.tokenizer import train_tokenizer
from looplm.engine import Engine, ExitCDF, FixedLoops, Margin, SamplingParams
from looplm.studies.bench_policies import FIXED, PoliciesProblem, bench_policies, draw, read_questions, read_text
from looplm.studies.depth_probe import probe_questions
from looplm.tasks import Compose

ROWS = random_ids(6, 40)
SMALL = PoliciesProblem(requests=3, tokens=6, rows=2, points=2, families=("exit_cdf", "margin"))
WORLD = Compose(entities=4, relations=2, held_out=0.5)


@pytest.fixture
def questions():
    tokenizer = train_tokenizer(["x"], 300, WORLD.words())
    torch.manual_seed(0)
    return looplm.LoopLMForCausalLM(tiny_config(vocab_size=len(tokenizer))).eval(), tokenizer


@torch.no_grad()
def test_loss_is_that_of_the_loops_where_tokens_leave():
    model = tiny_model()
    held_out = read_text(model, ROWS, requests=3)
    out = model(ROWS, keep_loops="all", use_cache=False)
    for q in (0.2, 0.5, 0.8):
        exits = model.exit_loops(out, q)[:, :-1].double()
        logits = model.logits_at_exit(out, q)[:, :-1].flatten(0, 1)
        wanted = F.cross_entropy(logits, ROWS[:, 1:].flatten()).item()
        assert held_out.outcome(ExitCDF(q)) == pytest.approx((exits.mean().item(), wanted), abs=1e-5)
    for loops in (1, 2, 3):
        logits = model(ROWS, loops=loops).logits[:, :-1].flatten(0, 1)
        wanted = F.cross_entropy(logits, ROWS[:, 1:].flatten()).item()
        assert held_out.outcome(FixedLoops(loops)) == pytest.approx((loops, wanted), abs=1e-5)


def test_accuracy_is_that_of_the_probe_at_the_same_exits(questions):
    model, tokenizer = questions
    held_out = read_questions(model, tokenizer, WORLD, requests=3)
    probe = probe_questions(model, tokenizer, WORLD, 3)
    for point in exit_curve(probe.gate_logits, probe.correct, probe.weights, (0.0, 0.3, 0.5, 0.7, 1.0)):
        assert held_out.outcome(ExitCDF(point.q)) == pytest.approx((point.mean_loops, point.accuracy))
    words = [tokenizer.decode(prompt) for prompt in held_out.prompts]
    assert all(word.startswith("<e") and word.endswith("<ask>") for word in words)


def test_every_policy_is_timed_at_thresholds_that_spread_its_loops():
    model = tiny_model()
    rows = bench_policies(model, read_text(model, ROWS, SMALL.requests), SMALL, repeats=1)
    assert [(row.policy, row.threshold) for row in rows[:3]] == [(FIXED, loops) for loops in (1, 2, 3)]
    assert [row.made_loops for row in rows[:3]] == [1, 2, 3]
    for family in SMALL.families:
        reached = [row.mean_loops for row in rows if row.policy == family]
        assert reached == pytest.approx([1 + 2 / 3, 1 + 4 / 3], abs=0.02)
    assert min(row.tokens_per_second for row in rows) > 0


def test_on_text_the_engine_asks_the_policy_for_every_token():
    model = tiny_model()
    held_out = read_text(model, ROWS, SMALL.requests)
    timed = bench_policies(model, held_out, SMALL, repeats=1)[-1]
    engine = Engine(model, depth=Margin(timed.threshold), max_length=64)
    params = [SamplingParams(max_tokens=6, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(3)]
    loops = [loop for done in engine.generate(held_out.prompts, params) for loop in done.loops]
    assert timed.policy == "margin"
    assert timed.made_loops == statistics.mean(loops)


def test_on_questions_the_engine_does_the_loops_of_the_answers(questions):
    model, tokenizer = questions
    problem = PoliciesProblem(requests=8, tokens=60, rows=8, points=2, families=("exit_cdf",))
    for row in bench_policies(model, read_questions(model, tokenizer, WORLD, 8), problem, repeats=1):
        assert row.made_loops == pytest.approx(row.mean_loops, abs=0.15)  # 480 draws


def test_a_policy_that_a_model_cannot_have_is_left_out_or_refused():
    model = tiny_model(exit_gate=False)
    held_out = read_text(model, ROWS, 1)
    rows = bench_policies(model, held_out, PoliciesProblem(requests=1, tokens=2, points=1), repeats=1)
    assert {row.policy for row in rows} == {
        FIXED, "state_converged", "step_below", "cosine_converged", "logits_kl", "entropy_below", "margin",
    }  # fmt: skip
    with pytest.raises(ValueError, match="exit gate"):
        bench_policies(model, held_out, SMALL, repeats=1)


def test_the_figure_has_a_line_for_every_policy():
    model = tiny_model()
    rows = bench_policies(model, read_text(model, ROWS, SMALL.requests), SMALL, repeats=1)
    for measure, factor in (("loss", 1), ("accuracy", 100)):
        (axes,) = draw(rows, measure).axes
        lines = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
        assert set(lines) == {"fixed depth", *SMALL.families}
        for name, points in lines.items():
            wanted = [[row.tokens_per_second, factor * row.measured] for row in rows if row.policy == name]
            assert points == pytest.approx(torch.tensor(wanted, dtype=torch.float64).numpy())


def test_mistakes_are_named(questions):
    with pytest.raises(ValueError, match="policy 'fixed' has no threshold; choose from exit_cdf"):
        PoliciesProblem(families=("fixed",))
    with pytest.raises(ValueError, match="points=0 must be at least 1"):
        PoliciesProblem(points=0)
    with pytest.raises(ValueError, match="the text has 240 tokens, too few for 11 prompts of 24"):
        read_text(tiny_model(), ROWS, requests=11)
    with pytest.raises(ValueError, match="has no '<e4>'"):
        read_questions(*questions, Compose(), 1)


def test_the_verb_prints_json_and_a_table_and_draws(tmp_path, text):
    tokenizer = train_tokenizer([text.read_text()], 300)
    torch.manual_seed(0)
    looplm.save(looplm.LoopLMForCausalLM(tiny_config(vocab_size=len(tokenizer))), tmp_path)
    tokenizer.save_pretrained(tmp_path)

    def run(*arguments):
        sizes = ["--requests", "2", "--tokens", "2", "--points", "1", "--repeats", "1", "--policy", "margin"]
        return CliRunner().invoke(app, ["bench", "policies", str(tmp_path), *map(str, arguments), *sizes])

    found = json.loads(run(text, "--json", "--plot", tmp_path / "new" / "figure.png").output)
    assert found["problem"]["measure"] == "loss"
    assert [row["policy"] for row in found["rows"]] == [FIXED] * 3 + ["margin"]
    assert (tmp_path / "new" / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "margin" in run().output
    for arguments, message in (
        ((text, "--questions"), f"--questions asks the demo's own; leave the text '{text}' out"),
        (("--plot", "figure.txt"), "--plot figure.txt: a figure's name ends in one of .svg, .png, .pdf"),
        (("--questions",), "the checkpoint's tokenizer has no '<e0>': it has not learned the demo's questions"),
    ):
        refused = run(*arguments)
        assert (refused.exit_code, refused.output) == (1, f"looplm: {message}\n")
