"""One method on prompt after prompt: what it accepts, and what its steps cost beside plain ones of the same moment."""

import dataclasses
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from foretell.analysis.observer import RULES, GuessRecord, GuessSlot, observe
from foretell.bench.stats import PairedRuns, bootstrap, first_loop
from foretell.core.params import SamplingParams
from foretell.core.platform import thread_times
from foretell.doctor import predict
from foretell.doctor.candidates import Candidate
from foretell.doctor.predict import Pooled, SpeedPrediction, TextAcceptance, TextTimes, pool, scaled
from foretell.draft.base import Method
from foretell.draft.config import MethodConfig
from foretell.engine.config import speculative_config
from foretell.engine.engine import Engine, Request
from foretell.engine.recorder import StepTime
from foretell.theory.possible import NO_PARTS, Guesses, Possible, of_run, possible
from foretell.theory.run_costs import StepCosts

SHORT_TOKENS, TIMED_TOKENS = 32, 32
"""Of a text by which a method is only looked at; of one that is timed, and half as many where it is only looked at."""
LEAST_OWN = 0.25
"""Share of a step that is its own, at least."""
WARM_UP_TOKENS = 4
TIMED_LENGTHS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Examined:
    """One method on the prompts."""

    method: str
    drafter: str | None
    verify: str
    slots: list[float]  # acceptance by slot, given that those before it were kept
    agreement: float | None  # share of first guesses that are the target's most probable token
    mean_acceptance_length: float  # measured, with the most guesses
    guess_cost: float | None  # c: one guess in plain passes
    best_case: float | None  # speedup if every guess were accepted, at the best length
    predictions: list[SpeedPrediction]
    speculation: str = "on"  # "auto": measured, not predicted
    num_prompts: int = 0
    config: dict[str, Any] = dataclasses.field(
        default_factory=dict
    )  # of the speculative configuration: what was chosen

    words: str = ""  # see ``Candidate``
    is_default: bool = False  # see ``Candidate``
    possible: Possible | None = None  # on the prompts as they were: not drawn towards 1

    @property
    def best(self) -> SpeedPrediction | None:
        """The length with the largest predicted speedup."""
        return max(self.predictions, key=lambda one: one.speedup.value, default=None)

    @property
    def label(self) -> str:
        """For people."""
        return self.words or f"{'auto:' if self.speculation == 'auto' else ''}{self.method}"


class Examination(ABC):
    """A candidate's texts so far. ``look`` takes one prompt more."""

    def __init__(self, engine: Engine, candidate: Candidate, params: SamplingParams) -> None:
        """engine: the target's. Raises ForetellError where the method cannot be loaded for it."""
        self.candidate, self.params = candidate, params
        self.own = engine.with_method(candidate.config, speculation=candidate.speculation, drafter_errors="raise")
        self.split = engine.model.spec.device.type == "cpu"
        self.seconds: list[float] = []  # of each prompt, as the schedule counts them
        self.num_tokens: list[int] = []  # of each text, up to where it began to loop
        self.num_looped = 0

    def look(self, request: Request, *, timed: bool, short: bool = False) -> None:
        """One prompt more. timed: for costs too. short: a short text and few of its lengths. Raises DrafterError."""
        most = min(self.params.max_new_tokens, SHORT_TOKENS) if short else self.params.max_new_tokens
        params = dataclasses.replace(self.params, seed=(self.params.seed or 0) + len(self.seconds), max_new_tokens=most)
        self._look(dataclasses.replace(request, params=params), timed=timed, short=short)

    @abstractmethod
    def _look(self, request: Request, *, timed: bool, short: bool) -> None: ...

    @abstractmethod
    def found(self, *, seed: int, resamples: int = predict.RESAMPLES) -> Examined:
        """What the prompts so far say."""

    @property
    def costs(self) -> StepCosts | None:
        """Of its steps and plain ones; None where no step was timed."""
        return None

    def _took(self, token_ids: Sequence[int]) -> int:
        """Count a text; its tokens up to where it began to loop."""
        end = first_loop(token_ids)
        self.num_looped += end is not None
        self.num_tokens.append(len(token_ids) if end is None else end)
        return self.num_tokens[-1]

    def _found(self, predicted: list[SpeedPrediction], mean: float, **more: Any) -> Examined:
        candidate, config = self.candidate, self.own.speculative
        given: dict[str, Any] = {"slots": [], "agreement": None, "guess_cost": None, "best_case": None, **more}
        count = len(self.num_tokens)
        predicted = [dataclasses.replace(one, speedup=predict.believed(one.speedup, count)) for one in predicted]
        return Examined(
            method=candidate.method, drafter=candidate.drafter, verify=config.verifier.name,
            mean_acceptance_length=mean, predictions=predicted, speculation=candidate.speculation,
            num_prompts=count, config=dict(candidate.chosen), words=candidate.words,
            is_default=candidate.is_default, **given,
        )  # fmt: skip


