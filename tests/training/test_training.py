"""Training runs: exact resume, atomic checkpoints, schedules, logs and refusals."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import looplm
from looplm.data.tokenizer import load_tokenizer
from looplm.objectives import ExpectedLoss
from looplm.training import checkpoints, load_recipe, loop, opening, train
from looplm.training.distribution import World
from looplm.training.module import ObjectiveModule
from looplm.training.schedules import WarmupStableDecay

TINY = """
out: {out}
model: {{hidden_size: 16, intermediate_size: 24, num_attention_heads: 2, core_layers: 1, rope_theta: 10000.0}}
vocab_size: 320
data:
  length: 32
  rows: 4
  mean: sources
  sources:
    text: {{kind: text, path: {text}, share: 1, held_out_rows: 2}}
    compose: {{kind: task, share: 1, held_out_questions: 16, task: {{kind: compose, entities: 4, relations: 2}}}}
objective: {{kind: expected_loss, beta: 0.05}}
schedule: {{kind: wsd, warmup_steps: 2, decay: 0.5}}
loops: 2
steps: 12
log_every: 1
evaluate_every: 6
save_every: 6
"""


@pytest.fixture
def recipe_file(tmp_path, text):
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY.format(out=tmp_path / "run", text=text))
    return path


STATE = "trainer/shard-00001-model-00001-of-00001.safetensors"


def recipe_at(recipe_file, out, *overrides):
    return load_recipe(recipe_file, [f"out={out}", *overrides])


def log_of(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def without_times(records):
    timed = ("tokens_per_second", "flop_utilisation")
    return [{k: v for k, v in record.items() if k not in timed} for record in records]


def assert_same_checkpoint(one: Path, other: Path):
    for name in ("model.safetensors", STATE):
        a, b = load_file(one / name), load_file(other / name)
        assert set(a) == set(b)
        for key, tensor in a.items():
            assert tensor.equal(b[key]), f"{name}: {key}"
    assert (one / "trainer.json").read_text() == (other / "trainer.json").read_text()


class KilledError(Exception):
    """Stands for a process that dies in the middle of a step."""


@pytest.mark.parametrize("depth", ["null", "{kind: log_normal, mu: 1.0, high: 5, grad_loops: 2}"])
def test_resume_equals_the_uninterrupted_run_bit_for_bit(recipe_file, tmp_path, monkeypatch, depth):
    whole = train(recipe_at(recipe_file, tmp_path / "whole", f"depth={depth}"))
    real, seen = loop.accumulate, []

    def dies_after_nine(session, batch, step):
        seen.append(step)
        if len(seen) == 10:  # three steps past the checkpoint at 6
            raise KilledError
        return real(session, batch, step)

    monkeypatch.setattr(loop, "accumulate", dies_after_nine)
    with pytest.raises(KilledError):
        train(recipe_at(recipe_file, tmp_path / "parts", f"depth={depth}"))
    assert [path.name for path in (tmp_path / "parts" / "checkpoints").iterdir()] == ["step-00000006"]
    torch.manual_seed(99)  # a new process has another random state
    resumed = train(recipe_at(recipe_file, tmp_path / "parts", f"depth={depth}"))
    assert seen == [*range(10), *range(6, 12)]
    assert (whole.step, resumed.step) == (12, 12)
    assert_same_checkpoint(whole.checkpoint, resumed.checkpoint)
    assert without_times(log_of(tmp_path / "parts")) == without_times(log_of(tmp_path / "whole"))


def test_each_step_runs_at_its_own_drawn_depth(recipe_file, tmp_path):
    recipe = recipe_at(recipe_file, tmp_path / "run", "depth={kind: uniform, low: 1, high: 4}")
    train(recipe)
    loops = [record["loops"] for record in log_of(tmp_path / "run") if "loss" in record]
    assert loops == [recipe.depth.draw(recipe.seed, step).loops for step in range(12)]
    assert len(set(loops)) > 1
    for record in log_of(tmp_path / "run"):
        if "loss" in record:
            assert f"loss_loop{record['loops']}" in record
            assert f"loss_loop{record['loops'] + 1}" not in record


@pytest.mark.parametrize("per", ["sequence", "micro_batch"])
def test_exits_in_the_log_are_a_distribution_whatever_the_rows_depths(recipe_file, tmp_path, per):
    """Rows that stop at the first loop leave there by force, which says nothing of the gate."""
    depth = f"depth={{kind: uniform, low: 1, high: 3, per: {per}}}"
    train(recipe_at(recipe_file, tmp_path / "run", depth, "data.rows=8", "micro_rows=1", "steps=3"))
    for record in log_of(tmp_path / "run"):
        if "loss" in record:
            exits = [value for name, value in record.items() if name.startswith("exit_loop")]
            assert len(exits) == sum(name.startswith("state_norm_loop") for name in record) > 1
            assert sum(exits) == pytest.approx(1)


def test_a_finished_run_is_left_alone(recipe_file, tmp_path):
    first = train(recipe_at(recipe_file, tmp_path / "run", "steps=4"))
    stamp = (first.checkpoint / "model.safetensors").stat().st_mtime_ns
    again = train(recipe_at(recipe_file, tmp_path / "run", "steps=4"))
    assert again == first
    assert first.finished
    assert (first.checkpoint / "model.safetensors").stat().st_mtime_ns == stamp


def test_stage_two_changes_the_gate_alone(recipe_file, tmp_path):
    first = train(recipe_at(recipe_file, tmp_path / "one"))
    second = recipe_file.with_name("two.yaml")
    stage_two = recipe_file.read_text().replace("model:", f"init_from: {tmp_path / 'one'}\n# model:")
    second.write_text(stage_two.replace("{kind: expected_loss, beta: 0.05}", "{kind: gate_regression}"))
    done = train(recipe_at(second, tmp_path / "two"))
    before, after = (load_file(path / "model.safetensors") for path in (first.checkpoint, done.checkpoint))
    changed = {name for name in before if not before[name].equal(after[name])}
    assert changed == {"model.exit_gate.weight", "model.exit_gate.bias"}
    assert {key.split("/")[1] for key in load_file(done.checkpoint / STATE)} == changed | {"0"}


def test_the_checkpoint_is_a_model_folder_with_its_tokenizer(recipe_file, tmp_path):
    done = train(recipe_at(recipe_file, tmp_path / "run"))
    model, tokenizer = looplm.load(done.checkpoint), load_tokenizer(done.checkpoint)
    ids = tokenizer("A loop <e1>", return_tensors="pt")["input_ids"]
    assert model(ids).logits.shape[-1] == len(tokenizer) == model.config.vocab_size
    assert model.config.eos_token_id == tokenizer.eos_token_id


def test_an_unfinished_checkpoint_does_not_count(recipe_file, tmp_path, monkeypatch):
    def no_room(*_):
        raise OSError("no space left on device")

    train(recipe_at(recipe_file, tmp_path / "run", "steps=6"))
    folder = tmp_path / "run" / "checkpoints"
    model = looplm.load(folder / "step-00000006")
    monkeypatch.setattr(checkpoints.os, "replace", no_room)
    module = ObjectiveModule(model, ExpectedLoss())
    live = checkpoints.Live(module=module, optimizers=(torch.optim.AdamW(model.parameters()),))
    progress = checkpoints.Progress(step=7)
    with pytest.raises(OSError, match="no space"):
        checkpoints.save_checkpoint(folder, live, progress, load_tokenizer(folder / "step-00000006"), 2, World())
    assert [path.name for path in checkpoints.complete_checkpoints(folder)] == ["step-00000006"]
    assert opening.latest_checkpoint(tmp_path / "run").name == "step-00000006"


def test_only_the_newest_checkpoints_are_kept(recipe_file, tmp_path):
    train(recipe_at(recipe_file, tmp_path / "run", "save_every=2", "keep_checkpoints=3"))
    names = [path.name for path in checkpoints.complete_checkpoints(tmp_path / "run" / "checkpoints")]
    assert names == ["step-00000008", "step-00000010", "step-00000012"]


def interrupt_after(command, log, records):
    """Run until the log has so many records, press Ctrl-C once, and give back what was printed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    for _ in range(1200):
        if log.exists() and log.read_text().count('"loss":') >= records:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    return out, err


