"""This machine, this target, these drafters: what is measured of each, the predicted speedup, one recommendation."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import accumulate
from math import isfinite
from operator import mul
from statistics import median
from time import perf_counter
from typing import Any

from foretell.bench.stats import FEW
from foretell.core.errors import ConfigError, ForetellError
from foretell.core.params import SamplingParams
from foretell.core.platform import thread_times
from foretell.costs.measure import grid
from foretell.costs.outlook import Cell, lengths_to, outlook
from foretell.doctor.candidates import Candidate
from foretell.doctor.examine import Examination, Examined, examination
from foretell.doctor.machine import Machine, look
from foretell.doctor.recommend import command_of, recommend, undecided
from foretell.doctor.warn import Warned, about_choice, about_method, about_run
from foretell.engine.engine import Engine, Request
from foretell.kernels.functions import dram_read_bandwidth

TIME_LIMIT_S = 60.0
JUDGED = (FEW, FEW + 2)
"""Prompts after which it is asked which methods need more of them."""
LEAST_OWN = 0.5
"""Share of the time that counts, at least: with it a limit is never more than twice as long on the clock."""
FEW_RESAMPLES = 60
"""... by so many texts drawn anew."""


@dataclass(frozen=True)
class Checkup:
    """The doctor's report on a machine, a target and what can guess for it."""

    target: str
    temperature: float
    num_prompts: int  # that the method with the most of them was measured on
    tokens_a_text: float
    machine: Machine
    plain_step_seconds: float | None
    plain_pass_seconds: float | None
    methods: list[Examined]
    left: dict[str, str]  # methods not tried, and why
    warnings: list[Warned]
    command: str
    conclusion: str
    recommended: dict[str, Any] = field(default_factory=dict)  # the speculative configuration of the command
    speculation: str = "on"  # of the command
    is_sure: bool = False  # whether the intervals decide
    outlook: list[Cell] = field(default_factory=list)  # of the best method, by length of text and number of requests

    @property
    def share_of_limit(self) -> float | None:
        """Of the memory's bandwidth, that a plain pass of the target reaches; above 1 the weights stay in caches."""
        least = self.machine.least_pass_seconds
        return least / self.plain_pass_seconds if least and self.plain_pass_seconds else None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        outlook = [cell._asdict() for cell in self.outlook]
        more = {"machine": self.machine.to_dict(), "share_of_limit": self.share_of_limit, "outlook": outlook}
        return {**asdict(self), **more}


@dataclass(frozen=True)
class Progress:
    """How far a checkup is."""

    what: str  # is measured now
    share: float  # of the time that it takes, as it seems now; it never falls
    seconds_left: float


class OwnClock:
    """Seconds, without those in which this process's threads were ready and other programs had the processors, where the
    system tells: as much is then measured as on an idle machine."""

    def __init__(self) -> None:
        self.passed = self.own = 0.0
        self._at, self._used = perf_counter(), self._use()

    @staticmethod
    def _use() -> tuple[float, float]:
        times = thread_times().values()
        return sum(ran for ran, _ in times), sum(waited for _, waited in times)

    def __call__(self) -> float:
        """Since it was made."""
        now, used = perf_counter(), self._use()
        ran, waited = (max(0.0, new - old) for new, old in zip(used, self._used, strict=True))
        self.passed += now - self._at
        self.own += (now - self._at) * max(LEAST_OWN, ran / (ran + waited) if waited else 1.0)
        self._at, self._used = now, used
        return self.own


