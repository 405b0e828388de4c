"""Everything in flight, tick by tick: admit, begin prompts, enter, step, leave, read out."""

import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from looplm.engine.batches import LaneBatch, block_batch, lane_batch
from looplm.engine.decisions import Decisions
from looplm.engine.kv_policies import recomputes, slots_to_fill
from looplm.engine.memory import Memory
from looplm.engine.requests import Choice, FinishReason, Lane, PromptBlock, Row, TokenEvent
from looplm.engine.runner import Runner
from looplm.engine.sampling import best_alternatives, choose
from looplm.engine.scheduler import Scheduler, catching_up, full_blocks, looping, readable
from looplm.engine.speculation import RowAcceptance, Speculation, TickCost
from looplm.engine.stats import Stats
from looplm.engine.store import PAGE

NEAR_TIE = 1e-4  # a lead of the best logit under which rounding may choose
Item = TypeVar("Item")


class Flight:
    """The phases of a tick, over parts that the engine has built.

    min_readout: tokens that wait for one another before they are read out.
    """

    def __init__(
        self, memory: Memory, scheduler: Scheduler, runner: Runner, speculate: Speculation | None, min_readout: int
    ) -> None:
        self.memory, self.scheduler, self.runner = memory, scheduler, runner
        self.policy, self.width = memory.policy, scheduler.width
        self.decisions = Decisions(runner, memory.loops)
        self.speculate = speculate
        self.min_readout = min_readout
        self.coda = runner.config.coda_layers > 0
        self.stats, self.cost = Stats(), TickCost()
        self.events: list[TokenEvent] = []

    @torch.inference_mode()
    def tick(self) -> list[TokenEvent]:
        """One core step of everything in flight, and what came of it."""
        self._admit()
        self._begin_blocks()
        began = time.perf_counter()
        self._enter()
        lanes = self._step()
        self._read_out()
        if lanes:
            self.cost.add(lanes, time.perf_counter() - began)
        events, self.events = self.events, []
        return events

    # Prompts --------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        self.stats.reused_tokens += PAGE * sum(row.prefilled for row in self.scheduler.admit())

    def _begin_blocks(self) -> None:
        new = self.scheduler.begin_blocks()
        if new:
            self._attempt(new, lambda blocks: self.runner.enter_blocks(block_batch(blocks, self.memory)), _row_of)
            self._note_ends([block for block in new if block in self.scheduler.filling])

    def _note_ends(self, blocks: Sequence[PromptBlock]) -> None:
        """Keep the states of prompts' last tokens, from which each loop's exit is decided when all are done."""
        ends = [block for block in blocks if block.ends]
        if ends:
            _, states = self.runner.block_states([_end(block) for block in ends])
            for block, state in zip(ends, states, strict=True):
                block.states.append(state)

    def _end_blocks(self, blocks: Sequence[PromptBlock]) -> None:
        """Blocks that have done all loops; the last tokens of whole prompts become lanes that have left."""
        if self.coda:
            self._attempt(blocks, lambda part: self.runner.read_blocks(block_batch(part, self.memory)), _row_of)
        blocks = [block for block in blocks if block in self.scheduler.filling]
        for block in blocks:
            block.row.prefilled += 1
            self.stats.prefill_tokens += len(block.tokens)
        ends = [block for block in blocks if block.ends]
        if ends:
            self._end_prompts(ends)
        self.scheduler.end_blocks(block for block in blocks if block in self.scheduler.filling)

    def _end_prompts(self, ends: Sequence[PromptBlock]) -> None:
        inputs, _ = self.runner.block_states([_end(block) for block in ends])
        lanes = []
        for block in ends:
            row, prompt = block.row, block.row.request.prompt
            lane = self.scheduler.lane(row, prompt[-1], len(prompt) - 1)
            lane.entered = True
            row.lanes.append(lane)
            lanes.append(lane)
        by_depth: dict[int, list[int]] = {}
        for place, block in enumerate(ends):
            by_depth.setdefault(block.last, []).append(place)
        for loops, places in by_depth.items():
            states = torch.stack([torch.stack(ends[place].states) for place in places])
            self._leave_prompt([lanes[place] for place in places], inputs[places], states, loops)
        for row in self._finite(lanes):
            self.memory.remember(row, full_blocks(row))
            self.memory.fold(row)

    def _leave_prompt(self, lanes: Sequence[Lane], inputs: Tensor, states: Tensor, loops: int) -> None:
        """Last tokens of prompts have done all loops; each is left with the state [loops + 1, D] its policy picks."""
        runner = self.runner
        numbers = torch.tensor([lane.number for lane in lanes], device=runner.device)
        runner.inputs[numbers] = inputs
        still = list(range(len(lanes)))
        for loop in range(1, loops + 1):
            here = [lanes[index] for index in still]
            at = numbers[still]
            runner.before[at], runner.state[at] = states[still, loop - 1], states[still, loop]
            for lane in here:
                lane.loop = loop
            for lane in self.decisions.leaving(here, self._batch):
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
        starts = [lane.row.last_state for lane in lanes if lane.row.last_state is not None]
        self.runner.enter(self._batch(lanes), torch.stack(starts) if starts else None)
        for lane in lanes:
            lane.entered = True

    def _step(self) -> int:
        """How many lanes there were, and nothing else with them."""
        lanes, blocks = looping(self.scheduler.rows), list(self.scheduler.filling)
        if not lanes and not blocks:
            return 0
        self.stats.ticks += bool(lanes)
        self._attempt([*lanes, *blocks], self._step_all, _row_of)
        stepped = [lane for lane in lanes if not lane.dropped]
        if stepped:
            self._attempt(stepped, self._let_leave, _row_of)
        # What is not a number stays so until it leaves.
        self._finite([lane for lane in stepped if lane.left and not lane.dropped])
        done = [block for block in self.scheduler.filling if block.loop == block.last]
        if done:
            self._end_blocks(done)
        return 0 if blocks else len(lanes)  # a tick with prompts in it says nothing of what lanes cost

    def _step_all(self, items: Sequence[Lane | PromptBlock]) -> None:
        lanes = [item for item in items if isinstance(item, Lane)]
        blocks = [item for item in items if isinstance(item, PromptBlock)]
        behind = catching_up(lanes)
        self.runner.step(
            self._batch([*lanes, *behind]) if lanes else None, block_batch(blocks, self.memory) if blocks else None
        )
        for block in blocks:
            block.loop += 1
        self._note_ends(blocks)
        self.stats.core_steps += len(lanes) + len(behind)
        for lane in (*lanes, *behind):
            lane.loop += 1
        for lane in behind:
            if lane.loop == lane.last:
                lane.row.behind.remove(lane)
                self.scheduler.drop([lane])

    def _let_leave(self, lanes: Sequence[Lane]) -> None:
        leaving = self.decisions.leaving(lanes, self._batch)
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
        leaving = [lane for row in rows for lane in readable(row, in_order=self.coda)]
        busy = looping(rows) or self.scheduler.entering or self.scheduler.filling
        if len(leaving) < self.min_readout and busy:
            leaving = []
        proposing = [lane for row in rows for lane in self._proposing(row)]
        if leaving or proposing:
            self._attempt([*leaving, *proposing], self._choose, _row_of)
        for row in list(self.scheduler.rows):
            self._advance(row)

    def _proposing(self, row: Row) -> list[Lane]:
        if self.speculate is None:
            return []
        entry = self.speculate.entry or self._entry(row)
        ending = sum(1 for _ in takewhile(lambda lane: lane.left, row.lanes))  # these make room in this very tick
        lanes = list(row.lanes)[: self.width - 1 + ending]
        ready = [lane for lane in lanes if lane.entered and not lane.left and lane.loop >= entry]
        return [lane for lane in ready if self.speculate.reread or lane.choice is None]

    def _entry(self, row: Row) -> int:
        """The loop at which this row proposes now."""
        if row.acceptance is None:
            row.acceptance = RowAcceptance(row.request.loops)
        others = sum(len(other.lanes) for other in self.scheduler.rows if other is not row)
        return row.acceptance.entry(self.width, others, self.cost)

    def _choose(self, lanes: Sequence[Lane]) -> None:
        _, logits = self.runner.read(self._batch(lanes))
        chosen = choose(logits, [lane.row.asked(lane) for lane in lanes])
        for place, lane in enumerate(lanes):
            wanted = lane.row.request.params.logprobs
            lane.settled = lane.left
            if not lane.left:
                self._propose(lane, chosen.tokens[place], chosen.logprobs[place])
            lane.choice = Choice(
                token=chosen.tokens[place],
                logprob=chosen.logprobs[place],
                lead=chosen.leads[place],
                alternatives=best_alternatives(logits[place], wanted) if wanted and lane.left else [],
            )

    def _propose(self, lane: Lane, token: int, logprob: float) -> None:
        """Note a proposal, and report it where that is asked for and it is news."""
        before = lane.proposals.get(max(lane.proposals, default=0))
        lane.proposals[lane.loop] = token
        if self.speculate is not None and self.speculate.anytime and token != before:
            self.events.append(
                TokenEvent(
                    number=lane.row.request.number, index=lane.row.index(lane.position), token=token,
                    loops=lane.loop, logprob=logprob, provisional=True,
                )
            )  # fmt: skip

    def _batch(self, lanes: Sequence[Lane]) -> LaneBatch:
        return lane_batch(lanes, self.memory)

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
        if row.acceptance is not None:
            row.acceptance.add(head.proposals, choice.token)
        if head.proposals:
            self.stats.proposed += 1
            self.stats.agreed += head.proposals[min(head.proposals)] == choice.token
        self.stats.tokens += 1
        self.stats.loops += head.loop
        self.stats.near_ties += params.temperature == 0 and choice.lead < NEAR_TIE
        may_end = row.done > params.min_tokens
        text, stopped = row.add_text(choice.token, may_end)
        self.events.append(
            TokenEvent(
                number=row.request.number, index=index, token=choice.token, loops=head.loop, logprob=choice.logprob,
                text=text, alternatives=choice.alternatives,
            )
        )  # fmt: skip
        if stopped or (may_end and choice.token in row.request.ends):
            self.finish(row, "stop")
        elif row.done == params.max_tokens:
            self.finish(row, "length")
        else:
            return choice.token
        return None

    # Ends -----------------------------------------------------------------------------------------------------

    def finish(self, row: Row, reason: FinishReason, error: str | None = None) -> None:
        """End a request: give back all that it holds, and report it."""
        self.scheduler.remove(row)
        text = row.end_text()
        self.events.append(
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
                self.finish(lane.row, "error", f"the state is not finite at loop {lane.loop}")
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
                self.finish(row_of(items[0]), "error", "out of memory")
                return
            middle = len(items) // 2
            for part in (items[:middle], items[middle:]):
                alive = [item for item in part if row_of(item) in self.scheduler.rows]
                if alive:
                    self._attempt(alive, work, row_of)


def _row_of(item: Lane | PromptBlock) -> Row:
    return item.row


def _end(block: PromptBlock) -> tuple[int, int]:
    """Where the states of a prompt's last token are kept."""
    return block.slot, len(block.tokens) - 1


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