def test_ctrl_c_leaves_a_resumable_run(recipe_file, tmp_path):
    command = [sys.executable, "-m", "looplm", "train", str(recipe_file), "steps=100000", "save_every=100000"]
    log, stopped = tmp_path / "run" / "log.jsonl", 0
    for _ in range(2):
        out, err = interrupt_after(command, log, stopped + 5)
        (done,) = checkpoints.complete_checkpoints(tmp_path / "run" / "checkpoints")[-1:]
        before, stopped = stopped, json.loads((done / "trainer.json").read_text())["step"]
        assert stopped > before
        assert f"stopped at step {stopped} of 100000; the same command resumes" in err
        assert str(done) in out
        steps = [record["step"] for record in log_of(tmp_path / "run") if "loss" in record]
        assert steps == list(range(1, stopped + 1))


def test_the_log_has_every_number(recipe_file, tmp_path):
    train(recipe_at(recipe_file, tmp_path / "run"))
    records = log_of(tmp_path / "run")
    first = records[0]
    assert {"loss", "lr_factor", "grad_norm", "exit_entropy", "mean_exit_loop", "loss_loop1", "loss_loop2"} <= set(
        first
    )
    evaluations = [record for record in records if "text/loss_loop1" in record]
    assert [record["step"] for record in evaluations] == [6, 12]
    for source in ("text", "compose"):
        assert {f"{source}/loss_loop{loop}" for loop in range(1, 5)} <= set(evaluations[0])  # 1 to 2T
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))
    assert json.loads((tmp_path / "run" / "recipe.json").read_text())["optimizer"]["lr"] == 2e-3


