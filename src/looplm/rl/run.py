"""One run from recipe to checkpoint: build or resume, reinforce, leave a folder that says what was done."""

import contextlib
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.optim import Optimizer

from looplm.models import LoopLMForCausalLM, load, save
from looplm.models.tokens import end_token_ids
from looplm.objectives.loop_weights import LearnedWeights
from looplm.rl.collect import Collector, own_places
from looplm.rl.diary import Diary
from looplm.rl.loop import Session, run_steps
from looplm.rl.module import PolicyModule
from looplm.rl.recipe import RLRecipe
from looplm.rl.rollouts import EngineRollouts, RolloutSource, merged_model, most_loops
from looplm.rl.vllm import VLLMRollouts
from looplm.training.checkpoints import (
    Base,
    Live,
    Progress,
    complete_checkpoints,
    content_hash,
    read_progress,
    restore,
    save_checkpoint,
    seed_process,
)
from looplm.training.distribution import World, distribute, open_world
from looplm.training.logs import RunLog, SilentLog, StepProgress
from looplm.training.monitors import NonFiniteGuard
from looplm.training.opening import Opened, is_trained, latest_checkpoint, make_trainable, open_checkpoint
from looplm.training.optimizers import build_optimizers
from looplm.training.run import RunResult, finished_run
from looplm.training.run_folder import alone_in, claim, refuse_another

MakeSource = Callable[[RLRecipe, Opened], RolloutSource]


def reinforce(
    recipe: RLRecipe, console: Console | None = None, title: str = "rl", source: MakeSource | None = None
) -> RunResult:  # fmt: skip
    """Run `recipe`, or resume it where its folder already holds a checkpoint of the same recipe.

    Under torchrun every process calls this alike. On CPU a resumed run equals the uninterrupted one bit for bit,
    rollouts included.

    source: who samples, given the recipe and the model; by default this process's engine, or the recipe's server.

    Raises:
        ValueError: if the folder belongs to another recipe, or the checkpoint, the questions or what marks them are
            unusable; nothing is written then. If the run must stop later, since a reward fails or the policy that is
            trained drifts from the one that sampled, what it reached is saved.
    """
    folder, world = Path(recipe.out), open_world()
    finished = finished_run(recipe, folder)
    if finished is not None:
        return finished
    own_places(recipe.sampling.prompts, recipe.minibatches, world)
    with alone_in(folder, world):
        try:
            source = source or (engine_source if recipe.sampling.server is None else server_source)
            return _reinforce(recipe, folder, world, console or Console(stderr=True), title, source)
        finally:
            recipe.environment.close()


def engine_source(recipe: RLRecipe, opened: Opened) -> EngineRollouts:
    """This process's engine on the live model; of adapters, on a copy that has them in its weights."""
    sampling, model = recipe.sampling, opened.model
    merged = model if recipe.lora is None else merged_model(model)
    return EngineRollouts(
        merged, opened.tokenizer, sampling.depth.policy(model.config.loops), kv=sampling.kv,
        temperature=sampling.temperature, stop=sampling.stop, max_tokens=sampling.max_tokens,
        max_prompt=sampling.max_prompt, max_rows=sampling.max_rows, kv_bytes=sampling.kv_bytes,
        refresh=lambda: None if merged is model else merged.load_state_dict(merged_model(model).state_dict()),
    )  # fmt: skip


def server_source(recipe: RLRecipe, opened: Opened) -> VLLMRollouts:
    """The client of the recipe's vLLM server; its leading process hands over the weights, adapters in them."""
    sampling, model = recipe.sampling, opened.model
    server = sampling.server
    assert server is not None
    return VLLMRollouts(
        server, opened.tokenizer, loops=most_loops(sampling.depth.policy(model.config.loops), model.config.loops),
        vocab_size=model.config.vocab_size, ends=end_token_ids(model, opened.tokenizer.eos_token_id),
        write=lambda folder: save(merged_model(model), folder, server.layout),
        folder=Path(server.folder or Path(recipe.out) / "served"), temperature=sampling.temperature,
        stop=sampling.stop, max_tokens=sampling.max_tokens, max_prompt=sampling.max_prompt, world=open_world(),
    )  # fmt: skip


