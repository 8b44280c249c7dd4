"""What fails beside a pass costs guesses, a pass that fails costs its own requests, and only what fails again and again
ends a service."""

import logging
import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

from foretell import Engine, SamplingParams, Service, Submission
from foretell.core.errors import EngineError, ForetellError, ServiceClosedError, UnreadableError
from foretell.costs.table import CostTable
from foretell.engine import batch as passes, failures as policy
from foretell.engine.batch import Batch
from foretell.engine.failures import PLANNER, Failures, GuardedPlanner, RaisedFailures
from foretell.engine.prompts import PromptReader
from foretell.engine.recorder import Recorder
from foretell.engine.request.scoring import Scoring
from foretell.planner.acceptance import Acceptance
from foretell.planner.observations import RowView, StepObservation
from foretell.planner.plan import StepPlan
from foretell.planner.planner import Planner
from foretell.server.errors import of_engine
from foretell.service.drift import Drifts
from foretell.service.service import MOST_FAULTS, STATES
from tests.engine.harness import ToyTokenizer, table
from tests.engine.integrity import check_service
from tests.service.test_service import Mailbox, service

SECRET = "a secret of the machine"


@pytest.fixture
def running() -> Iterator[Service]:
    made = service(max_num_seqs=2)
    yield made
    made.close()


def params(seed: int, length: int = 20) -> SamplingParams:
    return SamplingParams(max_new_tokens=length, ignore_eos=True, seed=seed)


@cache
def alone(seed: int) -> list[int]:
    return Engine(table(1), ToyTokenizer()).generate([1, 2, seed], params(seed)).token_ids


def ask(running: Service, box: Mailbox, seeds: range, **more: Any) -> None:
    for seed in seeds:
        running.submit(Submission(str(seed), [1, 2, seed], params(seed), **more), box.hear)


def ends(box: Mailbox, seeds: range) -> tuple[list[int], list[ForetellError]]:
    """The seeds whose text is that of plain decoding, and the errors of the others."""
    right, errors = [], []
    for seed in seeds:
        last = box.last(str(seed))
        if last.error is not None:
            errors.append(last.error)
            continue
        assert last.completion.token_ids == alone(seed)
        right.append(seed)
    return right, errors


def failing(
    monkeypatch: pytest.MonkeyPatch,
    kind: Any,
    name: str,
    when: Callable[[Any, int], bool],
    error: Exception | None = None,
) -> list[int]:
    """A call of a class or module that fails at times: when(its first argument, number). Returns the numbers so far."""
    original, calls = getattr(kind, name), list[int]()

    def call(self: Any, *args: Any, **options: Any) -> Any:
        calls.append(len(calls))
        if when(self, calls[-1]):
            raise error or RuntimeError(SECRET)
        return original(self, *args, **options)

    monkeypatch.setattr(kind, name, call)
    return calls


# -- passes ------------------------------------------------------------------------------------------------------------