def test_the_loss_falls(recipe_file, tmp_path):
    train(recipe_at(recipe_file, tmp_path / "run", "steps=60", "optimizer.lr=0.01"))
    losses = [record["loss"] for record in log_of(tmp_path / "run") if "loss" in record]
    assert losses[-1] < losses[0] - 1


def test_warmup_stable_decay_by_hand():
    schedule = WarmupStableDecay(warmup_steps=4, decay=0.3, final=0.0)
    factors = [round(schedule.factor(step, 10), 6) for step in range(10)]
    assert factors == [0.25, 0.5, 0.75, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    floor = WarmupStableDecay(warmup_steps=0, decay=0.5, final=0.1)
    assert [round(floor.factor(step, 4), 6) for step in range(4)] == [1, 1, 0.7, 0.4]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stepz=3", "unknown key 'stepz'"),
        ("optimizer.learning_rate=3", "unknown key 'optimizer.learning_rate'"),
        ("objective.gamma=3", r"unknown key 'objective.gamma'"),
        ("data.sources.compose.task.hops=3", r"unknown key 'data.sources.compose.task.hops'"),
        ("schedule.warmup=3", "unknown key 'schedule.warmup'"),
        ("optimizer.lr=abc", "optimizer.lr: Input should be a valid number"),
        ("optimizer.lr=-1", "lr=-1.0 must be above 0"),
        ("seed=9223372036854775808", "seed: Input should be less than 9223372036854775808"),
        ("seed=-1", "seed: Input should be greater than or equal to 0"),
        ("steps=0", "steps: Input should be greater than 0"),
        ("objective.kind=none", "objective: .*'expected_loss', 'gate_regression'"),
        ("model=null", "give model .* or init_from"),
        ("duplicate={factor: 2}", "duplicate changes a trained model"),
        ("epochs=2", "exactly one of steps and epochs"),
        ("model.vocab_size=5", "set vocab_size instead"),
        ("objective.beta=nan", "objective.beta: Input should be a finite number"),
        ("objective={kind: gate_regression,beta: 1}", "unknown key 'objective.beta'"),
        ("model=[1,2]", "model: Input should be a valid dictionary"),
        ("depth={kind: poisson, lambda: 3}", "unknown key 'depth.lambda'"),
        ("depth={kind: uniform, low: 9, high: 4}", "1 <= low <= high"),
        ("data.sources.compose.task.entities=0", "entities of at least 1"),
        ("steps", "not of the form a.b=value"),
        ("data.length=8", None),
    ],
)
def test_bad_recipes_are_named(recipe_file, override, message):
    if message is None:
        assert load_recipe(recipe_file, [override]).data.length == 8
        return
    with pytest.raises(ValueError, match=message) as error:
        load_recipe(recipe_file, [override])
    assert "\n" not in str(error.value)