def _reinforce(
    recipe: RLRecipe, folder: Path, world: World, console: Console, title: str, make_source: MakeSource
) -> RunResult:  # fmt: skip
    refuse_another(folder, recipe)  # again, now that nobody else can claim it
    done = complete_checkpoints(folder / "checkpoints")
    resume = done[-1] if done else None
    start = Progress() if resume is None else read_progress(resume)
    opened = open_checkpoint(recipe, resume, start.base)
    recipe.policy_gradient.check_model(opened.model.config)
    rows = world.each(lambda: _same_questions(recipe, start.rows))
    start = replace(start, base=opened.base or start.base or _base(recipe), rows=rows)
    reference = _reference(recipe, opened.model, start.base)
    make_trainable(recipe, opened.model, resume, recipe.policy_gradient.trains)
    world.wait()  # nobody writes before everybody has looked
    own = opened.model.config.loops
    loops = most_loops(recipe.sampling.depth.policy(own), own)
    module, wrapped, live = _built(recipe, opened.model, loops, world)
    seed_process(recipe.seed, start.step, world)
    if resume is not None:
        restore(resume, live, world)
    guard = NonFiniteGuard(recipe.nonfinite)
    guard.load_state_dict(start.guard)
    collector = world.each(
        lambda: Collector(recipe, recipe.environment, opened.tokenizer, make_source(recipe, opened), world)
    )
    world.each(collector.check)
    world.led(lambda: claim(folder, recipe))
    collector.source.weights_changed()  # a server may hold other weights still
    log = RunLog(folder, start.step, console) if world.leads else SilentLog()
    session = Session(
        recipe=recipe, world=world, live=live, wrapped=wrapped, reference=reference, guard=guard, loops=loops,
        collector=collector, pad=opened.tokenizer.pad_token_id or 0,
        diary=Diary(recipe, folder, module, opened.tokenizer, loops, world, log, start.step),
    )  # fmt: skip
    try:
        with StepProgress(title, recipe.steps, start.step, console if world.leads else Console(quiet=True)) as bar:
            step = run_steps(
                session, start, bar,
                lambda progress: save_checkpoint(
                    folder / "checkpoints", live, progress, opened.tokenizer, recipe.keep_checkpoints, world
                ),
            )  # fmt: skip
    finally:
        log.close()
    return RunResult(checkpoint=complete_checkpoints(folder / "checkpoints")[-1], step=step, steps=recipe.steps)


def _built(
    recipe: RLRecipe, model: LoopLMForCausalLM, loops: int, world: World
) -> tuple[PolicyModule, nn.Module, Live]:  # fmt: skip
    """The policy under its objective, itself and wrapped, and with its optimisers."""
    objective = recipe.policy_gradient
    autocast = torch.bfloat16 if recipe.precision == "bfloat16" else None
    module = PolicyModule(model, objective, loops, autocast)
    wrapped = distribute(module, recipe.parallel, world)
    optimizers = build_optimizers(model, recipe.optimizer, lambda name: is_trained(recipe, name, objective.trains))
    _add_loop_logits(recipe, module, optimizers[-1])
    return module, wrapped, Live(module=module, optimizers=optimizers, lora=recipe.lora)


def _same_questions(recipe: RLRecipe, before: Mapping[str, str]) -> dict[str, str]:
    """The questions' fingerprint, which must be that from `before`, if the run has any."""
    found = {"environment": recipe.environment.fingerprint()}
    if before and before != found:
        raise ValueError(
            f"environment does not give the questions any more that the run in {recipe.out} learns from; put its file "
            f"back, or start another out= with init_from={recipe.out}"
        )
    return found


def _add_loop_logits(recipe: RLRecipe, module: PolicyModule, optimizer: Optimizer) -> None:
    """Learned loop weights move at their own multiple of the rate, without decay."""
    rule = recipe.objective.loop_weights
    if isinstance(rule, LearnedWeights):
        rate = optimizer.param_groups[0]["base_lr"] * rule.lr_factor
        parameters = list(module.beside().values())
        optimizer.add_param_group(
            {"params": parameters, "name": "loop_weights", "lr": rate, "base_lr": rate, "weight_decay": 0.0}
        )


def _base(recipe: RLRecipe) -> Base | None:
    """The checkpoint that the reference is, where there is one."""
    if not recipe.objective.kl:
        return None
    checkpoint = latest_checkpoint(recipe.init_from).absolute()
    return Base(path=str(checkpoint), content=content_hash(checkpoint))


def _reference(
    recipe: RLRecipe, model: LoopLMForCausalLM, base: Base | None
) -> Callable[[], AbstractContextManager[LoopLMForCausalLM]]:  # fmt: skip
    """Opens the model as it was before the run: with adapters the model without them, else a frozen copy.

    Raises:
        ValueError: if the checkpoint that the run began from is another one now.
    """
    if base is None or recipe.lora is not None:
        return lambda: _adapters_off(model)
    if content_hash(Path(base.path)) != base.content:
        raise ValueError(f"{base.path} holds another model than this run's reference; put that back")
    frozen = load(base.path, model.dtype).to(model.device).eval().requires_grad_(False)
    return lambda: contextlib.nullcontext(frozen)


@contextlib.contextmanager
def _adapters_off(model: LoopLMForCausalLM) -> Generator[LoopLMForCausalLM]:
    layers: list[Any] = [part for part in model.modules() if hasattr(part, "lora_A")]  # PEFT's own
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield model
    finally:
        for layer in layers:
            layer.enable_adapters(True)
