"""The engine: rows at mixed depths in one core step, refilled at every loop."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from looplm.engine.compiled import is_installed
from looplm.engine.flight import Flight
from looplm.engine.graphs import cuda_graph
from looplm.engine.intake import Intake, Options, Prompt
from looplm.engine.kv_policies import KVPolicy, kv_policy, recomputes
from looplm.engine.memory import Memory
from looplm.engine.policies import DepthPolicy, FixedLoops, check_policy, is_whole
from looplm.engine.requests import Completion, Row, TokenEvent
from looplm.engine.runner import Runner
from looplm.engine.sampling import SamplingParams
from looplm.engine.scheduler import Scheduler
from looplm.engine.speculation import Speculation, check_speculation
from looplm.engine.stats import Stats
from looplm.engine.store import PAGE
from looplm.models import LoopLMForCausalLM
from looplm.models.tokens import end_token_ids


class Engine:
    """Generates with a looped model, each token at its own depth.

    Args:
        tokenizer: encodes prompts given as text and makes completions' text; prompts of token ids do without.
        depth: when tokens leave, unless a request says otherwise; all loops by default.
        kv: how loops share key/value slots: "full", "recomputed", "last", "averaged", "first", "adjacent", or a policy.
        loops: the most that any request may ask for; the model's own by default.
        max_rows: requests in the loop at once · max_length: tokens of prompt and completion at most.
        kv_bytes: what keys and values may take.
        prefill_tokens: of prompts in the loop at once, so that long ones do not hold up the others.
        min_readout: how many tokens wait for coda and head together, as long as others are in the loop.
        deterministic: computes calls of exactly 16 rows, so that on CPU a request's tokens and loops are bit-equal
            whatever runs beside it; else they may differ at near-ties, which `stats` counts.
        speculate: lets tokens enter before their predecessor is final; changes no token, but for near-ties.
        cuda_graphs: replays the core step as recorded graphs, one for each power of two of rows and of pages; needs a
            GPU. What it records is tested on CPU, the recording itself has not been run on a GPU yet.
        compiled: norms and single tokens' attention by compiled loops, for float32 models on a CPU; by default where
            numba is installed (the `cpu` extra), but not if deterministic. Compiling takes some seconds, once.
        seed: of requests that bring none.
    """

    def __init__(
        self, model: LoopLMForCausalLM, tokenizer: PreTrainedTokenizerBase | None = None, *,
        depth: DepthPolicy | None = None, kv: str | KVPolicy = "full", loops: int | None = None, max_rows: int = 16,
        max_length: int = 2048, kv_bytes: int = 2**30, prefill_tokens: int = 512, min_readout: int = 1,
        deterministic: bool = False, speculate: Speculation | None = None, cuda_graphs: bool = False,
        compiled: bool | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        policy, loops = kv_policy(kv), model.config.loops if loops is None else loops
        _check_sizes(
            model, loops=loops, max_rows=max_rows, max_length=max_length, min_readout=min_readout, kv_bytes=kv_bytes,
            prefill_tokens=prefill_tokens,
        )  # fmt: skip
        if not is_whole(seed, -math.inf):
            raise ValueError(f"seed={seed!r} must be a whole number")
        if cuda_graphs and model.device.type != "cuda":
            raise ValueError(f"cuda_graphs needs a model on a GPU; this one is on '{model.device}'")
        depth = check_policy(FixedLoops(loops) if depth is None else depth)
        if speculate is not None:
            check_speculation(speculate).check(policy, loops)
        width = 1 if speculate is None else speculate.width_at(loops)
        # What may be recomputed keeps its state, one for each token.
        lanes = max_rows * (max_length if recomputes(policy) else width)
        memory = Memory(model.config, model.lm_head.weight, policy, loops, max_rows, max_length, kv_bytes)
        blocks = max(1, prefill_tokens // PAGE)
        self.memory, self.scheduler = memory, Scheduler(memory, max_rows, width, lanes, blocks)
        self._model = model
        self.runner = Runner(
            model, lanes, blocks, max_length, memory.core, memory.boundary, policy, deterministic,
            capture=cuda_graph if cuda_graphs else None, fast=_compiles(model, compiled, deterministic),
        )  # fmt: skip
        self.intake = Intake(
            config=model.config, tokenizer=tokenizer, memory=memory, depth=depth, loops=loops,
            max_length=max_length, seed=seed, speculates=speculate is not None,
            ends=frozenset(end_token_ids(model, None if tokenizer is None else tokenizer.eos_token_id)),
        )  # fmt: skip
        self.intake.check_depth(depth)
        self._kept: list[TokenEvent] = []
        self._claimed: set[int] = set()  # requests that streams and lists report themselves
        self._flight = Flight(memory, self.scheduler, self.runner, speculate, min_readout)

    @property
    def stats(self) -> Stats:
        """Counts since the engine began."""
        return self._flight.stats

    # What users call ------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        told: Callable[[Completion], object] | None = None, **options: Any,
    ) -> list[Completion]:  # fmt: skip
        """Complete every prompt (text or token ids): `n` completions each, in the order of the prompts.

        `told` hears of each as it ends · `options` are the fields of `Options`, the same for all prompts.
        """
        if isinstance(prompts, str):
            raise ValueError("prompts is a list; for one prompt give [prompt]")
        prompts = list(prompts)
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams | None) else list(sampling)
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts came with {len(each)} sampling parameters; give one, or as many")
        rows = [
            row
            for prompt, params in zip(prompts, each, strict=True)
            for row in self.intake.rows(prompt, params, Options(**options))
        ]
        done = {}
        for event in self._events(rows):
            if event.completion is not None:
                done[event.number] = event.completion
                if told is not None:
                    told(event.completion)
        return [done[row.request.number] for row in rows]

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Any) -> Iterator[TokenEvent]:
        """Complete one prompt token by token, from when the first is asked for. `options` as in `generate`.

        Closing the iterator, or letting go of it, cancels.
        """
        return self._events(self.intake.rows(prompt, sampling, Options(**options)))

    def _events(self, rows: Sequence[Row]) -> Iterator[TokenEvent]:
        """What comes of `rows`, which nobody else is told; who leaves early cancels them."""
        mine = {row.request.number for row in rows}
        missing = set(mine)
        self.scheduler.waiting.extend(rows)
        self._claimed |= mine
        try:
            while missing:
                for event in self._tick(lambda number: number in mine):
                    if event.completion is not None:
                        missing.discard(event.number)
                    yield event
        finally:
            for number in missing:
                self.cancel(number)
            self._claimed -= mine
            self._kept, self._flight.events = (
                [event for event in told if event.number not in mine] for told in (self._kept, self._flight.events)
            )

    def submit(self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Any) -> list[int]:
        """Queue a prompt: the numbers of its `n` completions, by which `tick` reports and `cancel` finds them.

        Raises:
            ValueError: for an empty prompt, an unknown token, a depth beyond the engine's, or what can never fit.
        """
        rows = self.intake.rows(prompt, sampling, Options(**options))
        self.scheduler.waiting.extend(rows)
        return [row.request.number for row in rows]

    def cancel(self, number: int) -> None:
        """End a request; its pages and lanes are free at once, and the next tick reports it. Ended ones stay so."""
        for row in [*self.scheduler.waiting, *self.scheduler.rows]:
            if row.request.number == number:
                self._flight.finish(row, "cancelled")

    @property
    def busy(self) -> bool:
        """Whether any request has not ended, or `tick` has not reported it."""
        untold = any(event.number not in self._claimed for event in self._kept)
        return bool(self.scheduler.waiting or self.scheduler.rows or self._flight.events or untold)

    def forget_prefixes(self) -> None:
        """Drop what is kept of earlier prompts: to be called when the model's weights have changed.

        Requests in the loop go on with the new weights on what the old ones computed, and leave nothing to later ones.

        Raises:
            ValueError: if the model has another dtype or device now.
        """
        self.runner.read_weights(self._model)
        self.memory.forget()

    def tick(self) -> list[TokenEvent]:
        """One core step of everything in flight, and what came of what was submitted; nothing is told twice."""
        return self._tick(lambda number: number not in self._claimed)

    def _tick(self, wanted: Callable[[int], bool]) -> list[TokenEvent]:
        """A tick, and what is to be told of some requests; what it says of others stays for who asks for them."""
        events = self._kept + self._flight.tick()
        self._kept = [event for event in events if not wanted(event.number)]
        return [event for event in events if wanted(event.number)]


def _check_sizes(model: LoopLMForCausalLM, **counts: int) -> None:
    for name, count in counts.items():
        if not is_whole(count):
            raise ValueError(f"{name}={count!r} must be a whole number of at least 1")
    places = model.config.max_position_embeddings
    if model.config.rope == "learned" and counts["max_length"] > places:
        raise ValueError(
            f"max_length={counts['max_length']} is more than max_position_embeddings={places}, "
            "and learned positions do not extend"
        )


def _compiles(model: LoopLMForCausalLM, asked: bool | None, deterministic: bool) -> bool:
    """Whether compiled loops are used: if asked for, or where they can be."""
    suits = model.dtype == torch.float32 and model.device.type == "cpu"
    if asked and not suits:
        raise ValueError(f"compiled=True needs a float32 model on a CPU; this one is {model.dtype} on '{model.device}'")
    if asked and deterministic:
        raise ValueError("compiled=True does not go with deterministic=True: which loop runs depends on the traffic")
    return suits and is_installed() and not deterministic if asked is None else asked
