"""The RL loop: what was sampled is what is trained, nothing moves without a reason, and a run resumes exactly."""

import json
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rl_runs import read_log, write_recipe
from safetensors.torch import load_file

import looplm
from looplm.models import save
from looplm.rl import loop, rollouts
from looplm.rl.run import engine_source, reinforce
from looplm.training.module import MetricSums

EARLY = "sampling.depth={kind: early, family: exit_cdf, threshold: 0.5}"
QUIET = Console(file=StringIO())
HUGINN = {
    "prelude_layers": 1, "core_layers": 1, "coda_layers": 1, "norm_placement": "sandwich_dual", "norm_in_loop": False,
    "injection": "concat", "state_init": "normal",
}  # fmt: skip


def run(recipe):
    return reinforce(recipe, QUIET)


def weights_of(checkpoint):
    return load_file(checkpoint / "model.safetensors")


@pytest.mark.parametrize("parts", [{}, HUGINN], ids=["ouro-like", "huginn-like"])
@pytest.mark.parametrize("kv", ["full", "recomputed"])
def test_without_a_step_every_ratio_stays_one(tmp_path, parts, kv):
    """Temperature 0.6, early exit, three updates in a row at rate 0 (R33)."""
    recipe = write_recipe(tmp_path, (EARLY, "optimizer.lr=1e-30", f"sampling.kv={kv}", "log_every=1"), **parts)
    run(recipe)
    records = [record for record in read_log(tmp_path / "run") if "ratio" in record]
    assert len(records) == 3
    for record in records:
        assert 1 < record["mean_loops"] < 3
        assert abs(record["ratio"] - 1) < 1e-4
        assert record["ratio_drift"] < 1e-4
        assert record["clipped"] == 0


@pytest.mark.parametrize("loops", [1, 2, 5])
def test_a_fixed_depth_may_be_any(tmp_path, loops):
    run(write_recipe(tmp_path, (f"sampling.depth={{kind: fixed, loops: {loops}}}", "steps=1")))
    (record,) = [record for record in read_log(tmp_path / "run") if "ratio" in record]
    assert record["mean_loops"] == loops
    assert record["ratio_drift"] < 1e-4
    assert f"weight_loop{loops}" in record


def test_what_is_not_what_sampled_is_refused(tmp_path, monkeypatch):
    """A store that is not filled, as if training did not know of early exits."""
    recipe = write_recipe(tmp_path, (EARLY,))
    real = rollouts.EngineRollouts._rollout

    def forgetful(self, done):
        rollout = real(self, done)
        return rollouts.Rollout(**{**vars(rollout), "loops": [3] * len(rollout.loops)})

    monkeypatch.setattr(rollouts.EngineRollouts, "_rollout", forgetful)
    with pytest.raises(ValueError, match=r"step 0: log-probabilities in training lie .* more than max_drift=0.001"):
        run(recipe)


def test_a_sharing_that_cannot_be_replayed_is_refused(tmp_path):
    with pytest.raises(ValueError, match="kv='last' shares keys between loops in a way that training cannot replay"):
        write_recipe(tmp_path, ("sampling.kv=last",))


@pytest.mark.parametrize("depth", ["fixed", "early"])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, depth):
    more = (EARLY,) if depth == "early" else ()
    more = (*more, "steps=4", "save_every=2", "objective.kl=0.1", "objective.loop_weights={kind: learned}")
    whole = run(write_recipe(tmp_path, more, out="whole"))
    calls = []

    def stops(recipe, opened):
        source = engine_source(recipe, opened)
        real = source.sample

        def sample(*args):
            calls.append(args)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return real(*args)

        source.sample = sample
        return source

    with pytest.raises(KeyboardInterrupt):
        reinforce(write_recipe(tmp_path, more, out="cut"), QUIET, source=stops)
    resumed = run(write_recipe(tmp_path, more, out="cut"))
    assert resumed.step == 4
    ours, theirs = weights_of(resumed.checkpoint), weights_of(whole.checkpoint)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    kept = ("reward", "ratio", "reference_kl", "mean_loops", "learned_weight_loop1", "grad_norm", "eval/reward_loop3")
    pairs = zip(read_log(tmp_path / "cut"), read_log(tmp_path / "whole"), strict=True)
    for one, other in pairs:
        assert [one.get(name) for name in kept] == [other.get(name) for name in kept]


