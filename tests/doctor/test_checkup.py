"""The order and the end of a checkup: the default first, a limit of time, no more than the intervals need."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foretell import Engine
from foretell.bench.stats import PairedRuns
from foretell.core.errors import DrafterError, ModelError
from foretell.doctor import candidates as finding, checkup, examine
from foretell.doctor.candidates import Candidate, candidates
from foretell.doctor.checkup import OwnClock, Progress, Schedule, check_up
from foretell.doctor.examine import Examined
from foretell.doctor.machine import look
from foretell.doctor.warn import about_method
from foretell.engine.recorder import StepTime
from tests.doctor.test_recommend import examined
from tests.engine.harness import ToyTokenizer


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Exam:
    """Takes so many seconds a prompt, and says what it is told to."""

    def __init__(
        self, clock: Clock, method: str, seconds: float, speedup: tuple[float, float, float], *, default: bool = False
    ) -> None:
        self.clock, self.each, self.speedup = clock, seconds, speedup
        self.candidate = Candidate(method, {}, None, is_default=default)
        self.seconds: list[float] = []
        self.timed: list[bool] = []
        self.short: list[bool] = []
        self.fails_at: int | None = None

    def itself(self) -> "Exam":
        return self

    def look(self, request: Any, *, timed: bool, short: bool) -> None:
        self.clock.now += self.each
        if self.fails_at == len(self.seconds):
            raise DrafterError("it broke")
        self.timed.append(timed)
        self.short.append(short)

    def found(self, *, seed: int, resamples: int = 200) -> Examined:
        value, low, high = self.speedup
        if len(self.seconds) < 5 or not resamples:
            low = high = value
        return examined(self.candidate.method, value, low, high, prompts=len(self.seconds))


def run(
    clock: Clock, exams: list[Exam], *, limit: float = 60.0
) -> tuple[list[str], dict[str, str], list[Progress], list[str]]:
    """(methods that were looked at, those left out, progress, what was said)."""
    progress: list[Progress] = []
    said: list[str] = []
    left: dict[str, str] = {}
    schedule = Schedule(limit, 4, 0, progress.append, said.append, clock)
    named: Any = [(exam.candidate.method, exam.itself) for exam in exams]
    done: list[Any] = schedule.run(named, [None] * 10, left)  # type: ignore[list-item]
    return [exam.candidate.method for exam in done], left, progress, said


def test_what_the_intervals_decide_is_not_measured_on() -> None:
    clock = Clock()
    exams = [
        Exam(clock, "hybrid", 1.0, (1.5, 1.49, 1.51), default=True),
        Exam(clock, "ngram", 1.0, (1.49, 1.4, 1.6)),
        Exam(clock, "eagle3", 1.0, (0.7, 0.69, 0.71)),
    ]
    done, left, progress, said = run(clock, exams)
    assert (done, left) == (["hybrid", "ngram", "eagle3"], {})
    assert [len(exam.seconds) for exam in exams] == [10, 10, 5]
    assert exams[0].timed == [True] * 4 + [False] * 6
    assert exams[0].short == [True] + [False] * 9
    assert (
        said[0]
        == "hybrid (what is used where no method is named): about 1.50 times as fast as plain decoding on one prompt"
    )
    assert "after 5 prompts no more is needed of eagle3" in said
    assert [one.share for one in progress] == sorted(one.share for one in progress)
    assert all(0 <= one.share <= 1 and 0 <= one.seconds_left <= 60 for one in progress)
    exams = [Exam(clock, "a", 1.0, (1.5, 1.49, 1.51)), Exam(clock, "b", 1.0, (0.7, 0.69, 0.71))]
    assert run(clock, exams)[3][-1] == "5 prompts decide"
    assert [len(exam.seconds) for exam in exams] == [5, 5]
    exams = [Exam(clock, "a", 1.0, (1.5, 1.49, 1.51)), Exam(clock, "b", 1.0, (0.7, 0.69, 0.71))]
    assert run(clock, exams, limit=math.inf)[0] == ["a", "b"]
    assert [len(exam.seconds) for exam in exams] == [10, 10], "inf: all prompts"


def test_every_method_is_looked_at_and_the_best_have_the_rest_of_the_time() -> None:
    """On a busy machine five methods had no time, and the default was advised where another won on an idle one."""
    clock = Clock()
    names = ("hybrid", "ngram", "suffix", "eagle3", "medusa")
    exams = [
        Exam(clock, name, 5.0, (1.0 + place / 10, 0.5, 3.0), default=not place) for place, name in enumerate(names)
    ]
    done, left, progress, said = run(clock, exams)
    assert (done, left) == (list(names), {})
    assert clock.now <= 60
    assert "the time left is for more prompts of hybrid" in said
    assert [len(exam.seconds) for exam in exams] == [8, 1, 1, 1, 1], "from one prompt of each nothing would follow"
    clock = Clock()
    exams = [
        Exam(clock, name, 3.0, (1.0 + place / 10, 0.5, 3.0), default=not place) for place, name in enumerate(names)
    ]
    assert "the time left is for more prompts of hybrid, medusa, eagle3" in run(clock, exams)[3]
    assert [len(exam.seconds) >= 5 for exam in exams] == [True, False, False, True, True]
    # The default first, then the fastest so far.
    assert [one.what for one in progress[10:12]] == ["hybrid, prompt 2", "hybrid, prompt 3"]


def test_the_time_ends_where_it_was_to_end() -> None:
    """It took a quarter of an hour on a busy machine."""
    clock = Clock()
    exams = [Exam(clock, name, 25.0, (1.0, 0.5, 3.0)) for name in ("hybrid", "ngram", "suffix")]
    done, left, _, _ = run(clock, exams)
    assert done == ["hybrid", "ngram"]
    assert left == {"suffix": "60 s (--time-limit) are too short for more methods"}
    assert clock.now <= 60
    slow = [Exam(clock, "hybrid", 500.0, (1.0, 0.5, 3.0)), Exam(clock, "ngram", 1.0, (1.0, 0.5, 3.0))]
    assert run(clock, slow)[0] == ["hybrid"], "one prompt in any case"


def test_what_other_programs_take_of_the_time_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """60 s were too short for five methods where others computed."""
    at = Clock()
    times: dict[int, tuple[float, float]] = {1: (0.0, 0.0), 2: (0.0, 0.0)}
    monkeypatch.setattr(checkup, "perf_counter", at)
    monkeypatch.setattr(checkup, "thread_times", lambda: dict(times))
    clock = OwnClock()
    at.now, times[1], times[2] = 10.0, (8.0, 1.0), (7.0, 4.0)
    assert clock() == pytest.approx(7.5)
    at.now, times[1] = 20.0, (9.0, 100.0)
    assert (clock(), clock.passed) == (pytest.approx(12.5), 20.0), "half of it counts in any case"
    times.clear()  # where the system does not tell
    at.now = 30.0
    assert clock() == pytest.approx(22.5)


def test_steps_are_timed_without_the_wait_for_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    times: dict[int, tuple[float, float]] = {1: (0.0, 5.0), 2: (0.0, 0.0)}
    monkeypatch.setattr(examine, "thread_times", lambda: dict(times))
    steps = examine._OwnTimes()
    took: list[float] = []
    for waited in (5.0, 5.004, 5.5):
        times[1] = (0.0, waited)
        steps.append(StepTime(0.0, 0.002, 0.006, 0.002, 4, 2, 3))
        took.append(steps[-1].seconds)
    assert took == pytest.approx([0.01, 0.006, 0.0025]), "the first one as it was: its prompt waited too"
    assert steps[1].seconds_target == pytest.approx(0.0036)
    assert steps[1].num_draft_tokens == 4


@pytest.mark.parametrize("is_steady", [True, False])
def test_what_was_planned_by_costs_of_a_busy_machine_decides_nothing(is_steady: bool) -> None:
    """Five prompts then showed for certain that guesses do not pay, and on an idle machine that they do."""
    exam: Any = SimpleNamespace(
        _pairs=[PairedRuns(10, 1.0, 10, 1.1 + 0.1 * i) for i in range(5)], _is_steady=is_steady,
        own=SimpleNamespace(speculative=SimpleNamespace(num_speculative_tokens=4)), _steps={True: [], False: []},
        _found=lambda predicted, mean, possible: predicted[0].speedup, split=True,
    )  # fmt: skip
    assert examine.Measured.found(exam, seed=0).is_point != is_steady


def test_what_is_advised_on_a_busy_machine_may_be_other_when_it_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine.load("bundled", speculative="none")
    only = [Candidate("ngram", {"method": "ngram"}, None)]
    made: dict[str, Any] = {"target": "bundled", "max_new_tokens": 8, "num_timed": 1, "bandwidth": False}
    is_busy = "run it again when the machine is idle: it may advise otherwise"
    for load, said in ((9.0, True), (0.0, False)):
        seen = replace(look(engine), load_average=load)
        monkeypatch.setattr(checkup, "look", lambda _, seen=seen: seen)
        monkeypatch.setattr(checkup, "thread_times", dict)
        found = check_up(engine, [[5, 6, 7] * 5] * 2, only, {}, **made)
        assert (is_busy in found.conclusion) == said
        assert found.methods[0].best is not None
        assert found.methods[0].best.speedup.is_point, "no interval from two prompts"
        assert "few_prompts" in [one.about for one in found.warnings]


def test_a_drafter_that_fails_is_left_out() -> None:
    clock = Clock()
    exams = [Exam(clock, name, 1.0, (1.0, 0.5, 3.0)) for name in ("a", "b", "c")]
    exams[0].fails_at, exams[1].fails_at = 0, 4
    done, left, _, said = run(clock, exams)
    assert (done, left) == (["b", "c"], {"a": "it broke"})
    assert "b failed: it broke" in said
    assert [len(exam.seconds) for exam in exams] == [0, 4, 10]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("/a/b.gguf: b.gguf has no MTP head: llama.nextn_predict_layers is not stated. Many files leave it out: give one",
         "b.gguf has no MTP head ('foretell explain --method mtp' says more)"),
        ("m: it lacks tensor x; download it again", "it lacks tensor x ('foretell explain --method mtp' says more)"),
        ("m: it cannot be read", "it cannot be read"),
    ],
)  # fmt: skip
def test_why_a_method_is_not_tried_is_one_short_line(error: str, said: str) -> None:
    """The words of a file without the module went over three lines of the report."""

    def load() -> Any:
        raise ModelError(error)

    left: dict[str, str] = {}
    Schedule(math.inf, 1, 0, lambda _: None, lambda _: None).run([("mtp", load)], [None], left)  # type: ignore[list-item]
    assert left == {"mtp": said}


def test_an_instruct_model_is_asked_in_its_template() -> None:
    engine = Engine.load("bundled")
    only = [Candidate("ngram", {"method": "ngram"}, None)]
    made: dict[str, Any] = {"target": "bundled", "max_new_tokens": 8, "num_timed": 1, "bandwidth": False}
    assert check_up(engine, [[5, 6, 7] * 5], only, {}, **made).command.endswith(' --chat "MESSAGE"')
    engine.tokenizer = ToyTokenizer()  # without a template
    assert check_up(engine, [[5, 6, 7] * 5], only, {}, **made).command.endswith(' "PROMPT"')


def spec(name: str) -> Any:
    return SimpleNamespace(name=name, weight_bytes=10**8)


@pytest.mark.parametrize(("target", "default"), [("smollm2-135m", "hybrid"), ("bundled", "draft_model")])
def test_what_is_used_by_default_comes_first_and_as_auto_next(target: str, default: str) -> None:
    """The head of that model is bundled, and it was said that there is none."""
    tried, left = candidates(spec(target))
    assert [(one.method, one.speculation, one.is_default) for one in (tried[0], tried[-1])] == [
        (default, "on", True), (default, "auto", True),
    ]  # fmt: skip
    assert default not in left
    assert tried[0].drafter is None, "it need not be named"
    assert {one.method for one in tried} >= {"hybrid", "eagle3", "ngram", "suffix"}
    only, _ = candidates(spec(target), methods=["ngram", default])
    assert [(one.method, one.speculation) for one in only] == [(default, "on"), ("ngram", "on")]


def test_methods_may_bring_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``foretell evaluate`` could: a length, a rule and a method's own keys, several of one method."""
    engine = Engine.load("bundled", speculative="none")
    words = ["ngram:3", "auto:ngram:2:prompt_lookup_min=2", "eagle3:5:rejection", "suffix"]
    tried, left = candidates(engine.model.spec, methods=words)
    assert left == {}
    assert [(one.label, one.speculation) for one in tried] == [
        ("ngram:3", "on"), ("auto:ngram:2:prompt_lookup_min=2", "auto"), ("eagle3:5:rejection", "on"), ("suffix", "on")
    ]  # fmt: skip
    assert tried[0].config == {"method": "ngram", "num_speculative_tokens": 3}
    assert tried[1].chosen == {"prompt_lookup_min": 2}
    assert (tried[2].config["num_speculative_tokens"], tried[2].chosen) == (5, {"verify": "rejection"})
    found = check_up(
        engine, [[5, 6, 7, 8] * 4], tried[:3], {}, target="bundled", temperature=1.0, max_new_tokens=12, num_timed=1,
        bandwidth=False,
    )  # fmt: skip
    assert {one.label for one in found.methods} == {"ngram:3", "auto:ngram:2:prompt_lookup_min=2", "eagle3:5:rejection"}
    (head,) = (one for one in found.methods if one.method == "eagle3")
    assert (head.verify, len(head.slots) <= 5, head.best is not None) == ("rejection", True, True)


