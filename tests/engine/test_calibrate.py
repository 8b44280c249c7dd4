"""Cost tables: of every method that a request may name, kept only where the machine was quiet, checked, and replaced."""

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from foretell import Engine, SamplingParams, Service, ServiceOptions, Submission, speculative_config
from foretell.core.measured import MAX_AGE_S, file_of
from foretell.costs.files import load, load_begun
from foretell.costs.measure import StepSeconds
from foretell.costs.table import CostTable, TextCosts
from foretell.draft.none import NoMethod, NoneConfig
from foretell.draft.suffix import Suffix, SuffixConfig
from foretell.engine.batch import Batch
from foretell.engine.calibrate import KEPT, Bench, Calibration, InterruptedMeasuringError
from foretell.engine.planning import SLICE_S
from foretell.engine.speculation import Speculation
from foretell.methods.draft_model.config import DraftModelConfig
from foretell.methods.draft_model.drafter import DraftModel
from foretell.planner.budget import PROMISE
from foretell.planner.corrections import Corrections
from tests.engine.harness import ToyTokenizer, started, table
from tests.engine.integrity import check_service
from tests.service.test_service import Mailbox

LIGHT = {"ngram", "suffix", "prediction"}


@pytest.fixture(autouse=True)
def _no_earlier_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path))


class Machine:
    """Stands in for ``Bench.step``: passes of 10 ms, guesses of 1 ms; ``slow`` gives the factor of the n-th step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slow: Callable[[int], float] = lambda number: 1.0) -> None:
        self.slow, self.steps, self.asked, self.waited = slow, 0, set[str](), 0.0
        self.busy = 0.0  # seconds that threads wait for a processor in each second that they run
        monkeypatch.setattr("foretell.engine.calibrate.processor_seconds", self.processor_seconds)
        monkeypatch.setattr(Bench, "step", self.step)
        monkeypatch.setattr(Bench, "lag_seconds", lambda bench, method: 0.0)

    def step(self, method: str, batch: int, depth: int) -> StepSeconds:
        self.steps += 1
        self.asked.add(method)
        factor = self.slow(self.steps)
        self.waited += self.busy
        return StepSeconds(0.001 * (depth > 0), 0.01 * factor, 0.0, batch * (1 + depth))

    def processor_seconds(self) -> tuple[float, float]:
        return float(self.steps), self.waited


def made(**options: Any) -> Service:
    """A service that has not been started, over table models, with a draft model."""
    config = speculative_config({"method": "draft_model", "num_speculative_tokens": 4})
    engine = Engine(table(1), ToyTokenizer(), speculative=config, method=DraftModel(table(2, blur=0.3)))
    return Service(engine, ServiceOptions(max_num_seqs=2, max_model_len=200, **options))


def calibration() -> Calibration:
    choices = made()._choices
    return Calibration(
        choices.engine.model, choices.plain, choices.guessing, choices.weightless, max_batch=2, time_limit_s=20.0
    )


def test_methods_without_weights_are_measured_though_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    costs = calibration().measure()
    assert machine.asked == {"none", "draft_model", *LIGHT}
    assert set(costs.methods) == {"draft_model", *LIGHT}
    for name in LIGHT:
        assert costs.draft(name, 1, 1) == costs.draft(name, 1, 4) == pytest.approx(0.001), "one depth holds for all"


def test_real_steps_of_all_methods_can_be_timed() -> None:
    costs = calibration().measure()
    assert set(costs.methods) == {"draft_model", *LIGHT}
    assert all(costs.draft(name, 1, 1) > 0.0 for name in costs.methods)


def test_the_widest_passes_that_a_lookup_asks_for_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind long texts a pass over many nodes takes much longer than narrow ones let expect."""
    texts: list[dict[str, int]] = []
    monkeypatch.setattr(
        "foretell.engine.calibrate.measure_texts", lambda step, methods, _, **more: texts.append(methods) or {}
    )
    model, config = table(1, max_positions=2048), SuffixConfig(6)
    choice = Speculation(config, Suffix(), config.load_verifier(model))
    plain = Speculation(NoneConfig(), NoMethod(), NoneConfig().load_verifier(model))
    costs = Calibration(model, plain, [], [choice], max_batch=1, time_limit_s=20.0).measure()
    assert {(1, 1), (1, 7)} == costs.verify_cells.keys()
    assert {"suffix": 6} in texts
    assert all(one == {"suffix": 6} for one in texts)  # a busy machine is measured twice


