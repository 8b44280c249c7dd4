"""Prefixes on disk: found as in memory, worth their files, bounded, and with all that a model keeps of a text."""

import random
from pathlib import Path
from threading import Event, Thread, Timer, current_thread
from typing import Any

import pytest
import torch

from foretell import Engine, SamplingParams
from foretell.core.shelf import Shelf
from foretell.draft.suffix import Suffix
from foretell.engine.prefix import PrefixStore
from foretell.engine.prefix_files import PrefixFiles
from foretell.methods.eagle.drafter import Eagle3
from foretell.model.llama.run.native import supports
from tests.engine.integrity import check_prefixes
from tests.engine.test_prefix import row
from tests.engine.test_recurrent import keep_states
from tests.methods.eagle.eagles import EAGLE3, random_head
from tests.model.llama.hybrid import hybrid_config, native_hybrid
from tests.model.tiny import VOCAB

TEXT = list(range(100))
A, B = ("a", None), ("b", None)  # owners


def files(folder: Path, max_bytes: int = 1 << 24) -> PrefixFiles:
    return PrefixFiles(Shelf(folder, option="prefix_dir", identity={"model": "m"}, max_bytes=max_bytes))


def again(found: PrefixFiles) -> PrefixFiles:
    """As another process finds them."""
    found.shelf.close()
    return files(found.shelf.root, found.shelf.max_bytes)


def held(*texts: list[int], store: bool = True) -> PrefixStore:
    made = PrefixStore(1 << 24)
    for number, text in enumerate(texts):
        made.add(text, row(float(number + 1), 512), (), None, A, store=store)
    return made


def put(found: PrefixFiles, store: PrefixStore) -> None:
    for prefix in store.to_store():
        found.put(prefix)


def test_a_store_finds_on_disk_what_it_does_not_hold(tmp_path: Path) -> None:
    first = files(tmp_path)
    put(first, held(TEXT))
    known = again(first)
    store = PrefixStore(1 << 24, known)
    assert store.find([*TEXT[:90], 500, 501], (), B) is None
    assert store.find([*TEXT[:60], 500, 501], (), A) is None, "so few tokens are not worth a file"
    found = store.find([*TEXT[:90], 500, 501], (), A)
    assert found[1] == 90
    assert store.num_tokens == 100, "it is in memory now"
    target, expected = row(0.0, 512), row(1.0, 512)
    found[0].copy_into(target, 90)
    for mine, theirs in zip((*target.keys, *target.values), (*expected.keys, *expected.values), strict=True):
        assert torch.equal(mine[0, :, :90], theirs[0, :, :90])
    assert not store.to_store(), "it is not written again"
    known.shelf.drop(next(iter(known.shelf.entries)))
    assert store.find(TEXT, (), A) is not None
    assert PrefixStore(1 << 24, known).find(TEXT, (), A) is None, "a file that has gone is not found"
    check_prefixes(store)


def test_what_an_adapter_has_read_stays_in_memory(tmp_path: Path) -> None:
    """Under its name another one may be loaded after a start."""
    store, found = PrefixStore(1 << 24), files(tmp_path)
    store.add(TEXT, row(1.0, 512), (), None, ("a", "x"))
    assert not store.to_store()
    put(found, held(TEXT))
    after = PrefixStore(1 << 24, again(found))
    assert after.find(TEXT, (), ("a", "x")) is None
    assert after.find(TEXT, (), A) is not None


def test_what_files_hold_nearly_is_not_written_and_what_goes_on_replaces_it(tmp_path: Path) -> None:
    found = files(tmp_path)
    put(found, held(TEXT))
    store = held(TEXT, [*TEXT, *range(200, 230)], [*TEXT[:80], *range(300, 330)])
    put(found, store)
    assert len(found.shelf.entries) == 1
    assert not store.to_store(), "nothing is looked at twice"
    put(found, held([*TEXT, *range(200, 280)]))
    assert len(found.shelf.entries) == 1, "the longer one serves for both"
    put(found, held([*range(400, 480)]))
    assert len(found.shelf.entries) == 2
    assert again(found).find([*TEXT, *range(200, 280)], (), A, 100) is not None


