"""Which pages of the key/value pools are free, who uses the others, and which hold prompts that may come again."""

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

BLANK, SCRATCH = 0, 1  # nobody's pages: what tables name where a row has no page, and what padding writes to


class Pages:
    """A free list over `num_pages` pages, beside nobody's two, and the users of each; the lowest free ones go first."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.users = [1, 1] + [0] * num_pages
        self._free = list(range(2, num_pages + 2))

    @property
    def num_free(self) -> int:
        """Pages that nobody uses."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` free pages, each now with one user; the caller has seen that there are as many."""
        assert count <= len(self._free), "more pages were taken than are free"
        taken = [heapq.heappop(self._free) for _ in range(count)]
        for page in taken:
            self.users[page] = 1
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """One more user of pages in use."""
        for page in pages:
            assert self.users[page] > 0, "a free page was shared"
            self.users[page] += 1

    def release(self, pages: Sequence[int]) -> list[int]:
        """One user less; the pages that are free now."""
        freed = []
        for page in pages:
            assert page > SCRATCH, "nobody's page was released"
            assert self.users[page] > 0, "a page was released twice"
            self.users[page] -= 1
            if self.users[page] == 0:
                heapq.heappush(self._free, page)
                freed.append(page)
        return freed


@dataclass(frozen=True)
class Block:
    """The pages of one block of tokens: in the core's pool one for each table, in the boundary's pool at most one."""

    core: tuple[int, ...]
    boundary: tuple[int, ...]


@dataclass
class _Entry:
    block: Block
    parent: Hashable
    key: Hashable
    children: int = 0


class PrefixCache:
    """Blocks of prompts that were prefilled, found again by their tokens and everything before them.

    A chain starts at a root: whatever else decides what the pages hold (depth, KV policy, start seed). Entries are
    users of their pages; the least recently used leaves give way when pages run out.
    """

    def __init__(self, core: Pages, boundary: Pages) -> None:
        self.core, self.boundary = core, boundary
        self._ids: dict[Hashable, int] = {}  # (number of the entry before, or (root,), and tokens) -> number
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._next = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, root: Hashable, blocks: Sequence[tuple[int, ...]]) -> list[Block]:
        """The pages of the longest known beginning of `blocks`; the caller becomes a user of them."""
        found = []
        parent: Hashable = (root,)
        for tokens in blocks:
            number = self._ids.get((parent, tokens))
            if number is None:
                break
            self._entries.move_to_end(number)
            found.append(self._entries[number].block)
            parent = number
        for block in found:
            self.core.share(block.core)
            self.boundary.share(block.boundary)
        return found

    def add(self, root: Hashable, blocks: Sequence[tuple[int, ...]], pages: Sequence[Block]) -> None:
        """Remember the pages of `blocks`; those that are known already stay as they are."""
        parent: Hashable = (root,)
        for tokens, block in zip(blocks, pages, strict=True):
            key = (parent, tokens)
            if key not in self._ids:
                self.core.share(block.core)
                self.boundary.share(block.boundary)
                self._ids[key] = self._next
                self._entries[self._next] = _Entry(block, parent, key)
                self._count_child(parent, 1)
                self._next += 1
            parent = self._ids[key]

    def evict(self) -> bool:
        """Give up the oldest leaf of which a page becomes free; False if there is none.

        A row may go on with some of a block's pages alone, where its KV policy keeps fewer loops than a prefill has.
        """
        for number, entry in self._entries.items():
            if entry.children == 0 and self._frees(entry.block):
                self._drop(number, entry)
                return True
        return False

    def make_room(self, core: int, boundary: int) -> bool:
        """Free so many more pages of each pool, or none at all: False where giving up everything would not do."""
        wanted = self.core.num_free + core, self.boundary.num_free + boundary
        if any(most < more for most, more in zip(self._evictable(), (core, boundary), strict=True)):
            return False
        while self.core.num_free < wanted[0] or self.boundary.num_free < wanted[1]:
            assert self.evict(), "fewer pages became free than were counted"
        return True

    def clear(self) -> None:
        """Forget everything: the weights have changed."""
        for entry in self._entries.values():
            self.core.release(entry.block.core)
            self.boundary.release(entry.block.boundary)
        self._entries.clear()
        self._ids.clear()

    def _drop(self, number: int, entry: _Entry) -> None:
        del self._entries[number], self._ids[entry.key]
        self._count_child(entry.parent, -1)
        self.core.release(entry.block.core)
        self.boundary.release(entry.block.boundary)

    def _evictable(self) -> tuple[int, int]:
        """Pages of each pool that would become free if `evict` were called until it finds nothing more."""
        stay: set[Hashable] = set()
        freed = [0, 0]
        for number in sorted(self._entries, reverse=True):  # what hangs on an entry is younger than it
            entry = self._entries[number]
            if number in stay or not self._frees(entry.block):
                stay.add(entry.parent)
                continue
            freed[0] += sum(self.core.users[page] == 1 for page in entry.block.core)
            freed[1] += sum(self.boundary.users[page] == 1 for page in entry.block.boundary)
        return freed[0], freed[1]

    def _frees(self, block: Block) -> bool:
        pools = ((self.core, block.core), (self.boundary, block.boundary))
        return any(pages.users[page] == 1 for pages, held in pools for page in held)

    def _count_child(self, parent: Hashable, more: int) -> None:
        if isinstance(parent, int):
            self._entries[parent].children += more
