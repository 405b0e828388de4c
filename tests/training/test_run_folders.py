"""Whose a run's folder is: one recipe, one run at a time, the same data and base, and nothing half removed."""

import json
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

import looplm
from looplm.data.tokenizer import load_tokenizer
from looplm.training import checkpoints, load_recipe, loop, train
from looplm.training.checkpoints import complete_checkpoints

TINY = """
out: {out}
model: {{hidden_size: 16, intermediate_size: 24, num_attention_heads: 2, core_layers: 1, rope_theta: 10000.0}}
vocab_size: 320
data:
  length: 32
  rows: 4
  sources:
    text: {{kind: text, path: {text}, held_out_rows: 2}}
objective: {{kind: expected_loss, beta: 0.05}}
schedule: {{kind: constant, warmup_steps: 2}}
loops: 2
steps: 4
log_every: 1
evaluate_every: 100
save_every: 2
"""
LORA = "lora={rank: 4, alpha: 8.0}"


@pytest.fixture
def recipe(tmp_path, text):
    """The recipe under some overrides, into `run` unless these say otherwise."""
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY.format(out=tmp_path / "run", text=text))
    return lambda *overrides: load_recipe(path, overrides)


def steps_of(folder):
    """The steps that the log tells of, evaluations apart."""
    records = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [record["step"] for record in records if not any("/loss_loop" in name for name in record)]


def assert_same(one, other):
    files = [file.relative_to(one) for file in one.rglob("*.safetensors")]
    assert files
    for file in files:
        a, b = load_file(one / file), load_file(other / file)
        assert set(a) == set(b)
        assert all(tensor.equal(b[name]) for name, tensor in a.items()), file


def dies_at(monkeypatch, step):
    """From here on, a run dies in this step."""
    real = loop.accumulate

    def accumulate(session, batch, at):
        if at == step:
            raise KeyboardInterrupt
        return real(session, batch, at)

    monkeypatch.setattr(loop, "accumulate", accumulate)


def test_a_run_that_saved_nothing_gives_its_folder_up(recipe, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        dies_at(patched, 1)
        with pytest.raises(KeyboardInterrupt):
            train(recipe("optimizer.lr=0.5"))
    run = tmp_path / "run"
    (left,) = (run / "tensorboard").iterdir()
    assert steps_of(run) == [1]
    done = train(recipe("data.rows=3"))
    assert steps_of(run) == [1, 2, 3, 4]
    assert not left.exists()
    assert json.loads((run / "recipe.json").read_text())["data"]["rows"] == 3
    assert_same(train(recipe("data.rows=3", f"out={tmp_path / 'fresh'}")).checkpoint, done.checkpoint)


def gradient_breaks(monkeypatch, calls):
    """The gradient's norm is infinite from its `calls`-th call on."""
    real, seen = loop.clip_grad_norm_, []

    def norm(*arguments):
        seen.append(0)
        return torch.tensor(torch.inf) if len(seen) >= calls else real(*arguments)

    monkeypatch.setattr(loop, "clip_grad_norm_", norm)


def test_the_cure_of_a_broken_gradient_can_be_followed(recipe, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        gradient_breaks(patched, 1)
        with pytest.raises(ValueError, match=r"step 2, 3 times in a row; lower optimizer.lr or clip_norm$"):
            train(recipe("save_every=50"))
    assert not complete_checkpoints(tmp_path / "run" / "checkpoints")
    train(recipe("save_every=50", "optimizer.lr=1e-4", "steps=2"))
    with monkeypatch.context() as patched:
        gradient_breaks(patched, 2)
        with pytest.raises(ValueError, match=r"under another out=; init_from=.*/two starts it from step 1$"):
            train(recipe("nonfinite.policy=stop", f"out={tmp_path / 'two'}"))
    advised = [f"out={tmp_path / 'three'}", f"init_from={tmp_path / 'two'}", "optimizer.lr=1e-4"]
    assert train(recipe(*advised)).finished


def test_a_saved_step_is_not_saved_again(recipe, monkeypatch):
    done = train(recipe("steps=2")).checkpoint
    stamp = (done / "model.safetensors").stat().st_mtime_ns
    gradient_breaks(monkeypatch, 1)
    with pytest.raises(ValueError, match="starts it from step 2"):
        train(recipe("nonfinite.policy=stop"))
    assert complete_checkpoints(done.parent) == [done]
    assert (done / "model.safetensors").stat().st_mtime_ns == stamp


def test_how_a_run_is_watched_and_kept_is_no_other_recipe(recipe, monkeypatch):
    with monkeypatch.context() as patched:
        dies_at(patched, 3)
        with pytest.raises(KeyboardInterrupt):
            train(recipe())
    changes = ["log_every=2", "evaluate_every=3", "save_every=3", "keep_checkpoints=1", "data.workers=1"]
    done = train(recipe(*changes, "monitors.norm=7", "nonfinite.patience=9", "micro_rows=2"))
    assert done.finished
    assert [path.name for path in complete_checkpoints(done.checkpoint.parent)] == ["step-00000004"]


def test_a_constant_rate_goes_on_for_longer(recipe, tmp_path):
    whole = train(recipe(f"out={tmp_path / 'whole'}", "steps=6"))
    train(recipe())
    assert_same(whole.checkpoint, train(recipe("steps=6")).checkpoint)
    assert json.loads((tmp_path / "run" / "recipe.json").read_text())["steps"] == 6
    with pytest.raises(ValueError, match="holds 6 steps already, more than steps=5"):
        train(recipe("steps=5"))


@pytest.mark.parametrize("kind", ["wsd", "cosine"])
def test_a_rate_that_depends_on_the_end_keeps_it(recipe, kind):
    schedule = f"schedule={{kind: {kind}, warmup_steps: 1}}"
    train(recipe(schedule))
    with pytest.raises(ValueError, match=f"steps differs, and every rate of schedule '{kind}' may depend on it"):
        train(recipe(schedule, "steps=6"))


@pytest.mark.parametrize("content", ["{", "[1]", "null", '"text"'])
def test_a_recipe_that_is_none_is_named(recipe, tmp_path, content):
    train(recipe())
    (tmp_path / "run" / "recipe.json").write_text(content)
    with pytest.raises(ValueError, match=r"recipe.json is damaged; remove"):
        train(recipe("steps=6"))


def test_a_recipe_of_other_keys_is_another(recipe, tmp_path):
    """As written by a version that lacked a key whose value is nothing."""
    train(recipe())
    held = tmp_path / "run" / "recipe.json"
    values = json.loads(held.read_text())
    del values["ema"]
    held.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"another recipe \(ema differs\)"):
        train(recipe())


HOLDER = """
import sys, time
from pathlib import Path
from looplm.training.distribution import World
from looplm.training.run_folder import alone_in
with alone_in(Path(sys.argv[1]), World()):
    print("held", flush=True)
    time.sleep(600)
"""


def test_one_run_at_a_time(recipe, tmp_path):
    train(recipe("steps=2"))
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=f"another process trains in {tmp_path / 'run'}; wait"):
            train(recipe())
        assert train(recipe("steps=2")).finished  # to look at a finished run takes no lock
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
    assert train(recipe()).finished