def test_the_update_does_not_depend_on_micro_batches(tmp_path):
    """In float64, so that sums in another order agree closely."""
    found = []
    for index, micro in enumerate(("null", "1", "3")):
        more = (EARLY, "precision=float64", f"micro_rows={micro}", "objective.kl=0.1", "steps=1", "save_every=1")
        found.append(weights_of(run(write_recipe(tmp_path, more, out=f"run{index}")).checkpoint))
    before = weights_of(tmp_path / "model")
    for other in found[1:]:
        for name, tensor in found[0].items():
            torch.testing.assert_close(other[name], tensor, atol=1e-9, rtol=0)
    assert any((tensor - before[name].to(tensor)).abs().max() > 1e-4 for name, tensor in found[0].items())


def test_two_processes_learn_what_one_does(tmp_path):
    """Three groups on two processes are uneven, minibatches are the same; where one process fails, both stop and save.

    In float64, so that sums in another order agree closely.
    """
    common = (EARLY, "precision=float64", "micro_rows=2", "steps=2", "save_every=2", "advantages.scale=batch")
    runs = {
        "uneven": ("objective.kl=0.1", "sampling.prompts=3", "objective.loop_weights={kind: learned}"),
        "minibatches": ("minibatches=2", "epochs=2", "objective.loop_weights={kind: last}"),
    }
    alone = {name: run(write_recipe(tmp_path, (*common, *more), out=f"{name}1")) for name, more in runs.items()}
    runs["failing"] = ('environment.functions=["tests.rl.rl_runs:fails_on_the_second_process"]',)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    root = Path(__file__).parents[2]
    script, recipe = root / "tests/rl/distributed_rl.py", tmp_path / "recipe.yaml"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}"}
    given = ["|".join((*common, *more, f"out={tmp_path / name}2")) for name, more in runs.items()]
    done = subprocess.run(
        [*command, str(script), str(recipe), *given], check=True, env=environment, timeout=240, stdout=subprocess.PIPE
    )
    kept = ("reward", "reward_std", "ratio", "clipped", "reference_kl", "mean_loops", "grad_norm", "length", "updates")
    for name, finished in alone.items():
        ours, theirs = weights_of(tmp_path / f"{name}2/checkpoints/step-00000002"), weights_of(finished.checkpoint)
        for key, tensor in theirs.items():
            torch.testing.assert_close(ours[key], tensor, atol=1e-8, rtol=0)
        for one, other in zip(read_log(tmp_path / f"{name}2"), read_log(tmp_path / f"{name}1"), strict=True):
            assert [one.get(k) for k in kept] == pytest.approx([other.get(k) for k in kept], abs=1e-6)
    stops = [line for line in done.stdout.decode().splitlines() if line.startswith("stopped: ")]
    assert len(stops) == 2
    assert all("RuntimeError: enough" in line and "step 1 is saved" in line for line in stops)
    assert (tmp_path / "failing2/checkpoints/step-00000001/trainer.json").exists()


def shifted_rollouts(monkeypatch):
    """Let the sampler tell other log-probabilities than those it drew from."""
    real = rollouts.EngineRollouts._rollout

    def lying(self, done):
        rollout = real(self, done)
        return rollouts.Rollout(**{**vars(rollout), "logprobs": [value - 0.5 for value in rollout.logprobs]})

    monkeypatch.setattr(rollouts.EngineRollouts, "_rollout", lying)


@pytest.mark.parametrize("first", ["first_group_dead", "small_digits"])
def test_the_sampler_is_checked_by_the_first_minibatch_that_learns(tmp_path, monkeypatch, first):
    more = ("minibatches=4", "objective.kl=0", f'environment.functions=["tests.rl.rl_runs:{first}"]')
    run(write_recipe(tmp_path, (*more, "steps=1"), out="honest"))
    (record,) = [record for record in read_log(tmp_path / "honest") if "updates" in record]
    assert record["updates"] == (3 if first == "first_group_dead" else 4)
    assert record["sampler_drift"] < 1e-4
    shifted_rollouts(monkeypatch)
    with pytest.raises(ValueError, match=r"step 0: log-probabilities in training lie 0\.5 from"):
        run(write_recipe(tmp_path, more))


def test_a_drift_that_is_no_number_stops_the_run(tmp_path, monkeypatch):
    real = rollouts.EngineRollouts._rollout

    def broken(self, done):
        rollout = real(self, done)
        return rollouts.Rollout(**{**vars(rollout), "logprobs": [float("nan")] * len(rollout.logprobs)})

    monkeypatch.setattr(rollouts.EngineRollouts, "_rollout", broken)
    with pytest.raises(ValueError, match="log-probabilities in training lie nan from"):
        run(write_recipe(tmp_path))