class Predicted(Examination):
    """Texts with as many guesses as the method makes; the speedup at each number of guesses follows from them."""

    def __init__(self, engine: Engine, candidate: Candidate, params: SamplingParams) -> None:
        """See ``Examination``."""
        super().__init__(engine, candidate, params)
        config, method = self.own.speculative, self.own.method
        can = method.capabilities
        chain: dict[str, Any] = {"shape": "chain"} if "chain" in can.shapes else {}
        drawn = can.draws and params.temperature > 0
        rule, draws = ("rejection", "iid") if drawn else ("exact", "auto")
        self._observed, self._record = observe(
            self.own, dataclasses.replace(config, **{"verify": rule, "draws": draws, **chain}), _fresh(method)
        )
        self._rate = config.verifier.name if config.verifier.name in RULES else "rejection"
        self._longest = config.num_speculative_tokens
        self._timed_as = dataclasses.replace(config, **{"draws": "auto", **chain})
        self._lanes: dict[int, Engine] = {}  # by guesses
        self.texts: list[TextAcceptance] = []
        self.times: list[TextTimes] = []

    def _look(self, request: Request, *, timed: bool, short: bool) -> None:
        record, index = self._record, len(self.texts)
        record.text = index
        (output,) = self._observed.generate_batch([request])
        count = self._took(output.token_ids)
        self.texts.append(_acceptance(record, index, count, self._rate, self._longest))
        if timed:
            self.times.append(self._time(request, short=short))

    def _time(self, request: Request, *, short: bool) -> TextTimes:
        """Short runs of plain decoding and of each length in turn, so that a slower machine slows all; from prompt to
        prompt in another order."""
        most = min(request.params.max_new_tokens, TIMED_TOKENS // 2 if short else TIMED_TOKENS)
        params = dataclasses.replace(request.params, max_new_tokens=most, ignore_eos=True)
        longest, several = self._longest, _nested(self.own.method) and not short
        lengths = [0, *(length for length in TIMED_LENGTHS if several and length < longest), longest]
        turn = len(self.times) % len(lengths)
        made = {
            length: _steps(self._lane(length, request), request, params) for length in lengths[turn:] + lengths[:turn]
        }
        plain, *guessed = (made[length] for length in lengths)
        first = max(0.0, _extra(guessed[-1]) - _extra(plain))
        steps = [step for one in guessed for step in (one[1:] or one)]
        light = [step for step in steps if step.is_light]
        return TextTimes(plain[1:] or plain, [step for step in steps if not step.is_light], first, light)

    def _lane(self, length: int, request: Request) -> Engine:
        """That makes so many guesses; 0: plain decoding. A new one decodes a little first."""
        if (lane := self._lanes.get(length)) is None:
            made: MethodConfig = dataclasses.replace(self._timed_as, num_speculative_tokens=max(1, length))
            lane = (
                self.own.with_method(made, method=_fresh(self.own.method))
                if length
                else self.own.with_method(speculative_config("none"))
            )
            _warm_up(lane, request)
            self._lanes[length] = lane
        return lane

    @property
    def costs(self) -> StepCosts | None:
        """See ``Examination``."""
        return pool(self.texts, self.times, split=self.split).costs

    def found(self, *, seed: int, resamples: int = predict.RESAMPLES) -> Examined:
        """See ``Examination``."""
        texts, times = self.texts, self.times
        whole = pool(texts, times, split=self.split)
        mean = sum(text.num_tokens for text in texts) / len(texts)
        nested = _nested(self.own.method)
        made = list(range(1, min(self._longest, len(whole.rates)) + 1)) if nested else [self._longest]
        steps = sum(sum(text.guesses.values()) + sum(text.light.values()) for text in texts)
        firsts = [step.slots[0].agreement for step in self._record.steps if step.slots]
        known = [one.agrees for one in firsts if one is not None]
        predicted = predict.predictions(
            texts, times, made, num_tokens=max(1, round(mean)), split=self.split, seed=seed, resamples=resamples
        )
        tokens = sum(text.num_tokens for text in texts) / max(1, steps)
        return self._found(
            predicted,
            tokens,
            slots=whole.rates,
            agreement=sum(known) / len(known) if known else None,
            guess_cost=whole.costs.per_guess if whole.costs is not None else None,
            best_case=_best_case(whole.costs, whole.light_costs),
            possible=self._possible(whole, predicted),
        )

    def _possible(self, whole: Pooled, predicted: Sequence[SpeedPrediction]) -> Possible | None:
        """Of the recorded steps with the best number of guesses."""
        best, costs = max(predicted, key=lambda one: one.speedup.value, default=None), whole.costs
        if best is None or costs is None or whole.light_costs is None:
            return None
        if not costs.undrafted:
            return Possible(best.speedup.value, unknown=NO_PARTS)
        passes = dataclasses.replace(costs, undrafted={**whole.light_costs.undrafted, **costs.undrafted})
        steps = []
        for one in self._record.steps:
            if one.position + one.num_tokens > self.num_tokens[one.text]:  # the text loops from here on
                continue
            by, nodes = whole.light_costs if one.is_light else costs, min(one.num_guesses, best.num_speculative_tokens)
            kept = sum(slot.accepted for slot in one.slots[:nodes])
            steps.append(Guesses(nodes, kept, draft=max(0.0, by.at(nodes) - by.pass_at(nodes))))
        return possible(steps, passes.pass_at, best.speedup.value, widest=max(passes.undrafted))


class Measured(Examination):
    """``speculation="auto"``: what it does depends on what it has seen, so each text is decoded both ways, one after the
    other."""

    def __init__(self, engine: Engine, candidate: Candidate, params: SamplingParams) -> None:
        """See ``Examination``."""
        super().__init__(engine, candidate, params)
        self._plain = self.own.with_method(speculative_config("none"), speculation="on")
        self._pairs: list[PairedRuns] = []
        self._steps: dict[bool, list[StepTime]] = {False: [], True: []}  # by whether they are the method's own
        self._is_steady = True

    def _look(self, request: Request, *, timed: bool, short: bool) -> None:
        if not self._pairs:
            costs = self.own.measure()
            self._is_steady = costs is None or costs.is_steady
            for lane in (self._plain, self.own):
                _warm_up(lane, request)
        lanes = [self._plain, self.own][:: -1 if len(self._pairs) % 2 else 1]
        ran = {}
        for lane in lanes:
            lane.forget()
            with _own_times(lane) as steps:
                (output,) = lane.generate_batch([request])
            ran[lane is self.own] = (len(output.token_ids), sum(step.seconds for step in steps))
            self._steps[lane is self.own] += steps
        self._took(output.token_ids)
        self._pairs.append(PairedRuns(*ran[False], *ran[True]))

    def found(self, *, seed: int, resamples: int = predict.RESAMPLES) -> Examined:
        """See ``Examination``."""
        whole, steps = sum(self._pairs[1:], self._pairs[0]), self._steps[True]
        # What was planned by costs of a busy machine says little of an idle one: it decides nothing.
        speedup = bootstrap(self._pairs if self._is_steady else [whole], seed=seed)
        mean = whole.tokens / max(1, len(steps))
        most = self.own.speculative.num_speculative_tokens
        found = of_run(
            self._steps[False], steps, speedup.value, tokens=whole.tokens, seconds=whole.seconds, split=self.split
        )
        return self._found([SpeedPrediction(most, mean, mean / speedup.value, speedup)], mean, possible=found)


def examination(engine: Engine, candidate: Candidate, params: SamplingParams) -> Examination:
    """Of a candidate, without a prompt so far. Raises ForetellError where it cannot be loaded."""
    return (Measured if candidate.speculation == "auto" else Predicted)(engine, candidate, params)


def _acceptance(record: GuessRecord, text: int, count: int, rule: str, longest: int) -> TextAcceptance:
    """One text's part of a record, up to ``count`` tokens."""
    steps = [one for one in record.steps if one.text == text and one.position + one.num_tokens <= count]
    reached, kept = [0] * longest, [0.0] * longest
    for step in steps:
        for slot, guess in enumerate(step.slots[:longest]):
            reached[slot] += 1
            kept[slot] += _chance(guess, rule)
    whole = [one for one in steps if one.depth_limit >= longest] or steps
    guesses = Counter(one.num_guesses for one in whole if not one.is_light)
    light = Counter(one.num_guesses for one in whole if one.is_light)
    return TextAcceptance(tuple(reached), tuple(kept), guesses, sum(one.num_tokens for one in steps), light)


def _nested(method: Method) -> bool:
    """Whether shorter proposals are the beginnings of longer ones, so that one run tells of all lengths. A method with a
    light part decides by the whole proposal which part guesses."""
    return method.capabilities.draws and method.light is None


def _chance(guess: GuessSlot, rule: str) -> float:
    """That a guess is kept: exact where both distributions are known, else what came of it."""
    return RULES[rule](guess.agreement) if guess.agreement is not None else float(guess.accepted)


def _fresh(method: Method) -> Method:
    return method.fresh() if method.capabilities.learns else method


class _OwnTimes(list[StepTime]):
    """Steps without the time that their slowest thread was ready and other programs had the processors."""

    _waited: dict[int, tuple[float, float]] | None = None  # at the step before; the first one's has the prompt's too

    def append(self, step: StepTime) -> None:
        """One step more, which has just ended."""
        before, self._waited = self._waited, thread_times()
        since = (
            [now[1] - before[thread][1] for thread, now in self._waited.items() if thread in before] if before else []
        )
        share = 1.0 - max(since, default=0.0) / max(step.seconds, 1e-9)
        super().append(scaled(step, min(1.0, max(LEAST_OWN, share))))


@contextmanager
def _own_times(engine: Engine) -> Iterator[list[StepTime]]:
    """As ``Recorder.timing``."""
    steps = _OwnTimes()
    before, engine.recorder.steps = engine.recorder.steps, steps
    try:
        yield steps
    finally:
        engine.recorder.steps = before


def _steps(engine: Engine, request: Request, params: SamplingParams) -> list[StepTime]:
    with _own_times(engine) as steps:
        engine.generate_batch([dataclasses.replace(request, params=params)])
    return steps


def _warm_up(engine: Engine, request: Request) -> None:
    _steps(engine, request, dataclasses.replace(request.params, max_new_tokens=WARM_UP_TOKENS, ignore_eos=True))
    engine.forget()


def _extra(steps: Sequence[StepTime]) -> float:
    """By how much the first step is longer than the median of the others."""
    return steps[0].seconds - median(step.seconds for step in steps[1:]) if len(steps) > 1 else 0.0


def _best_case(*costs: StepCosts | None) -> float | None:
    """Speedup if every guess were accepted, at the best number of guesses that was timed."""
    found = [(count + 1) / cost for one in costs if one for count, cost in one.step.items() if count]
    return max(found, default=None)