def test_a_head_is_tried_alone_and_in_a_hybrid() -> None:
    tried, left = candidates(spec("bundled"), draft="bundled/eagle1")
    assert [(one.method, one.config.get("model"), dict(one.chosen)) for one in (tried[0], tried[-1])] == [
        ("eagle1", "bundled/eagle1", {})] * 2  # fmt: skip
    hybrid = next(one for one in tried if one.method == "hybrid")
    assert hybrid.config == {"method": "hybrid", "model": "bundled/eagle1", "second": "eagle1"}
    assert hybrid.chosen == {"second": "eagle1"}
    assert "medusa" in left


def test_a_target_that_nothing_comes_with_has_what_needs_no_weights() -> None:
    tried, left = candidates(spec("some/where"))
    assert {one.method for one in tried} >= {"ngram", "suffix"}
    assert [(one.method, one.is_default, one.speculation) for one in (tried[0], tried[-1])] == [
        ("suffix", True, "on"), ("suffix", True, "auto")]  # fmt: skip
    assert "it needs a trained head" in left["hybrid"]


def test_smaller_models_of_the_same_vocabulary_that_were_pulled_are_draft_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A SmolLM2 stood in the list for a Qwen."""
    vocab = {str(index): index for index in range(300)}
    own, other = (SimpleNamespace(get_vocab=lambda found=found: found) for found in (vocab, {**vocab, "x": 7}))
    known = ("qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b", "smollm2-135m")
    monkeypatch.setattr(finding, "pulled", lambda name: Path(name) if name in known else None)
    monkeypatch.setattr(finding, "load_tokenizer", lambda name: own if name.startswith("qwen") else other)
    target: Any = SimpleNamespace(name="qwen2.5-coder-1.5b", weight_bytes=10**9)
    for tokenizer, drafts in ((own, ["qwen2.5-coder-0.5b"]), (other, ["smollm2-135m"]), (None, [])):
        tried, _ = candidates(target, tokenizer)
        assert [one.drafter for one in tried if one.method == "draft_model"] == drafts


@pytest.mark.parametrize(("temperature", "warned"), [(0.0, False), (0.7, True)])
def test_sampling_is_warned_of_where_there_is_some(temperature: float, warned: bool) -> None:
    can = SimpleNamespace(needs_draft=False, needs_head=False)
    engine: Any = SimpleNamespace(model=SimpleNamespace(spec=SimpleNamespace(max_positions=99, is_quantised=False)))
    own: Any = SimpleNamespace(method=SimpleNamespace(capabilities=can, max_positions=None))
    one = Examined("eagle3", None, "coupled", [0.3], 0.9, 2.0, 0.1, 2.0, [])
    found = about_method(engine, own, one, temperature=temperature)
    assert [each.about for each in found] == ["sampling"] * warned