def test_what_was_measured_on_a_quiet_machine_is_kept_and_read(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    costs = calibration().table()
    measured = machine.steps
    again = calibration()
    assert load(again.key) == costs
    assert again.table() == costs
    assert machine.steps - measured < 50, "a few steps are enough to check it"


def test_what_was_measured_on_a_busy_machine_is_measured_again_and_not_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine(monkeypatch, slow=lambda number: 1.0 + 30.0 * (number * 7919 % 13 > 3))
    made = calibration()
    costs = made.table()
    assert not costs.is_steady
    assert load(made.key) is None
    assert "the machine is busy" in caplog.text
    # Quiet again after the first measuring: the lesser figures are those of the machine, and they are kept.
    first = machine.steps // 2
    machine.steps, machine.slow = 0, lambda number: 1.0 if number > first else 1.0 + 30.0 * (number * 7919 % 13 > 3)
    costs = made.table()
    assert costs.is_steady
    assert costs.verify(1, 1) == pytest.approx(0.01)
    assert load(made.key) == costs


def test_a_kept_table_that_says_more_than_steps_take_now_is_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Evenly slow steps look steady: a pass measured at 31 times its time made a guess cost 0.02 passes for ever."""
    machine = Machine(monkeypatch, slow=lambda number: 31.0)
    busy = calibration().table()
    assert busy.verify(1, 1) == pytest.approx(0.31)
    machine.slow = lambda number: 1.0
    caplog.clear()
    with caplog.at_level("DEBUG", "foretell"):
        costs = calibration().table()
    assert costs.verify(1, 1) == pytest.approx(0.01)
    assert "310.00 ms and takes 10.00 ms now" in caplog.text
    told = [record.getMessage() for record in caplog.records if record.levelname != "DEBUG"]
    assert told[0] == "costs: measuring what passes take here, up to 20 s", "what it does, not what it has dropped"
    assert not any(word in line for line in told for word in ("dropped", "used up", "extrapolated"))
    machine.slow, machine.asked = lambda number: 31.0, set()
    assert calibration().table() == costs, "steps that are slower now say nothing against it"


def test_a_kept_table_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch)
    made = calibration()
    made.table()
    assert load(made.key) is not None
    path = file_of(made.key)
    old = {**json.loads(path.read_text(encoding="utf-8")), "time": time.time() - MAX_AGE_S - 1}
    path.write_text(json.dumps(old), encoding="utf-8")
    assert load(made.key) is None
    del old["time"]
    path.write_text(json.dumps(old), encoding="utf-8")
    assert load(made.key) is None


def test_an_idle_service_measures_again_what_live_steps_contradict(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, slow=lambda number: 31.0)
    service = made()
    with started(service):
        service.measure()
        planner = service._costs.planner
        service._costs._next_measuring = 0.0
        assert planner.costs.verify(1, 1) == pytest.approx(0.31)
        machine.slow = lambda number: 1.0
        service._call(service._measure_again)
        assert planner.costs.verify(1, 1) == pytest.approx(0.31), "nothing speaks against it yet"
        costs = service._costs

        def stopped(*_: object) -> StepSeconds:
            raise InterruptedMeasuringError

        def contradict() -> float:  # on the engine's thread, which is not idle meanwhile
            for _ in range(60):
                planner.corrections.tick()
                planner.corrections.observe_plain(0.01, 0.31, 1)
            with monkeypatch.context() as patch:
                patch.setattr(Bench, "step", stopped)
                service._measure_again()  # a request has come ...
            service._measure_again()  # ... and after it measuring does not begin at once
            return planner.costs.verify(1, 1)

        assert service._call(contradict) == pytest.approx(0.31)
        costs._next_measuring = 0.0
        deadline = time.monotonic() + 30
        while planner.costs.verify(1, 1) > 0.02 and time.monotonic() < deadline:
            service._call(service._measure_again)
        assert planner.costs.verify(1, 1) == pytest.approx(0.01)
        assert planner.corrections.plain == 1.0


def stops_after(count: int) -> Callable[[], bool]:
    """A request comes when it is asked once more."""
    left = iter(range(count))
    return lambda: next(left, None) is None


def test_measuring_is_broken_off_where_work_comes() -> None:
    made = calibration()
    with pytest.raises(InterruptedMeasuringError):
        made.measure(must_stop=stops_after(5))
    assert len(made._begun.done) <= 5


def test_measuring_that_is_broken_off_again_and_again_comes_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real steps, of which each is made once: what was timed before a request came is not timed again."""
    made, calls, sound = calibration(), list[tuple[str, int, int]](), Bench._step

    def step(self: Bench, opened: Any, caps: list[int]) -> StepSeconds:
        calls.append(("step", len(opened.members), caps[0]))
        return sound(self, opened, caps)

    monkeypatch.setattr(Bench, "_step", step)
    monkeypatch.setattr(Bench, "long_text", lambda self, longest: 0)
    monkeypatch.setattr("foretell.costs.measure._CHEAP_S", 0.02)
    monkeypatch.setattr("foretell.engine.calibrate.processor_seconds", lambda: (0.0, 0.0))
    monkeypatch.setattr(CostTable, "is_steady", True)
    parts, broken = [0], 0
    while True:
        begun = made._begun
        before = len(begun.done) if begun else 0
        try:
            costs = made.measure(must_stop=stops_after(4), on_part=lambda max_batch, _: parts.append(max_batch))
            break
        except InterruptedMeasuringError:
            broken += 1
            assert begun is None or made._begun is begun
            assert len(made._begun.done) >= before
            assert broken < 10_000
    assert made._begun is None, "the next one begins anew"
    assert broken > 20
    assert set(parts) == {0, 1, 2}
    assert sorted(parts[: parts.index(2)]) == parts[: parts.index(2)], "smallest batch first"
    assert set(costs.methods) == {"draft_model", *LIGHT}
    assert {batch for batch, _ in costs.verify_cells} == {1, 2}
    assert load(made.key) == costs


def test_after_a_ctrl_c_the_next_start_goes_on_there(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    costs = calibration().measure()
    whole, machine.steps = machine.steps, 0

    def step(self: Bench, *rest: Any) -> StepSeconds:
        if machine.steps == 20:
            raise KeyboardInterrupt
        return machine.step(*rest)

    with monkeypatch.context() as patch:
        patch.setattr(Bench, "step", step)
        with pytest.raises(KeyboardInterrupt) as stopped:
            calibration().measure()
    assert stopped.value.__notes__ == [KEPT]
    machine.steps = 0
    again = calibration()
    assert again.measure().verify_cells == costs.verify_cells
    assert machine.steps == whole - 20
    assert not load_begun(again._key_begun), "the table is whole"


def test_long_texts_are_opened_again_after_a_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their rows went with the process that was stopped."""
    model, config = table(1, max_positions=2048), SuffixConfig(6)
    choice = Speculation(config, Suffix(), config.load_verifier(model))
    plain = Speculation(NoneConfig(), NoMethod(), NoneConfig().load_verifier(model))
    monkeypatch.setattr("foretell.costs.measure._CHEAP_S", 0.02)

    def pressed(*_: object) -> StepSeconds:
        raise KeyboardInterrupt

    begun = Calibration(model, plain, [], [choice], max_batch=1, time_limit_s=20.0)
    with monkeypatch.context() as patch:
        patch.setattr(Bench, "step_of_text", pressed)
        with pytest.raises(KeyboardInterrupt) as stopped:
            begun.measure()
    assert stopped.value.__notes__ == [KEPT]
    assert Calibration(model, plain, [], [choice], max_batch=1, time_limit_s=20.0).measure().length


def test_what_cannot_be_kept_is_not_said_to_be(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FORETELL_CACHE", os.devnull)
    monkeypatch.setattr(Bench, "step", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt) as stopped:
        calibration().measure()
    assert not hasattr(stopped.value, "__notes__")
    assert "costs: cannot be kept in" in caplog.text


def test_a_service_that_is_closed_keeps_what_it_has_measured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("foretell.service.service.IDLE_S", 1e3)
    caplog.set_level("INFO", "foretell")
    machine = Machine(monkeypatch)
    counts = []
    for stops in (30, 60):
        with started(made()) as service:
            begun = machine.steps
            with monkeypatch.context() as patch:
                patch.setattr(Bench, "step", lambda bench, *rest: (bench._go_on(), machine.step(*rest))[1])
                service._call(partial(service._costs.measure_again, must_stop=stops_after(stops)))
            counts.append((machine.steps - begun, service._costs._calibration._begun.done))
        assert KEPT in caplog.text
        caplog.clear()
    (first, one), (second, both) = counts
    assert first > 10
    assert second > 10
    assert both[: len(one)] == one
    assert len(both) == len(one) + second


def test_what_threads_waited_for_processors_counts_against_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evenly slow steps look steady: where others have half of the processors, every step takes twice its time."""
    machine, made = Machine(monkeypatch, slow=lambda number: 2.0), calibration()
    machine.busy = 1.0
    costs = made.measure()
    assert costs.spread == pytest.approx(2.0)
    assert costs.disorder == 1.0
    assert not costs.is_steady
    assert load(made.key) is None, "the next start measures again"
    machine.busy, machine.slow = 0.1, lambda number: 1.0
    assert made.measure().is_steady, "some waiting is usual"


def test_a_busy_moments_table_is_replaced_by_the_lesser_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, service = Machine(monkeypatch, slow=lambda number: 2.0), made()
    machine.busy = 1.0
    with started(service):
        service.measure()
        costs, busy = service._costs, service._costs.planner.costs
        assert not busy.is_steady
        machine.busy, machine.slow = 0.0, lambda number: 1.0 if Random(number).random() < 0.6 else 4.0
        low = {cell: 0.001 for cell in busy.verify_cells if cell == (1, 1)}
        service._call(lambda: costs.planner.use(replace(busy, verify_cells={**busy.verify_cells, **low})))
        costs._next_measuring = 0.0
        service._call(lambda: costs.measure_again(must_stop=lambda: False))
        assert costs.planner.costs.verify_cells[1, 1] == 0.001, "it was lower then"
        others = {cell: cost for cell, cost in costs.planner.costs.verify_cells.items() if cell not in low}
        assert all(cost == pytest.approx(0.01) for cost in others.values()), "all others are lower now"
        assert costs.planner.costs.is_steady


def test_a_service_is_ready_before_costs_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is timed before the service takes requests; until it is, only those guess that ask to guess always."""
    machine = Machine(monkeypatch)
    monkeypatch.setattr("foretell.service.service.IDLE_S", 1e3)  # nobody measures but who is told to
    service, box = made(), Mailbox()
    with started(service):
        assert (service.state, machine.steps) == ("ready", 0)
        params = SamplingParams(max_new_tokens=40, ignore_eos=True, seed=3)
        service.submit(Submission("a", [1, 2, 3], params), box.hear)
        plain = box.last("a").completion
        service.submit(Submission("b", [1, 2, 3], params, always=True), box.hear)
        always = box.last("b").completion
        assert (plain.num_draft_tokens, machine.steps) == (0, 0)
        assert plain.plain_reason is not None
        assert "still being measured" in plain.plain_reason
        assert always.num_draft_tokens > 0
        assert always.token_ids == plain.token_ids
        service.measure()
        assert machine.steps > 0
        service.submit(Submission("c", [1, 2, 3], params), box.hear)
        known = box.last("c").completion
        assert known.token_ids == plain.token_ids
        assert known.num_draft_tokens > 0
        check_service(service)
    again = made()
    with started(again):
        assert again._costs.is_measured, "an earlier start has measured"


def test_an_idle_service_measures_costs_that_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request breaks it off, and it goes on in the next idle moment, at once."""
    monkeypatch.setattr("foretell.service.service.IDLE_S", 1e3)
    machine, service = Machine(monkeypatch), made()
    with started(service):
        costs = service._costs
        assert costs is not None
        stops = [0, 1, 50, 100]

        def step(self: Bench, *rest: Any) -> StepSeconds:
            self._go_on()
            return machine.step(*rest)

        monkeypatch.setattr(Bench, "step", step)
        for count in stops:
            service._call(partial(costs.measure_again, must_stop=stops_after(count)))
            assert not costs.is_measured
        assert costs.unplanned(2)
        service._call(lambda: costs.measure_again(must_stop=lambda: False))
        assert costs.is_measured
        assert not costs.unplanned(2)


def test_a_service_that_is_never_idle_measures_in_slices_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock of its own: steps of 10 ms, of requests and of measuring alike. Batches come to be known one after the other,
    and what it takes stays within the promise."""
    now = [0.0]
    for place in ("planning.perf_counter", "planning.monotonic", "calibrate.perf_counter"):
        monkeypatch.setattr(f"foretell.engine.{place}", lambda: now[0])
    machine, service = Machine(monkeypatch), made()
    monkeypatch.setattr("foretell.service.service.IDLE_S", 1e3)

    def step(self: Bench, *rest: Any) -> StepSeconds:
        self._go_on()
        now[0] += 0.01
        return machine.step(*rest)

    monkeypatch.setattr(Bench, "step", step)
    monkeypatch.setattr(Bench, "step_of_text", None)  # long texts wait for an idle moment
    with started(service):
        costs = service._costs
        seen, served, longest = [""], 0.0, 0.0

        def serve() -> None:
            nonlocal served, longest
            for _ in range(200_000):
                if not costs.unplanned(2):
                    return
                now[0] += 0.01
                served += 0.01
                before = now[0]
                costs.measure_beside(0.01)
                longest = max(longest, now[0] - before)
                seen.append("1" if not costs.unplanned(1) else "")

        service._call(serve)
        assert not costs.unplanned(2)
        assert "1" in seen, "plans are made for one request while those for two are not known"
        assert machine.steps * 0.01 <= PROMISE * served + 0.3
        assert longest <= SLICE_S + 0.05
        assert not costs.is_measured, "the rest waits for an idle moment"


def test_measuring_of_many_rows_is_broken_off_between_their_prompts() -> None:
    made, read = calibration(), list[int]()
    bench = made._bench(lambda: len(read) >= 2)
    forward = made.model.forward
    made.model.forward = lambda *args, **options: (read.append(1), forward(*args, **options))[1]  # type: ignore[method-assign]
    with pytest.raises(InterruptedMeasuringError):
        bench.step("none", 8, 0)
    assert len(read) == 2


def costs_of(calibration: Calibration, guess: float) -> CostTable:
    """Passes of a second whatever their width; guesses of ``guess`` seconds."""
    verify = {(1, 1 + depth): 1.0 for depth in range(9)} | {(2, 2 + 2 * depth): 1.0 for depth in range(9)}
    return CostTable(verify, {name: {(1, 1): guess, (1, 8): guess} for name in calibration.choices})


Costs = Callable[[float], None]


@pytest.fixture
def by_table(monkeypatch: pytest.MonkeyPatch) -> Costs:
    """Services plan by ``costs_of`` alone: what steps take on the machine that runs the tests does not count."""

    def use(guess: float) -> None:
        monkeypatch.setattr(Calibration, "kept", lambda self: costs_of(self, guess))
        monkeypatch.setattr(Corrections, "_learn", lambda *_: None)

    return use


def test_a_prediction_guesses_in_a_service_that_was_not_told_of_it(by_table: Costs) -> None:
    by_table(0.05)
    service, box = made(), Mailbox()
    with started(service):
        params = SamplingParams(max_new_tokens=60, ignore_eos=True, seed=3)
        service.submit(Submission("plain", [1, 2, 3], params, speculative=service.method("none")), box.hear)
        plain = box.last("plain").completion
        assert plain.plain_reason is None, "no guesses were asked for"
        guess = Submission(
            "guess", [1, 2, 3], params, prediction_ids=tuple(plain.token_ids), speculative=service.method("prediction")
        )
        service.submit(guess, box.hear)
        found = box.last("guess").completion
        assert found.token_ids == plain.token_ids
        assert found.num_accepted_tokens > 40
        assert found.plain_reason is None


def test_a_request_that_cannot_guess_is_told_why(by_table: Costs) -> None:
    by_table(30.0)
    service, box = made(), Mailbox()
    with started(service):
        service.submit(
            Submission("a", [1, 2, 3], SamplingParams(max_new_tokens=4, seed=3), speculative=service.method("ngram")),
            box.hear,
        )
        found = box.last("a").completion
        assert found.plain_reason is not None
        assert "a guess costs 30.00 passes; it cannot win at any acceptance" in found.plain_reason


@pytest.mark.parametrize("speculation", ["on", "auto"])
def test_methods_without_weights_guess_beside_plain_decoding(speculation: str, by_table: Costs) -> None:
    """A service whose own choice is plain decoding never guessed, whatever a request asked for."""
    by_table(0.05)
    service = Service(Engine(table(1), ToyTokenizer()), ServiceOptions(speculation=speculation, max_model_len=200))
    box = Mailbox()
    with started(service):
        params = SamplingParams(max_new_tokens=100, ignore_eos=True, seed=3, temperature=0.0)
        service.submit(Submission("a", [1, 2, 3], params, speculative=service.method("ngram")), box.hear)
        found = box.last("a").completion
        assert found.num_accepted_tokens > 0


def test_a_service_that_is_stopped_while_it_measures_waits_for_no_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took 45 s on a busy machine from the signal to the end."""
    options = ServiceOptions(speculation="auto", max_model_len=200)
    service, steps, sound = Service(Engine(table(1), ToyTokenizer(), speculative="ngram"), options), [], Bench.step
    measures, is_closing = threading.Event(), threading.Event()

    def step(self: Bench, *rest: Any) -> Any:
        steps.append(rest)
        if len(steps) == 3:
            measures.set()
            assert is_closing.wait(30)
        return sound(self, *rest)

    monkeypatch.setattr(Bench, "step", step)
    monkeypatch.setattr("foretell.service.service.IDLE_S", 0.0)
    service.start()
    assert measures.wait(30)
    assert service.drain(1.0)
    closing = threading.Thread(target=service.close)
    closing.start()
    while not service._closed:
        time.sleep(0.001)
    is_closing.set()
    closing.join(30)
    assert (service.state, len(steps)) == ("stopped", 3)
    assert len(list(tmp_path.rglob("*.json"))) == 1, "what was measured so far is kept for the next start"


def test_what_a_first_long_text_takes_beside_attention_does_not_grow_with_its_square(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A head's 30 ms at 512 tokens became .6 s at 2,048, and it was never tried there."""
    Machine(monkeypatch)
    text = TextCosts(once=4e-8, each=5e-9)
    monkeypatch.setattr(Bench, "long_text", lambda bench, longest: 512)
    monkeypatch.setattr(Bench, "open_long", lambda bench, method, length: 0.03)
    monkeypatch.setattr(
        "foretell.engine.calibrate.measure_texts", lambda step, methods, *_, **more: dict.fromkeys(methods, text)
    )
    assert calibration().measure().texts["draft_model"].read == 5e-9
    monkeypatch.setattr(Bench, "open_long", lambda bench, method, length: 1e-9 * length * length / 2)
    assert calibration().measure().texts["draft_model"].read == pytest.approx(1e-9), "where it took less"


@pytest.mark.parametrize("context", [4096, 420])
def test_a_long_text_that_guesses_fill_is_begun_again(context: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that is always right fills a text ten times as fast as plain decoding; the context may end it sooner."""
    model = table(1)
    monkeypatch.setattr(model, "spec", replace(model.spec, max_positions=context))
    config = DraftModelConfig(num_speculative_tokens=9)
    plain = Speculation(NoneConfig(), NoMethod(), NoneConfig().load_verifier(model))
    bench = Bench(model, plain, [Speculation(config, DraftModel(model), config.load_verifier(model))])
    bench.open_long("draft_model", 300)
    opened: list[int] = []
    again = bench.open_long
    monkeypatch.setattr(bench, "open_long", lambda method, length: opened.append(length) or again(method, length))
    for _ in range(100):
        assert bench.step_of_text("draft_model", 9, is_long=True).rows == 10
    assert set(opened) == {300}
    assert len(opened) < 20


def test_a_plain_step_is_one_of_those_that_a_call_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured as all of them, plain decoding of small models looked up to four times as slow as it is: guesses stood."""
    engine = Engine.load("bundled", speculative="ngram")
    if engine.model.most_passes == 1:
        pytest.skip("this model makes one pass a call here")
    events, real = list[Any](), Batch.step

    def step(self: Batch, *given: Any, **options: Any) -> Any:
        events.append(real(self, *given, **options))
        return events[-1]

    monkeypatch.setattr(Batch, "step", step)
    bench = Bench(engine.model, engine.choice(NoneConfig()), [engine.choice(engine.speculative)])
    told = [bench.step("none", 2, 0) for _ in range(12)]
    assert max(event.num_passes for event in events) > 1
    for event, seconds in zip(events, told, strict=True):
        assert seconds.draft + seconds.target + seconds.rest == pytest.approx(event.seconds / event.num_passes)
