"""Which rows are in, which wait, and whose turn it is: everything of the engine that computes nothing."""

from collections import deque
from collections.abc import Iterable, Sequence

from looplm.engine.memory import Memory
from looplm.engine.requests import Lane, PromptBlock, Row
from looplm.engine.store import PAGE


class Scheduler:
    """First come, first served; where pages run out the youngest row waits again.

    rows: in order of admission · width: tokens of one row in the loop at most · filling: blocks of prompts in the loop.
    """

    def __init__(self, memory: Memory, max_rows: int, width: int, num_lanes: int, num_blocks: int) -> None:
        self.memory, self.width = memory, width
        self.waiting: deque[Row] = deque()
        self.rows: list[Row] = []
        self.entering: list[Lane] = []
        self.filling: list[PromptBlock] = []
        self.preemptions = 0
        self._numbers, self._lanes = list(range(max_rows)), list(range(num_lanes))
        self._slots = list(range(num_blocks))

    def admit(self) -> list[Row]:
        """Let in whom there is place for."""
        admitted = []
        while self.waiting and self._numbers:
            row = self.waiting[0]
            row.number = self._numbers[-1]
            if not self.memory.admit(row, full_blocks(row), alone=not self.rows):
                break
            self._numbers.pop()
            self.rows.append(self.waiting.popleft())
            admitted.append(row)
        return admitted

    def begin_blocks(self) -> list[PromptBlock]:
        """The next blocks of prompts, oldest rows first, as many as there is place for; they are in the loop now."""
        new: list[PromptBlock] = []
        for row in self.rows:
            while row.begun < row.prompt_blocks and self._slots:
                new.append(PromptBlock(row=row, index=row.begun, slot=self._slots.pop()))
                row.begun += 1
        self.filling += new
        return new

    def end_blocks(self, blocks: Iterable[PromptBlock]) -> None:
        """They have done their loops, or are not to."""
        for block in blocks:
            self.filling.remove(block)
            self._slots.append(block.slot)

    def follow(self, row: Row, token: int, position: int) -> None:
        """`token` is the row's next one to enter."""
        lane = self.lane(row, token, position)
        row.lanes.append(lane)
        self.entering.append(lane)

    def lane(self, row: Row, token: int, position: int) -> Lane:
        """A lane for a token of `row`."""
        return Lane(
            row=row, number=self._lanes.pop(), token=token, position=position, last=row.request.loops,
            forced=row.forced_loops(row.index(position)),
        )  # fmt: skip

    def placed(self) -> list[Lane]:
        """The lanes that enter now, each with a page for its position; younger rows give theirs up for it."""
        entering, self.entering = self.entering, []
        order = {id(row): place for place, row in enumerate(self.rows)}
        entering = [lane for lane in entering if not lane.dropped]
        for lane in sorted(entering, key=lambda lane: (order[id(lane.row)], lane.position)):
            while not lane.dropped and lane.position >= len(lane.row.blocks) * PAGE:
                if not self.memory.grow(lane.row):
                    self._preempt(self.rows[-1])
        return [lane for lane in entering if not lane.dropped]

    def drop(self, lanes: Iterable[Lane]) -> None:
        """The lanes' tokens are not to be, or are done."""
        for lane in lanes:
            lane.dropped = True
            self._lanes.append(lane.number)

    def remove(self, row: Row) -> None:
        """Take back all that `row` holds."""
        self.drop(lane for lane in (*row.lanes, *row.behind) if not lane.dropped)
        row.lanes.clear()
        row.behind.clear()
        self.end_blocks([block for block in self.filling if block.row is row])
        if row in self.rows:
            self.rows.remove(row)
            self.memory.release(row)
            self._numbers.append(row.number)
        else:
            self.waiting.remove(row)

    def _preempt(self, row: Row) -> None:
        """Back to the front of the queue; what it has made is made again, alike, when it comes back."""
        self.preemptions += 1
        self.remove(row)
        row.done, row.last_state = 0, None
        self.waiting.appendleft(row)


def full_blocks(row: Row) -> list[tuple[int, ...]]:
    """The prompt's blocks that others may share: full ones, but never the last token, whose states count."""
    prompt = row.request.prompt
    return [prompt[start : start + PAGE] for start in range(0, (len(prompt) - 1) // PAGE * PAGE, PAGE)]


def readable(row: Row, in_order: bool) -> list[Lane]:
    """Lanes of `row` that have left and are to be read out; `in_order` where a coda reads those before them."""
    found = []
    for lane in row.lanes:
        if lane.left and not lane.settled:
            found.append(lane)
        elif in_order and not lane.settled:
            break
    return found


def catching_up(lanes: Sequence[Lane]) -> list[Lane]:
    """Earlier tokens of the lanes' rows that left at the very loop where the lanes stand: they go on with them."""
    return [behind for lane in lanes for behind in lane.row.behind if behind.loop == lane.loop]


def looping(rows: Sequence[Row]) -> list[Lane]:
    """The lanes that are in the loop."""
    return [lane for row in rows for lane in row.lanes if lane.entered and not lane.left]