def test_recipes_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match=r"no recipe 'nope': neither a file nor one of addition, .*, exit_prior, "):
        load_recipe("nope")
    (tmp_path / "broken.yaml").write_text("a: [")
    with pytest.raises(ValueError, match="cannot be read"):
        load_recipe(tmp_path / "broken.yaml")
    (tmp_path / "empty.yaml").write_text("steps: 3\n")
    with pytest.raises(ValueError, match="recipe empty: "):
        load_recipe(tmp_path / "empty.yaml")


@pytest.mark.parametrize(
    "override",
    [
        "data.sources.text.path=/nowhere",
        "model.hiden_size=8",
        "vocab_size=100",
        "model.num_attention_heads=5",
        "data.length=3",
        "model.exit_gate=false",
        "model.loops=[4]",
        "data.sources.compose.task.held_out=0.0001",
    ],
)
def test_a_run_that_cannot_start_writes_nothing(recipe_file, tmp_path, override):
    with pytest.raises(ValueError):  # noqa: PT011  (each names its own input)
        train(recipe_at(recipe_file, tmp_path / "run", override))
    assert not (tmp_path / "run").exists()


def test_another_recipe_in_the_same_folder_is_refused(recipe_file, tmp_path):
    train(recipe_at(recipe_file, tmp_path / "run", "steps=2"))
    with pytest.raises(ValueError, match=r"another recipe \(optimizer.lr differs\)"):
        train(recipe_at(recipe_file, tmp_path / "run", "steps=2", "optimizer.lr=0.1"))


def test_the_same_folder_by_another_path_is_the_same_run(recipe_file, tmp_path, monkeypatch):
    first = train(recipe_at(recipe_file, tmp_path / "run", "steps=2"))
    monkeypatch.chdir(tmp_path)
    assert train(recipe_at(recipe_file, "./run", "steps=2")).step == first.step


def test_a_damaged_recipe_is_named(recipe_file, tmp_path):
    train(recipe_at(recipe_file, tmp_path / "run", "steps=2"))
    (tmp_path / "run" / "recipe.json").write_text("{")
    with pytest.raises(ValueError, match=r"recipe.json is damaged"):
        train(recipe_at(recipe_file, tmp_path / "run", "steps=2"))


def test_strays_are_no_checkpoints(recipe_file, tmp_path):
    done = train(recipe_at(recipe_file, tmp_path / "run", "steps=2"))
    (done.checkpoint.parent / "step-junk").write_text("")
    (done.checkpoint.parent / "step-00000099").mkdir()
    assert opening.latest_checkpoint(tmp_path / "run") == done.checkpoint


def test_values_are_taken_as_they_are(recipe_file):
    recipe = load_recipe(recipe_file, [], {"out": "d #1: x", "data.sources.text.path": "2024"})
    assert (recipe.out, recipe.data.sources["text"].path) == ("d #1: x", "2024")


def test_a_gradient_that_is_not_finite_stops_the_run(recipe_file, tmp_path):
    with pytest.raises(ValueError, match=r"not finite at step .*, 3 times in a row"):
        train(recipe_at(recipe_file, tmp_path / "run", "optimizer.lr=1e30", "clip_norm=1e30", "steps=50"))
    assert checkpoints.complete_checkpoints(tmp_path / "run" / "checkpoints")  # what was reached is kept
    with pytest.raises(ValueError, match=r"not finite at step"):
        train(
            recipe_at(recipe_file, tmp_path / "again", "optimizer.lr=1e30", "clip_norm=1e30", "nonfinite.policy=stop")
        )


SETTINGS = {
    "average": ["ema={decay: 0.5}"],
    "warm term": ["stability={form: {kind: finite_difference, warm: true}, weight: 0.1}"],
    "muon": ["optimizer={kind: muon, lr: 0.01, adam: {lr: 0.01}}"],
    "no epsilon": ["optimizer={kind: adamw, eps: 0.0, update_clipping: true, gate_lr: 0.1}"],
    "eight bits": ["optimizer={kind: adamw, bits: 8}", "model.intermediate_size=256"],
    "curriculum": [
        "depth={kind: poisson, mean: 3.0, high: 6, grad_loops: 2, grad_low: 1, growth: {steps: 4, grad: true}}"
    ],
    "by sequence": ["depth={kind: uniform, low: 1, high: 3, per: sequence}", "micro_rows=2"],
    "dropout": ["model.dropout=0.2", "model.state_noise=0.1"],
    "random start": ["model.injection=add", "model.state_init=normal", "objective={kind: last_loop}"],
    "ramp": ["data.ramp={rows: 1, steps: 5}", "data.workers=1"],
    "an epoch": ["steps=null", "epochs=1", "data.rows=11"],
    "checkpointing": ["checkpointing=loop", "precision=bfloat16"],
}


