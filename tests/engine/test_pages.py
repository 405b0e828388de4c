"""Pages and the prefix cache against a plain model of who holds what, over long random lives."""

import copy
import random
from collections import Counter
from collections.abc import Hashable

import pytest

from looplm.engine.pages import BLANK, SCRATCH, Block, Pages, PrefixCache

Chain = tuple[Hashable, tuple[tuple[int, ...], ...]]  # a root and the blocks up to and including one


def test_the_lowest_free_pages_go_first() -> None:
    pages = Pages(5)
    assert pages.take(3) == [2, 3, 4]
    assert pages.release([3, 2]) == [3, 2]
    assert pages.take(3) == [2, 3, 5]
    assert pages.num_free == 1


def test_a_page_is_free_when_its_last_user_leaves() -> None:
    pages = Pages(2)
    (page,) = pages.take(1)
    pages.share([page])
    assert pages.release([page]) == []
    assert pages.num_free == 1
    assert pages.release([page]) == [page]
    assert pages.num_free == 2


def test_misuse_is_noticed() -> None:
    pages = Pages(2)
    (page,) = pages.take(1)
    pages.release([page])
    with pytest.raises(AssertionError, match="released twice"):
        pages.release([page])
    with pytest.raises(AssertionError, match="free page was shared"):
        pages.share([page])
    with pytest.raises(AssertionError, match="more pages"):
        pages.take(3)
    for nobodys in (BLANK, SCRATCH):
        with pytest.raises(AssertionError, match="nobody"):
            pages.release([nobodys])
    assert pages.num_free == 2


