"""`looplm demo`: train one small looped model, then show what its loops do."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerFast

from looplm.analysis.exit_curve import (
    DepthPoint,
    ExitPoint,
    exit_curve,
    fixed_depth_points,
    height_over_fixed,
    worst_gap,
)
from looplm.analysis.exit_decoding import decode_with_exits
from looplm.data.tokenizer import load_tokenizer
from looplm.models import LoopLMForCausalLM, load
from looplm.studies.demo_report import hops_label, write_report
from looplm.studies.depth_probe import held_out_questions, probe_questions
from looplm.tasks import Compose
from looplm.training import Recipe, load_recipe, train
from looplm.training.data_recipe import TaskSource
from looplm.training.evaluate import held_out_losses, losses_by_loop
from looplm.training.mixture import Mixture

STAGES = ("Stage I", "Stage II")
_SAMPLE_PROMPT = "The statement "
_MOST_HOPS = 6


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A prompt and its continuation, piece by piece with the loop that each was read at."""

    prompt: str
    pieces: list[tuple[str, int]]


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """Everything the demo measured; written as demo.json beside the report."""

    parameters: int
    trained_loops: int
    accuracy_by_loop: list[float]
    accuracy_by_hops: dict[str, list[float]]
    text_loss_by_loop: list[float]
    fixed_depth: list[DepthPoint]
    exit_curves: dict[str, list[ExitPoint]]
    height_over_fixed: dict[str, float]
    worst_gap_between: dict[str, float]
    sample_q: float
    sample_mean_loops: float
    samples: list[Sample]


def run_demo(
    out: Path, text: str | None = None, overrides: tuple[str, ...] = (), console: Console | None = None
) -> bool:
    """Train (or resume) both stages under `out`, measure, and write report.html; False if it was interrupted."""
    console = console or Console()
    checkpoints: list[Path] = []
    recipes = demo_recipes(out, text, overrides)
    for stage, recipe in zip(STAGES, recipes, strict=True):
        done = train(recipe, console, title=stage)
        if not done.finished:
            console.print(f"stopped at step {done.step} of {stage}; the same command resumes", highlight=False)
            return False
        checkpoints.append(done.checkpoint)
    publish(checkpoints[-1], out / "model")
    result = measure(recipes[-1], checkpoints)
    (out / "demo.json").write_text(json.dumps(asdict(result), indent=1) + "\n")
    report = write_report(result, out)
    show(result, console)
    console.print(f"\nmodel:  {out / 'model'}\nreport: {report}", highlight=False, soft_wrap=True)
    return True


def demo_recipes(out: Path, text: str | None = None, overrides: tuple[str, ...] = ()) -> tuple[Recipe, Recipe]:
    """Both stages under `out`; overrides of data, loops and seed go to both, others to Stage I."""
    placed = [override for override in overrides if override.split("=")[0] in ("out", "init_from")]
    if placed:
        raise ValueError(f"the demo places its own stages, so '{placed[0]}' has no meaning; use --out")
    shared = [override for override in overrides if override.startswith(("data.", "loops=", "seed="))]
    corpus = {"data.sources.text.path": text} if text else {}
    first = load_recipe("mini_stage1", overrides, corpus | {"out": str(out / "stage1")})
    stage_two = {"out": str(out / "stage2"), "init_from": str(out / "stage1")}
    second = load_recipe("mini_stage2", shared, corpus | stage_two)
    _refuse_unmeasurable(second)
    return first, second


def _refuse_unmeasurable(recipe: Recipe) -> None:
    """Say before the training what could not be shown after it."""
    task = _task(recipe)
    if task.max_hops > _MOST_HOPS:
        raise ValueError(
            f"the demo shows at most {_MOST_HOPS} hops, not {task.max_hops}; lower data.sources.compose.task.max_hops"
        )
    empty = [hops for hops, examples in held_out_questions(task).items() if not examples]
    if empty:
        raise ValueError(
            f"no {empty[0]}-hop question is held out in this small world; raise data.sources.compose.task.held_out"
        )


def _task(recipe: Recipe) -> Compose:
    source = recipe.data.sources.get("compose")
    if not isinstance(source, TaskSource) or not isinstance(source.task, Compose) or "text" not in recipe.data.sources:
        raise ValueError("the demo measures the sources text and compose; leave both in data.sources")
    return source.task


