"""A run killed at random moments, inside saves too, is never broken and ends as if it had not been killed."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from safetensors.torch import load_file

import looplm
from looplm.training import load_recipe, train
from looplm.training.checkpoints import complete_checkpoints

KILLS = int(os.environ.get("LOOPLM_KILLS", "3"))  # `make nightly` takes 20
RECIPE = """
out: {out}
model: {{hidden_size: 16, intermediate_size: 24, num_attention_heads: 2, core_layers: 1, rope_theta: 10000.0}}
vocab_size: 320
data:
  length: 32
  rows: 4
  sources:
    text: {{kind: text, path: {text}, share: 2, held_out_rows: 2}}
    compose: {{kind: task, share: 1, held_out_questions: 16, task: {{kind: compose, entities: 4, relations: 2}}}}
objective: {{kind: expected_loss, beta: 0.05}}
stability: {{form: {{kind: finite_difference, warm: true}}, weight: 0.1}}
ema: {{decay: 0.9}}
depth: {{kind: uniform, low: 1, high: 3}}
loops: 2
steps: {steps}
micro_rows: 2
log_every: 1
evaluate_every: 1000
save_every: 2
"""


def lines(log):
    return log.read_text().count("\n") if log.exists() else 0


def killed_after(command, log, more, pause):
    """SIGKILL after `more` log lines and `pause` seconds; whether the run was still going."""
    wanted = lines(log) + more
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    for _ in range(6000):
        if process.poll() is not None or lines(log) >= wanted:
            break
        time.sleep(0.01)
    time.sleep(pause)
    process.send_signal(signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode in (0, -signal.SIGKILL), err.decode()
    return process.returncode != 0


@pytest.mark.timeout(60 + 60 * KILLS)
def test_kills_at_random_moments_change_nothing(tmp_path):
    text, file = tmp_path / "text.txt", tmp_path / "recipe.yaml"
    text.write_text("A loop thinks again before it answers. " * 60)
    file.write_text(RECIPE.format(out=tmp_path / "whole", text=text, steps=12 * KILLS + 8))
    whole = train(load_recipe(file))
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "looplm", "train", str(file), f"out={out}"]
    draw, kills, in_save = random.Random(0), 0, 0
    while kills < KILLS:
        assert killed_after(command, out / "log.jsonl", draw.randint(2, 9), draw.uniform(0, 0.08))
        kills += 1
        in_save += any((out / "checkpoints").glob("*.partial"))
        for checkpoint in complete_checkpoints(out / "checkpoints"):
            looplm.load(checkpoint)
    print(f"{kills} kills, {in_save} of them inside a save")
    resumed = train(load_recipe(file, [f"out={out}"]))
    assert resumed.step == whole.step
    for name in ("model.safetensors", "ema/model.safetensors"):
        a, b = load_file(whole.checkpoint / name), load_file(resumed.checkpoint / name)
        assert all(a[key].equal(b[key]) for key in a)
    ours, theirs = (
        [{k: v for k, v in json.loads(line).items() if k not in ("tokens_per_second", "flop_utilisation")}
         for line in (run / "log.jsonl").read_text().splitlines()]
        for run in (out, tmp_path / "whole")
    )  # fmt: skip
    assert ours == theirs
