"""Huginn's study: its dynamics against states recomputed in one call, its verdicts on outcomes of known sign."""

import pytest
import torch

from conftest import random_ids, tiny_model
from looplm.analysis.trajectories import KINDS, classify, spread_of_starts
from looplm.engine import Engine, LogitsKL, SamplingParams
from looplm.studies.loop_dynamics import KL, Look, dynamics
from looplm.studies.recurrence import COLLAPSE, FIXED, IGNORED, LOOPED, RecurrenceStudy
from looplm.studies.study import Outcome

LOOK = Look(rows=2, tokens=12, starts=3, shown=6, prompts=2, completion=5, products=8)
MOST = 16  # loops followed and at most allowed, of a model of 4 and `follow` and `leave` as they are


class Letters:
    def decode(self, tokens):
        return f"<{tokens[0]}>"


@pytest.fixture(scope="module")
def huginn():
    return tiny_model(
        core_layers=1, prelude_layers=1, coda_layers=1, norm_placement="sandwich_dual", norm_in_loop=False,
        injection="concat", state_init="normal", exit_gate=False, loops=4, initializer_range=0.1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def text():
    return random_ids(4, 40)


@pytest.fixture(scope="module")
def seen(huginn, text):
    return dynamics(huginn, Letters(), text, LOOK)


@torch.no_grad()
def states_of(model, ids, loops, seed):
    out = model.model(ids, loops=loops, keep_loops="all", use_cache=False, state_seed=seed)
    return torch.stack([out.states[loop].flatten(0, 1) for loop in range(1, loops + 1)])


def test_states_are_those_of_one_whole_call(huginn, text, seen):
    ids = text[:2, :12]
    loops = 8 * 4
    each = torch.stack([states_of(huginn, ids, loops, seed) for seed in range(3)])
    spread = spread_of_starts(each).mean(-1).tolist()
    assert [x for x, _ in seen.series["spread of starts"]] == list(range(loops + 1))
    assert [y for _, y in seen.series["spread of starts"]][1:] == pytest.approx(spread, rel=1e-3, abs=1e-7)
    assert seen.values["spread of starts"] == pytest.approx(spread[-1], rel=1e-3, abs=1e-7)
    kinds = classify(each[0])
    for index, kind in enumerate(KINDS):
        assert seen.values[f"{kind} share"] == (kinds == index).double().mean().item()
    row = each[0][:, 3:9]  # six tokens amid the first row of twelve
    apart = (row - row[-1]).norm(dim=-1) / row[-1].norm(dim=-1)
    found = [[y for _, y in seen.series[f"distance, token {number:02d}"]] for number in range(6)]
    torch.testing.assert_close(torch.tensor(found), apart[: loops // 2].T, rtol=1e-3, atol=1e-5)
    assert seen.facts["shown tokens"] == [f"<{token}>" for token in ids[0, 3:9].tolist()]


def test_exits_are_the_made_tokens_loops_but_for_the_first(huginn, text, seen):
    stream = text.flatten().tolist()
    prompts = [stream[:16], stream[80:96]]  # the text has 160 tokens
    params = SamplingParams(max_tokens=5, temperature=1.0, ignore_eos=True)
    firsts = []
    for name, warm in (("plain", False), ("continuous", True)):
        engine = Engine(huginn, depth=LogitsKL(KL), loops=MOST, max_length=21, compiled=False)
        made = engine.generate(prompts, params, warm_start=warm)
        loops = [loops for done in made for loops in done.loops[1:]]
        assert len(loops) == 8
        firsts.append([done.loops[0] for done in made])
        assert min(loops) < MOST
        expected = [(float(loop), loops.count(loop) / 8) for loop in range(1, MOST + 1)]
        assert seen.series[f"exits, {name}"] == expected
        assert seen.values[f"KL exit, {name}"] == sum(loops) / 8
    assert firsts[0] == firsts[1]  # no token was made before them whose state they could start from
    assert seen.series["exits, plain"] != seen.series["exits, continuous"]


def test_too_few_loops_or_starts_are_refused():
    with pytest.raises(ValueError, match="follow must be 4 or more, starts 2 or more"):
        Look(starts=1)


def outcome(loss, one, accuracy, correlation, gain=0.1, plain=6.0, continuous=5.0, spread=1e-4, **kinds):
    shares = {f"{kind} share": kinds.get(kind.split()[0], 0.0) for kind in KINDS}
    return Outcome(
        values={
            "text loss": loss, "text loss, 1 loop": one, "accuracy": accuracy, "token correlation": correlation,
            "loops' gain": gain, "KL exit, plain": plain, "KL exit, continuous": continuous, "spread of starts": spread,
            **shares,
        }
    )  # fmt: skip


def test_verdicts_follow_every_seed():
    good = {
        LOOPED: [outcome(1.0, 3.0, 0.8, 0.3, fixed=0.5, orbit=0.3, slider=0.2), outcome(1.1, 2.9, 0.9, 0.4, fixed=1)],
        FIXED: [outcome(1.5, 1.5, 0.2, 0.2), outcome(1.4, 1.4, 0.3, 0.2)],
        COLLAPSE: [outcome(5.0, 5.0, 0.0, 0.999)],
        IGNORED: [outcome(4.0, 4.0, 0.0, 0.5, gain=-5e-4)],
    }
    verdicts = RecurrenceStudy().verdicts(good)
    assert [verdict.holds for verdict in verdicts] == [True, True, True, True, True, True, True, False]
    assert [verdict.effect for verdict in verdicts] == pytest.approx([0.4, 0.6, 1.5, 0.999, 5e-4, 1.0, 1e-4, 2.0])
    bad = good | {
        LOOPED: [outcome(1.45, 1.3, 0.25, 0.995, plain=4.0, spread=0.3), good[LOOPED][1]],
        IGNORED: [outcome(4.0, 4.1, 0.0, 0.5, gain=0.02)],
    }
    assert not any(verdict.holds for verdict in RecurrenceStudy().verdicts(bad))


@pytest.mark.parametrize("scale", ["paper", "cpu", "smoke"])
def test_bad_runs_run_once_and_the_others_at_every_seed(scale, tmp_path):
    jobs = RecurrenceStudy().jobs(scale, 3)
    assert {cell: len(runs) for cell, runs in jobs.items()} == {LOOPED: 3, FIXED: 3, COLLAPSE: 1, IGNORED: 1}
    (once,), (often,), (collapse,) = (jobs[cell][0].recipes(tmp_path) for cell in (FIXED, LOOPED, COLLAPSE))
    assert (once.loops, once.depth, often.depth.kind) == (1, None, "log_normal_poisson")
    assert collapse.optimizer.lr == pytest.approx(10 * often.optimizer.lr)
    assert (collapse.model["norm"], collapse.model["injection"]) == ("plain", "add")