@dataclass
class Schedule:
    """Methods in turn: one short prompt of each, and then prompt after prompt of as many of the best as the time allows an
    interval of, until it is over or the intervals decide."""

    time_limit_s: float
    num_timed: int
    seed: int
    progress: Callable[[Progress], None]
    notice: Callable[[str], None]
    clock: Callable[[], float] = field(default_factory=OwnClock)

    def __post_init__(self) -> None:
        self._begun, self._share, self._is_limited = self.clock(), 0.0, isfinite(self.time_limit_s)

    @property
    def seconds_left(self) -> float:
        """Until the limit."""
        return self.time_limit_s - (self.clock() - self._begun)

    def run(
        self,
        exams: Iterable[tuple[str, Callable[[], Examination]]],
        requests: Sequence[Request],
        left: dict[str, str],
    ) -> list[Examination]:
        """All that were looked at, by one prompt at least. exams: what loads each, the default first."""
        done: dict[str, Examination] = {}
        for name, load in exams:
            if done and self.seconds_left < median(exam.seconds[0] for exam in done.values()):
                left[name] = f"{self.time_limit_s:g} s (--time-limit) are too short for more methods"
                continue
            self._tell(f"loading {name}", self.seconds_left)
            try:
                exam = load()
            except ForetellError as error:
                left[name] = _in_short(str(error), name.partition(" ")[0].partition(":")[0])
                continue
            if said := self._look(name, exam, requests[0], round=0, units=len(requests), is_last=len(requests) == 1):
                left[name] = said
            else:
                done[name] = exam
                self._tell_first(name, exam)
        playing = dict(done)
        for round, request in enumerate(requests[1:], start=1):
            if round in JUDGED and self._is_limited and self._is_decided(playing, done, round):
                break
            playing = self._affordable(playing)
            for name, exam in self._by_promise(playing):
                if self.seconds_left < median(exam.seconds):
                    return list(done.values())
                units = (len(requests) - round) * len(playing)
                if said := self._look(name, exam, request, round=round, units=units):
                    self.notice(f"{name} failed: {said}")
                    del playing[name]
        return list(done.values())

    def _tell(self, what: str, seconds: float) -> None:
        """That it is done now; seconds: until the end."""
        seconds, passed = max(0.0, min(self.seconds_left, seconds)), self.clock() - self._begun
        self._share = max(self._share, passed / max(passed + seconds, 1e-9))
        self.progress(Progress(what, self._share, seconds))

    def _look(
        self, name: str, exam: Examination, request: Request, *, round: int, units: int, is_last: bool = False
    ) -> str:
        """One prompt of one method; why its drafter failed, else "". units: prompts of methods that are still to come."""
        self._tell(f"{name}, prompt {round + 1}", units * (median(exam.seconds) if exam.seconds else self.time_limit_s))
        begun = self.clock()
        try:
            exam.look(request, timed=round < self.num_timed, short=not round and self._is_limited and not is_last)
        except ForetellError as error:
            return str(error)
        exam.seconds.append(self.clock() - begun)
        return ""

    def _affordable(self, playing: Mapping[str, Examination]) -> dict[str, Examination]:
        """As many of the best so far as can have the prompts of an interval in the time that is left; at least one."""
        kept: dict[str, Examination] = {}
        needed = 0.0
        for name, exam in self._by_promise(playing):
            needed += max(0, FEW - len(exam.seconds)) * exam.seconds[-1]
            if kept and needed > self.seconds_left:
                break
            kept[name] = exam
        if len(kept) < len(playing):
            self.notice(f"the time left is for more prompts of {', '.join(kept)}")
        return kept

    def _by_promise(self, playing: Mapping[str, Examination]) -> list[tuple[str, Examination]]:
        """The default first, then by speedup so far: where the time ends within a round, the last ones go without."""

        def place(exam: Examination) -> tuple[bool, float]:
            best = exam.found(seed=self.seed, resamples=0).best
            return not exam.candidate.is_default, 0.0 if best is None else -best.speedup.value

        return sorted(playing.items(), key=lambda one: place(one[1]))

    def _tell_first(self, name: str, exam: Examination) -> None:
        best = exam.found(seed=self.seed, resamples=0).best
        if best is not None:
            default = " (what is used where no method is named)" if exam.candidate.is_default else ""
            self.notice(
                f"{name}{default}: about {best.speedup.value:.2f} times as fast as plain decoding on one prompt"
            )

    def _is_decided(self, playing: dict[str, Examination], done: Mapping[str, Examination], round: int) -> bool:
        """Leave out what cannot be the one to use. Whether nothing is left to be found out."""
        found = {name: exam.found(seed=self.seed, resamples=FEW_RESAMPLES) for name, exam in done.items()}
        needed = undecided([one for name, one in found.items() if name in playing or one.num_prompts >= FEW])
        kept = [name for name in playing if found[name] in needed]
        dropped = [name for name in playing if name not in kept]
        for name in dropped:
            del playing[name]
        if not kept:
            self.notice(f"{round} prompts decide")
        elif dropped:
            self.notice(f"after {round} prompts no more is needed of {', '.join(dropped)}")
        return not kept


def _in_short(error: str, method: str) -> str:
    """The first words of an error after the name of its file, and which command says the rest."""
    said = next((part for part in error.split(": ") if " " in part), error).partition("; ")[0].partition(". ")[0]
    return said if error.endswith(said) else f"{said} ('foretell explain --method {method}' says more)"


