"""The cost table: what was measured comes back, in between is linear, bigger is never cheaper, and the disk may fail."""

import json
import math
import os
import time
from pathlib import Path

import numpy as np
import pytest

from foretell.core.errors import ConfigError
from foretell.core.measured import MAX_AGE_S, file_of
from foretell.costs import files
from foretell.costs.files import identity, load, save
from foretell.costs.measure import PLAIN, StepSeconds, depths, grid, measure
from foretell.costs.table import PASS, CostTable, TextCosts, isotonic
from foretell.engine.recorder import StepTime
from foretell.planner.corrections import Corrections
from foretell.theory.run_costs import step_costs


def table(guess: float = 0.4, free: int = 8, batches: tuple[int, ...] = (1, 2, 4, 8)) -> CostTable:
    """Passes of one second up to ``free`` nodes, in proportion beyond; ``guess`` seconds a depth."""
    verify = {(b, b * (1 + d)): max(1.0, b * (1 + d) / free) for b in batches for d in (0, 1, 2, 4)}
    draft = {(b, d): guess * d for b in batches for d in (1, 2, 4)}
    return CostTable(verify, {"m": draft}, {"m": 0.01})


class Machine:
    """Steps of exact cost, with a clock that they move and a record of what was asked."""

    def __init__(self, guess: float = 0.1) -> None:
        self.now, self.guess, self.asked = 0.0, guess, []

    def step(self, method: str, batch: int, depth: int) -> StepSeconds:
        self.asked.append((method, batch, depth))
        draft, target = self.guess * depth, 1.0 + 0.01 * batch * (1 + depth)
        self.now += draft + target
        return StepSeconds(draft, target * 0.75, target * 0.25)

    def clock(self) -> float:
        return self.now


