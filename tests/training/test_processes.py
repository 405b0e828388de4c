"""One, two and three processes train the same model under DDP and FSDP2, random depth and one loop included."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from looplm.training import load_recipe, train
from looplm.training.checkpoints import complete_checkpoints, seed_process
from looplm.training.distribution import World
from looplm.training.run_folder import alone_in

RECIPE = """
out: unset
model:
  hidden_size: 16
  intermediate_size: 24
  num_attention_heads: 2
  prelude_layers: 1
  core_layers: 2
  coda_layers: 1
  injection: concat
  state_init: normal
  norm_in_loop: false
  rope_theta: 10000.0
  initializer_range: 0.2
vocab_size: 320
data:
  length: 24
  rows: 5
  sources:
    text: {{kind: text, path: {text}, share: 2, held_out_rows: 2}}
    compose: {{kind: task, share: 1, held_out_questions: 8, task: {{kind: compose, entities: 4, relations: 2}}}}
objective: {{kind: expected_loss, beta: 0.05}}
optimizer: {{kind: adamw, lr: 0.01}}
schedule: {{kind: constant, warmup_steps: 0}}
depth: {{kind: uniform, low: 1, high: 3}}
loops: 3
steps: 6
precision: float64
log_every: 1
evaluate_every: 6
save_every: 3
"""
# Every case runs under both wrappers. Five rows on two or three processes are uneven by themselves.
CASES = {
    "random depth": ["micro_rows=1"],
    "per sequence": ["depth={kind: uniform, low: 1, high: 3, per: sequence}"],
    "truncated": ["depth={kind: uniform, low: 1, high: 3, grad_loops: 1}", "objective={kind: last_loop}"],
    "one loop": ["depth=null", "loops=1", "model.tie_word_embeddings=true"],
    "tied": ["depth=null", "model.tie_word_embeddings=true", "model.coda_layers=0"],
    "stable": ["stability={form: {kind: finite_difference, every: 2}, weight: 0.1}", "objective={kind: last_loop}"],
    "warm": ["stability={form: {kind: finite_difference, warm: true}, weight: 0.1}", "micro_rows=1"],
    "ddp jvp": ["stability={form: {kind: jacobian_vector}, weight: 0.1}"],
    "averaged": ["checkpointing=loop", "data.mean=sources", "ema={decay: 0.5}"],
}


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distributed")
    text = folder / "text.txt"
    text.write_text("A loop thinks again before it answers. " * 60)
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(text=text))
    return path


@pytest.fixture(scope="module")
def alone(recipe_file):
    """The run of each case in one process."""
    found = {}
    for name, overrides in CASES.items():
        out = recipe_file.parent / "one" / name.replace(" ", "_")
        found[name] = train(load_recipe(recipe_file, [f"out={out}", *overrides])).checkpoint
    return found


def torchrun(processes, *program):
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--master_port", "0",
        "--rdzv_backend", "c10d", "--rdzv_endpoint", "127.0.0.1:0", *map(str, program),
    ]  # fmt: skip
    return subprocess.run(
        command, capture_output=True, text=True, timeout=280, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


def launch(processes, *arguments, script="distributed_train.py"):
    done = torchrun(processes, Path(__file__).parent / script, *arguments)
    assert done.returncode == 0, done.stderr[-4000:]


def assert_same(one, other, tolerance=1e-8):
    files = [path.relative_to(one) for path in sorted(one.rglob("model.safetensors"))]
    assert files
    for file in files:
        a, b = load_file(one / file), load_file(other / file)
        assert set(a) == set(b)
        for key, tensor in a.items():
            torch.testing.assert_close(tensor, b[key], atol=tolerance, rtol=tolerance, msg=f"{other}: {key}")


def random_states(checkpoint):
    files = (checkpoint / "trainer").glob("*.safetensors")
    return {key: tensor for file in files for key, tensor in load_file(file).items() if key.startswith("rng/")}


def losses(checkpoint):
    lines = (checkpoint.parents[1] / "log.jsonl").read_text().splitlines()
    names = ("loss", "grad_norm", "state_norm_loop1", "token_correlation", "exit_loop1")
    return [[r[name] for name in names] for r in map(json.loads, lines) if "loss" in r]


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_agree(recipe_file, alone, processes):
    runs, outs = [], {}
    for name, overrides in CASES.items():
        for parallel in ("ddp",) if name.startswith("ddp") else ("ddp", "fsdp"):
            out = recipe_file.parent / f"{parallel}{processes}" / name.replace(" ", "_")
            outs[name, parallel] = out
            runs.append(";".join([str(out), f"parallel={parallel}", *overrides]))
    launch(processes, recipe_file, *runs)
    for (name, parallel), out in outs.items():
        checkpoint = complete_checkpoints(out / "checkpoints")[-1]
        torch.testing.assert_close(
            losses(checkpoint), losses(alone[name]), atol=1e-9, rtol=1e-7, msg=f"{name} {parallel}"
        )
        assert_same(alone[name], checkpoint)


def test_a_run_goes_on_with_another_number_of_processes(recipe_file, alone):
    """Three steps on two FSDP processes, the rest on one; then three on one, the rest on two."""
    out = recipe_file.parent / "moved"
    launch(2, recipe_file, ";".join([str(out), "parallel=fsdp", *CASES["averaged"]]))
    last, first = complete_checkpoints(out / "checkpoints")[::-1]
    shutil.rmtree(last)
    assert first.name == "step-00000003"
    stored = random_states(first)
    assert not stored["rng/0"].equal(stored["rng/1"])  # each process drops other entries
    resumed = train(load_recipe(recipe_file, [f"out={out}", *CASES["averaged"]]))
    assert resumed.step == 6
    assert_same(alone["averaged"], resumed.checkpoint)
    grown = recipe_file.parent / "grown"
    shutil.copytree(alone["averaged"].parents[1], grown)
    shutil.rmtree(grown / "checkpoints" / "step-00000006")
    launch(2, recipe_file, ";".join([str(grown), *CASES["averaged"]]))
    assert_same(alone["averaged"], grown / "checkpoints" / "step-00000006")
    stored = random_states(grown / "checkpoints" / "step-00000006")
    assert stored["rng/0"].equal(random_states(alone["averaged"])["rng/0"])
    seed_process(0, 3, World(rank=1, size=2))
    assert stored["rng/1"].equal(torch.get_rng_state())  # new at step 3, and nothing draws from it without dropout


def test_a_sharded_model_is_put_together_on_the_leading_process_alone(tmp_path):
    launch(2, tmp_path / "found", script="distributed_gather.py")
    assert (tmp_path / "found").read_text() == "agreed"


def test_a_folder_in_use_stops_every_process(recipe_file, tmp_path):
    """The leading process alone sees the lock; nobody waits for it afterwards."""
    with alone_in(tmp_path / "run", World()):
        done = torchrun(2, "-m", "looplm", "train", recipe_file, f"out={tmp_path / 'run'}")
    assert done.returncode != 0
    assert done.stderr.count("another process trains in") == 1
    assert "Traceback (most recent call last)" not in done.stderr.split("torch/distributed/elastic")[0]