def test_the_log_tells_of_every_update(tmp_path, monkeypatch):
    """Means over all of a step's updates: only the first is on the policy that sampled."""
    found, real = [], loop._gradient

    def watched(session, part, sums):
        alone = MetricSums()
        norm = real(session, part, alone)
        found.append(alone.means(session.world.sum))
        for name, pair in alone.sums.items():
            sums.sums[name] = sums.sums.get(name, 0) + pair
        return norm

    monkeypatch.setattr(loop, "_gradient", watched)
    run(write_recipe(tmp_path, ("epochs=4", "optimizer.lr=0.01", "steps=1", "objective.clip_high=0.05")))
    (record,) = [record for record in read_log(tmp_path / "run") if "updates" in record]
    assert record["updates"] == len(found) == 4
    for name in ("loss", "ratio", "ratio_drift", "clipped", "sampled_kl", "nll_loop2"):
        assert record[name] == pytest.approx(sum(one[name] for one in found) / 4, abs=1e-6)
    assert found[0]["clipped"] == 0 < record["clipped"]
    assert record["sampler_drift"] == found[0]["ratio_drift"] < 1e-4 < record["ratio_drift"]


def test_learned_loop_weights_are_as_exact_as_the_model(tmp_path):
    run(write_recipe(tmp_path, ("precision=float64", "objective.loop_weights={kind: learned}", "steps=1")))
    (record,) = [record for record in read_log(tmp_path / "run") if "updates" in record]
    assert record["ratio_drift"] < 1e-12


@pytest.mark.parametrize("questions", [3, 64])
def test_an_evaluation_asks_every_question_once(tmp_path, questions):
    recipe = write_recipe(tmp_path, ("steps=1", f"evaluation.questions={questions}", "evaluate_every=1"))
    held_out = recipe.environment.num_questions("test")
    assert 3 < held_out < 20
    run(recipe)
    (record,) = [record for record in read_log(tmp_path / "run") if "eval/questions" in record]
    assert record["eval/questions"] == min(questions, held_out)


def test_equal_rewards_move_nothing(tmp_path):
    more = ('environment.functions=["tests.rl.rl_runs:always_one"]', "optimizer.weight_decay=0.5")
    done = run(write_recipe(tmp_path, more))
    after, before = weights_of(done.checkpoint), weights_of(tmp_path / "model")
    assert all(torch.equal(after[name], before[name]) for name in before)
    records = [record for record in read_log(tmp_path / "run") if "reward" in record]
    assert all(record["dead_groups"] == 1 and record["updates"] == 0 for record in records)


def test_completions_that_were_cut_short_move_nothing_where_they_are_masked(tmp_path):
    done = run(write_recipe(tmp_path, ("mask_truncated=true", "sampling.max_tokens=1", "objective.kl=0.1")))
    after, before = weights_of(done.checkpoint), weights_of(tmp_path / "model")
    records = [record for record in read_log(tmp_path / "run") if "reward" in record]
    if all(record["truncated"] == 1 for record in records):
        assert all(torch.equal(after[name], before[name]) for name in before)
        assert all(record["updates"] == 0 for record in records)


def test_dead_groups_are_drawn_anew_and_then_dropped(tmp_path):
    more = (
        'environment.functions=["tests.rl.rl_runs:always_one"]', "advantages={dead: resample, attempts: 2}",
        "objective.kl=0.1", "steps=1",
    )  # fmt: skip
    done = run(write_recipe(tmp_path, more))
    (record,) = [record for record in read_log(tmp_path / "run") if "reward" in record]
    assert record["resampled_groups"] == 8  # four groups, twice
    assert record["updates"] == 0  # though the reference would pull on what is kept
    after, before = weights_of(done.checkpoint), weights_of(tmp_path / "model")
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_the_gate_learns_from_the_price_of_its_loops(tmp_path):
    """With no other reward than fewer loops, the gate comes to leave earlier."""
    more = (
        'environment.functions=["tests.rl.rl_runs:always_one"]', "objective.learn_exits=true",
        "objective.loop_weights={kind: last}",
        "sampling.depth={kind: sampled}", "loop_price=1.0", "steps=12", "evaluate_every=12", "optimizer.lr=1e-30",
        "optimizer.gate_lr=0.05", "sampling.prompts=8", "advantages.scale=none",
    )  # fmt: skip
    run(write_recipe(tmp_path, more))
    loops = [record["mean_loops"] for record in read_log(tmp_path / "run") if "mean_loops" in record]
    assert sum(loops[-3:]) / 3 < sum(loops[:3]) / 3 - 0.3


def test_later_updates_use_the_gate_that_sampled_and_are_clipped(tmp_path):
    more = (EARLY, "epochs=2", "minibatches=2", "optimizer.lr=1e-305", "steps=1", "objective.clip_high=0.01")
    run(write_recipe(tmp_path, more))
    (record,) = [record for record in read_log(tmp_path / "run") if "updates" in record]
    assert record["updates"] == 4
    assert abs(record["ratio"] - 1) < 1e-4  # no weight moves at this rate


