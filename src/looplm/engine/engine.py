"""The engine: rows at mixed depths in one core step, refilled at every loop.

A tick: admit, prefill, let tokens enter, step them all, ask their depth policies, read out those that leave.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from looplm.engine.batches import block_batch, lane_batch
from looplm.engine.decisions import Decisions
from looplm.engine.intake import Intake, Options, Prompt
from looplm.engine.kv_policies import KVPolicy, kv_policy, recomputes, slots_to_fill
from looplm.engine.memory import Memory
from looplm.engine.policies import DepthPolicy, FixedLoops
from looplm.engine.requests import Choice, Completion, FinishReason, Lane, Row, TokenEvent
from looplm.engine.runner import PromptEnds, Runner
from looplm.engine.sampling import SamplingParams, best_alternatives, choose
from looplm.engine.scheduler import Block, Scheduler, catching_up, full_blocks, looping, readable
from looplm.engine.speculation import Speculation
from looplm.engine.store import PAGE
from looplm.models import LoopLMForCausalLM
from looplm.models.tokens import end_token_ids

NEAR_TIE = 1e-4  # a lead of the best logit under which rounding may choose
Item = TypeVar("Item")


@dataclass(kw_only=True)
class Stats:
    """Counts since the engine began.

    ticks: those with a core step · core_steps: applications of the core to one token; times its layers, of blocks
    loops: of the tokens made · near_ties: greedy choices by a lead below 1e-4 · accepted, rejected: proposed tokens.
    """

    ticks: int = 0
    core_steps: int = 0
    prefill_tokens: int = 0
    reused_tokens: int = 0
    tokens: int = 0
    loops: int = 0
    near_ties: int = 0
    accepted: int = 0
    rejected: int = 0


class Engine:
    """Generates with a looped model, each token at its own depth.

    Args:
        tokenizer: encodes prompts given as text and makes completions' text; prompts of token ids do without.
        depth: when tokens leave, unless a request says otherwise; all loops by default.
        kv: how loops share key/value slots: "full", "recomputed", "last", "averaged", "first", "adjacent", or a policy.
        loops: the most that any request may ask for; the model's own by default.
        max_rows: requests in the loop at once · max_length: tokens of prompt and completion at most.
        kv_bytes: what keys and values may take.
        prefill_tokens: of prompts in one tick, so that long ones do not hold up the others.
        min_readout: how many tokens wait for coda and head together, as long as others are in the loop.
        deterministic: computes calls of exactly 16 rows, so that on CPU a request's tokens and loops are bit-equal
            whatever runs beside it; else they may differ at near-ties, which `stats` counts.
        speculate: lets tokens enter before their predecessor is final; changes no token.
        seed: of requests that bring none.
    """

    def __init__(
        self, model: LoopLMForCausalLM, tokenizer: PreTrainedTokenizerBase | None = None, *,
        depth: DepthPolicy | None = None, kv: str | KVPolicy = "full", loops: int | None = None, max_rows: int = 16,
        max_length: int = 2048, kv_bytes: int = 2**30, prefill_tokens: int = 512, min_readout: int = 1,
        deterministic: bool = False, speculate: Speculation | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        self.config, self.policy = model.config, kv_policy(kv)
        self.loops = model.config.loops if loops is None else loops
        _check_sizes(model, loops=self.loops, max_rows=max_rows, max_length=max_length, min_readout=min_readout)
        depth = FixedLoops(self.loops) if depth is None else depth
        depth.check_model(model.config, self.loops)
        if speculate is not None:
            speculate.check(self.policy, self.loops)
        self.speculate, self.width = speculate, 1 if speculate is None else speculate.width_at(self.loops)
        self.min_readout, self.prefill_blocks = min_readout, max(1, prefill_tokens // PAGE)
        like = model.lm_head.weight
        memory = self.memory = Memory(model.config, like, self.policy, self.loops, max_rows, max_length, kv_bytes)
        # What may be recomputed keeps its state, one for each token.
        lanes = max_rows * (max_length if recomputes(self.policy) else self.width)
        self.scheduler = Scheduler(memory, max_rows, self.width, lanes)
        self.runner = Runner(model, lanes, max_length, memory.core, memory.boundary, self.policy, deterministic)
        self.decisions = Decisions(self.runner, self.loops)
        self.intake = Intake(
            config=model.config, tokenizer=tokenizer, memory=memory, depth=depth, loops=self.loops,
            max_length=max_length, seed=seed, speculates=speculate is not None,
            ends=frozenset(end_token_ids(model, None if tokenizer is None else tokenizer.eos_token_id)),
        )  # fmt: skip
        self.stats = Stats()
        self._events: list[TokenEvent] = []

    # What users call ------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[Completion]:  # fmt: skip
        """Complete every prompt (text or token ids): `n` completions each, in the order of the prompts.

        `options` are the fields of `Options`, the same for all prompts.
        """
        if isinstance(prompts, str):
            raise ValueError("prompts is a list; for one prompt give [prompt]")
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams | None) else list(sampling)
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts came with {len(each)} sampling parameters; give one, or as many")
        rows = [
            row
            for prompt, params in zip(prompts, each, strict=True)
            for row in self.intake.rows(prompt, params or SamplingParams(), Options(**options))
        ]
        self.scheduler.waiting.extend(rows)
        missing = {row.request.number for row in rows}
        done: dict[int, Completion] = {}
        while missing:
            for event in self.tick():
                if event.completion is not None and event.number in missing:
                    done[event.number] = event.completion
                    missing.discard(event.number)
        return [done[row.request.number] for row in rows]

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Any) -> Iterator[TokenEvent]:
        """Complete one prompt token by token; closing the iterator cancels. `options` as in `generate`."""
        return self._stream(set(self.submit(prompt, sampling, **options)))

    def _stream(self, numbers: set[int]) -> Iterator[TokenEvent]:
        try:
            while numbers:
                for event in self.tick():
                    if event.number in numbers:
                        if event.completion is not None:
                            numbers.discard(event.number)
                        yield event
        finally:
            for number in numbers:
                self.cancel(number)

    def submit(self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Any) -> list[int]:
        """Queue a prompt: the numbers of its `n` completions, by which `tick` reports and `cancel` finds them.

        Raises:
            ValueError: for an empty prompt, an unknown token, a depth beyond the engine's, or what can never fit.
        """
        rows = self.intake.rows(prompt, sampling or SamplingParams(), Options(**options))
        self.scheduler.waiting.extend(rows)
        return [row.request.number for row in rows]

    def cancel(self, number: int) -> None:
        """End a request; its pages and lanes are free at once, and the next tick reports it. Ended ones stay so."""
        for row in [*self.scheduler.waiting, *self.scheduler.rows]:
            if row.request.number == number:
                self._finish(row, "cancelled")

    @property
    def busy(self) -> bool:
        """Whether any request has not ended, or has not been reported."""
        return bool(self.scheduler.waiting or self.scheduler.rows or self._events)

    def forget_prefixes(self) -> None:
        """Drop what is kept of earlier prompts: to be called when the model's weights have changed."""
        if self.memory.prefixes is not None:
            self.memory.prefixes.clear()

    def tick(self) -> list[TokenEvent]:
        """One core step of everything in flight, and what came of it."""
        self._admit()
        self._prefill()
        self._enter()
        self._step()
        self._read_out()
        events, self._events = self._events, []
        return events

    # Prompts --------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        self.stats.reused_tokens += PAGE * sum(row.prefilled for row in self.scheduler.admit())

    def _prefill(self) -> None:
        for loops, blocks in self.scheduler.prompt_blocks(self.prefill_blocks).items():
            self._attempt(blocks, lambda part, loops=loops: self._prefill_blocks(part, loops), lambda block: block[0])

    def _prefill_blocks(self, blocks: Sequence[Block], loops: int) -> None:
        ends = self.runner.prefill(block_batch(blocks, loops, self.memory))
        finished = []
        for row, block in blocks:
            row.prefilled = block + 1
            self.stats.prefill_tokens += min(PAGE, len(row.request.prompt) - block * PAGE)
            if row.prefilled == row.prompt_blocks:
                finished.append(row)
        if not finished:
            return
        lanes = [self.scheduler.lane(row, row.request.prompt[-1], len(row.request.prompt) - 1) for row in finished]
        for row, lane in zip(finished, lanes, strict=True):
            row.lanes.append(lane)
            lane.entered = True
        self._leave_prompt(lanes, ends, loops)
        for row in self._finite(lanes):
            self.memory.remember(row, full_blocks(row))
            self.memory.fold(row)

    def _leave_prompt(self, lanes: Sequence[Lane], ends: PromptEnds, loops: int) -> None:
        """The prompts' last tokens have done all loops; each is left with the state of the loop that its policy picks."""
        runner = self.runner
        numbers = self._numbers(lanes)
        runner.seeds[numbers] = torch.tensor([lane.row.request.state_seed for lane in lanes], device=runner.device)
        runner.inputs[numbers] = ends.inputs
        still = list(range(len(lanes)))
        for loop in range(1, loops + 1):
            here = [lanes[index] for index in still]
            at = numbers[still]
            runner.before[at], runner.state[at] = ends.states[still, loop - 1], ends.states[still, loop]
            if ends.gates is not None and runner.gate is not None:
                runner.gate[at] = ends.gates[still, loop - 1].to(runner.gate.dtype)
            for lane in here:
                lane.loop = loop
            for lane in self.decisions.leaving(here, self._read):
                lane.left = True
            still = [index for index in still if not lanes[index].left]
            if not still:
                return

    # Tokens in the loop ---------------------------------------------------------------------------------------

    def _enter(self) -> None:
        placed = self.scheduler.placed()
        for warm in (False, True):
            lanes = [lane for lane in placed if (lane.row.last_state is not None) == warm]
            if lanes:
                self._attempt(lanes, self._embed, _row_of)

    def _embed(self, lanes: Sequence[Lane]) -> None:
        runner = self.runner
        seeds = [lane.row.request.state_seed for lane in lanes]
        runner.seeds[self._numbers(lanes)] = torch.tensor(seeds, device=runner.device)
        starts = [lane.row.last_state for lane in lanes if lane.row.last_state is not None]
        runner.enter(lane_batch(lanes, self.memory), torch.stack(starts) if starts else None)
        for lane in lanes:
            lane.entered = True

    def _step(self) -> None:
        lanes = looping(self.scheduler.rows)
        if not lanes:
            return
        self.stats.ticks += 1
        self._attempt(lanes, self._step_lanes, _row_of)
        stepped = [lane for lane in lanes if not lane.dropped]
        self._attempt(stepped, self._let_leave, _row_of)
        self._finite([lane for lane in stepped if not lane.dropped])

    def _step_lanes(self, lanes: Sequence[Lane]) -> None:
        behind = catching_up(lanes)
        self.runner.step(lane_batch([*lanes, *behind], self.memory))
        self.stats.core_steps += len(lanes) + len(behind)
        for lane in (*lanes, *behind):
            lane.loop += 1
        for lane in behind:
            if lane.loop == lane.last:
                lane.row.behind.remove(lane)
                self.scheduler.drop([lane])

    def _let_leave(self, lanes: Sequence[Lane]) -> None:
        leaving = self.decisions.leaving(lanes, self._read)
        for lane in leaving:
            lane.left = True
        if recomputes(self.policy):
            for lane in leaving:
                lane.behind = lane.loop < lane.last
                lane.row.behind += [lane] * lane.behind
        else:
            self._fill(leaving)

    def _fill(self, lanes: Sequence[Lane]) -> None:
        """Copy the last keys and values of tokens that left early into the slots that they did not reach."""
        copies = []
        for lane in lanes:
            table = self.memory.core_tables[lane.row.number, :, lane.position // PAGE]
            own = table[self.policy.slot(lane.loop)]
            slots = slots_to_fill(self.policy, lane.loop, lane.row.request.loops)
            copies += [(own, table[slot], lane.position % PAGE) for slot in slots]
        if copies:
            self.memory.core.copy(*torch.tensor(np.array(copies), device=self.runner.device).unbind(1))

    # Reading out ----------------------------------------------------------------------------------------------

    def _read_out(self) -> None:
        """Choose the tokens that follow lanes which have left, and propose those that follow others."""
        rows = self.scheduler.rows
        leaving = [lane for row in rows for lane in readable(row, in_order=self.config.coda_layers > 0)]
        if len(leaving) < self.min_readout and (looping(rows) or self.scheduler.entering):
            leaving = []
        proposing = [lane for row in rows for lane in self._proposing(row)]
        if leaving or proposing:
            self._attempt([*leaving, *proposing], self._choose, _row_of)
        for row in list(self.scheduler.rows):
            self._advance(row)

    def _proposing(self, row: Row) -> list[Lane]:
        if self.speculate is None:
            return []
        lanes = list(row.lanes)[: self.width - 1]
        ready = [lane for lane in lanes if lane.entered and not lane.left and lane.loop >= self.speculate.entry]
        return [lane for lane in ready if self.speculate.reread or lane.choice is None]

    def _choose(self, lanes: Sequence[Lane]) -> None:
        _, logits = self._read(lanes)
        chosen = choose(logits, [lane.row.asked(lane) for lane in lanes])
        for place, lane in enumerate(lanes):
            wanted = lane.row.request.params.logprobs
            lane.settled = lane.left
            lane.choice = Choice(
                token=chosen.tokens[place],
                logprob=chosen.logprobs[place],
                lead=chosen.leads[place],
                alternatives=best_alternatives(logits[place], wanted) if wanted and lane.left else [],
            )

    def _read(self, lanes: Sequence[Lane]) -> tuple[Tensor, Tensor]:
        return self.runner.read(lane_batch(lanes, self.memory))

    def _advance(self, row: Row) -> None:
        """Make final what is, drop what followed another token, and let the next ones enter."""
        while row.lanes and row.lanes[0].settled:
            head = row.lanes.popleft()
            if not head.behind:
                self.scheduler.drop([head])
            token = self._commit(row, head)
            if token is None:
                return
            if row.lanes and row.lanes[0].token == token:
                self.stats.accepted += 1
                continue
            self._replace(row, 0, token, head.position + 1)
        for place, lane in enumerate(list(row.lanes)):
            last = row.index(lane.position) + 1 >= row.request.params.max_tokens
            if lane.choice is None or place + 1 >= self.width or last:
                return
            following = row.lanes[place + 1] if place + 1 < len(row.lanes) else None
            if following is None or following.token != lane.choice.token:
                self._replace(row, place + 1, lane.choice.token, lane.position + 1)
                return

    def _replace(self, row: Row, place: int, token: int, position: int) -> None:
        """Let `token` be the row's lane number `place`, instead of those that are there."""
        wrong = list(row.lanes)[place:]
        self.stats.rejected += len(wrong) > 0
        self.scheduler.drop(wrong)
        for _ in wrong:
            row.lanes.pop()
        self.scheduler.follow(row, token, position)

    def _commit(self, row: Row, head: Lane) -> int | None:
        """Make the head's choice part of the completion; the token, or None if the request has ended with it."""
        choice, index, params = head.choice, row.done, row.request.params
        assert choice is not None
        row.done += 1
        if row.request.warm_start:
            row.last_state = self.runner.state[head.number].clone()
        if index < len(row.made):  # made before a preemption
            return row.made[index]
        row.add(choice, head.loop)
        self.stats.tokens += 1
        self.stats.loops += head.loop
        self.stats.near_ties += params.temperature == 0 and choice.lead < NEAR_TIE
        may_end = row.done > params.min_tokens
        text, stopped = row.add_text(choice.token, may_end)
        self._events.append(
            TokenEvent(
                number=row.request.number, index=index, token=choice.token, loops=head.loop, logprob=choice.logprob,
                text=text, alternatives=choice.alternatives,
            )
        )  # fmt: skip
        if stopped or (may_end and choice.token in row.request.ends):
            self._finish(row, "stop")
        elif row.done == params.max_tokens:
            self._finish(row, "length")
        else:
            return choice.token
        return None

    # Ends -----------------------------------------------------------------------------------------------------

    def _finish(self, row: Row, reason: FinishReason, error: str | None = None) -> None:
        self.scheduler.remove(row)
        text = row.end_text()
        self._events.append(
            TokenEvent(
                number=row.request.number, index=len(row.made), token=None, loops=0, logprob=0.0, text=text,
                completion=row.completion(reason, error),
            )
        )  # fmt: skip

    def _finite(self, lanes: Sequence[Lane]) -> list[Row]:
        """The rows of `lanes` whose states are numbers; the others end here, and nothing of theirs reaches another."""
        if not lanes:
            return []
        finite = self.runner.finite(np.array([lane.number for lane in lanes]))
        for lane, good in zip(lanes, finite, strict=True):
            if not good and not lane.dropped:
                self._finish(lane.row, "error", f"the state is not finite at loop {lane.loop}")
        return [lane.row for lane in lanes if not lane.dropped]

    def _attempt(
        self, items: Sequence[Item], work: Callable[[Sequence[Item]], None], row_of: Callable[[Item], Row]
    ) -> None:  # fmt: skip
        """`work` on all items; where memory does not suffice on halves of them, and a single one's request ends."""
        try:
            work(items)
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            if len(items) == 1:
                self._finish(row_of(items[0]), "error", "out of memory")
                return
            middle = len(items) // 2
            for part in (items[:middle], items[middle:]):
                alive = [item for item in part if row_of(item) in self.scheduler.rows]
                if alive:
                    self._attempt(alive, work, row_of)

    def _numbers(self, lanes: Sequence[Lane]) -> Tensor:
        return torch.tensor([lane.number for lane in lanes], device=self.runner.device)


def _row_of(lane: Lane) -> Row:
    return lane.row


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _check_sizes(model: LoopLMForCausalLM, **counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name}={count} must be at least 1")
    places = model.config.max_position_embeddings
    if model.config.rope == "learned" and counts["max_length"] > places:
        raise ValueError(
            f"max_length={counts['max_length']} is more than max_position_embeddings={places}, "
            "and learned positions do not extend"
        )
