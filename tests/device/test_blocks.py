"""Rows of an accelerator take blocks of one memory that has not room for all of them at full length."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from foretell import SamplingParams, ServiceOptions
from foretell.core import graphs
from foretell.core.errors import ConfigError
from foretell.engine import engine as engines, selfcheck
from foretell.engine.loop import Limits, Loop
from foretell.kernels.gpu import ops as operators
from foretell.model import blocks
from foretell.model.blocks import BlockCache
from foretell.model.cache import SPARE, KVCache
from foretell.service.memory import bytes_per_token, sizes_of
from tests.device.counting import Run, engine_on, model, requests, run
from tests.device.pretend import METER, NAME, PretendRecorder
from tests.device.test_tokens import DRAFT, FAST, SLOW
from tests.engine.integrity import check_loop

LONG = SamplingParams(max_new_tokens=16, ignore_eos=True)
FILTERED = replace(LONG, temperature=0.7, top_k=20, top_p=0.9, max_new_tokens=12)
ROWS = [LONG, replace(LONG, temperature=0.0), FILTERED, LONG]
QUICK = ("none",)
BLOCKS = 12


@contextmanager
def few_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Loop]]:
    """Blocks of eight slots, half of what four whole rows need; the loops that run, whose books are checked."""
    made: list[Loop] = []
    begin, tick = Loop.__init__, Loop.tick

    def few(rows: int, queue: int, kv_tokens: int, capacity: int, **options: Any) -> Limits:
        return Limits(rows, queue, BLOCKS * 8, capacity, **options)

    def keep(self: Loop, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        made.append(self)

    def checked(self: Loop) -> Any:
        ended = tick(self)
        if self.jobs:  # the last ends with its loop
            counted = METER.launches.copy(), METER.reads.copy(), METER.uploads.copy()
            check_loop(self)
            METER.launches, METER.reads, METER.uploads = counted
        return ended

    with monkeypatch.context() as patch:
        patch.setattr(blocks, "BLOCK", 8)
        patch.setattr(operators, "BLOCK_SLOTS", 8)
        patch.setattr(engines, "Limits", few)
        patch.setattr(Loop, "__init__", keep)
        patch.setattr(Loop, "tick", checked)
        yield made


def assert_same(monkeypatch: pytest.MonkeyPatch, name: str) -> Run:
    """The tokens of the CPU; some requests had to wait, or gave their blocks up and read their text again."""
    config, given = (FAST | SLOW)[name], requests(ROWS)
    expected = run(engine_on("cpu", config), given)
    with few_blocks(monkeypatch) as loops:
        found = run(engine_on(NAME, config), given)
    assert found.tokens == expected.tokens
    (loop,) = loops
    pool = loop.batch.pool
    assert isinstance(pool, BlockCache)
    whole = -(-loop.limits.capacity // 8)  # a row that guesses large trees has room for them
    assert pool.num_blocks == max(BLOCKS, whole) <= 2 * whole
    assert loop.recorder.num_preemptions or len(found.steps[0].rows) < len(ROWS)
    return found


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in (*FAST, *SLOW) if name not in QUICK)]
)
def test_the_tokens_are_the_cpus(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """One read in every step between whose neighbours nobody came or went, and no upload that waits."""
    found = assert_same(monkeypatch, name)
    if name in QUICK:
        assert found.steady
        assert all(step.reads.total() == 1 and not step.uploads for step in found.steady)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAST, *SLOW])
def test_captured_graphs_read_the_table(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """It changes between their launches."""
    monkeypatch.setitem(graphs.RECORDERS, NAME, PretendRecorder)
    assert_same(monkeypatch, name)


def test_a_service_takes_no_more_than_it_is_given() -> None:
    """Blocks of the target for some texts at full length, and whole rows of the drafter for as many requests as half of the
    memory holds."""
    engine, options = engine_on(NAME, DRAFT), ServiceOptions(max_num_seqs=8, max_model_len=1000)
    choice, own = engine.choice(), bytes_per_token(engine.model, [])
    whole = sizes_of(engine, [choice], replace(options, kv_memory_gib=1.0))
    row = (whole.capacity + SPARE) * choice.method.bytes_per_token
    assert (whole.max_rows, whole.kv_tokens) == (8, 8 * whole.capacity)
    for share, rows in ((2.0, 1), (5.0, 2), (18.0, 8)):  # of a row of the drafter, which is smaller than the target's
        budget = int(share * row) + whole.capacity * own
        sizes = sizes_of(engine, [choice], replace(options, kv_memory_gib=budget / 2**30))
        assert rows <= sizes.max_rows <= 8
        assert whole.capacity <= sizes.kv_tokens < sizes.max_rows * whole.capacity or sizes.max_rows == 1
        assert sizes.kv_tokens * own + sizes.max_rows * row <= budget
        pool = engine.model.new_pool(sizes.max_rows, sizes.capacity, sizes.kv_tokens)
        assert isinstance(pool, BlockCache)
        assert pool.num_blocks == sizes.kv_tokens // 64
    with pytest.raises(ConfigError, match="give a smaller max_model_len, or more with kv_memory_gib"):
        sizes_of(engine, [choice], replace(options, kv_memory_gib=whole.capacity * own / 2**30))


@pytest.mark.slow
def test_the_check_at_load_reads_rows_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a batch there does, and finds no fault."""
    join, joined = BlockCache.join, 0

    def counted(self: BlockCache, other: KVCache, used: int) -> None:
        nonlocal joined
        joined += 1
        join(self, other, used)

    monkeypatch.setattr(BlockCache, "join", counted)
    monkeypatch.setattr(selfcheck, "LIMIT_S", 1e9)
    found = selfcheck.check_passes(model(NAME))
    assert (found.fault, found.error) == ("", "")
    assert joined > 5
    assert len(found.paths) > 5
