"""A training run as one typed value, filled by a YAML file and `a.b=value` overrides."""

from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from yaml import YAMLError

from looplm.objectives import Objective, Stability
from looplm.training.adapters import Lora
from looplm.training.averaging import EmaSettings
from looplm.training.data_recipe import Data
from looplm.training.depth import DepthSchedule, FixedDepth
from looplm.training.distribution import Parallel
from looplm.training.monitors import Monitors, NonFinite
from looplm.training.optimizers import AdamWSettings, OptimizerSettings
from looplm.training.schedules import LearningRate, WarmupStableDecay

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
R = TypeVar("R")
BUILT_IN = Path(__file__).parent / "recipes"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Duplicate:
    """The core's layers copied `factor` times before training (Ouro, arXiv 2510.25741: 24 layers to 48).

    order: "stack" repeats the whole stack, "interleave" each layer; the paper does not say which.
    """

    factor: Annotated[int, Field(ge=2)] = 2
    order: Literal["stack", "interleave"] = "stack"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RunSettings:
    """What every kind of run has: where it lies, what it starts from, how its weights move, when it tells and saves.

    A step's rows are cut into micro-batches of `micro_rows` a process. "bfloat16" computes matrix products in it
    (autocast) and keeps weights, gate, norms, softmax and losses in float32; "float64" is for proofs of equality.
    """

    out: str
    init_from: str | None = None
    lora: Lora | None = None
    optimizer: Annotated[OptimizerSettings, Field(discriminator="kind")] = field(default_factory=AdamWSettings)
    schedule: Annotated[LearningRate, Field(discriminator="kind")] = field(default_factory=WarmupStableDecay)
    steps: PositiveInt | None = None
    micro_rows: PositiveInt | None = None
    clip_norm: PositiveFloat = 1.0
    precision: Literal["float32", "bfloat16", "float64"] = "float32"
    checkpointing: Literal["none", "block", "loop"] = "none"
    parallel: Parallel = "ddp"
    nonfinite: NonFinite = field(default_factory=NonFinite)
    monitors: Monitors = field(default_factory=Monitors)
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    log_every: PositiveInt = 10
    evaluate_every: PositiveInt = 250
    save_every: PositiveInt = 250
    keep_checkpoints: PositiveInt = 2

    @property
    def free_fields(self) -> tuple[str, ...]:
        """The keys that a resumed run may change: they decide memory, speed, and what is told or kept of it."""
        told = ("monitors", "nonfinite", "log_every", "evaluate_every", "save_every", "keep_checkpoints")
        return ("out", "micro_rows", "checkpointing", "parallel", *told)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Recipe(RunSettings):
    """Everything that decides a run. What was run lies in its folder as recipe.json.

    A new model is built from `model` (fields of `LoopLMConfig`) with the tokenizer in the folder `tokenizer`, or with a
    new one of `vocab_size` tokens trained on the text. `init_from` continues from a checkpoint instead; `model` then
    changes fields that no tensor depends on (a RoPE base), and `duplicate` or `lora` what is trained.

    `loops` is the model's depth and that of every step, unless `depth` draws one (`looplm.training.depth`); without it
    a checkpoint's own count stays. `steps` or `epochs` says how long.

    `micro_rows`, `checkpointing`, `parallel` and the number of processes
    change memory and speed, not the result, but for these: a depth drawn `per: micro_batch` and a probe over the
    `whole_tensor` belong to the micro-batches that come of them, dropout is drawn by each process for its own, and Muon
    under FSDP2 orthogonalises in bfloat16 what lies on several processes (PyTorch's own; weights within 4e-4).
    """

    model: dict[str, Any] | None = None
    vocab_size: PositiveInt = 1024
    tokenizer: str | None = None
    duplicate: Duplicate | None = None
    data: Data
    objective: Annotated[Objective, Field(discriminator="kind")]
    stability: Stability | None = None
    loops: PositiveInt | None = None
    depth: Annotated[DepthSchedule, Field(discriminator="kind")] | None = None
    epochs: PositiveInt | None = None
    ema: EmaSettings | None = None

    def __post_init__(self) -> None:
        if self.model is None and self.init_from is None:
            raise ValueError("give model (a new one) or init_from (a checkpoint folder)")
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give exactly one of steps and epochs")
        if self.model is not None and "vocab_size" in self.model:
            raise ValueError("model.vocab_size follows from the tokenizer; set vocab_size instead")
        if self.model is not None and "loops" in self.model:
            raise ValueError("model.loops is the recipe's own loops; set loops instead")
        if self.init_from is None:
            self._refuse_for_new_models()
        elif self.tokenizer is not None:
            raise ValueError("init_from brings its own tokenizer; leave tokenizer out")
        if self.optimizer.bits == 8 and self.parallel == "fsdp":
            raise ValueError("optimizer.bits=8 cannot be saved from FSDP's shards; take parallel: ddp")
        if self.stability is not None:
            self.stability.check_objective(self.objective)
            if self.parallel == "fsdp" and self.stability.form.kind in ("jacobian_vector", "vector_jacobian"):
                raise ValueError(
                    f"stability.form '{self.stability.form.kind}' cannot go through FSDP's shards; "
                    "take 'finite_difference', or parallel: ddp"
                )
        if self.lora is not None and not self.objective.trains("model.core.0.attention.q_proj.weight"):
            raise ValueError(
                f"lora adapts the core, which objective '{self.objective.kind}' keeps frozen; leave lora out"
            )
        lowest = self.depth.lowest if self.depth is not None else self.loops
        if lowest is not None:
            self.objective.check_loops(lowest)

    def _refuse_for_new_models(self) -> None:
        for name in ("duplicate", "lora"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} changes a trained model; give init_from")

    @property
    def free_fields(self) -> tuple[str, ...]:
        """As of any run, but `micro_rows` and `data.workers` by what a step is."""
        by_depth = self.depth is not None and self.depth.per == "micro_batch"
        by_probe = self.stability is not None and getattr(self.stability.form, "whole_tensor", False)
        bound = {"micro_rows"} if by_depth or by_probe else set()
        return ("data.workers", *(name for name in super().free_fields if name not in bound))

    def depth_schedule(self, model_loops: int) -> DepthSchedule:
        """Where each step's loops come from, for a model of so many."""
        loops = self.loops or model_loops
        return self.depth or FixedDepth(loops=loops, high=loops)


