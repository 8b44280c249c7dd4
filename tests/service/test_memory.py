"""What a service plans its memory by: all that may be open at once is counted, and what is left is given back."""

from collections.abc import Iterator

import psutil
import pytest
import torch

from foretell import Engine, Service, ServiceOptions, speculative_config
from foretell.core.params import SamplingParams
from foretell.core.probs import Processors
from foretell.draft.base import Method
from foretell.engine.state import State
from foretell.methods.draft_model.drafter import DraftModel
from foretell.model.cache import KVCache
from foretell.model.target import Target
from foretell.service.memory import SHARE, TooLittleMemoryError, bytes_per_row, bytes_per_token, kv_budget, sizes_of
from tests.engine.harness import started, table

WITH_MEMORY = ("draft_model", "eagle1", "eagle2", "eagle3", "kangaroo", "dflash")
WITHOUT = ("none", "medusa", "ngram", "suffix", "prediction")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load("bundled")


def loaded(engine: Engine, name: str) -> Method:
    return engine.with_method(name).method


def held(engine: Engine, method: Method) -> Iterator[KVCache]:
    """The caches that a drafter of one row holds, the target's aside."""
    from foretell.engine.engine import Request

    row = engine.make_row(0, Request([1, 2, 3], SamplingParams(seed=1)))
    spec = engine.model.spec
    processors = Processors([row.params], vocab_size=spec.vocab_size, end_token_ids=[], device=spec.device)
    state = State.open([row], processors, 64)
    target = Target(engine.model, 1, 64)
    drafter = method.open(state, 64, target)
    values = {**vars(drafter), "cache": getattr(drafter, "cache", None)}  # a head's is made when it is read
    values.pop("_cache", None)
    for value in values.values():
        found = value.cache if isinstance(value, Target) else value
        if isinstance(found, KVCache) and found is not target.cache:
            yield found


@pytest.mark.parametrize("name", [*WITH_MEMORY, *WITHOUT])
def test_a_method_declares_at_least_the_memory_that_its_drafters_hold(engine: Engine, name: str) -> None:
    method = loaded(engine, name)
    caches = list(held(engine, method))
    assert bool(caches) == (name in WITH_MEMORY)
    assert method.bytes_per_token >= sum(cache.bytes_per_slot for cache in caches)
    assert (method.bytes_per_token > 0) == (name in WITH_MEMORY)


def test_the_greediest_method_counts_where_memory_is_given_back() -> None:
    target, small, large = table(1), DraftModel(table(2, num_layers=2)), DraftModel(table(3, num_layers=5))
    own = target.new_cache(0, 1).bytes_per_slot
    assert bytes_per_token(target, []) == own
    assert bytes_per_token(target, [small]) == 3 * own
    assert bytes_per_token(target, [small, large, small]) == 6 * own


def test_a_draft_that_is_the_target_itself_has_a_cache_of_its_own() -> None:
    target = table(1)
    assert bytes_per_token(target, [DraftModel(target)]) == 2 * target.new_cache(0, 1).bytes_per_slot


@pytest.mark.parametrize(
    ("default", "also"),
    [("draft_model", ()), ("eagle3", ()), ("none", ("draft_model",)), ("ngram", ("eagle3", "draft_model"))],
)
def test_a_service_counts_the_default_and_those_beside_it(engine: Engine, default: str, also: tuple[str, ...]) -> None:
    budget_gib = 0.0979
    settings = ServiceOptions(speculation="on", kv_memory_gib=budget_gib, max_model_len=256, max_num_seqs=32)
    service = Service(engine.with_method(default), settings, also=[speculative_config(name) for name in also])
    with started(service):
        methods = [loaded(engine, name) for name in (default, *also)]
        most = engine.model.new_cache(0, 1).bytes_per_slot + max(method.bytes_per_token for method in methods)
        waiting = 32 * bytes_per_row(engine.model, methods)
        assert (waiting > 0) == any("eagle" in name for name in (default, *also))
        assert service.kv_tokens == min((int(budget_gib * 2**30) - waiting) // most, 32 * 320)


def test_rows_that_leave_a_cache_give_their_pages_back() -> None:
    """Of a drafter's cache nobody else did: it kept the pages of the most rows that it ever had."""
    cache = KVCache(8, 4096, [(2, 64)] * 2, torch.float32, [torch.device("cpu")] * 2)
    for memory in (*cache.keys, *cache.values):
        memory[:] = 1.0
    before = resident()
    cache.keep(torch.tensor([0]))
    freed = before - resident()
    assert freed > 0.8 * 7 * 4096 * cache.bytes_per_slot
    assert (cache.keys[0][0] == 1.0).all()


def resident() -> int:
    """Bytes of this process in memory."""
    return int(psutil.Process().memory_info().rss)


def test_models_that_may_be_loaded_at_once_share_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may still have one whole text; one that is too long for all of the share is refused."""
    model = table(1)
    monkeypatch.setattr("foretell.service.memory.free_memory", lambda: int(3000 / SHARE))

    def budget(row_tokens: int, models: int) -> int:
        return kv_budget(model, 10, given_gib=None, row_tokens=row_tokens, max_rows=50, models=models)

    assert [budget(20, models) for models in (1, 2, 3)] == [300, 150, 100]
    assert [budget(120, models) for models in (1, 2, 3)] == [300, 150, 120]
    with pytest.raises(TooLittleMemoryError, match="one request may have 301"):
        budget(301, 3)
    own = [
        sizes_of(
            Engine(model), [], ServiceOptions(max_model_len=64, max_num_seqs=1, kv_memory_gib=1, models_at_once=models)
        )
        for models in (1, 3)
    ]
    assert own[0].kv_tokens == own[1].kv_tokens  # what is given is each one's own
    assert own[1].prefix_bytes == own[0].prefix_bytes