def test_simulated_exits_train_another_policy_and_say_so(tmp_path):
    run(write_recipe(tmp_path, ("simulated_exit=0.5", "steps=1", "objective.loop_weights={kind: last}")))
    (record,) = [record for record in read_log(tmp_path / "run") if "ratio_drift" in record]
    assert record["ratio_drift"] > 0.01
    assert record["mean_loops"] == 3  # sampled at all loops
    assert record["nll_loop1"] > 0  # and trained at fewer
    with pytest.raises(ValueError, match="for tokens sampled at one depth"):
        write_recipe(tmp_path, ("simulated_exit=0.5", EARLY))


def test_adapters_learn_and_the_reference_is_the_model_without_them(tmp_path):
    more = (EARLY, "lora={rank: 4}", "objective.kl=0.1", "optimizer.lr=0.01", "steps=4", "save_every=2")
    whole = run(write_recipe(tmp_path, more, out="whole"))
    records = [record for record in read_log(tmp_path / "whole") if "reward" in record]
    assert records[0]["reference_kl"] < 1e-6 < records[-1]["reference_kl"]
    assert all(record["ratio_drift"] < 1e-4 for record in records)  # the engine follows the adapters
    before, after = looplm.load(tmp_path / "model").state_dict(), looplm.load(whole.checkpoint).state_dict()
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert moved
    assert all(".q_proj." in name or "_proj." in name for name in moved)
    calls = []

    def stops(recipe, opened):
        source = engine_source(recipe, opened)
        real = source.sample
        source.sample = lambda *args: calls.append(1) or (real(*args) if len(calls) < 4 else _interrupt())
        return source

    with pytest.raises(KeyboardInterrupt):
        reinforce(write_recipe(tmp_path, more, out="cut"), QUIET, source=stops)
    resumed = looplm.load(run(write_recipe(tmp_path, more, out="cut")).checkpoint).state_dict()
    assert all(torch.equal(resumed[name], after[name]) for name in after)


def test_a_run_tells_what_it_did(tmp_path):
    run(write_recipe(tmp_path, (EARLY,)))
    records = read_log(tmp_path / "run")
    told = {name for record in records for name in record}
    assert told >= {
        "reward", "reward_std", "mark", "length", "truncated", "mean_loops", "dead_groups", "entropy_loop1",
        "entropy_loop3", "log_snr_loop1", "log_snr_loop3", "ratio", "ratio_drift", "clipped", "eval/reward_loop1",
        "eval/reward_loop3", "lr_factor", "grad_norm",
    }  # fmt: skip
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 3 * 4
    assert all(len(sample["loops"]) <= 10 and 0 <= sample["reward"] <= 1 for sample in samples)


def test_the_reference_is_the_checkpoint_that_the_run_began_from(tmp_path):
    more = ("objective.kl=0.1", "save_every=1", "steps=2")
    recipe = write_recipe(tmp_path, more)
    calls = []

    def stops(recipe, opened):
        source = engine_source(recipe, opened)
        real = source.sample
        source.sample = lambda *args: calls.append(1) or (real(*args) if len(calls) == 1 else _interrupt())
        return source

    with pytest.raises(KeyboardInterrupt):
        reinforce(recipe, QUIET, source=stops)
    model = looplm.load(tmp_path / "model")
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    save(model, tmp_path / "model")
    with pytest.raises(ValueError, match="holds another model than this run's reference"):
        run(write_recipe(tmp_path, more))


def _interrupt():
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sampling.group=1", "greater than or equal to 2"),
        ("minibatches=3", "4 prompts cannot be cut into 3 minibatches"),
        ("objective.learn_exits=true", "needs exits that the gate has drawn"),
        ("objective.temperature=0.5", "differs from sampling.temperature=0.6"),
        ("parallel=fsdp", "take parallel: ddp"),
        ("sampling.depth={kind: early, family: nothing, threshold: 1}", "no depth policy 'nothing'"),
        ("sampling.depth={kind: fixed, loops: 0}", "loops=0 must be at least 1"),
        ("nonsense=1", "unknown key 'nonsense'"),
    ],
)
def test_recipes_that_make_no_sense_are_refused_by_name(tmp_path, override, message):
    with pytest.raises(ValueError, match=message):
        write_recipe(tmp_path, (override,))


def test_a_model_without_a_gate_is_refused(tmp_path):
    recipe = write_recipe(tmp_path, exit_gate=False)
    with pytest.raises(ValueError, match="read an exit gate, which this model has not"):
        run(recipe)
    assert not (tmp_path / "run" / "recipe.json").exists()
