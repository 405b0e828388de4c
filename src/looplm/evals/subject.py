"""The model under evaluation: opened once, with all of it that decides answers, and what its tokens cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from looplm.data.tokenizer import fingerprint, load_tokenizer
from looplm.engine.kv_policies import kv_policy
from looplm.evals.accounting import DENSE, costs_of
from looplm.evals.depths import Depth, exit_depth, fixed_depths
from looplm.evals.results import Evaluation, Item
from looplm.models import LoopLMConfig, LoopLMForCausalLM, load
from looplm.models.reading import find_folder, read_layout
from looplm.models.tokens import end_token_ids
from looplm.training.checkpoints import content_hash
from looplm.training.opening import latest_checkpoint


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Which model, read at which depths.

    model: a checkpoint, run folder or hub id · loops, exits ("q=0.5"): the depths; the model's own loops without any
    kv: how loops share keys and values where it generates (prefill is always full)
    against: models that its compute is compared with, by a name of `accounting.DENSE`, or as `model`.
    """

    model: str
    loops: tuple[int, ...] = ()
    exits: tuple[str, ...] = ()
    kv: str = "full"
    dtype: str = "float32"
    device: str = "cpu"
    against: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Subject:
    """An open model; `settings` are what of it decides answers, for results."""

    folder: Path
    model: LoopLMForCausalLM
    tokenizer: PreTrainedTokenizerFast
    depths: tuple[Depth, ...]
    kv: str
    settings: Mapping[str, Any]
    against: Mapping[str, LoopLMConfig]

    @property
    def loops(self) -> int:
        """The most that any of the depths may ask for."""
        return max(depth.loops for depth in self.depths)

    @property
    def max_length(self) -> int:
        """Tokens that the model's positions were made for."""
        return self.model.config.max_position_embeddings

    def result(self, found: Evaluation) -> Evaluation:
        """`found` with this model among its settings, and the costs of each of its depths."""
        costs = {depth.name: self._cost(depth, found.items) for depth in self.depths}
        return replace(found, settings={**self.settings, **found.settings}, costs=costs)

    def _cost(self, depth: Depth, items: Mapping[str, Mapping[str, Sequence[Item]]]) -> dict[str, float]:
        """What a token costs; under an exit rule by the loops that the items' tokens did."""
        config = self.model.config
        more: dict[str, Any] = {"kv": self.kv, "dtype": self.model.dtype, "against": self.against}
        if depth.fixed:
            return costs_of(config, depth.loops, **more)
        counted = [item for told in items.values() for item in told.get(depth.name, ()) if item.loops and item.tokens]
        tokens = sum(item.tokens or 0 for item in counted)
        if not tokens:
            return {}
        mean = min(depth.loops, sum((item.loops or 0) * (item.tokens or 0) for item in counted) / tokens)
        below = int(mean)  # FLOPs are linear in loops, so a mean costs what its two neighbours do in these shares
        shares = {below: below + 1 - mean, below + 1: mean - below}
        return costs_of(config, {loops: share for loops, share in shares.items() if share}, **more)


def open_subject(asked: ModelSettings) -> Subject:
    """The model that is asked for, with its tokenizer and its depths.

    Raises:
        ValueError: for an unusable checkpoint, a depth that it cannot do, an unknown `kv` or model in `against`.
    """
    kv_policy(asked.kv)
    against = {name: _dense(name) for name in asked.against}
    folder = latest_checkpoint(asked.model)
    tokenizer = load_tokenizer(folder)
    model = load(folder, dtype=asked.dtype, device=asked.device)
    loops = asked.loops if asked.loops or asked.exits else (model.config.loops,)
    settings = {
        "model": asked.model, "checkpoint": content_hash(folder), "dtype": str(model.dtype).removeprefix("torch."),
        "device": asked.device, "kv": asked.kv, "tokenizer": fingerprint(tokenizer),
        "end_tokens": sorted(end_token_ids(model, tokenizer.eos_token_id)), "looplm": version("looplm"),
        "torch": version("torch"),
    }  # fmt: skip
    depths = (
        *(fixed_depths(sorted(loops)) if loops else ()),
        *(exit_depth(rule, model.config) for rule in dict.fromkeys(asked.exits)),
    )
    return Subject(
        folder=folder, model=model, tokenizer=tokenizer, depths=depths, kv=asked.kv, settings=settings, against=against
    )  # fmt: skip


def _dense(name: str) -> LoopLMConfig:
    if name in DENSE:
        return DENSE[name]()
    try:
        return read_layout(find_folder(name, weights=False))[1]
    except ValueError as error:
        raise ValueError(f"{error}; to compare compute with, name {', '.join(DENSE)} or a checkpoint") from error