def load_recipe(
    source: str | Path, overrides: Sequence[str] = (), values: Mapping[str, Any] = MappingProxyType({})
) -> Recipe:
    """The training recipe in a YAML file, or the built-in one of that name; see `read_recipe`."""
    return read_recipe(Recipe, BUILT_IN, source, overrides, values)


def read_recipe(
    kind: type[R], built_in: Path, source: str | Path, overrides: Sequence[str] = (),
    values: Mapping[str, Any] = MappingProxyType({}),
) -> R:  # fmt: skip
    """The recipe in a YAML file, or the one of that name in `built_in`, with `a.b=value` overrides.

    `values` are further overrides by dotted key whose values are taken as they are, not read as YAML (paths).

    Raises:
        ValueError: for a missing file, broken YAML, an unknown key or a value of the wrong kind; each is named.
    """
    path = _find(source, built_in)
    for override in overrides:
        if "=" not in override:
            raise ValueError(f"the override '{override}' is not of the form a.b=value")
    try:
        config = OmegaConf.load(path)
        for override in overrides:
            _override(config, override)
        container = OmegaConf.to_container(config, resolve=True)
        for key, value in values.items():
            _put(container, key.split("."), value)
        _fill_kinds(container)
        _leave_out_sources(container)
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError, TypeError, AttributeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path} with its overrides cannot be read as a recipe: {reason}") from error
    try:
        return TypeAdapter(kind).validate_python(container)
    except ValidationError as error:
        raise ValueError(f"recipe {path.stem}: {_first(error, container)}") from error


def resolved(recipe: RunSettings) -> dict[str, Any]:
    """The recipe as plain JSON values."""
    return TypeAdapter(type(recipe)).dump_python(recipe, mode="json")


def built_in_recipes(folder: Path = BUILT_IN) -> list[str]:
    """The names that are known without a file."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def _override(config: Any, override: str) -> None:
    key = override.partition("=")[0]
    _set(config, key, OmegaConf.select(OmegaConf.from_dotlist([override]), key))


def _set(config: Any, key: str, value: Any) -> None:
    """Merge a value into what is there; one that says its `kind`, at any depth, replaces it: its keys may not fit."""
    if OmegaConf.is_dict(value) and "kind" not in value and OmegaConf.is_dict(OmegaConf.select(config, key)):
        for name, part in value.items():
            _set(config, f"{key}.{name}", part)
    else:
        OmegaConf.update(config, key, value, merge=False)


# What an optimizer or schedule is where a recipe does not say.
_DEFAULT_KINDS = {"optimizer": "adamw", "schedule": "wsd"}


def _fill_kinds(container: Any) -> None:
    for name, kind in _DEFAULT_KINDS.items():
        if isinstance(container.get(name), dict):
            container[name].setdefault("kind", kind)


def _leave_out_sources(container: Any) -> None:
    """A source set to null is left out: how an override takes one away."""
    sources = (container.get("data") or {}).get("sources")
    if isinstance(sources, dict):
        for name in [name for name, source in sources.items() if source is None]:
            del sources[name]


def _put(container: Any, keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        container = container.setdefault(key, {})
    container[keys[-1]] = value


def _find(source: str | Path, built_in: Path) -> Path:
    for path in (Path(source), built_in / f"{source}.yaml"):
        if path.is_file():
            return path
    raise ValueError(f"no recipe '{source}': neither a file nor one of {', '.join(built_in_recipes(built_in))}")


def _first(error: ValidationError, given: Any) -> str:
    problem = error.errors()[0]
    unknown = problem["type"] == "unexpected_keyword_argument"
    where = ".".join(_keys(problem["loc"], given, keep_last=unknown or problem["type"] == "missing"))
    if unknown:
        return f"unknown key '{where}'"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message


def _keys(location: Sequence[int | str], given: Any, keep_last: bool) -> list[str]:
    """The keys of the recipe along pydantic's location, without the names of the kinds that it tried on the way."""
    keys = []
    for index, part in enumerate(location):
        listed = isinstance(given, list) and isinstance(part, int) and part < len(given)
        inside = listed or (isinstance(given, dict) and part in given)
        if inside:
            given = given[part]
        if inside or (keep_last and index == len(location) - 1):
            keys.append(str(part))
    return keys