def test_where_files_cannot_be_locked_the_folder_is_named(recipe, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.lockf", refuse)
    with pytest.raises(ValueError, match=f"{tmp_path / 'run'} lies where files cannot be locked"):
        train(recipe())


def test_a_start_that_fails_leaves_no_folder(recipe, tmp_path):
    (tmp_path / "here").mkdir()
    for out in (tmp_path / "here" / "a" / "b", tmp_path / "here"):
        with pytest.raises(ValueError, match="too small"):
            train(recipe(f"out={out}", "vocab_size=100"))
        assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.parametrize("source", ["text", "shards", "chat"])
def test_other_data_under_the_same_path_is_noticed(recipe, tmp_path, text, source):
    base = train(recipe(f"out={tmp_path / 'base'}", "steps=2")).checkpoint
    tokenizer = load_tokenizer(base)
    place = text

    def write(words):
        nonlocal place
        if source == "text":
            place.write_text(words * 60)
        elif source == "shards":
            place = tmp_path / "shards"
            shutil.rmtree(place, ignore_errors=True)
            looplm.data.shards.write_shards([tokenizer(words)["input_ids"]] * 60, place, tokenizer)
        else:
            place = tmp_path / "chat.jsonl"
            place.write_text(
                "".join(json.dumps({"prompt": words.split()[-1], "answer": f"{n}"}) + "\n" for n in range(60))
            )

    write("A loop thinks again before it answers. ")
    fields = ", prompt: prompt, answer: answer" if source == "chat" else ""
    common = [
        f"init_from={base}",
        "data.sources.text=null",
        f"data.sources.own={{kind: {source}, path: {place}{fields}}}",
    ]
    train(recipe(*common, "steps=2"))
    write("A loop thinks again before it forgets. ")
    with pytest.raises(ValueError, match=r"data.sources.own does not give the rows any more"):
        train(recipe(*common))
    write("A loop thinks again before it answers. ")
    assert train(recipe(*common)).finished


@pytest.fixture
def base(recipe, tmp_path):
    return train(recipe(f"out={tmp_path / 'base'}", "steps=2")).checkpoint


def test_adapters_stay_on_the_base_that_they_began_with(recipe, tmp_path, base, monkeypatch):
    common = (LORA, f"init_from={tmp_path / 'base'}")
    whole = train(recipe(*common, f"out={tmp_path / 'whole'}"))
    with monkeypatch.context() as patched:
        dies_at(patched, 3)
        with pytest.raises(KeyboardInterrupt):
            train(recipe(*common))
    train(recipe(f"out={tmp_path / 'base'}"))  # the base moves on, from step 2 to 4
    assert_same(whole.checkpoint, train(recipe(*common)).checkpoint)


def test_adapters_do_not_go_on_with_another_base(recipe, tmp_path, base):
    common = (LORA, f"init_from={tmp_path / 'base'}")
    train(recipe(*common, "steps=2"))
    newer = train(recipe(f"out={tmp_path / 'base'}")).checkpoint
    base.rename(tmp_path / "aside")
    with pytest.raises(ValueError, match=f"belong to what {base} held, and {newer} holds another model"):
        train(recipe(*common))
    shutil.copytree(newer, base)
    with pytest.raises(ValueError, match=f"belong to what {base} held, and {base} holds another model"):
        train(recipe(*common))
    shutil.rmtree(base)
    (tmp_path / "aside").rename(base)
    assert train(recipe(*common)).finished


STATE = "trainer/shard-00001-model-00001-of-00001.safetensors"
DAMAGES = {
    "cut": (STATE, lambda data: data[:-9]),
    "gone": (STATE, None),
    "garbage": (STATE, lambda data: b"\xff" * len(data)),
    "renamed": (STATE, lambda data: data.replace(b"core.0", b"core.7")),
    "no json": ("trainer.json", lambda data: data[:-3]),
    "a list": ("trainer.json", lambda _: b"[1]"),
    "no step": ("trainer.json", lambda data: data.replace(b'"step": 2', b'"step": "x"')),
    "adapter cut": ("adapter/adapter_model.safetensors", lambda data: data[:-9]),
    "trainer gone": ("trainer.json", lambda data: data.replace(b'"trainer"', b'"strainer"')),
    "adapter gone": ("adapter/adapter_model.safetensors", None),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_with_its_cure(recipe, tmp_path, base, damage):
    common = (LORA, f"init_from={base}", f"out={tmp_path / 'run'}")
    done = train(recipe(*common, "steps=2")).checkpoint
    name, change = DAMAGES[damage]
    data = (done / name).read_bytes()
    (done / name).unlink()
    if change is not None:
        assert change(data) != data
        (done / name).write_bytes(change(data))
    with pytest.raises(ValueError, match=rf"is damaged \(.+\); remove {done}, and the run goes on from") as error:
        train(recipe(*common))
    assert name.split("/")[0] in str(error.value)
    assert "\n" not in str(error.value)
    print("::", error.value)
    shutil.rmtree(done)
    assert train(recipe(*common)).finished


def test_a_checkpoint_is_never_half_removed(recipe, tmp_path, monkeypatch):
    def dies(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints.shutil, "rmtree", lambda path, ignore_errors=False: ignore_errors or dies(path))
        with pytest.raises(KeyboardInterrupt):
            train(recipe("keep_checkpoints=1"))
    folder = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000002.old", "step-00000004"]
    (folder / "step-00000003.partial").mkdir()
    assert train(recipe("steps=6")).finished
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000004", "step-00000006"]


def test_what_is_left_of_a_checkpoint_gives_way_to_a_whole_one(recipe, tmp_path):
    left = tmp_path / "run" / "checkpoints" / "step-00000002"
    left.mkdir(parents=True)
    (left / "stray").write_text("")
    assert train(recipe("steps=2")).checkpoint == left
    assert not (left / "stray").exists()


def test_a_float64_run_keeps_every_digit_of_its_start(recipe, tmp_path):
    base = train(recipe("precision=float64", "steps=2")).checkpoint
    (name, stored), *_ = load_file(base / "model.safetensors").items()
    assert not stored.float().double().equal(stored)
    frozen = [f"out={tmp_path / 'two'}", f"init_from={base}", "precision=float64", "objective={kind: gate_regression}"]
    after = train(recipe(*frozen, "steps=1")).checkpoint
    assert load_file(after / "model.safetensors")[name].equal(stored)


def test_a_runs_folder_serves_as_tokenizer(recipe, tmp_path):
    base = train(recipe("steps=2")).checkpoint
    done = train(recipe(f"tokenizer={tmp_path / 'run'}", f"out={tmp_path / 'two'}", "vocab_size=400"))
    fingerprint = looplm.data.tokenizer.fingerprint
    assert fingerprint(load_tokenizer(done.checkpoint)) == fingerprint(load_tokenizer(base))
    with pytest.raises(ValueError, match="neither a checkpoint nor a run"):
        train(recipe(f"tokenizer={tmp_path}", f"out={tmp_path / 'three'}"))


def test_what_was_left_out_is_told_once(recipe, tmp_path, base):
    chats = tmp_path / "chat.jsonl"
    records = [{"q": "why", "a": "so"}] * 20 + [{"q": "why", "a": "far too long " * 30}]
    chats.write_text("".join(json.dumps(record) + "\n" for record in records))
    source = f"{{kind: chat, path: {chats}, prompt: q, answer: a}}"
    common = (f"init_from={base}", f"data.sources.chat={source}")
    train(recipe(*common, "steps=2"))
    train(recipe(*common))
    assert steps_of(tmp_path / "run") == [0, 1, 2, 3, 4]
