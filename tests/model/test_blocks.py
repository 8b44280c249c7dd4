"""KV memory in blocks against its slow twin, a cache of whole rows."""

import random
from unittest.mock import patch

import pytest
import torch

from foretell.core.errors import CapacityError
from foretell.model import blocks
from foretell.model.blocks import BlockCache
from foretell.model.cache import KVCache
from tests.engine.integrity import check_blocks

CPU = torch.device("cpu")
CAPACITY, ROWS, SLOTS = 24, 4, 48
HEADS = [(2, 3)] * 2


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of four slots."""
    monkeypatch.setattr(blocks, "BLOCK", 4)


def cache_of(slots: int | None = SLOTS, rows: int = ROWS) -> BlockCache:
    """No row of it is in use."""
    made = BlockCache(rows, CAPACITY, slots, HEADS, torch.float32, CPU)
    made.clear()
    return made


class Twins:
    """The same is asked of both; ``lengths`` are how many slots of each row hold something."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        torch.manual_seed(seed)
        self.fast, self.slow = cache_of(), KVCache(ROWS, CAPACITY, HEADS, torch.float32, [CPU] * 2)
        self.slow.clear()
        self.lengths: list[int] = []
        self.come = self.moves = 0

    def arrive(self) -> None:
        length = self.rng.randint(1, CAPACITY)
        place = len(self.lengths)
        if place == ROWS or -(-length // 4) > len(self.fast._free):
            return
        for cache in (self.fast, self.slow):
            cache.open_rows(1)
            cache.fit([length], place)
        self.lengths.append(length)
        self.come += 1
        views = [cache.rows(place, place + 1) for cache in (self.fast, self.slow)]
        if self.rng.random() < 0.3:
            known = [[torch.randn(2, length, 3) for _ in HEADS] for _ in range(2)]
            for view in views:
                view.restore(*known, length)
            return
        parts = torch.randn(2, 2, 1, 2, length, 3)  # layer, keys and values
        slots = torch.arange(length)[None]
        for view in views:
            for layer, (keys, values) in enumerate(parts):
                view.write(layer, view.places(slots), keys, values)

    def leave(self) -> None:
        kept = [row for row in range(len(self.lengths)) if self.rng.random() < 0.7]
        self.rng.shuffle(kept)
        for cache in (self.fast, self.slow):
            cache.keep(torch.tensor(kept, dtype=torch.int64))
        self.lengths = [self.lengths[row] for row in kept]

    def step(self) -> None:
        """Every row that has room writes a tree of three nodes and keeps a path of two, the second perhaps moved."""
        needs = [min(length + 3, CAPACITY) for length in self.lengths]
        held = [-(-length // 4) for length in self.lengths]
        if not needs or sum(-(-need // 4) - at for need, at in zip(needs, held, strict=True)) > len(self.fast._free):
            return
        start = torch.tensor([min(length, CAPACITY - 3) for length in self.lengths])[:, None]
        nodes = torch.randn(2, 2, len(needs), 2, 3, 3)
        kept = torch.tensor([[0, self.rng.choice((1, 2))] for _ in needs])
        self.moves += int((kept[:, 1] == 2).sum())
        for cache in (self.fast, self.slow):
            cache.fit(needs)
            slots = start + torch.arange(3)
            for layer, (keys, values) in enumerate(nodes):
                cache.write(layer, cache.places(slots), keys, values)
            cache.move(start + kept, start + torch.arange(2))
        self.lengths = [min(length + 2, CAPACITY) for length in self.lengths]

    def check(self) -> None:
        check_blocks(self.fast)
        for layer in range(2) if self.lengths else ():
            for mine, theirs in zip(
                self.fast.seen(layer, CAPACITY, self.fast.sight(CAPACITY), torch.float32),
                self.slow.seen(layer, CAPACITY, None, torch.float32),
                strict=True,
            ):
                for row, length in enumerate(self.lengths):
                    assert torch.equal(mine[row, :, :length], theirs[row, :, :length])
        for row, length in enumerate(self.lengths):
            mine, theirs = (cache.rows(row, row + 1).saved(length) for cache in (self.fast, self.slow))
            for one, other in zip((*mine[0], *mine[1]), (*theirs[0], *theirs[1]), strict=True):
                assert torch.equal(one, other)


def test_a_thousand_rows_come_grow_and_leave() -> None:
    """Rows hold what rows of a whole cache hold, and in the end all blocks are free."""
    twins, turn = Twins(1), 0
    while twins.come < 1000:
        turn += 1
        twins.rng.choice((twins.arrive, twins.arrive, twins.step, twins.leave))()
        if turn % 16 == 0:
            twins.check()
    assert twins.moves > 100
    twins.fast.keep(torch.arange(0))
    check_blocks(twins.fast)
    assert len(twins.fast._free) == twins.fast.num_blocks == SLOTS // 4


def test_too_few_blocks_are_said_and_none_is_given() -> None:
    cache = cache_of(slots=24)
    cache.open_rows(3)
    cache.fit([8, 8])
    with pytest.raises(CapacityError, match=r"need 4 more blocks of 4 slots, and 2 of 6 are free"):
        cache.fit([16, 8, 8])
    check_blocks(cache)
    assert len(cache._free) == 2
    with pytest.raises(CapacityError, match="5 rows are to be open, and 4 were allocated"):
        cache.open_rows(2)


def test_one_whole_row_fits_into_any_memory() -> None:
    cache = cache_of(slots=1)
    cache.open_rows(1)
    cache.fit([10 * CAPACITY])
    assert (cache.num_blocks, len(cache._free)) == (6, 0)
    assert cache_of(slots=None).num_blocks == cache_of(slots=10**9).num_blocks == ROWS * 6


def test_padding_reaches_no_row() -> None:
    """What is written where a row has no block is lost, and a row reads zeros there, whatever was written."""
    cache = cache_of()
    cache.open_rows(2)
    cache.fit([4, 8])
    nan = torch.full((2, 2, 8, 3), torch.nan)
    before = [memory[:, 8:].clone() for memory in cache._all_keys]
    slots = torch.arange(8, 16)[None].expand(2, -1)
    cache.write(0, cache.places(slots), nan, nan)
    cache.move(slots, slots)
    assert all(torch.equal(memory[:, 8:], one) for memory, one in zip(cache._all_keys, before, strict=True))
    keys, values = cache.seen(0, CAPACITY, cache.sight(CAPACITY), torch.float32)
    assert not keys[0, :, 4:].any()
    assert not values[1, :, 8:].any()


@pytest.mark.parametrize("whole", [False, True])
def test_what_a_failed_row_held_reaches_no_other(whole: bool) -> None:
    """What is no number is none under a mask, too."""
    cache = KVCache(2, CAPACITY, HEADS, torch.float32, [CPU] * 2) if whole else cache_of()
    cache.clear()
    for _ in range(2):
        cache.open_rows(1)
        cache.fit([8])
        found = torch.stack(cache.seen(1, 8, cache.sight(8), torch.float32))
        assert bool(found.isfinite().all())
        nan = torch.full((1, 2, 8, 3), torch.nan)
        cache.write(1, cache.places(torch.arange(8)[None]), nan, nan)
        cache.scrub(0)
        cache.keep(torch.arange(0))


def test_no_address_changes() -> None:
    cache = cache_of()
    with patch.object(cache, "_allocate", side_effect=AssertionError):
        before = [cache.table.data_ptr(), *(memory.data_ptr() for memory in cache._all_keys)]
        for _ in range(3):
            cache.open_rows(2)
            cache.fit([5, 9])
            cache.keep(torch.tensor([1]))
            cache.keep(torch.arange(0))
    assert before == [cache.table.data_ptr(), *(memory.data_ptr() for memory in cache._all_keys)]


def test_rows_of_another_cache_join() -> None:
    twins = KVCache(2, CAPACITY, HEADS, torch.float32, [CPU] * 2)
    for memory in (*twins.keys, *twins.values):
        memory.copy_(torch.randn(memory.shape))
    cache = cache_of(slots=None)
    cache.open_rows(1)
    cache.join(twins, 9)
    check_blocks(cache)
    for row in range(2):
        mine, theirs = cache.rows(row + 1, row + 2).saved(9), twins.rows(row, row + 1).saved(9)
        assert all(
            torch.equal(one, other) for one, other in zip((*mine[0], *mine[1]), (*theirs[0], *theirs[1]), strict=True)
        )
    with pytest.raises(CapacityError, match="25 slots of a row join a cache whose rows have 24"):
        cache.join(twins, 25)