def check_up(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    tried: Sequence[Candidate],
    left: Mapping[str, str],
    *,
    target: str,
    guesses: Sequence[Sequence[int] | None] = (),
    temperature: float = 0.0,
    max_new_tokens: int = 64,
    num_timed: int = 4,
    seed: int = 0,
    bandwidth: bool = True,
    time_limit_s: float = TIME_LIMIT_S,
    flags: Sequence[str] = (),
    context: int | None = None,
    concurrency: int | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
    notice: Callable[[str], None] = lambda _: None,
) -> Checkup:
    """Examine the candidates, the first ones first, on the prompts (token ids) in turn, and recommend one.

    target: as the command line has it. guesses: a guess of each prompt's answer, for methods that read one. num_timed:
    prompts by which costs are timed, a few short runs each. time_limit_s: of measuring; the first candidate gets one prompt
    in any case, and inf is all prompts of all candidates. flags: further options of the recommended command. progress is
    called before each prompt, notice with what is known meanwhile. context, concurrency: tokens of text and requests at
    once up to which the best method is foreseen by costs that are measured for it; None, both: not. Raises ConfigError
    where no prompt fits, or for a longer context than the target's.
    """
    room = engine.model.spec.max_positions
    if context is not None and context > room:
        raise ConfigError(
            f"--context {context} is longer than the target's context of {room} tokens: give at most that"
        )
    fitting = [index for index, ids in enumerate(prompts) if 0 < len(ids) < room - 1]
    if not fitting:
        raise ConfigError(f"none of {len(prompts)} prompts fits the context of {room} tokens")
    params = SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
    requests = [
        Request(list(prompts[index]), params, guesses[index] if index < len(guesses) else None) for index in fitting
    ]
    clock = OwnClock()
    schedule = Schedule(time_limit_s, num_timed, seed, progress, notice, clock)
    machine = look(engine)
    not_tried = dict(left)

    loads = [(each.label, partial(examination, engine, each, params)) for each in tried]
    exams = schedule.run(loads, requests, not_tried)
    found = [exam.found(seed=seed) for exam in exams]
    if bandwidth and engine.model.spec.device.type == "cpu":
        machine = replace(machine, bytes_per_second=dram_read_bandwidth())
    passes = [costs for exam in exams if (costs := exam.costs) is not None]
    plain_step = median(one.seconds_plain_step for one in passes) if passes else None
    plain_pass = median(one.seconds_plain_pass for one in passes) if passes else None
    lengths = [length for exam in exams for length in exam.num_tokens]
    looped = sum(exam.num_looped for exam in exams) / max(1, len(lengths))
    mean = sum(lengths) / max(1, len(lengths))
    most = max((one.num_prompts for one in found), default=0)
    advice = recommend(found)
    foreseen: list[Cell] = []
    if context is not None or concurrency is not None:
        notice("timing passes over longer texts and more rows")
        foreseen = _foreseen(exams, found, context or min(2048, room), concurrency or 1)
    warned = [
        *about_run(machine, plain_pass, looped=looped, tokens=mean, prompts=most, given=len(fitting),
                   taken=1.0 - clock.own / max(clock.passed, 1e-9)),
        *(each for exam, one in zip(exams, found, strict=True) for each in about_method(
            engine, exam.own, one, temperature=temperature)),
        *about_choice(found, advice),
    ]  # fmt: skip
    is_short = not advice.is_sure or any("--time-limit" in why for why in not_tried.values())
    is_busy = is_short and any(one.about == "busy" for one in warned)
    return Checkup(
        target=target,
        temperature=temperature,
        num_prompts=most,
        tokens_a_text=mean,
        machine=machine,
        plain_step_seconds=plain_step,
        plain_pass_seconds=plain_pass,
        methods=sorted(found, key=lambda one: -(one.best.speedup.value if one.best else 0.0)),
        left=not_tried,
        warnings=warned,
        command=command_of(
            target, advice, temperature, flags, chat=getattr(engine.tokenizer, "chat_template", None) is not None
        ),
        conclusion=advice.why + ("; run it again when the machine is idle: it may advise otherwise" if is_busy else ""),
        recommended=advice.config,
        speculation=advice.speculation,
        is_sure=advice.is_sure,
        outlook=foreseen,
    )


def _foreseen(exams: Sequence[Examination], found: Sequence[Examined], context: int, concurrency: int) -> list[Cell]:
    """The fastest method that was examined guess by guess, its guesses taken to be kept as often with longer texts."""
    known = [(one, exam) for one, exam in zip(found, exams, strict=True) if one.slots and one.best is not None]
    if not known:
        return []
    best, exam = max(known, key=lambda pair: pair[0].best.speedup.value if pair[0].best else 0.0)
    costs = exam.own.with_method(exam.own.speculative, method=exam.own.method, speculation="auto").measure(concurrency)
    if costs is None or best.method not in costs.methods:
        return []
    kept = list(accumulate(best.slots, mul))
    return outlook(costs, best.method, kept, [1.0] * len(kept), lengths_to(context), grid(concurrency))
