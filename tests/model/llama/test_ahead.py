"""Where weights are fetched to: what is measured, when, and that no bit depends on it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from foretell.core.measured import measured_now
from foretell.kernels.functions import native_functions
from foretell.kernels.native import library
from foretell.model.llama.run import tuning as ahead
from foretell.model.llama.run.native import NativeModel
from foretell.model.llama.run.tuning import CHOICES, NEVER, NODES, choose, faster
from tests.model.llama.family import BUSHY, CAPACITY, make_model, prefill, run_tree
from tests.model.llama.test_threads import Machine

needs_library = pytest.mark.skipif(library()[0] is None, reason=str(library()[1]))


@pytest.mark.parametrize(("into_l2", "into_l1", "chosen"), [(1.0, 1.2, 2), (1.2, 1.0, NEVER), (1.0, 1.0, 2)])
@pytest.mark.parametrize("milliseconds", [1.0, 30.0, 1000.0])
def test_the_faster_is_chosen_by_its_least_time(
    into_l2: float, into_l1: float, chosen: int, milliseconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though every fifth pass is disturbed."""
    seconds = {2: into_l2 * milliseconds / 1000, NEVER: into_l1 * milliseconds / 1000}
    machine = Machine(seconds, lambda call: 0.0 if call % 5 else milliseconds / 500)
    monkeypatch.setattr(ahead, "perf_counter", machine.clock)
    assert faster(machine.run, CHOICES, measured_now) == chosen


@pytest.mark.parametrize(("milliseconds", "calls"), [(1.0, 28), (30.0, 16), (900.0, 12)])
def test_it_takes_twice_a_seventh_of_a_second_or_two_rounds(
    milliseconds: float, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(dict.fromkeys(CHOICES, milliseconds / 1000))
    monkeypatch.setattr(ahead, "perf_counter", machine.clock)
    faster(machine.run, CHOICES, measured_now)
    assert machine.calls == calls


def test_what_an_earlier_start_measured_costs_two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(dict.fromkeys(CHOICES, 0.001))
    monkeypatch.setattr(ahead, "perf_counter", machine.clock)

    def keep(candidates: Any, measure: Any, check: Any) -> dict[int, float]:
        assert check() == {2: pytest.approx(0.001)}
        return {2: 0.2, NEVER: 0.1}

    assert faster(machine.run, CHOICES, keep) == NEVER
    assert machine.calls == 2


class Watched:
    """A model that says what it was asked, beside a library's setting."""

    def __init__(self, model: NativeModel) -> None:
        self.model, self.spec, self.new_cache = model, model.spec, model.new_cache
        self.passes: list[tuple[int, int]] = []

    def forward(self, tokens: torch.Tensor, *given: Any) -> Any:
        self.passes.append((tokens.shape[1], native_functions().l2_rows(0)))
        return self.model.forward(tokens, *given)


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ahead, "_measured", False)
    before = native_functions().l2_rows(0)
    yield
    native_functions().l2_rows(before)


@needs_library
@pytest.mark.usefixtures("setting")
@pytest.mark.parametrize("chosen", [2, NEVER])
def test_the_first_large_model_of_a_process_decides(chosen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(run: Callable[[int], object], choices: tuple[int, int], keep: object) -> int:
        for choice in choices:
            run(choice)
        return chosen

    monkeypatch.setattr(ahead, "faster", measured)
    native = native_functions()
    watched: Any = Watched(NativeModel.from_hf(make_model("llama")))
    native.l2_rows(7)
    choose(watched, native)
    assert not watched.passes, "a small one may lie in a cache"
    assert native.l2_rows(0) == 7
    monkeypatch.setattr(ahead, "LEAST_BYTES", 0)
    for _ in range(2):
        choose(watched, native)
        assert watched.passes == [(NODES, 2), (NODES, NEVER)]
        assert native.l2_rows(0) == chosen


@needs_library
@pytest.mark.usefixtures("setting")
@pytest.mark.parametrize("weights", ["auto", "int8", "int4"])
def test_no_bit_depends_on_it(weights: str) -> None:
    model = NativeModel.from_hf(make_model("llama").to(torch.bfloat16), weights=weights)
    found = []
    for rows in (1, 2, 5, NEVER):
        native_functions().l2_rows(rows)
        cache = model.new_cache(1, CAPACITY)
        length = prefill(model, cache, [[1, 2, 3, 4, 5, 6, 7]], 4)
        tokens = torch.arange(BUSHY.shape[-1])[None] + 3
        found.append(run_tree(model, cache, tokens, BUSHY[:1], length)[0].logits)
    assert all(torch.equal(one, found[0]) for one in found)