def test_the_least_recently_used_file_goes_first(tmp_path: Path) -> None:
    texts = [list(range(start, start + 80)) for start in (0, 1000, 2000, 3000)]
    one = files(tmp_path / "one")
    put(one, held(texts[0]))
    found = files(tmp_path / "more", 3 * one.shelf.num_bytes + 100)
    put(found, held(*texts[:3]))
    assert found.find(texts[0], (), A, 0) is not None
    put(found, held(texts[3]))
    known = again(found)
    assert [known.find(text, (), A, 0) is not None for text in texts] == [True, False, True, True]


def test_texts_that_are_not_to_be_stored_are_not_written_until_others_have_them() -> None:
    store = held(TEXT, store=False)
    assert not store.to_store()
    store.add(TEXT[:80], row(1.0, 512), (), None, A)
    assert [prefix.ids for prefix in store.to_store()] == [TEXT[:80]], "of the longer text the rest is not to be stored"
    store.add(TEXT, row(1.0, 512), (), None, A)
    assert TEXT in [prefix.ids for prefix in store.to_store()]
    store.add([*TEXT, *range(200, 280)], row(1.0, 512), (), None, A, store=False)
    assert TEXT in [prefix.ids for prefix in store.to_store()], "a text that may be written stays until it is"
    check_prefixes(store)


def test_who_needs_hidden_states_gets_only_files_with_them(tmp_path: Path) -> None:
    store, found = PrefixStore(1 << 24), files(tmp_path)
    taps = torch.randn(1, 100, 8)
    store.add(TEXT, row(1.0), (0, 2), taps, A)
    put(found, store)
    known = again(found)
    assert known.find(TEXT, (1,), A, 0) is None
    assert known.find(TEXT, (), A, 0) is not None
    prefix = known.find(TEXT, (0, 2), A, 0)
    kept = prefix.whole().taps
    assert torch.equal(kept, taps)


@pytest.mark.filterwarnings("ignore")  # transformers tells which kernels are not installed
@pytest.mark.skipif(
    supports(hybrid_config("lfm2"), torch.float32, torch.device("cpu")) is not None, reason="no native hybrids here"
)
@pytest.mark.parametrize("heads", [False, True])
def test_a_hybrid_takes_up_states_and_heads_take_up_hidden_states(
    heads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens, the same number of them read, and the same guesses as by the store in memory."""
    keep_states(monkeypatch, 16)
    model, rng = native_hybrid("qwen3_5" if heads else "lfm2"), random.Random(1)
    prompt = [rng.randrange(3, VOCAB) for _ in range(100)]
    params = SamplingParams(max_new_tokens=9, seed=3, ignore_eos=True)
    method = Eagle3(random_head(EAGLE3), model) if heads else Suffix()
    config = {"method": "eagle3" if heads else "suffix", "num_speculative_tokens": 3}

    def engine() -> tuple[Engine, PrefixStore]:
        made = Engine(model, speculative=config, method=method.fresh(), prefix_memory_gib=0.01, drafter_errors="raise")
        assert made._prefixes is not None
        return made, made._prefixes

    first, store = engine()
    cold = first.generate(prompt, params)
    found = files(tmp_path)
    put(found, store)
    assert found.shelf.entries
    warm = first.generate(prompt, params)
    second, fresh = engine()
    fresh.further = again(found)
    told = second.generate(prompt, params)
    assert told.token_ids == warm.token_ids == cold.token_ids
    assert told.num_cached_tokens == warm.num_cached_tokens > 64
    assert told.steps == cold.steps


def test_a_file_may_be_read_before_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, on another thread; who asks meanwhile waits for it."""
    first = files(tmp_path)
    put(first, held(TEXT))
    known = again(first)
    go, threads, get = Event(), list[Thread](), known.shelf.get

    def slow(name: str) -> Any:
        threads.append(current_thread())
        assert go.wait(30.0)
        return get(name)

    monkeypatch.setattr(known.shelf, "get", slow)
    store = PrefixStore(1 << 24, known)
    assert store.load(TEXT[:60], (), A) is None, "so few tokens are not worth a file"
    loading = store.load(TEXT, (), A)
    assert loading is not None
    assert loading is store.load(TEXT, (), A)
    assert not loading.done()
    Timer(0.05, go.set).start()
    found = store.find(TEXT, (), A)
    assert found is not None
    assert found[1] == 100
    assert len(threads) == 1
    assert threads[0] is not current_thread()
    assert store.load(TEXT, (), A) is None, "it is in memory now"
    assert PrefixStore(1 << 24).load(TEXT, (), A) is None
    check_prefixes(store)
