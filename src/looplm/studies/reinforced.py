"""A study's run that is trained, then reinforced, then measured."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from filelock import FileLock
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from looplm.data.tokenizer import load_tokenizer
from looplm.models import LoopLMForCausalLM, load
from looplm.rl.recipe import RLRecipe, load_rl_recipe
from looplm.rl.run import reinforce
from looplm.studies.records import read_log
from looplm.studies.study import Outcome
from looplm.studies.trained import Trained
from looplm.training.recipe import RunSettings


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A finished run: its model in evaluation mode, and the log of its reinforcement, empty where there was none."""

    model: LoopLMForCausalLM
    tokenizer: PreTrainedTokenizerFast
    log: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Reinforced:
    """A policy of `warm_start`, or of the recipe's own `init_from`; reinforced unless told otherwise; then measured.

    measure: a module's own function of the policy, and of the recipe, which says what is asked.
    shared: the folder beside the cells' own that holds the warm starts of all cells that name it, by seed.
    """

    recipe: str
    overrides: tuple[str, ...]
    measure: Callable[[Policy, RLRecipe], Outcome]
    warm_start: Trained | None = None
    shared: str | None = None
    reinforces: bool = True
    seed: int = 0

    def steps(self) -> int:
        """Of the warm start, and after it."""
        return sum(recipe.steps or 0 for recipe in self.recipes(Path()))

    def recipes(self, folder: Path) -> list[RunSettings]:
        """Those of all stages under `folder`."""
        trained = [] if self.warm_start is None else self.warm_start.recipes(self._warm_folder(folder))
        return [*trained, *([self._recipe(folder)] if self.reinforces else [])]

    def __call__(self, folder: Path) -> Outcome:
        """Train or resume under `folder`, reinforce, then measure."""
        facts: dict[str, Any] = {}
        recipe, policy = self._recipe(folder), None
        if self.warm_start is not None:
            warm = self._warm_folder(folder)
            warm.mkdir(parents=True, exist_ok=True)
            with FileLock(warm / "lock"):  # who comes second finds it trained
                run, facts = self.warm_start.trained(warm)
            policy = Policy(model=run.model, tokenizer=run.tokenizer)
        if self.reinforces:
            done = reinforce(recipe, Console(quiet=True), title=folder.name)
            if not done.finished:
                raise KeyboardInterrupt
            policy = Policy(
                model=load(done.checkpoint).eval(), tokenizer=load_tokenizer(done.checkpoint),
                log=read_log(Path(recipe.out)),
            )  # fmt: skip
        assert policy is not None, "a run that neither trains nor reinforces"
        outcome = self.measure(policy, recipe)
        return replace(outcome, facts=facts | dict(outcome.facts))

    def _recipe(self, folder: Path) -> RLRecipe:
        values: dict[str, Any] = {"out": str(folder / "stage_rl"), "seed": self.seed}
        if self.warm_start is not None:
            values["init_from"] = self.warm_start.recipes(self._warm_folder(folder))[-1].out
        return load_rl_recipe(self.recipe, self.overrides, values)

    def _warm_folder(self, folder: Path) -> Path:
        return folder if self.shared is None else folder.parent.parent / self.shared / folder.name