class World:
    """Rows that come, reuse what is known, prefill the rest, remember it and go; and the truth about it.

    known: what the cache should hold, each chain with its pages and when it was last used.
    """

    def __init__(self, seed: int, num_core: int, num_boundary: int) -> None:
        self.choice = random.Random(seed)
        self.core, self.boundary = Pages(num_core), Pages(num_boundary)
        self.cache = PrefixCache(self.core, self.boundary)
        self.rows: list[tuple[Hashable, list[tuple[int, ...]], list[Block]]] = []
        self.known: dict[Chain, Block] = {}
        self.used: dict[Chain, int] = {}
        self.clock = 0
        self.seen: Counter[str] = Counter()

    def touch(self, chain: Chain) -> None:
        self.clock += 1
        self.used[chain] = self.clock

    def check(self) -> None:
        """Every page has as many users as hold it, and is free exactly if none does."""
        held = [block for _, _, blocks in self.rows for block in blocks] + list(self.known.values())
        for pages, names in ((self.core, "core"), (self.boundary, "boundary")):
            users = Counter(page for block in held for page in getattr(block, names))
            assert pages.users == [1, 1, *(users[page] for page in range(2, pages.num_pages + 2))]
            assert sorted(pages._free) == [page for page in range(2, pages.num_pages + 2) if users[page] == 0]
            assert pages.num_free == len(pages._free)
        assert len(self.cache) == len(self.known)

    def freed_with(self, block: Block) -> tuple[int, int]:
        """The pages of each pool that nobody but the cache uses."""
        return (
            sum(self.core.users[page] == 1 for page in block.core),
            sum(self.boundary.users[page] == 1 for page in block.boundary),
        )

    def arrive(self) -> None:
        """A prompt of few possible blocks, under one of two roots that look alike to a careless key."""
        root = self.choice.choice([0, (0,), ("deep", 4)])
        blocks = [(self.choice.randrange(2),) for _ in range(self.choice.randint(1, 5))]
        expected: list[Block] = []
        for end in range(1, len(blocks) + 1):
            chain = (root, tuple(blocks[:end]))
            if chain not in self.known:
                break
            expected.append(self.known[chain])
            self.touch(chain)
        found = self.cache.find(root, blocks)
        assert found == expected
        self.seen["found"] += len(found)
        self.rows.append((root, blocks, found))
        while len(found) < len(blocks):
            tables = self.choice.randint(1, 3)
            if not self.make_room(tables):
                self.seen["no room"] += 1
                self.leave(len(self.rows) - 1)
                return
            block = Block(tuple(self.take(self.core, tables)), tuple(self.take(self.boundary, 1)))
            found.append(block)

    def take(self, pages: Pages, count: int) -> list[int]:
        """Never a page in use, and never one twice."""
        before = list(pages.users)
        taken = pages.take(count)
        assert len(set(taken)) == count
        assert all(before[page] == 0 and page > SCRATCH for page in taken)
        return taken

    def make_room(self, tables: int) -> bool:
        """Nothing is given up where everything would not do; else no more than it takes, the oldest first."""
        more = tables - self.core.num_free, 1 - self.boundary.num_free
        if max(more) <= 0:
            return True
        truth, before = copy.deepcopy(self), len(self.known)
        while truth.core.num_free < tables or truth.boundary.num_free < 1:
            if not truth.evict():
                assert not self.cache.make_room(*more)
                assert len(self.cache) == before
                return False
        assert self.cache.make_room(*more)
        self.known, self.used = truth.known, truth.used
        self.seen["evicted"] += before - len(self.known)
        assert self.cache._ids == truth.cache._ids
        return True

    def evict(self) -> bool:
        """The oldest of the chains that nothing hangs on and that have a page which nobody else uses."""
        parents = {(root, blocks[:-1]) for root, blocks in self.known}
        leaves = [chain for chain, block in self.known.items() if chain not in parents and any(self.freed_with(block))]
        gains = {chain: self.freed_with(self.known[chain]) for chain in leaves}
        free = self.core.num_free, self.boundary.num_free
        evicted = self.cache.evict()
        assert evicted == bool(leaves)
        if leaves:
            oldest = min(leaves, key=self.used.__getitem__)
            del self.known[oldest]
            assert self.core.num_free == free[0] + gains[oldest][0]
            assert self.boundary.num_free == free[1] + gains[oldest][1]
            self.seen["evicted"] += 1
        return evicted

    def remember(self) -> None:
        if not self.rows:
            return
        root, blocks, held = self.choice.choice(self.rows)
        count = self.choice.randint(0, len(blocks))
        blocks, held = blocks[:count], held[:count]
        self.cache.add(root, blocks, held)
        for end in range(1, count + 1):
            chain = (root, tuple(blocks[:end]))
            if chain not in self.known:
                self.known[chain] = held[end - 1]
                self.touch(chain)
        again = self.cache.find(root, blocks)
        assert again == [self.known[root, tuple(blocks[:end])] for end in range(1, count + 1)]
        for end, block in enumerate(again, start=1):
            self.touch((root, tuple(blocks[:end])))
            self.core.release(block.core)
            self.boundary.release(block.boundary)

    def fold(self) -> None:
        """A row gives back all but one page of each block: it still uses what the cache may hold as well."""
        if not self.rows:
            return
        place = self.choice.randrange(len(self.rows))
        root, _, held = self.rows[place]
        kept = []
        for block in held:
            self.core.release(block.core[:-1])
            kept.append(Block(block.core[-1:], block.boundary))
        # What is folded is never remembered: its pages are not those of all loops.
        self.rows[place] = (root, [], kept)

    def leave(self, place: int | None = None) -> None:
        if not self.rows:
            return
        _, _, held = self.rows.pop(self.choice.randrange(len(self.rows)) if place is None else place)
        for block in held:
            self.core.release(block.core)
            self.boundary.release(block.boundary)

    def clear(self) -> None:
        self.cache.clear()
        self.known.clear()
        self.seen["cleared"] += 1


@pytest.mark.parametrize(("seed", "num_core", "num_boundary"), [(0, 12, 40), (1, 40, 12), (2, 60, 60), (3, 25, 15)])
def test_a_long_random_life(seed: int, num_core: int, num_boundary: int) -> None:
    world = World(seed, num_core, num_boundary)
    acts = [world.arrive, world.remember, world.leave, world.fold, world.evict, world.clear]
    for _ in range(5000):
        (act,) = world.choice.choices(acts, weights=[30, 30, 30, 8, 6, 0.3])
        act()
        world.check()
    assert all(world.seen[name] > 5 for name in ("found", "evicted", "cleared", "no room"))
    while world.rows:
        world.leave()
    world.check()
    while world.evict():
        pass
    assert (world.core.num_free, world.boundary.num_free) == (num_core, num_boundary)
    assert len(world.cache) == 0


def a_cache() -> tuple[Pages, PrefixCache]:
    pages = Pages(20)
    return pages, PrefixCache(pages, Pages(0))


