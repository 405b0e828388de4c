"""The model and tokenizer that a run starts from or goes on with."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from looplm.data.text import read_documents
from looplm.data.tokenizer import CHAT_TOKENS, load_tokenizer, train_tokenizer, word_tokenizer
from looplm.models import LoopLMConfig, LoopLMForCausalLM, load
from looplm.models.convert.duplicate import duplicate_core
from looplm.models.reading import find_folder
from looplm.training.adapters import add_adapter, is_adapter, load_adapter
from looplm.training.checkpoints import Base, complete_checkpoints, content_hash, intact
from looplm.training.data_recipe import TaskSource, TextSource
from looplm.training.recipe import Recipe, RunSettings


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A model under its recipe, its tokenizer, and the checkpoint that its adapters belong to if it has any."""

    model: LoopLMForCausalLM
    tokenizer: PreTrainedTokenizerFast
    base: Base | None = None


def open_run(recipe: Recipe, resume: Path | None, base: Base | None = None) -> Opened:
    """What `recipe` trains: from `resume`, a checkpoint of this run on `base`, or from the recipe's own start.

    Raises:
        ValueError: if the model, tokenizer or checkpoint is unusable, named, or is another than `base`.
    """
    if (resume is not None and recipe.lora is None) or recipe.init_from is not None:
        opened = open_checkpoint(recipe, resume, base)
        if resume is None or recipe.lora is not None:
            opened = replace(opened, model=_modified(recipe, opened.model))
    else:
        opened = _new(recipe)
    _check_vocabulary(opened)
    make_trainable(recipe, opened.model, resume, recipe.objective.trains)
    config = opened.model.config
    recipe.objective.check_model(config)
    recipe.objective.check_loops(recipe.depth_schedule(config.loops).lowest)
    if recipe.stability is not None:
        recipe.stability.check_model(opened.model)
    return opened


def open_checkpoint(recipe: RunSettings, resume: Path | None, base: Base | None) -> Opened:
    """The whole model of `resume`, a checkpoint of this run; of adapters, and at the start, that of `init_from`.

    Raises:
        ValueError: if it is damaged, or is not the checkpoint `base` that the run's adapters belong to.
    """
    if resume is not None and recipe.lora is None:
        with intact(resume, ""):
            return Opened(model=load(resume, _dtype(recipe)), tokenizer=load_tokenizer(resume))
    assert recipe.init_from is not None
    pinned = base is not None and Path(base.path).is_dir()
    checkpoint = Path(base.path) if pinned else latest_checkpoint(recipe.init_from).absolute()
    model = load(checkpoint, _dtype(recipe))
    if recipe.lora is not None:
        found = Base(path=str(checkpoint), content=content_hash(checkpoint))
        if base is not None and found.content != base.content:
            raise ValueError(
                f"the adapters in {recipe.out} belong to what {base.path} held, and {checkpoint} holds another model; "
                "put that back, or begin anew under another out="
            )
        base = found
    return Opened(model=model, tokenizer=load_tokenizer(checkpoint), base=base)


def make_trainable(
    recipe: RunSettings, model: LoopLMForCausalLM, resume: Path | None, trains: Callable[[str], bool]
) -> None:  # fmt: skip
    """Adapters in (those of `resume`, if any), gradients on for what is trained, activations as the recipe says."""
    model.to(_dtype(recipe)).train()
    if recipe.lora is not None:
        add_adapter(model, recipe.lora, recipe.seed)
        if resume is not None:
            with intact(resume, "adapter"):
                load_adapter(model, resume)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_trained(recipe, name, trains))
    _checkpoint_activations(model, recipe.checkpointing)


def is_trained(recipe: RunSettings, name: str, trains: Callable[[str], bool]) -> bool:
    """Whether the run moves the parameter of this name, where its objective `trains` some."""
    return is_adapter(name) if recipe.lora is not None else trains(name)


