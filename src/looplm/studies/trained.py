"""A study's run: a recipe, or several that continue one another, trained and then measured."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedTokenizerFast

from looplm.data.tokenizer import load_tokenizer
from looplm.models import LoopLMForCausalLM, load
from looplm.studies.records import read_log
from looplm.studies.study import Outcome
from looplm.training import Recipe, load_recipe, train
from looplm.training.checkpoints import complete_checkpoints, read_progress
from looplm.training.monitors import training_flops


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run: its last recipe, its model in evaluation mode, its log, and the folders of all its stages."""

    recipe: Recipe
    model: LoopLMForCausalLM
    tokenizer: PreTrainedTokenizerFast
    log: list[dict[str, Any]]
    stages: list[Path]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A recipe by name, with `a.b=value` overrides; it continues the stage of number `after`, by default the last."""

    recipe: str
    overrides: tuple[str, ...] = ()
    after: int | None = None


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Train every stage, each from an earlier one, and measure the last; `measure` is a module's own function."""

    stages: tuple[Stage, ...]
    measure: Callable[[Run], Outcome]
    seed: int = 0
    paths: Mapping[str, str] = field(default_factory=dict)

    def recipes(self, folder: Path) -> list[Recipe]:
        """The stages' recipes under `folder`."""
        found: list[Recipe] = []
        for number, stage in enumerate(self.stages, start=1):
            values: dict[str, Any] = {"out": str(folder / f"stage{number}"), "seed": self.seed, **self.paths}
            if found:
                values["init_from"] = found[-1 if stage.after is None else stage.after - 1].out
            found.append(load_recipe(stage.recipe, stage.overrides, values))
        return found

    def steps(self) -> int:
        """Those of all stages."""
        return sum(recipe.steps or 0 for recipe in self.recipes(Path()))

    def __call__(self, folder: Path) -> Outcome:
        """Train or resume under `folder`, then measure."""
        run, facts = self.trained(folder)
        outcome = self.measure(run)
        return replace(outcome, facts=facts | dict(outcome.facts))

    def trained(self, folder: Path) -> tuple[Run, dict[str, Any]]:
        """Train or resume every stage under `folder`: the run, and what it was."""
        recipes = self.recipes(folder)
        for recipe in recipes:
            done = train(recipe, Console(quiet=True), title=folder.name)
            if not done.finished:
                raise KeyboardInterrupt
        model = load(done.checkpoint).eval()
        stages = [Path(recipe.out) for recipe in recipes]
        run = Run(
            recipe=recipes[-1], model=model, tokenizer=load_tokenizer(done.checkpoint), log=read_log(stages[-1]),
            stages=stages,
        )  # fmt: skip
        return run, _facts(run, recipes)


def checkpoints(run: Run) -> Iterator[tuple[int, LoopLMForCausalLM]]:
    """Every checkpoint that the last stage kept, in order: its step, and its model in evaluation mode."""
    for path in complete_checkpoints(run.stages[-1] / "checkpoints"):
        yield read_progress(path).step, load(path).eval()


def _facts(run: Run, recipes: list[Recipe]) -> dict[str, Any]:
    config = run.model.config
    steps = [record for path in run.stages for record in read_log(path) if "tokens_per_second" in record]
    loops = sum(record["loops"] for record in steps) / len(steps)
    grad_loops = sum(record["grad_loops"] for record in steps) / len(steps)
    tokens = run.recipe.data.rows * run.recipe.data.length
    reads = len(run.recipe.objective.needs(max(1, round(loops))))
    per_loop = training_flops(config, 2, 2, tokens, run.recipe.data.length, reads) - training_flops(
        config, 1, 1, tokens, run.recipe.data.length, reads
    )
    one = training_flops(config, 1, 1, tokens, run.recipe.data.length, reads)
    skipped = (loops - grad_loops) * per_loop * 2 / 3  # a loop without gradient costs one pass of three
    return {
        "parameters": sum(parameter.numel() for parameter in run.model.parameters()),
        "layers": config.prelude_layers + config.core_layers + config.coda_layers,
        "loops": loops,
        "steps": sum(recipe.steps or 0 for recipe in recipes),
        "tokens_per_step": tokens,
        "gflops_per_step": (one + (loops - 1) * per_loop - skipped) / 1e9,
        "minutes": sum(
            tokens / record["tokens_per_second"] * recipe.log_every
            for recipe, path in zip(recipes, run.stages, strict=True)
            for record in read_log(path)
            if "tokens_per_second" in record
        )
        / 60,
    }
