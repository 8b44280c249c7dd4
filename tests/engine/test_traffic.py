"""Continuous batching: whatever comes, goes, is cancelled or preempted, every request's tokens are its solo ones."""

import pytest

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