def latest_checkpoint(path: str | Path) -> Path:
    """`path` itself if it is a checkpoint, else the newest complete one of the run folder `path`; or a hub id's."""
    path = Path(path)
    if not path.exists():
        return find_folder(str(path))
    if (path / "config.json").exists():
        return path
    done = complete_checkpoints(path / "checkpoints")
    if not done:
        raise ValueError(f"'{path}' is neither a checkpoint nor a run with a complete one")
    return done[-1]


def _dtype(recipe: RunSettings) -> torch.dtype:
    return torch.float64 if recipe.precision == "float64" else torch.float32


def _modified(recipe: Recipe, model: LoopLMForCausalLM) -> LoopLMForCausalLM:
    """What the recipe makes of a checkpoint before it trains."""
    if recipe.duplicate is not None:
        model = duplicate_core(model, recipe.duplicate.factor, recipe.duplicate.order)
    return _changed(model, (recipe.model or {}) | ({} if recipe.loops is None else {"loops": recipe.loops}))


def _changed(model: LoopLMForCausalLM, changes: dict[str, Any]) -> LoopLMForCausalLM:
    """`model` with other values in fields of its config that no tensor depends on; the tensors are shared."""
    if not changes:
        return model
    config = LoopLMConfig(**(model.config.to_diff_dict() | changes))
    with torch.device("meta"):
        changed = LoopLMForCausalLM(config)
    before, after = model.state_dict(), changed.state_dict()
    for name in sorted({*before, *after}):
        if name not in before or name not in after or before[name].shape != after[name].shape:
            raise ValueError(
                f"model: {changes} would change the tensor '{name}' of the checkpoint; only a new model can"
            )
    changed.load_state_dict(before, strict=True, assign=True)
    changed.tie_weights()
    changed.config.name_or_path = changed.name_or_path = model.name_or_path
    return changed


def _new(recipe: Recipe) -> Opened:
    tokenizer = _tokenizer_at(recipe.tokenizer) if recipe.tokenizer is not None else _new_tokenizer(recipe)
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    torch.manual_seed(recipe.seed)
    defaults = {"loops": recipe.loops or 4, **ids}
    values: dict[str, Any] = defaults | (recipe.model or {}) | {"vocab_size": len(tokenizer)}
    return Opened(model=LoopLMForCausalLM(LoopLMConfig(**values)), tokenizer=tokenizer)


def _tokenizer_at(place: str) -> PreTrainedTokenizerFast:
    """The tokenizer in a folder of its own, or of a checkpoint, a run or a hub id."""
    folder = Path(place)
    return load_tokenizer(folder if (folder / "tokenizer.json").exists() else latest_checkpoint(folder))


def _new_tokenizer(recipe: Recipe) -> PreTrainedTokenizerFast:
    sources = recipe.data.sources.values()
    task_words = [word for source in sources if isinstance(source, TaskSource) for word in source.task.words()]
    if all(isinstance(source, TaskSource) for source in sources):
        return word_tokenizer(dict.fromkeys(task_words))
    documents: list[str] = []
    for source in sources:
        if isinstance(source, TextSource):
            documents += read_documents(source.path, source.field)
    # With a chat's marks any model can go on to conversations.
    return train_tokenizer(documents, recipe.vocab_size, [*CHAT_TOKENS, *task_words])


def _check_vocabulary(opened: Opened) -> None:
    greatest, rows = max(opened.tokenizer.get_vocab().values()), opened.model.config.vocab_size
    if greatest >= rows:
        raise ValueError(
            f"the tokenizer's ids reach {greatest}, but the model embeds {rows} tokens only; "
            f"call model.resize_token_embeddings({greatest + 1}) and save it again, or use its own tokenizer"
        )


def _checkpoint_activations(model: LoopLMForCausalLM, unit: str) -> None:
    if unit == "block":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif unit == "loop":
        model.model.checkpoint_loops()