def test_a_step_that_fails_ends_its_own_requests_alone(
    running: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two are decoded, three wait: these get their texts, by a loop whose memory is new."""
    states = list[str]()
    pool = running._loop.batch.pool
    monkeypatch.setattr(
        Batch, "begin_anew", lambda self, call=Batch.begin_anew: (states.append(running.state), call(self))
    )
    failing(monkeypatch, passes, "step", lambda state, number: len(state.rows) == 2 and not states)
    box = Mailbox()
    ask(running, box, range(5))
    right, errors = ends(box, range(5))
    assert len(right) == 3
    assert all(isinstance(error, EngineError) and SECRET not in str(error) for error in errors)
    assert states == ["recovering"]
    assert running.state == "ready"
    assert running._loop.batch.pool is not pool
    check_service(running)
    assert running.snapshot().internal_errors["step"] == 1
    (line,) = [one for one in caplog.records if "internal error (step)" in one.getMessage()]
    assert "its requests (0, 1) end" in line.getMessage()
    assert line.exc_info


def test_weights_that_cannot_be_read_end_requests_with_the_reason_and_never_the_service(
    running: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of more than would end it for another error; afterwards texts are as they were."""
    error = UnreadableError("a file was changed")
    failing(monkeypatch, PromptReader, "_pass", lambda reader, number: number <= MOST_FAULTS, error)
    box = Mailbox()
    for seed in range(MOST_FAULTS + 1):
        ask(running, box, range(seed, seed + 1))
        assert ends(box, range(seed, seed + 1))[1] == [error]
    ask(running, box, range(9, 10))
    assert ends(box, range(9, 10))[0] == [9]
    assert running.state == "ready"
    assert of_engine(error).status == 500
    assert "a file was changed" in str(of_engine(error))


def test_a_prompt_that_cannot_be_read_ends_its_own_request(running: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is decoded meanwhile is read again, and goes on where it was."""
    failing(monkeypatch, PromptReader, "_pass", lambda reader, number: number == 1)
    begun, box = threading.Event(), Mailbox()
    running.submit(Submission("0", [1, 2, 0], params(0)), lambda update: (begun.set(), box.hear(update))[1])
    assert begun.wait(10.0)
    ask(running, box, range(1, 2))
    assert ends(box, range(2))[0] == [0]
    done = box.last("0").completion
    assert done.num_preemptions == 1
    assert running.snapshot().internal_errors["prompt"] == 1
    ask(running, box, range(2, 3))
    assert ends(box, range(2, 3))[0] == [2]


@pytest.mark.parametrize(
    ("kind", "name", "place"),
    [(Scoring, "read", "score"), (Batch, "arrive", "admission"), (Batch, "leave", "leaving")],
)
def test_so_it_is_wherever_rows_come_and_go(
    running: Service, monkeypatch: pytest.MonkeyPatch, kind: type, name: str, place: str
) -> None:
    failing(monkeypatch, kind, name, lambda one, number: number == 0)
    box = Mailbox()
    ask(running, box, range(4), num_prompt_logprobs=1)
    right, errors = ends(box, range(4))
    assert len(right) == 4 - (place != "leaving"), "whoever leaves has its text"
    assert all(isinstance(error, EngineError) for error in errors)
    assert running.snapshot().internal_errors[place] == 1
    check_service(running)
    assert running.state == "ready"


def test_what_a_client_has_left_is_ended_where_its_row_cannot_be_freed(
    running: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both commands are taken together: no request is lost where one before it fails."""
    box, taken, begun = Mailbox(), threading.Event(), threading.Event()
    failing(monkeypatch, Batch, "leave", lambda batch, number: number == 0)
    running.submit(Submission("first", [1, 2], params(0, 150)), lambda update: (begun.set(), box.hear(update))[1])
    assert begun.wait(10.0)
    running._inbox.append(taken.wait)  # type: ignore[arg-type]  # hold the thread until both are in the inbox
    running.cancel("first")
    ask(running, box, range(1, 2))
    taken.set()
    done = box.last("first").completion
    assert done.finish_reason == "cancelled"
    assert ends(box, range(1, 2))[0] == [1]


def test_only_what_fails_again_and_again_ends_the_service(running: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    told = threading.Event()
    running.on_failure = told.set
    calls = failing(monkeypatch, passes, "step", lambda state, number: number not in (2, 5))
    box = Mailbox()
    ask(running, box, range(20))
    assert told.wait(20.0)
    errors = ends(box, range(20))[1]
    assert len(calls) == 2 + 1 + 2 + 1 + MOST_FAULTS, "twice it failed twice, and a step between them went well"
    assert {type(error) for error in errors} == {EngineError, ServiceClosedError}
    assert not any(SECRET in str(error) for error in errors)
    assert (running.state, running.healthy, running.ready) == ("failed", False, False)
    assert "RuntimeError" in running.failure
    with pytest.raises(ServiceClosedError, match="the engine has failed"):
        ask(running, box, range(20, 21))


def test_each_state_has_words_of_its_own(running: Service) -> None:
    assert len(set(STATES.values())) == len(STATES)
    assert running.says == STATES["ready"]
    running.drain(1.0)
    with pytest.raises(ServiceClosedError, match="the server is stopping"):
        ask(running, Mailbox(), range(1))
    running.close()
    assert running.says == "the server has stopped"
    started = Service(Engine(table(1), ToyTokenizer()))
    with pytest.raises(ServiceClosedError, match="the server is starting"):
        ask(started, Mailbox(), range(1))


def test_an_engine_of_ones_own_raises_and_can_be_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(table(1), ToyTokenizer(), speculative="ngram", prefix_memory_gib=0.01)
    failing(monkeypatch, passes, "step", lambda state, number: number == 3)
    with pytest.raises(RuntimeError, match=SECRET):
        engine.generate([1, 2, 5], params(5))
    assert engine.generate([1, 2, 5], params(5)).token_ids == alone(5)


# -- beside them -------------------------------------------------------------------------------------------------------


def spoil(*_: object, **__: object) -> None:
    raise RuntimeError(SECRET)


@pytest.mark.parametrize("call", ["plan", "observe", "forget", "will_guess"])
def test_a_planner_that_fails_costs_guesses(running: Service, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    monkeypatch.setattr(Planner, call, spoil)
    box = Mailbox()
    ask(running, box, range(4))
    assert ends(box, range(4)) == (list(range(4)), [])
    found = running.snapshot().internal_errors["planner"]
    assert found == policy.MOST_IN_A_ROW or (found and call in ("forget", "will_guess")), "then it rests"


def test_parts_that_fail_are_left_out_and_told_once(
    running: Service, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    add, finish, texts = Recorder.add, Recorder.finish, [alone(seed) for seed in range(4)]
    monkeypatch.setattr(Recorder, "add", lambda *args: (add(*args), spoil()))
    monkeypatch.setattr(Recorder, "finish", lambda *args: (finish(*args), spoil()))
    made, box = running, Mailbox()
    assert made._loop.prefixes is not None
    monkeypatch.setattr(made._loop.prefixes, "find", spoil)
    monkeypatch.setattr(made._loop.prefixes, "add", spoil)
    monkeypatch.setattr(Drifts, "__call__", spoil)
    for seed in range(4):
        made.submit(Submission(str(seed), [1, 2, seed], params(seed)), lambda update: (box.hear(update), spoil())[1])
    assert [box.last(str(seed)).completion.token_ids for seed in range(4)] == texts  # type: ignore[union-attr]
    check_service(made)
    found = made.snapshot().internal_errors
    places = {"recorder", "prefixes", "observer", "sink"}
    assert {place for place, count in found.items() if count} == places
    assert min(found[place] for place in places) > 1
    lines = [one.getMessage().split(":")[0] for one in caplog.records if "internal error" in one.getMessage()]
    assert sorted(lines) == sorted(f"internal error ({place})" for place in places)


def test_a_watcher_that_fails_ends_its_own_request(running: Service) -> None:
    box = Mailbox()
    running.submit(Submission("watched", [1, 2], params(1), watch=spoil), box.hear)
    ask(running, box, range(2))
    assert isinstance(box.last("watched").error, EngineError)
    assert ends(box, range(2))[0] == [0, 1]
    assert running.snapshot().internal_errors["output"] == 1


def test_what_fails_at_rest_is_told_and_the_next_request_is_taken(
    running: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "_rest", spoil)
    box = Mailbox()
    ask(running, box, range(1))
    assert ends(box, range(1))[0] == [0]
    ask(running, box, range(1, 2))
    assert ends(box, range(1, 2))[0] == [1]
    assert running.healthy


def test_nothing_that_is_kept_keeps_a_service_from_closing(running: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running._keeper, "finish", spoil)
    running.close()
    assert running._failures.by_place()["keeper"] == 1


# -- the guard of the planner ------------------------------------------------------------------------------------------


class Odd(Planner):
    """A planner whose plans are what it is told."""

    def __init__(self) -> None:
        super().__init__(CostTable({(1, 1): 1.0}, {}), Acceptance(4), mode="on")
        self.next: StepPlan | None = None
        self.observed = 0

    def plan(self, rows: Any, arriving: int = 0) -> StepPlan:
        return self.next or super().plan(rows, arriving)

    def again(self, depth_limit: int, *, lagging: bool) -> StepPlan | None:
        return self.next

    def observe(self, plan: StepPlan, step: StepObservation) -> None:
        self.observed += 1


VIEWS = [RowView(name, "m", 4, 9) for name in "ab"]
STEP = StepObservation(2, [], 0.0, 1.0, 0.0)


@pytest.mark.parametrize(
    "wrong",
    [
        StepPlan([4], members=("a",)),
        StepPlan([4, 4], members=("a", "c")),
        StepPlan([4, 4], members=("b", "a")),
        StepPlan([4], members=("a", "b")),
        StepPlan([4, 4], [1], members=("a", "b")),
    ],
)
def test_a_plan_of_other_members_is_not_used(wrong: StepPlan) -> None:
    odd = Odd()
    planner = GuardedPlanner(odd, Failures())
    assert planner.plan(VIEWS).caps == [4, 4]
    odd.next = wrong
    assert planner.again(9, lagging=False) is None
    assert planner.again(9, lagging=False) is None, "nor is it asked for again"
    plan = planner.plan(VIEWS)
    assert (plan.caps, plan.members) == ([0, 0], ("a", "b"))
    planner.observe(plan, STEP)
    assert odd.observed == 0, "it says nothing of its plans"
    odd.next = None
    assert planner.plan(VIEWS).caps == [4, 4]
    odd.next = wrong
    with pytest.raises(RuntimeError, match="was made for"):
        GuardedPlanner(odd, RaisedFailures()).plan(VIEWS)


def test_it_rests_and_works_again(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    odd, failures = Odd(), Failures(clock=lambda: now[0])
    planner = GuardedPlanner(odd, failures)
    odd.next = StepPlan([])
    for _ in range(5):
        assert planner.plan(VIEWS).caps == [0, 0]
    odd.next = None
    assert planner.plan(VIEWS).caps == [0, 0], "it rests"
    assert planner.why_not("m") == f"{PLANNER} rests after 3 failures in a row (RuntimeError)"
    assert failures.by_place()["planner"] == policy.MOST_IN_A_ROW
    assert (failures.totals(), failures.rests()) == ({}, {}), "it is no method"
    now[0] += policy.FIRST_REST_S
    plan = planner.plan(VIEWS)
    assert plan.caps == [4, 4]
    planner.observe(plan, STEP)
    assert odd.observed == 1
    odd.next = StepPlan([])
    planner.plan(VIEWS)
    assert failures.why_rests(PLANNER) == "", "what went well stood between"
    with_traces = [record for record in caplog.records if record.exc_info]
    assert len(with_traces) == 1, "its kind is told once"
    assert [record.levelno for record in caplog.records].count(logging.ERROR) == 1