@pytest.mark.parametrize("seed", range(5))
def test_isotonic_is_the_nearest_non_decreasing_sequence(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(6)
    smooth = np.array(isotonic(values.tolist()))
    assert (np.diff(smooth) >= -1e-12).all()
    others = np.sort(rng.standard_normal((3000, 6)) * 1.5, axis=1)
    assert ((smooth - values) ** 2).sum() <= ((others - values) ** 2).sum(axis=1).min() + 1e-12
    assert isotonic([1.0, 2.0, 2.0, 5.0]) == [1.0, 2.0, 2.0, 5.0]


def test_measured_cells_come_back_and_between_is_linear() -> None:
    costs = table()
    assert costs.verify(1, 1) == 1.0
    assert costs.verify(8, 16) == 2.0
    assert costs.verify(8, 20) == pytest.approx(2.5)
    assert costs.verify(6, 6) == pytest.approx(1.0)
    assert costs.draft("m", 3, 3) == pytest.approx(1.2)
    assert costs.draft("m", 0, 3) == costs.draft("m", 3, 0) == 0.0
    assert costs.catch_up("m", 30) == pytest.approx(0.3)
    xs, ys = costs.verify_curve(8)
    assert np.interp(8, xs, ys) == costs.verify(8, 16)


def test_beyond_the_grid_goes_on_and_is_never_free() -> None:
    costs = table()
    assert costs.verify(8, 80) == pytest.approx(10.0)
    assert costs.draft("m", 4, 8) == pytest.approx(3.2)
    assert costs.verify(32, 32) >= costs.verify(8, 8)
    flat = CostTable({(1, 1): 1.0, (1, 2): 1.5, (1, 4): 1.5}, {})
    assert flat.verify(1, 10) > 1.5


def test_noise_never_makes_a_bigger_step_cheaper() -> None:
    rng = np.random.default_rng(0)
    noisy = table()
    shaken = CostTable(
        {cell: cost * math.exp(0.2 * rng.standard_normal()) for cell, cost in noisy.verify_cells.items()},
        {"m": {cell: cost * math.exp(0.2 * rng.standard_normal()) for cell, cost in noisy.draft_cells["m"].items()}},
    )
    for batch in (1, 2, 3, 4, 6, 8):
        verify = [shaken.verify(batch, batch + extra) for extra in range(40)]
        draft = [shaken.draft("m", batch, depth) for depth in range(10)]
        assert verify == sorted(verify)
        assert draft == sorted(draft)
    for extra in (0, 2, 3, 4):
        by_batch = [shaken.verify(batch, batch + extra) for batch in (1, 2, 3, 4, 6, 8)]
        assert by_batch == sorted(by_batch)


def test_measuring_recovers_the_machine() -> None:
    machine = Machine()
    costs = measure(machine.step, {"m": 6}, 8, time_limit_s=1e9, clock=machine.clock)
    assert costs.verify(4, 4) == pytest.approx(1.04)
    assert costs.verify(8, 8 * 7) == pytest.approx(1.56)
    assert costs.draft("m", 8, 6) == pytest.approx(0.6)
    assert {batch for _, batch, _ in machine.asked} == {1, 2, 4, 8}
    assert {depth for method, _, depth in machine.asked if method == "m"} == {1, 2, 3, 4, 6}
    assert grid(6) == [1, 2, 4, 6]
    assert depths(16) == [1, 2, 3, 4, 6, 8, 12, 16]
    assert depths(1) == [1]
    # plain and guessing cells take turns
    assert [ask[0] for ask in machine.asked[:7]] == [PLAIN, "m", "m", "m", "m", "m", PLAIN]


def test_measuring_keeps_to_its_time_and_to_small_trees() -> None:
    machine = Machine()
    costs = measure(machine.step, {"m": 16}, 32, time_limit_s=60.0, clock=machine.clock)
    assert machine.now < 65.0
    assert all(batch * (1 + depth) <= 96 for _, batch, depth in machine.asked)
    assert max(batch for _, batch, _ in machine.asked) < 32
    assert costs.verify(32, 32) >= costs.verify(1, 1)
    slow = Machine()
    only = measure(slow.step, {"m": 4}, 4, time_limit_s=0.0, clock=slow.clock)
    assert only.draft("m", 1, 4) == pytest.approx(0.4)  # batch 1 always, each cell once after the warm-up
    assert {batch for _, batch, _ in slow.asked} == {1}


def test_where_time_is_short_larger_batches_are_measured_less_deep() -> None:
    """A batch that was not measured was taken for a wide one of the smallest, whose first more rows cost less."""
    now = [0.0]

    def step(method: str, batch: int, depth: int) -> StepSeconds:  # a model of 1.5B: 30 ms, and 4 ms a row
        seconds = 0.026 + 0.004 * batch * (1 + depth)
        now[0] += seconds + 0.002 * (depth > 0)
        return StepSeconds(0.002 * (depth > 0), seconds, 0.0)

    costs = measure(step, {"m": 15, "lookup": 15}, 8, time_limit_s=15.0, weightless={"lookup"}, clock=lambda: now[0])
    assert {1, 2, 4, 8} == {batch for batch, _ in costs.verify_cells}
    assert {(1, 16), (4, 8), (8, 16)} <= costs.verify_cells.keys(), "every batch has a guess"
    assert (8, 64) not in costs.verify_cells
    assert now[0] < 18.0
    assert costs.draft("lookup", 8, 15) > 0.0


def test_a_step_that_found_less_is_measured_at_its_own_nodes() -> None:
    costs = measure(lambda method, batch, depth: StepSeconds(0.1, 1.0, 0.0, rows=batch), {"m": 2}, 2, 1e9)
    assert set(costs.verify_cells) == {(1, 1), (2, 2)}


def test_verdicts_say_where_guessing_can_win() -> None:
    assert "cannot win at any acceptance" in table(guess=6.0).verdict("m")
    assert "wins only up to batch 4" in table().verdict("m")
    assert "a guess costs 0.40 passes" in table().verdict("m")
    assert "at every batch up to 8" in table(guess=0.01, free=64).verdict("m")
    assert "not measured" in table().verdict("other")
    assert table(guess=6.0).best_case("m", 1) == 1.0
    assert table().best_case("m", 1) == pytest.approx(5 / 2.6)


def test_a_table_survives_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path))
    key = identity({"name": "t", "weight_bytes": 5}, {"m": {"depth": 4}})
    assert load(key) is None
    assert save(table(), key)
    assert load(key) == table()
    assert file_of(key).parent == tmp_path / "costs"
    assert [file.suffix for file in file_of(key).parent.iterdir()] == [".json"]
    assert file_of(identity({"name": "t", "weight_bytes": 6}, {"m": {"depth": 4}})) != file_of(key)


