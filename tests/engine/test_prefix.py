"""The prefix store: what it finds, what it forgets, and that a copy is what was computed."""

import random
import sys
import threading

import pytest
import torch

from foretell.engine.prefix import BLOCK, MERGED, PrefixStore
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
    assert torch.equal(found[0].whole().taps, taps)  # type: ignore[arg-type]
    assert store.find(ids, (1,)) is None
    assert store.find(ids, ()) is not None
    check_prefixes(store)


def of_text(ids: list[int]) -> KVCache:
    """A row in which a slot's keys and values tell the whole text up to it, as a model's would."""
    made, known = row(0.0, 4096), 0
    for at, token in enumerate(ids):
        known = hash((known, token)) % 9973
        for layer, memory in enumerate((*made.keys, *made.values)):
            memory[0, :, at] = known + layer / 8
    return made


def taps_of(ids: list[int], first: int) -> torch.Tensor:
    return of_text(ids).keys[0][0, 0, first : len(ids)].clone()[None]


@pytest.mark.parametrize("tapped", [False, True])
def test_texts_share_the_memory_of_what_they_have_in_common(tapped: bool) -> None:
    """Conversations at random, with branches: what is found is what was read, and only what is new takes memory."""
    rng, store, layers = random.Random(4), PrefixStore(1 << 26), (0,) if tapped else ()
    texts = [[rng.randrange(50) for _ in range(700)]]
    for number in range(40):
        begin = rng.choice(texts)
        ids = begin[: rng.choice((len(begin), rng.randrange(16, len(begin) + 1)))]
        found = store.find(ids, layers)
        first = 0 if found is None else found[1]
        if found is not None:
            target, expected = row(0.0, 4096), of_text(ids)
            found[0].copy_into(target, first)
            for memory, source in zip((*target.keys, *target.values), (*expected.keys, *expected.values), strict=True):
                assert torch.equal(memory[0, :, :first], source[0, :, :first])
            for piece, start, used in found[0].parts(first) if tapped else ():
                assert torch.equal(piece.taps[0, :used], taps_of(ids, 0)[0, start : start + used])
        ids = [*ids, *(rng.randrange(50) for _ in range(rng.randrange(200)))][:2000]
        before = store.num_bytes
        given = first - rng.randrange(min(first, 20) + 1)  # some that are known already
        store.add(ids, of_text(ids), layers, taps_of(ids, given) if tapped else None, first=given)
        check_prefixes(store)
        texts.append(ids)
        each = (2 * 2 * 2 * 4 + (4 if tapped else 0)) * 4
        assert store.num_bytes - before <= each * (len(ids) - first + MERGED), (number, "what was known takes none")
        assert all(len(prefix.pieces) <= 2 + len(prefix.ids) // (MERGED // 2) for prefix in store._prefixes.values())
    store.clear()
    assert store.num_bytes == 0


def test_what_goes_takes_its_memory_with_it() -> None:
    """A text that shares little of another one's piece does not hold the rest of it."""
    store, ids = PrefixStore(1 << 24), [number % 50 for number in range(3000)]
    store.add(ids, of_text(ids), (), None)
    whole = store.num_bytes
    short = [*ids[:200], *range(60, 60 + MERGED)]
    store.add(short, of_text(short), (), None)
    store.shrink(whole)
    assert store.find([*short, 1], ()) is not None
    assert store.num_bytes == whole * len(short) // len(ids)
    check_prefixes(store)


def test_hidden_states_after_a_beginning_that_has_gone_are_not_kept() -> None:
    store, ids = PrefixStore(1 << 22), list(range(64))
    store.add(ids, of_text(ids), (0,), taps_of(ids, 40), first=40)
    assert store.find(ids, ()) is None


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
