"""Study: Ouro's whole pipeline in miniature on real text, from pretraining at eight loops to a trained exit gate."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from looplm.analysis.origin import origin
from looplm.data.tokenizer import load_tokenizer
from looplm.models import LoopLMForCausalLM, load
from looplm.models.convert.duplicate import duplicate_core
from looplm.models.exits import exit_loops, exit_pdf
from looplm.objectives.targets import Batch, loop_losses, next_token_targets
from looplm.studies.ouro_tiny_report import write_ouro_tiny_report
from looplm.studies.python_text import write_code, write_conversations
from looplm.studies.records import write_result
from looplm.training import Recipe, load_recipe, train
from looplm.training.data_recipe import TextSource
from looplm.training.evaluate import held_out_losses, losses_by_loop
from looplm.training.mixture import Mixture

STAGES = ("1a", "1b", "2", "3", "4", "sft", "gate")
_LOOPS = 8
_THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99)
_PATHS = {"code": "data/code", "chat": "data/chat.jsonl"}  # the manual needs none
SMOKE = ("data.rows=2", "data.length=64", "steps=3", "evaluate_every=3", "save_every=3")


@dataclass(frozen=True, kw_only=True)
class StageOutcome:
    """A stage's end: held-out loss on the manual at loops 1 to 8, the gate's exits, and what it cost."""

    stage: str
    layers: int
    loops: int
    parameters: int
    tokens: int
    cpu_seconds: float
    manual_loss_by_loop: list[float]
    exit_by_loop: list[float]


@dataclass(frozen=True, kw_only=True)
class GatePoint:
    """Reading at the exit loops of threshold q: mean loops and held-out loss."""

    q: float
    mean_loops: float
    loss: float


def run_ouro_tiny(out: Path, smoke: bool, console: Console) -> bool:
    """Run (or resume) every stage under `out`, then write ouro_tiny.json and report.html; False if interrupted."""
    write_code(out / _PATHS["code"])
    write_conversations(out / _PATHS["chat"])
    seconds: dict[str, float] = {}
    for stage in STAGES:
        began = time.process_time()
        done = train(stage_recipe(out, stage, smoke), console, title=f"stage {stage}")
        seconds[stage] = time.process_time() - began
        if not done.finished:
            console.print(f"stopped at step {done.step} of stage {stage}; the same command resumes", highlight=False)
            return False
    values = _measure(out, smoke, seconds)
    write_result(out, "ouro_tiny", origin("looplm study ouro-tiny"), values)
    console.print(f"report: {write_ouro_tiny_report(values, out)}", highlight=False, soft_wrap=True)
    return True


def stage_recipe(out: Path, stage: str, smoke: bool) -> Recipe:
    """The recipe of a stage with its folders under `out`."""
    overrides = SMOKE if smoke else ()
    recipe = load_recipe(f"ouro_tiny_{stage}", overrides)
    paths: dict[str, Any] = {"out": str(out / stage)}
    if recipe.init_from is not None:
        paths["init_from"] = str(out / Path(recipe.init_from).name)
    for name in recipe.data.sources:
        if name in _PATHS:
            paths[f"data.sources.{name}.path"] = str(out / _PATHS[name])
    return load_recipe(f"ouro_tiny_{stage}", overrides, paths)


def _measure(out: Path, smoke: bool, seconds: dict[str, float]) -> dict[str, Any]:
    batch = _held_out_manual(out, smoke)
    models = {stage: load(_checkpoint(out, stage)) for stage in STAGES}
    outcomes = [_outcome(stage, models[stage], batch, out, smoke, seconds[stage]) for stage in STAGES]
    before = models["1a"]
    upcycled = {order: duplicate_core(before, 2, order) for order in ("stack", "interleave")}
    return {
        "stages": [asdict(outcome) for outcome in outcomes],
        "upcycling": {
            "before, at 4 loops": _losses(before, batch, 4)[-1],
            **{f"duplicated ({order}), at 4 loops": _losses(model, batch, 4)[-1] for order, model in upcycled.items()},
            "after stage 1b, at 4 loops": _losses(models["1b"], batch, 4)[-1],
        },
        "gates": {
            name: [asdict(p) for p in _gate_curve(models[s], batch)] for name, s in (("before", "4"), ("after", "gate"))
        },
        "fixed_depth": _losses(models["4"], batch, 4),
    }


def _checkpoint(out: Path, stage: str) -> Path:
    return sorted((out / stage / "checkpoints").glob("step-*"))[-1]


def _held_out_manual(out: Path, smoke: bool) -> Batch:
    recipe = stage_recipe(out, "1a", smoke)
    source = recipe.data.sources["manual"]
    assert isinstance(source, TextSource)
    data = type(recipe.data)(length=recipe.data.length, rows=1, sources={"manual": source})
    return Mixture(data, load_tokenizer(_checkpoint(out, "1a")), recipe.seed).held_out()["manual"]


def _losses(model: LoopLMForCausalLM, batch: Batch, loops: int) -> list[float]:
    found = held_out_losses(
        lambda rows, count: losses_by_loop(model, rows, count), {"m": batch}, loops, torch.device("cpu")
    )
    return list(found.values())


def _outcome(
    stage: str, model: LoopLMForCausalLM, batch: Batch, out: Path, smoke: bool, seconds: float
) -> StageOutcome:
    recipe, config = stage_recipe(out, stage, smoke), model.config
    _, gates = _token_losses(model, batch)
    return StageOutcome(
        stage=stage, layers=config.core_layers, loops=config.loops,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        tokens=sum(map(recipe.data.rows_at, range(recipe.steps or 0))) * recipe.data.length, cpu_seconds=seconds,
        manual_loss_by_loop=_losses(model, batch, _LOOPS), exit_by_loop=exit_pdf(gates).mean(0).tolist(),
    )  # fmt: skip


@torch.no_grad()
def _token_losses(model: LoopLMForCausalLM, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss [T, N] and gate logits [N, T] of the held-out targets, at the model's own loops."""
    trace = model.model(batch["input_ids"], position_ids=batch["position_ids"], keep_loops="all", use_cache=False)
    targets = next_token_targets(batch["labels"])
    kept = targets != -100
    assert trace.gate_logits is not None
    return loop_losses(model, trace, targets)[:, kept], trace.gate_logits.flatten(0, 1)[kept]


def _gate_curve(model: LoopLMForCausalLM, batch: Batch) -> list[GatePoint]:
    losses, gates = _token_losses(model, batch)
    points = []
    for q in _THRESHOLDS:
        chosen = exit_loops(gates, q)
        loss = losses.gather(0, chosen[None] - 1).mean()
        points.append(GatePoint(q=q, mean_loops=float(chosen.float().mean()), loss=float(loss)))
    return points
