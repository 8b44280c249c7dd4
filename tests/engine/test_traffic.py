"""Continuous batching: whatever comes, goes, is cancelled or preempted, every request's tokens are its solo ones."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from foretell.engine.request import scoring
from foretell.model import blocks
from foretell.model.blocks import BlockCache
from foretell.model.cache import KVCache
from tests.engine.harness import EOS, VOCAB, ToyTokenizer, table
from tests.engine.integrity import check_loop
from tests.engine.traffic import Traffic, left_of
from tests.model.table import TableLM
from tests.stress import size


@pytest.fixture(autouse=True)
def audited() -> None:
    """The folder's audit wraps the static engine's steps alone; here ``check_loop`` runs after every round."""


@pytest.mark.parametrize("seed", range(3))
def test_random_traffic_gives_every_request_its_solo_tokens(seed: int) -> None:
    traffic = Traffic(seed)
    assert traffic.run(150) >= 20
    counters = traffic.loop.recorder
    assert counters.num_cached_prompt_tokens > 0
    assert traffic.loop.batch.pool.num_rows == 0


def test_preempted_requests_go_on_where_they_were() -> None:
    traffic = Traffic(11, kv_tokens=192, max_new_tokens=(45, 60))
    assert traffic.run(150) > 5
    assert traffic.loop.recorder.num_preemptions > 2
    preempted = [told for told in traffic.told.values() if told.last and told.last.completion.num_preemptions]
    assert len(preempted) > 2


def test_prompts_read_in_chunks_stay_whole_while_others_end() -> None:
    """Only as many slots of a row as decoding rows used were moved to its new place: what had been read of a longer prompt
    was lost."""
    traffic = Traffic(21, stall_target_s=0.0, prefixes=False, max_new_tokens=(1, 3, 8))
    assert traffic.run(150) > 20
    assert len(traffic.in_chunks) > 10


PHASES = ("scoring", "waiting", "reading", "decoding", "again", "ended")
"""Where a request may stand when something befalls it."""


def until(traffic: Traffic, request_id: str, phase: str) -> None:
    """Rounds until a request stands there."""
    loop, job = traffic.loop, traffic.loop.jobs[request_id]
    if phase == "again":
        until(traffic, request_id, "decoding")
        preempt(traffic)
        assert job in loop.waiting
        return
    for _ in range(200):
        reads = any(one.row is job.row and one.filled for one in loop.batch.arrivals)
        if {
            "scoring": job in loop.scoring and bool(job.scoring and job.scoring.pieces),
            "waiting": job in loop.waiting,
            "reading": reads,
            "decoding": any(row is job.row for row in loop.batch.members) and len(job.row.token_ids) > 2,
            "ended": job.row.finish_reason is not None,
        }[phase]:
            return
        with torch.inference_mode():
            traffic.tick()
    raise AssertionError(f"never {phase}")


def preempt(traffic: Traffic) -> None:
    """All requests but the first one lose their rows."""
    loop = traffic.loop
    before = loop.limits
    loop.limits = replace(before, kv_tokens=1)
    loop._make_room()
    loop.limits = before


@pytest.mark.parametrize("phase", ["waiting", "reading", "decoding"])
def test_a_phase_that_is_not_that_of_its_container_is_found(phase: str) -> None:
    traffic = Traffic(5, stall_target_s=0.0, max_rows=1)
    for _ in range(2):
        traffic.arrive(least=30, whole=True)
    first, second = traffic.loop.jobs.values()
    while first.phase != "decoding":
        with torch.inference_mode():
            traffic.tick()
    check_loop(traffic.loop)
    job = second if second.phase != phase else first
    job.phase = phase  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match=f"its phase is {phase}"):
        check_loop(traffic.loop)


@pytest.mark.parametrize("event", ["cancelled", "timeout", "preempted"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_request_that_goes_leaves_nothing_wherever_it_stands(
    monkeypatch: pytest.MonkeyPatch, phase: str, event: str
) -> None:
    """A request of a way of guessing, beside two others that go on, and others after it: texts are those of requests alone,
    each counter counts once (``Traffic.check``), and no part of the loop holds anything of a request that has ended."""
    monkeypatch.setattr(scoring, "SCORE_CHUNK", 8)
    seed = PHASES.index(phase) + len(event)
    traffic = Traffic(seed, stall_target_s=0.0, kv_tokens=600, max_rows=3)
    loop, ways = traffic.loop, traffic.choices[seed % 3 :: 3]  # all of them, over the cases
    for way in ways:
        traffic.max_new_tokens = (30,)
        beside = [traffic.arrive(whole=True) for _ in range(2)]
        traffic.max_new_tokens = (12 if phase != "ended" else 4,)
        until(traffic, beside[0], "decoding")
        scored = 1 if phase == "scoring" else None
        victim = traffic.arrive(way, least=30, whole=True, num_prompt_logprobs=scored, timeout_s=1e3)
        until(traffic, victim, phase)
        traffic.cancelled.add(victim)
        if event == "cancelled":
            loop.cancel(victim)
            traffic._end()
        elif event == "timeout":
            traffic.now += 1e4
        else:
            preempt(traffic)
        check_loop(loop)
        traffic.arrive(way)
        traffic.finish()
    traffic.check()
    done = [told.last.completion for told in traffic.told.values() if told.last]
    reasons = Counter(one.finish_reason for one in done if one)
    assert reasons[event] == (0 if phase == "ended" or event == "preempted" else len(ways))
    if event == "preempted" and phase in ("reading", "decoding"):
        assert loop.recorder.num_preemptions >= len(ways)
    loop.observers.clear()
    loop._planned = []  # of the next plan, whatever it is: a list of rows that is compared by its identity
    assert not left_of(loop, set(traffic.told))
    assert loop.batch.pool.num_rows == len(loop.batch.groups) == len(loop.batch.arrivals) == 0
    assert loop.batch.state is None


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
    assert pool.num_blocks == 24 < 6 * 192 // 8
    least = pool.num_blocks
    while len(traffic.told) < most:
        traffic.round()
        least = min(least, len(pool._free))
    traffic.finish()
    assert traffic.check() > most // 2
    assert traffic.loop.recorder.num_preemptions > most // 50
    assert traffic.loop.recorder.num_cached_prompt_tokens > 0
    assert least < 3
    assert len(pool._free) == pool.num_blocks


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
        assert traffic.run(100) > 10
    assert with_store.loop.recorder.num_cached_prompt_tokens > 0
    assert without.loop.recorder.num_cached_prompt_tokens == 0