def test_what_one_command_has_measured_serves_others_that_need_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path))
    texts, draft = {PASS: TextCosts(1e-6)}, {"m": {(1, 1): 0.1}, "n": {(1, 1): 0.2}}
    made = CostTable({(1, 1): 1.0}, draft, {"m": 0.01, "n": 0.02}, texts)
    model, methods = {"name": "t", "max_batch": 8, "longest": 4096}, {"m": {"depth": 4}, "n": {"depth": 2}}
    file_of({}).parent.mkdir()
    (file_of({}).parent / "a.json").write_text("{", encoding="utf-8")  # other measurements lie there, too
    assert save(made, identity(model, methods))
    part = load(identity({**model, "max_batch": 1, "longest": 2048}, {"m": {"depth": 4}}))
    assert part == CostTable({(1, 1): 1.0}, {"m": {(1, 1): 0.1}}, {"m": 0.01}, texts)
    for changed, asked in (
        ({"max_batch": 9}, methods),
        ({"longest": 8192}, methods),
        ({"name": "u"}, methods),
        ({}, {"m": {"depth": 5}}),
        ({}, {**methods, "o": {}}),
    ):
        assert load(identity({**model, **changed}, asked)) is None
    monkeypatch.setattr(files, "source_digest", lambda: "another")
    assert load(identity(model, {"m": {"depth": 4}})) is None