def publish(checkpoint: Path, target: Path) -> None:
    """Copy a checkpoint's model and tokenizer to `target`, a plain model folder."""
    aside = target.with_suffix(".partial")
    for stale in (aside, target):
        shutil.rmtree(stale, ignore_errors=True)
    shutil.copytree(checkpoint, aside, ignore=shutil.ignore_patterns("trainer*"))
    aside.rename(target)


def measure(recipe: Recipe, checkpoints: list[Path]) -> DemoResult:
    """Read both stages' checkpoints on held-out questions and text, at the trained loops and as many beyond."""
    assert recipe.loops is not None
    loops = recipe.loops
    tokenizer = load_tokenizer(checkpoints[-1])
    task = _task(recipe)
    models = dict(zip(STAGES, map(load, checkpoints), strict=True))
    probes = {stage: probe_questions(model, tokenizer, task, 2 * loops) for stage, model in models.items()}
    probe = probes[STAGES[1]]
    fixed = fixed_depth_points(probe.correct[:, :loops], probe.weights)
    curves = {stage: exit_curve(p.gate_logits[:, :loops], p.correct, p.weights) for stage, p in probes.items()}
    model = models[STAGES[1]]
    held_out = {"text": Mixture(recipe.data, tokenizer, recipe.seed).held_out()["text"]}
    losses = held_out_losses(partial(losses_by_loop, model), held_out, 2 * loops, torch.device("cpu"))
    q = _cheapest(curves[STAGES[1]], fixed[-1].accuracy).q
    samples = _samples(model, tokenizer, task, q)
    drawn = [loop for sample in samples for _, loop in sample.pieces]
    return DemoResult(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        trained_loops=loops,
        accuracy_by_loop=[point.accuracy for point in fixed_depth_points(probe.correct, probe.weights)],
        accuracy_by_hops=probe.accuracy_by_hops(),
        text_loss_by_loop=list(losses.values()),
        fixed_depth=fixed,
        exit_curves=curves,
        height_over_fixed={stage: height_over_fixed(curve, fixed) for stage, curve in curves.items()},
        worst_gap_between={stage: worst_gap(curve, fixed) for stage, curve in curves.items()},
        sample_q=q,
        sample_mean_loops=sum(drawn) / len(drawn),
        samples=samples,
    )


def show(result: DemoResult, console: Console) -> None:
    """Print the tables that the report also holds."""
    table = Table(title="Accuracy by loops (3 hops and more held out) and held-out text loss", title_justify="left")
    table.add_column("")
    for loop in range(1, len(result.accuracy_by_loop) + 1):
        table.add_column(f"{loop}" + ("*" if loop == result.trained_loops else ""), justify="right")
    percent: Callable[[float], str] = "{:.0%}".format
    table.add_row("all", *map(percent, result.accuracy_by_loop))
    for hops, accuracies in result.accuracy_by_hops.items():
        table.add_row(hops_label(hops), *map(percent, accuracies))
    table.add_row("text loss", *map("{:.2f}".format, result.text_loss_by_loop))
    console.print(table)
    console.print(f"* trained depth; {result.parameters:,} parameters\n", highlight=False)
    for stage, curve in result.exit_curves.items():
        reached = _cheapest(curve, result.fixed_depth[-1].accuracy)
        console.print(
            f"{stage + ' exits:':<15} {reached.accuracy:.1%} at {reached.mean_loops:.2f} mean loops (q = {reached.q}); "
            f"{round(100 * result.height_over_fixed[stage], 1) + 0.0:+.1f} points over fixed depth at worst",
            highlight=False, soft_wrap=True,
        )  # fmt: skip


def _cheapest(curve: list[ExitPoint], full: float) -> ExitPoint:
    """The point of fewest mean loops whose accuracy is within one point of full depth."""
    return min((p for p in curve if p.accuracy >= full - 0.01), key=lambda p: p.mean_loops)


def _samples(model: LoopLMForCausalLM, tokenizer: PreTrainedTokenizerFast, task: Compose, q: float) -> list[Sample]:
    questions = [examples[0].prompt for examples in held_out_questions(task).values()]
    prompts = [(_SAMPLE_PROMPT, 120), *((question, 1) for question in questions)]
    generator = torch.Generator().manual_seed(0)
    samples = []
    for prompt, length in prompts:
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
        made = decode_with_exits(model, ids, q, length, temperature=0.7 if length > 1 else 0.0, generator=generator)
        samples.append(Sample(prompt=prompt, pieces=[(str(tokenizer.decode([t.token])), t.loop) for t in made]))
    return samples
