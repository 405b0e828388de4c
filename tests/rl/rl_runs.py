"""A tiny policy in a folder, prompts with a reward that varies, and recipes on them."""

import json
import os
from pathlib import Path

import torch
from tests.conftest import tiny_config

import looplm
from looplm.data.tokenizer import word_tokenizer
from looplm.models import save
from looplm.rl.recipe import RLRecipe, load_rl_recipe
from looplm.tasks import RunningSum

BASE = """
out: {out}
init_from: {model}
environment: {{kind: functions, path: {prompts}, functions: ["tests.rl.rl_runs:small_digits"], held_out: 0.2}}
sampling: {{prompts: 4, group: 4, temperature: 0.6, max_tokens: 10, max_prompt: 32}}
optimizer: {{kind: adamw, lr: 1.0e-3, weight_decay: 0.0}}
schedule: {{kind: constant, warmup_steps: 0}}
clip_norm: 1.0
steps: 3
evaluate_every: 3
save_every: 3
evaluation: {{questions: 4}}
"""


def small_digits(prompts, completions, **_) -> list[float]:
    """The share of characters that are digits below 5."""
    return [sum(letter in "01234" for letter in text) / max(1, len(text)) for text in completions]


def always_one(prompts, completions, **_) -> list[float]:
    return [0.35] * len(completions)


def first_group_dead(prompts, completions, **_) -> list[float]:
    """Equal rewards for the first four completions of a step, others for the rest."""
    return [0.35 if number < 4 else float(number % 2) for number in range(len(completions))]


CALLS: list[int] = []


def fails_on_the_second_process(prompts, completions, **_) -> list[float]:
    """Of torchrun's two, in the second step."""
    CALLS.append(len(completions))
    if os.environ["RANK"] == "1" and len(CALLS) == 2:
        raise RuntimeError("enough")
    return small_digits(prompts, completions)


def policy(folder: Path, **changes) -> Path:
    """A random model over the words of running sums, saved."""
    torch.manual_seed(0)
    tokenizer = word_tokenizer(RunningSum().words())
    values = {"exit_gate": True, "loops": 3, **changes, "vocab_size": len(tokenizer)}
    save(looplm.LoopLMForCausalLM(tiny_config(**values)), folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_recipe(folder: Path, overrides: tuple[str, ...] = (), out: str = "run", **changes) -> RLRecipe:
    """A recipe on a policy in `folder`, which is made where it is not there."""
    model = folder / "model"
    if not model.exists():
        policy(model, **changes)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{n:02}......="}) + "\n" for n in range(40)))
    path = folder / "recipe.yaml"
    path.write_text(BASE.format(out=folder / out, model=model, prompts=prompts))
    return load_rl_recipe(path, overrides)


def read_log(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