def test_a_table_is_of_the_code_that_was_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path))
    key = identity({"name": "t"}, {})
    assert save(table(), key)
    monkeypatch.setattr(files, "source_digest", lambda: "another")
    other = identity({"name": "t"}, {})
    assert load(other) is None
    stale = time.time() - MAX_AGE_S - 60.0
    os.utime(file_of(key), (stale, stale))
    assert save(table(), other)
    assert list((tmp_path / "costs").iterdir()) == [file_of(other)], "and old ones do not pile up"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"key": 1}', '{"key": KEY}', '{"key": KEY, "verify": [[1, 1, "x"]], "draft": {}}']
)
def test_broken_and_foreign_files_are_ignored(text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    key = identity({"name": "t"}, {})
    path = tmp_path / "table.json"
    path.write_text(text.replace("KEY", json.dumps(key)), encoding="utf-8")
    with caplog.at_level("DEBUG", "foretell"):
        assert load(key, path) is None
    assert len(caplog.records) == 1
    assert "measuring again" in caplog.text
    assert caplog.records[0].levelname == "DEBUG", "there is nothing that a user could do"


def test_a_disk_that_refuses_does_not_stop_serving(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert not save(table(), {}, tmp_path / "file" / "costs" / "x.json")
    assert "every start measures them: make it writable, or set FORETELL_CACHE" in caplog.text


def test_bad_tables_are_refused() -> None:
    for verify in ({}, {(1, 2): 1.0}, {(1, 1): 0.0}, {(1, 1): math.nan}):
        with pytest.raises(ConfigError):
            CostTable(verify, {})
    with pytest.raises(ConfigError, match="not measured"):
        table().draft("other", 1, 1)


def test_corrections_learn_a_drift_and_a_difference() -> None:
    rng = np.random.default_rng(0)
    found = Corrections(["m"])
    for _ in range(150):  # all twice as slow; only plain steps seen
        found.tick()
        found.observe_plain(2.0 * math.exp(0.1 * rng.standard_normal()), 1.0, 1)
    assert found.plain == pytest.approx(2.0, rel=0.1)
    assert found.guess == pytest.approx(2.0, rel=0.35)  # unseen, it follows
    assert found.draft["m"] == pytest.approx(2.0, rel=0.35)
    doubt = found.doubt(1)
    for _ in range(150):
        found.tick()
        found.observe_guess(3.0 * math.exp(0.1 * rng.standard_normal()), 1.0)
        found.observe_draft("m", 0.5, 1.0)
    assert found.guess == pytest.approx(3.0, rel=0.1)
    assert found.draft["m"] == pytest.approx(0.5, rel=0.1)
    for _ in range(5):  # a few plain steps are enough to tell them apart again
        found.tick()
        found.observe_plain(2.0, 1.0, 1)
    assert found.plain == pytest.approx(2.0, rel=0.2)
    assert found.doubt(1) < doubt


def test_corrections_shrug_at_outliers() -> None:
    found = Corrections([])
    for step in range(200):
        found.tick()
        found.observe_plain(100.0 if step % 20 == 0 else 1.0, 1.0, 1)
    assert found.plain == pytest.approx(1.0, rel=0.15)
    before = found.plain
    found.observe_plain(0.0, 1.0, 1)
    found.observe_draft("unknown", 1.0, 1.0)
    assert found.plain == before


@pytest.mark.parametrize("slower", [3.0, 6.0, 15.0])
@pytest.mark.parametrize("burst", [4, 8, 20])
@pytest.mark.parametrize("plain_first", [0, 10])
def test_a_burst_of_slow_guessing_steps_is_forgotten(slower: float, burst: int, plain_first: int) -> None:
    rng = np.random.default_rng(1)
    found = Corrections(["m"])

    def step(kind: str, factor: float, count: int) -> None:
        for _ in range(count):
            found.tick()
            value = factor * math.exp(0.1 * rng.standard_normal())
            if kind == "guess":
                found.observe_guess(value, 1.0)
                found.observe_draft("m", factor * math.exp(0.1 * rng.standard_normal()), 1.0)
            else:
                found.observe_plain(value, 1.0, 1)

    step("guess", 1.0, 200)
    step("plain", 1.0, plain_first)
    step("guess", slower, burst)
    step("plain", 1.0, 10)  # the machine was slow for both: plain steps say that this is over
    assert found.guess / found.plain < 1.45
    sure = found.doubt(1)
    step("plain", 1.0, 3000)
    assert found.guess / found.plain < 1.1
    assert found.draft["m"] / found.plain < 1.25
    assert found.doubt(1) > 1.3 * sure, "what was not seen for long is known less"
    for _ in range(6):  # and what is slower for good is learned
        step("guess", 3.0, 40)
        step("plain", 1.0, 4)
    assert found.guess / found.plain == pytest.approx(3.0, rel=0.2)


def test_a_busy_machine_shows_in_the_figures() -> None:
    rng = np.random.default_rng(0)

    class Busy(Machine):
        def step(self, method: str, batch: int, depth: int) -> StepSeconds:
            told = super().step(method, batch, depth)
            late = float(rng.random() < share) * 30.0
            return StepSeconds(told.draft, told.target * (1 + late + 0.1 * rng.random()), told.rest)

    for share, steady in ((0.0, True), (0.02, True), (0.7, False)):
        busy = Busy()
        costs = measure(busy.step, {"m": 6}, 8, time_limit_s=1e9, clock=busy.clock)
        assert costs.is_steady == steady, share
    falling = CostTable({(1, 1): 3.0, (1, 4): 1.0}, {})
    assert falling.disorder == 3.0
    assert not falling.is_steady
    assert table().disorder == 1.0


def test_of_two_measurements_the_lesser_figures_count() -> None:
    one = CostTable({(1, 1): 3.0, (1, 2): 1.0}, {"m": {(1, 1): 0.5}}, {"m": 0.2}, spread=3.0)
    other = CostTable({(1, 1): 1.0, (2, 2): 2.0}, {"m": {(1, 1): 0.7}}, {"m": 0.1}, spread=1.1)
    both = one.least(other)
    assert both.verify_cells == {(1, 1): 1.0, (1, 2): 1.0, (2, 2): 2.0}
    assert both.draft_cells == {"m": {(1, 1): 0.5}}
    assert both.lag_seconds == {"m": 0.1}
    assert both.is_steady


def steps(plain: float, guess: float, draft: float, count: int = 200) -> Corrections:
    """Corrections after steps that took so many times what the table says, give or take a fifth."""
    rng = np.random.default_rng(0)
    found = Corrections(["m"])
    for step in range(count):
        found.tick()
        noise = math.exp(0.2 * rng.standard_normal())
        if step % 4 == 0:
            found.observe_plain(plain * noise, 1.0, 1)
        else:
            found.observe_guess(guess * noise, 1.0)
            found.observe_draft("m", draft * noise, 1.0)
    return found


@pytest.mark.parametrize(
    ("plain", "guess", "draft", "said"),
    [
        (0.05, 0.05, 0.05, "passes take 0.05 of what was measured"),
        (0.02, 0.02, 1.2, "passes take 0.02 of what was measured"),
        (1.0, 4.0, 1.0, "guessing passes take 3."),
        (1.0, 1.0, 20.0, "guesses of m take"),
        (1.0, 1.0, 0.05, "guesses of m take 0.0"),
    ],
)
def test_live_steps_speak_against_a_wrong_table(plain: float, guess: float, draft: float, said: str) -> None:
    told = steps(plain, guess, draft).contradiction()
    assert told is not None
    assert said in told


@pytest.mark.parametrize(("plain", "guess", "draft"), [(1.0, 1.0, 1.0), (4.0, 4.0, 4.0), (1.2, 0.8, 1.8)])
def test_control_a_machine_that_is_busy_now_says_nothing_against_it(plain: float, guess: float, draft: float) -> None:
    assert steps(plain, guess, draft).contradiction() is None
    assert steps(0.05, 0.05, 0.05, count=20).contradiction() is None, "too few steps"


def test_costs_of_a_run_are_medians_in_plain_steps() -> None:
    def timed(guesses: int, draft: float, target: float, rest: float) -> StepTime:
        return StepTime(0.0, draft, target, rest, guesses, 0, 1)

    plain = [timed(0, 0.0, 1.0, 0.25)] * 3
    steps = [timed(n, 0.1 * n, 1.0 + 0.1 * n, 0.5) for n in (1, 3) for _ in range(3)] + [timed(2, 9.0, 9.0, 9.0)]
    costs = step_costs(plain, steps, split=True)
    assert costs.draft == pytest.approx({1: 0.1, 3: 0.3}), "one step of two guesses says nothing"
    assert costs.verify == pytest.approx({1: 1.1, 3: 1.3})
    assert costs.step == pytest.approx({1: 1.7 / 1.25, 3: 2.1 / 1.25})
    assert costs.per_guess == pytest.approx(0.1)
    assert [costs.pass_at(count) for count in (0, 1, 2, 3)] == pytest.approx([1.0, 1.6 / 1.25, 1.7 / 1.25, 1.8 / 1.25])
    slow, many = [timed(2, 0.1, 4.0, 0.5)] * 3, [timed(4, 0.1, 1.0, 0.25)] * 300
    noisy = step_costs(plain, slow + many, split=True)
    assert noisy.pass_at(4) == pytest.approx(1.0, rel=0.03), "three slow steps do not make those of many dear"
    assert noisy.pass_at(2) == pytest.approx(noisy.pass_at(4)), "it never falls"
    whole = step_costs(plain, steps, split=False)
    assert (whole.draft, whole.per_guess) == ({}, None)


def test_beyond_the_largest_batch_a_pass_costs_what_its_rows_do() -> None:
    """Of a model that waits for memory up to eight rows, and computes beyond: measured for one and two texts. On a line
    through them eight texts of twelve nodes in all were as dear as eight, and guesses were taken for free."""

    def seconds(rows: float) -> float:
        return 1.0 + 0.1 * max(0.0, rows - 8)

    cells = {(batch, rows): seconds(rows) for batch in (1, 2) for rows in (1, 2, 4, 8, 16, 32) if rows >= batch}
    table = CostTable(cells, {})
    for batch in (3, 5, 8, 16):
        for rows in (batch, batch + 1, batch + 4, batch + 9):
            assert table.verify(batch, rows) == pytest.approx(seconds(rows), rel=0.02), (batch, rows)
    assert table.verify(40, 44) == pytest.approx(seconds(44), rel=0.02), "beyond all rows that were measured"
    plain_alone = CostTable({(1, 1): 1.0}, {})
    assert plain_alone.verify(8, 8) == pytest.approx(8.0), "nothing is known of more rows: in proportion"
