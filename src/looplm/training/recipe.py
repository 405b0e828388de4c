"""A training run as one typed value, filled by a YAML file and `a.b=value` overrides."""

from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from yaml import YAMLError

from looplm.objectives import ExpectedLoss, GateRegression
from looplm.tasks import Compose
from looplm.training.depth import Depth, DepthSchedule, FixedDepth
from looplm.training.schedules import WarmupStableDecay

_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
BUILT_IN = Path(__file__).parent / "recipes"


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class TextData:
    """Running text: `rows` windows a step from `path` (a file or folder; Python's own manual by default).

    `weight` is the share of this source's mean loss in the step's loss.
    """

    path: str | None = None
    rows: PositiveInt = 6
    weight: PositiveFloat = 1.0
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.1
    held_out_rows: PositiveInt = 64


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class TaskData:
    """Fresh questions of a task each step; the loss is on the answer only, and `weight` as for text."""

    task: Compose = field(default_factory=Compose)
    questions: PositiveInt = 192
    weight: PositiveFloat = 1.0
    held_out_questions: PositiveInt = 512


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Data:
    """What a step's batch is mixed from; rows are `length` tokens."""

    length: Annotated[int, Field(ge=2)] = 128
    text: TextData | None = None
    compose: TaskData | None = None

    def __post_init__(self) -> None:
        if self.text is None and self.compose is None:
            raise ValueError("name at least one source: text or compose")


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Optimizer:
    """AdamW; weight decay on matrices only."""

    lr: PositiveFloat = 2e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Recipe:
    """Everything that decides a run. What was run lies in its folder as recipe.json.

    A new model is built from `model` (fields of `LoopLMConfig`) with a tokenizer of `vocab_size` tokens trained on
    the text; `init_from` continues from a checkpoint folder instead. `loops` is the model's depth and that of every
    step, unless `depth` draws one for each (`looplm.training.depth`).
    """

    out: str
    model: dict[str, Any] | None = None
    vocab_size: PositiveInt = 1024
    init_from: str | None = None
    data: Data
    objective: Annotated[ExpectedLoss | GateRegression, Field(discriminator="kind")]
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: WarmupStableDecay = field(default_factory=WarmupStableDecay)
    loops: PositiveInt = 4
    depth: Annotated[DepthSchedule, Field(discriminator="kind")] | None = None
    steps: PositiveInt
    clip_norm: PositiveFloat = 1.0
    seed: Annotated[int, Field(ge=0)] = 0
    log_every: PositiveInt = 10
    evaluate_every: PositiveInt = 250
    save_every: PositiveInt = 250
    keep_checkpoints: PositiveInt = 2

    def __post_init__(self) -> None:
        if (self.model is None) == (self.init_from is None):
            raise ValueError("give exactly one of model (a new one) and init_from (a checkpoint folder)")
        if self.model is not None and "vocab_size" in self.model:
            raise ValueError("model.vocab_size follows from the tokenizer; set vocab_size instead")
        self.objective.check_loops(self.loops if self.depth is None else self.depth.low)

    def depth_at(self, step: int) -> Depth:
        """The loops of 0-based `step`, and how many of them carry gradient."""
        schedule = self.depth or FixedDepth(loops=self.loops, high=self.loops)
        return schedule.draw(self.seed, step)


def load_recipe(
    source: str | Path, overrides: Sequence[str] = (), values: Mapping[str, Any] = MappingProxyType({})
) -> Recipe:
    """The recipe in a YAML file, or the built-in one of that name, with `a.b=value` overrides.

    `values` are further overrides by dotted key whose values are taken as they are, not read as YAML (paths).

    Raises:
        ValueError: for a missing file, broken YAML, an unknown key or a value of the wrong kind; each is named.
    """
    path = _find(source)
    for override in overrides:
        if "=" not in override:
            raise ValueError(f"the override '{override}' is not of the form a.b=value")
    try:
        merged = OmegaConf.merge(OmegaConf.load(path), OmegaConf.from_dotlist(list(overrides)))
        container = OmegaConf.to_container(merged, resolve=True)
        for key, value in values.items():
            _put(container, key.split("."), value)
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError, TypeError, AttributeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path} with its overrides cannot be read as a recipe: {reason}") from error
    try:
        return TypeAdapter(Recipe).validate_python(container)
    except ValidationError as error:
        raise ValueError(f"recipe {path.stem}: {_first(error)}") from error


def resolved(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain JSON values."""
    return TypeAdapter(Recipe).dump_python(recipe, mode="json")


def built_in_recipes() -> list[str]:
    """The names that `load_recipe` knows without a file."""
    return sorted(path.stem for path in BUILT_IN.glob("*.yaml"))


def _put(container: Any, keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        container = container.setdefault(key, {})
    container[keys[-1]] = value


def _find(source: str | Path) -> Path:
    for path in (Path(source), BUILT_IN / f"{source}.yaml"):
        if path.is_file():
            return path
    raise ValueError(f"no recipe '{source}': neither a file nor one of {', '.join(built_in_recipes())}")


def _first(error: ValidationError) -> str:
    problem = error.errors()[0]
    unions = {"expected_loss", "gate_regression", "fixed", "uniform", "poisson", "log_normal", "log_normal_poisson"}
    where = ".".join(str(part) for part in problem["loc"] if part not in unions)
    if problem["type"] == "unexpected_keyword_argument":
        return f"unknown key '{where}'"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message
