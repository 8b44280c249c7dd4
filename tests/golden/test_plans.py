"""Planners decide as when ``plans.json`` was made: 24 made-up machines, 700 steps each."""

import json
from functools import cache
from typing import Any

import pytest

from foretell.planner import corrections, decisions
from foretell.planner.budget import BUDGET, PROMISE, START_CREDIT_PASSES
from tests.golden import plans
from tests.golden.plans import MACHINES, PATH, STEPS, Machine, Run, steps_of

RECORDS: dict[str, Any] = {record["machine"]: record for record in json.loads(PATH.read_text())}


@pytest.fixture(autouse=True)
def deciding_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "thread_time", lambda: 0.0)


def difference(record: dict[str, Any], wanted: dict[str, Any]) -> str:
    """Where two runs part; nothing where they do not."""
    for step, (one, other) in enumerate(zip(steps_of(record["plans"]), steps_of(wanted["plans"]), strict=True)):
        if one != other:
            return f"{record['machine']}: step {step} is {one}, was {other}"
    states = record["state"], wanted["state"]
    differ = {key: value for key, value in states[0].items() if not _same(value, states[1][key])}
    return f"{record['machine']}: the same steps end in {differ}, not in {wanted['state']}" if differ else ""


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return one == pytest.approx(other, rel=1e-5)  # six digits are written down
    return bool(one == other)


@cache
def run_of(machine: Machine) -> Run:
    """All its steps, once."""
    return Run(machine).steps()


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_plans_are_those_that_were_written_down(machine: Machine) -> None:
    parted = difference(run_of(machine).record, RECORDS[machine.name])
    assert not parted


@pytest.mark.parametrize(
    "machine", [one for one in MACHINES if one.mode == "auto" and not one.always], ids=lambda machine: machine.name
)
def test_no_machine_loses_more_than_is_promised(machine: Machine) -> None:
    """Trials and wrong guesses together never cost 2 % of plain decoding, and the trials of all options no more than
    their budget holds: its share of the time, a pass of each option at first, and what the last trial overdraws it by."""
    run = run_of(machine)
    assert run.seconds - run.plain_seconds <= PROMISE * run.plain_seconds
    num_options = 2 if machine.light else 1
    most = BUDGET * run.seconds + (num_options * START_CREDIT_PASSES + 1.0) * run.plain_step
    assert run.planner.state["trial_seconds"] <= most


def test_a_difference_is_told_with_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a filter that knows the machine a little less parts from what is written down."""
    assert len(RECORDS) == len(MACHINES) == 24
    assert all(len(steps_of(record["plans"])) == STEPS for record in RECORDS.values())
    monkeypatch.setattr(corrections.Corrections, "_NOISE", 0.17**2)
    machine = next(machine for machine in MACHINES if machine.name == "it hardly pays")
    wanted = RECORDS[machine.name]
    assert difference(Run(machine).steps().record, wanted).startswith("it hardly pays: step ")
    assert not difference(wanted, wanted)
    steps = steps_of(wanted["plans"])
    one_other = " ".join([*steps[:-1], "6"])
    assert difference({**wanted, "plans": one_other}, wanted) == "it hardly pays: step 699 is 6, was 1"


def test_making_it_anew_must_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["plans"])
    before = PATH.read_bytes()
    with pytest.raises(SystemExit, match="--overwrite"):
        plans.main()
    assert PATH.read_bytes() == before
