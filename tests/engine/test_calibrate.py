"""Cost tables: of every method that a request may name, kept only where the machine was quiet, checked, and replaced."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretell import Engine, SamplingParams, Service, ServiceOptions, Submission, speculative_config
from foretell.core.measured import MAX_AGE_S, file_of
from foretell.costs.files import load
from foretell.costs.measure import StepSeconds
from foretell.costs.table import CostTable
from foretell.draft.none import NoMethod, NoneConfig
from foretell.draft.suffix import Suffix, SuffixConfig
from foretell.engine.calibrate import Bench, Calibration, InterruptedMeasuringError
from foretell.engine.speculation import Speculation
from foretell.methods.draft_model.config import DraftModelConfig
from foretell.methods.draft_model.drafter import DraftModel
from foretell.planner.corrections import Corrections
from tests.engine.harness import ToyTokenizer, table
from tests.service.test_service import Mailbox

LIGHT = {"ngram", "suffix", "recycling", "prediction"}


@pytest.fixture(autouse=True)
def _no_earlier_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path))


class Machine:
    """Stands in for ``Bench.step``: passes of 10 ms, guesses of 1 ms; ``slow`` gives the factor of the n-th step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slow: Callable[[int], float] = lambda number: 1.0) -> None:
        self.slow, self.steps, self.asked = slow, 0, set[str]()
        monkeypatch.setattr(Bench, "step", self.step)
        monkeypatch.setattr(Bench, "lag_seconds", lambda bench, method: 0.0)

    def step(self, method: str, batch: int, depth: int) -> StepSeconds:
        self.steps += 1
        self.asked.add(method)
        factor = self.slow(self.steps)
        return StepSeconds(0.001 * (depth > 0), 0.01 * factor, 0.0, batch * (1 + depth))


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
    monkeypatch.setattr("foretell.engine.calibrate.measure_texts", lambda step, methods, _: texts.append(methods) or {})
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
    service._thread = None
    service.start()
    try:
        assert service._costs is not None
        planner = service._costs.planner
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
                planner.corrections.observe("plain", 0.01, 0.31)
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
    finally:
        service.close()


def test_measuring_is_broken_off_where_work_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = calibration()
    asked: list[int] = []

    def must_stop() -> bool:
        asked.append(1)
        return len(asked) > 5

    with pytest.raises(InterruptedMeasuringError):
        made.measure(must_stop=must_stop)
    assert len(asked) == 6


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
        monkeypatch.setattr(Calibration, "table", lambda self: costs_of(self, guess))
        monkeypatch.setattr(Corrections, "_learn", lambda *_: None)

    return use


def test_a_prediction_guesses_in_a_service_that_was_not_told_of_it(by_table: Costs) -> None:
    by_table(0.05)
    service, box = made(), Mailbox()
    service.start()
    try:
        params = SamplingParams(max_new_tokens=60, ignore_eos=True, seed=3)
        service.submit(Submission("plain", [1, 2, 3], params, speculative=service.method("none")), box.hear)
        plain = box.last("plain").completion
        assert plain is not None
        assert plain.plain_reason is None, "no guesses were asked for"
        guess = Submission(
            "guess", [1, 2, 3], params, prediction_ids=tuple(plain.token_ids), speculative=service.method("prediction")
        )
        service.submit(guess, box.hear)
        found = box.last("guess").completion
        assert found is not None
        assert found.token_ids == plain.token_ids
        assert found.num_accepted_tokens > 40
        assert found.plain_reason is None
    finally:
        service.close()


def test_a_request_that_cannot_guess_is_told_why(by_table: Costs) -> None:
    by_table(30.0)
    service, box = made(), Mailbox()
    service.start()
    try:
        service.submit(
            Submission("a", [1, 2, 3], SamplingParams(max_new_tokens=4, seed=3), speculative=service.method("ngram")),
            box.hear,
        )
        found = box.last("a").completion
        assert found is not None
        assert found.plain_reason is not None
        assert "a guess costs 30.00 passes; it cannot win at any acceptance" in found.plain_reason
    finally:
        service.close()


@pytest.mark.parametrize("speculation", ["on", "auto"])
def test_methods_without_weights_guess_beside_plain_decoding(speculation: str, by_table: Costs) -> None:
    """A service whose own choice is plain decoding never guessed, whatever a request asked for."""
    by_table(0.05)
    service = Service(Engine(table(1), ToyTokenizer()), ServiceOptions(speculation=speculation, max_model_len=200))
    box = Mailbox()
    service.start()
    try:
        params = SamplingParams(max_new_tokens=100, ignore_eos=True, seed=3, temperature=0.0)
        service.submit(Submission("a", [1, 2, 3], params, speculative=service.method("ngram")), box.hear)
        found = box.last("a").completion
        assert found is not None
        assert found.num_accepted_tokens > 0
    finally:
        service.close()


def test_a_service_that_is_stopped_while_it_measures_waits_for_no_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took 45 s on a busy machine from the signal to the end."""
    options = ServiceOptions(speculation="auto", max_model_len=200, cost_time_limit_s=2.0)
    service, steps, sound = Service(Engine(table(1), ToyTokenizer(), speculative="ngram"), options), [], Bench.step

    def step(self: Bench, *rest: Any) -> Any:
        steps.append(rest)
        if len(steps) == 3:
            assert service.drain(1.0)
        return sound(self, *rest)

    monkeypatch.setattr(Bench, "step", step)
    try:
        service.start()
        assert (service.state, len(steps)) == ("stopped", 3)
        assert list(tmp_path.rglob("*.json")) == [], "what was measured so far is dropped"
    finally:
        service.close()


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