def blocks_of(pages: Pages, count: int) -> list[Block]:
    return [Block((page,), ()) for page in pages.take(count)]


def test_a_block_is_found_only_behind_what_came_before_it() -> None:
    pages, cache = a_cache()
    held = blocks_of(pages, 2)
    cache.add("root", [(1, 2), (3, 4)], held)
    assert cache.find("root", [(1, 2), (3, 4), (5, 6)]) == held
    assert cache.find("root", [(1, 2), (9, 9), (3, 4)]) == held[:1]
    assert cache.find("root", [(3, 4)]) == []
    assert cache.find("other", [(1, 2)]) == []


def test_roots_are_no_numbers_of_entries() -> None:
    """A root may be any value, also one that the cache might use itself."""
    pages, cache = a_cache()
    cache.add("root", [(1,), (2,)], blocks_of(pages, 2))
    for root in (0, 1, -1, -2, ("root",), None, ((), ())):
        assert cache.find(root, [(1,)]) == []
        assert cache.find(root, [(2,)]) == []


def test_asking_leaves_nothing_behind() -> None:
    """Every request may bring a root of its own."""
    pages, cache = a_cache()
    for seed in range(100):
        assert cache.find(("root", seed), [(1,)]) == []
        cache.add(("root", seed), [], [])
    assert not any(vars(cache)[name] for name in vars(cache) if isinstance(vars(cache)[name], dict))
    assert pages.num_free == 20


def test_the_oldest_leaf_goes_first_and_its_parent_after_it() -> None:
    pages, cache = a_cache()
    for root in "ab":
        held = blocks_of(pages, 2)
        cache.add(root, [(1,), (2,)], held)
        for block in held:
            pages.release(block.core)
    used = cache.find("a", [(1,), (2,)])
    for block in used:
        pages.release(block.core)
    order = []
    while cache.evict():
        order.append([len(found) for found in (peek(pages, cache, "a"), peek(pages, cache, "b"))])
    assert order == [[2, 1], [2, 0], [1, 0], [0, 0]]
    assert pages.num_free == 20


def peek(pages: Pages, cache: PrefixCache, root: str) -> list[int]:
    """Which blocks are known, without counting as a use."""
    kept = cache._entries.copy()
    found = cache.find(root, [(1,), (2,)])
    for block in found:
        pages.release(block.core)
    cache._entries = kept
    return [block.core[0] for block in found]


def test_what_a_row_uses_is_not_evicted_nor_what_leads_to_it() -> None:
    pages, cache = a_cache()
    mine, yours = blocks_of(pages, 2), blocks_of(pages, 2)
    cache.add("a", [(1,), (2,)], mine)
    for block in mine:
        pages.release(block.core)
    pages.share(mine[1].core)  # a row that uses the second block alone, with a first one of its own
    assert not cache.evict()
    pages.release(mine[1].core)
    cache.add("a", [(1,), (3,)], yours)  # the first is known already: yours stays out
    assert pages.users[yours[0].core[0]] == 1
    for block in yours:
        pages.release(block.core)
    assert [cache.evict() for _ in range(4)] == [True, True, True, False]
    assert pages.num_free == 20


def test_a_block_goes_as_long_as_one_of_its_pages_becomes_free() -> None:
    """A row that keeps one loop's page of a block does not keep the others from being given up."""
    core, boundary = Pages(4), Pages(4)
    cache = PrefixCache(core, boundary)
    block = Block(tuple(core.take(2)), tuple(boundary.take(1)))
    cache.add("a", [(1,)], [block])
    assert not cache.evict()
    core.release(block.core[1:])
    assert cache.evict()
    assert (core.num_free, boundary.num_free) == (3, 3)
    assert [core.users[page] for page in block.core] == [1, 0]


def test_after_clearing_nothing_is_known_and_users_keep_their_pages() -> None:
    pages, cache = a_cache()
    held = blocks_of(pages, 3)
    cache.add("a", [(1,), (2,), (3,)], held)
    cache.clear()
    assert len(cache) == 0
    assert cache.find("a", [(1,)]) == []
    assert [pages.users[block.core[0]] for block in held] == [1, 1, 1]
    cache.add("a", [(1,)], held[:1])
    assert cache.find("a", [(1,), (2,)]) == held[:1]
    with pytest.raises(ValueError, match="zip"):
        cache.add("a", [(1,), (2,)], held[:1])
