"""The prefix store: what it finds, what it forgets, and that a copy is what was computed."""

import sys
import threading

import pytest
import torch

from foretell.engine.prefix import BLOCK, PrefixStore
from foretell.model.cache import KVCache
from tests.engine.integrity import check_prefixes


def row(value: float, slots: int = 128) -> KVCache:
    made = KVCache(1, slots, [(2, 4)] * 2, torch.float32, [torch.device("cpu")] * 2)
    for memory in (*made.keys, *made.values):
        memory[:] = value + torch.arange(slots)[:, None] / 1000
    return made


def test_the_longest_shared_beginning_is_found_token_by_token() -> None:
    store = PrefixStore(1 << 20)
    ids = list(range(50))
    store.add(ids, row(1.0), (), None)
    store.add([*ids[:20], *range(200, 240)], row(2.0), (), None)
    found = store.find([*ids[:45], 99, 98], ())
    assert found is not None
    assert found[1] == 45
    target = row(0.0)
    found[0].copy_into(target, 45)
    for memory, source in zip((*target.keys, *target.values), (*row(1.0).keys, *row(1.0).values), strict=True):
        assert torch.equal(memory[0, :, :45], source[0, :, :45])
        assert (memory[0, :, 45:] < 0.5).all()
    assert store.find(list(range(300, 340)), ()) is None
    assert store.find(ids[: BLOCK - 1], ()) is None
    assert (store.num_queries, store.num_hits) == (47 + 40 + BLOCK - 1, 45), "tokens that were asked for, and had"
    check_prefixes(store)


def test_what_one_request_had_stored_stays_to_be_stored() -> None:
    """A request that is not to be stored repeats the text of one that is."""
    store, ids = PrefixStore(1 << 20), list(range(32))
    store.add(ids, row(1.0), (), None, store=False)
    assert not store.to_store()
    for stored in (True, False):
        store.add(ids, row(1.0), (), None, store=stored)
        assert [one.ids for one in store.to_store()] == [ids]


def test_a_text_that_goes_on_replaces_its_beginning() -> None:
    store = PrefixStore(1 << 20)
    store.add(list(range(32)), row(1.0), (), None)
    size = store.num_bytes
    store.add(list(range(64)), row(1.0), (), None)
    assert store.num_tokens == 64
    assert store.num_bytes == 2 * size
    store.add(list(range(32)), row(1.0), (), None)
    assert store.num_tokens == 64
    check_prefixes(store)


def test_the_least_recently_used_is_forgotten() -> None:
    one = PrefixStore(1 << 20)
    one.add(list(range(32)), row(1.0), (), None)
    store = PrefixStore(2 * one.num_bytes)
    texts = [list(range(start, start + 32)) for start in (0, 1000, 2000)]
    store.add(texts[0], row(1.0), (), None)
    store.add(texts[1], row(2.0), (), None)
    assert store.find(texts[0], ()) is not None
    store.add(texts[2], row(3.0), (), None)
    assert store.find(texts[1], ()) is None
    assert store.find(texts[0], ()) is not None
    assert store.num_bytes <= store.max_bytes
    store.add(list(range(100)), row(1.0), (), None)  # larger than all that is allowed: not kept
    assert store.find(texts[2], ()) is not None
    check_prefixes(store)


def test_who_needs_hidden_states_gets_only_prefixes_with_them() -> None:
    store = PrefixStore(1 << 20)
    ids = list(range(32))
    store.add(ids, row(1.0), (), None)
    assert store.find(ids, (0, 2)) is None
    taps = torch.ones(1, 32, 8)
    store.add(ids, row(1.0), (0, 2), taps)
    found = store.find(ids, (0, 2))
    assert found is not None
    assert found[0].taps is taps
    assert store.find(ids, (1,)) is None
    assert store.find(ids, ()) is not None
    check_prefixes(store)


def test_a_violated_invariant_is_found() -> None:
    store = PrefixStore(1 << 20)
    store.add(list(range(32)), row(1.0), (), None)
    store.num_bytes += 1
    with pytest.raises(RuntimeError, match="are counted"):
        check_prefixes(store)


def test_its_size_may_be_read_while_prefixes_come_and_go() -> None:
    """A service's figures are read on other threads than the engine's."""
    store, memory = PrefixStore(1 << 17), row(1.0)
    errors: list[RuntimeError] = []
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            try:
                assert store.num_tokens >= 0
            except RuntimeError as error:
                errors.append(error)
                return

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    reader = threading.Thread(target=read)
    reader.start()
    for number in range(600):
        store.add([number % 97, *range(20)], memory, (), None)
    over.set()
    reader.join()
    sys.setswitchinterval(before)
    assert errors == []
    assert store.num_tokens > 0
    check_prefixes(store)
