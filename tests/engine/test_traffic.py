"""Continuous batching: whatever comes, goes, is cancelled or preempted, every request's tokens are its solo ones."""

import pytest

from foretell.model import blocks
from foretell.model.blocks import BlockCache
from foretell.model.cache import KVCache
from foretell.model.table import TableLM
from tests.engine.harness import EOS, VOCAB, ToyTokenizer, table
from tests.engine.traffic import Traffic
from tests.stress import size


@pytest.fixture(autouse=True)
def audited() -> None:
    """The folder's audit wraps the static engine's steps alone; here ``check_loop`` runs after every round."""


@pytest.mark.parametrize("seed", range(3))
def test_random_traffic_gives_every_request_its_solo_tokens(seed: int) -> None:
    traffic = Traffic(seed)
    for _ in range(150):
        traffic.round()
    traffic.finish()
    assert traffic.check() >= 20
    counters = traffic.loop.recorder
    assert counters.num_cached_prompt_tokens > 0
    assert traffic.loop.batch.pool.num_rows == 0


def test_preempted_requests_go_on_where_they_were() -> None:
    traffic = Traffic(11, kv_tokens=192, max_new_tokens=(45, 60))
    for _ in range(150):
        traffic.round()
    traffic.finish()
    assert traffic.check() > 5
    assert traffic.loop.recorder.num_preemptions > 2
    preempted = [told for told in traffic.told.values() if told.last and told.last.completion.num_preemptions]
    assert len(preempted) > 2


def test_prompts_read_in_chunks_stay_whole_while_others_end() -> None:
    """Only as many slots of a row as decoding rows used were moved to its new place: what had been read of a longer prompt
    was lost."""
    traffic = Traffic(21, stall_target_s=0.0, prefixes=False, max_new_tokens=(1, 3, 8))
    for _ in range(150):
        traffic.round()
    traffic.finish()
    assert traffic.check() > 20
    assert len(traffic.in_chunks) > 10


class BlockTable(TableLM):
    """A table whose batches hold their rows in blocks."""

    has_blocks = True

    def new_pool(self, num_rows: int, capacity: int, slots: int | None) -> KVCache:
        """Of two layers, as its caches are."""
        shapes = [(1, 1)] * self.spec.num_layers
        return BlockCache(num_rows, capacity, slots, shapes, self.spec.dtype, self.spec.device)


@pytest.mark.parametrize("most", [25, pytest.param(1000, marks=pytest.mark.slow)])
def test_rows_in_blocks_are_given_back(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Memory for one text at full length, or many short ones: requests wait, are preempted, cancelled, and end; in the end
    all of it is free. A table notices what is not where it was written."""
    monkeypatch.setattr(blocks, "BLOCK", 8)
    target = BlockTable(VOCAB, seed=1, eos_token_ids=(EOS,), num_layers=2)
    traffic = Traffic(
        13, kv_tokens=192, models=(target, table(2, blur=0.3)), tokenizer=ToyTokenizer(), max_new_tokens=(1, 20, 45, 60)
    )
    pool = traffic.loop.batch.pool
    assert isinstance(pool, BlockCache)
    assert pool.num_blocks == 24 < 6 * 192 // 8
    least = pool.num_blocks
    while len(traffic.told) < most:
        traffic.round()
        least = min(least, pool.num_free)
    traffic.finish()
    assert traffic.check() > most // 2
    assert traffic.loop.recorder.num_preemptions > most // 50
    assert traffic.loop.recorder.num_cached_prompt_tokens > 0
    assert least < 3
    assert pool.num_free == pool.num_blocks


@pytest.mark.slow
def test_ten_thousand_steps() -> None:
    """All of them at length (``tests.stress``), else one thousand."""
    traffic, num_steps = Traffic(77), size(1_000, 10_000)
    while traffic.loop.recorder.num_steps < num_steps:
        traffic.round()
    traffic.finish()
    assert traffic.check() > num_steps // 10


def test_without_prefix_reuse_the_same() -> None:
    with_store, without = Traffic(5), Traffic(5, prefixes=False)
    for traffic in (with_store, without):
        for _ in range(100):
            traffic.round()
        traffic.finish()
        assert traffic.check() > 10
    assert with_store.loop.recorder.num_cached_prompt_tokens > 0
    assert without.loop.recorder.num_cached_prompt_tokens == 0