@pytest.mark.parametrize("overrides", SETTINGS.values(), ids=SETTINGS)
def test_resume_is_exact_under_every_setting(recipe_file, tmp_path, overrides):
    """The newest checkpoint lost, the run goes on from the one before, and ends where it ended."""
    common = ("save_every=2", "evaluate_every=100", *overrides)
    whole = train(recipe_at(recipe_file, tmp_path / "run", "steps=6", *common))
    kept = {path: load_file(path) for path in whole.checkpoint.rglob("*.safetensors")}
    before = without_times(log_of(tmp_path / "run"))
    shutil.rmtree(whole.checkpoint)
    torch.manual_seed(99)
    again = train(recipe_at(recipe_file, tmp_path / "run", "steps=6", *common))
    assert again.checkpoint == whole.checkpoint
    for path, tensors in kept.items():
        found = load_file(path)
        assert all(tensor.equal(found[name]) for name, tensor in tensors.items()), path
    assert without_times(log_of(tmp_path / "run")) == before


def test_an_override_with_a_kind_replaces_at_any_depth(recipe_file):
    first = ["stability={form: {kind: finite_difference, warm: true}, weight: 0.1}"]
    recipe = load_recipe(
        recipe_file, [*first, "stability={form: {kind: vector_jacobian}}", "objective={kind: last_loop}"]
    )
    assert (recipe.stability.form.kind, recipe.stability.weight) == ("vector_jacobian", 0.1)
    merged = load_recipe(recipe_file, ["optimizer={lr: 0.5}", "data={length: 16}"])
    assert (merged.optimizer.lr, merged.data.length, merged.data.rows) == (0.5, 16, 4)


def test_dropout_is_drawn_by_the_recipes_seed_alone(recipe_file, tmp_path):
    """A run from a checkpoint builds nothing at random, so that what the process drew before must not matter."""
    first = train(recipe_at(recipe_file, tmp_path / "first", "steps=1"))
    text = recipe_file.read_text().replace("model:", f"init_from: {first.checkpoint}\n# model:")
    recipe_file.write_text(text)
    runs = []
    for state in (1, 2):
        torch.manual_seed(state)
        made = train(recipe_at(recipe_file, tmp_path / str(state), "steps=2", "model={dropout: 0.3}"))
        runs.append(load_file(made.checkpoint / "model.safetensors"))
    assert all(tensor.equal(runs[1][name]) for name, tensor in runs[0].items())


def test_the_greatest_seed_will_do(recipe_file, tmp_path):
    assert train(recipe_at(recipe_file, tmp_path / "run", f"seed={2**63 - 1}", "steps=2")).finished


def test_a_run_without_held_out_rows_logs_no_empty_records(recipe_file, tmp_path):
    sources = ("data.sources.compose=null", "data.sources.text.held_out=0.0")
    train(recipe_at(recipe_file, tmp_path / "run", *sources, "steps=6"))
    assert [record["step"] for record in log_of(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


def test_an_alarm_that_stays_is_one_record(recipe_file, tmp_path):
    train(recipe_at(recipe_file, tmp_path / "run", "monitors={norm: 1e-6}", "steps=6"))
    (alarm,) = [record for record in log_of(tmp_path / "run") if record.get("alarm") == "norm explosion"]
    assert (alarm["step"], alarm["of"]) == (1, "step")


def test_looking_at_a_run_does_not_change_it(recipe_file, tmp_path):
    """Monitors and held-out losses draw no dropout."""
    runs = [
        train(
            recipe_at(
                recipe_file, tmp_path / str(every), "model.dropout=0.3", f"log_every={every}", f"evaluate_every={every}"
            )
        )
        for every in (1, 100)
    ]
    a, b = (load_file(run.checkpoint / "model.safetensors") for run in runs)
    assert all(a[name].equal(b[name]) for name in a)
