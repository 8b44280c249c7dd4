"""Speedup before it is timed: from acceptance by slot and the costs of a few short runs, with an interval.

``steps(L)`` of a text of L tokens, each step emitting 1 + accepted tokens and the last cut at the end, is exact by
recursion. Where a method has a light part (``Method.light``), steps in which that part guessed are timed apart: all texts
say how often each part guesses, the timed ones what its steps cost. The interval draws
whole texts anew (bootstrap), those of the acceptance and those of the costs alike, so that it shows what other prompts of
the same kind and other passes would give; a machine that changes is beyond it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, TypeVar

import numpy as np

from foretell.bench.stats import FEW, Interval, interval_of
from foretell.theory.run_costs import StepCosts, StepTiming, step_costs

RESAMPLES = 200
PRIOR_PROMPTS = 1.5
"""Prompts that what was known before counts for: that a method is as fast as plain decoding. The largest figure of several
is largest by chance too; with this, those of docs/doctor.md from 20 prompts come nearer to what 30 others gave."""
Step = TypeVar("Step", bound=StepTiming)


@dataclass(frozen=True)
class TextAcceptance:
    """One text decoded with as many guesses as a method makes."""

    reached: tuple[int, ...]  # of each slot: steps at which all before it were kept, and there was room for it
    kept: tuple[float, ...]  # of each slot: sum of the chances that its guess is kept, 0 where none was made
    guesses: Mapping[int, int]  # number of guesses -> steps that made so many
    num_tokens: int
    light: Mapping[int, int] = field(default_factory=dict)  # the same of steps in which the light part guessed


@dataclass(frozen=True)
class TextTimes:
    """One text decoded for its times, plainly and with guesses."""

    plain: Sequence[StepTiming]
    steps: Sequence[StepTiming]  # of all numbers of guesses
    first: float  # seconds by which a first step is longer than the others: the drafter reads the prompt
    light: Sequence[StepTiming] = ()  # steps in which the light part guessed, which are not among ``steps``


@dataclass(frozen=True)
class SpeedPrediction:
    """A method at one length of proposal."""

    num_speculative_tokens: int
    tokens_per_step: float
    cost: float  # of a step in plain steps
    speedup: Interval


@dataclass(frozen=True)
class Pooled:
    """Texts put together: what a prediction reads."""

    rates: list[float]
    shares: Mapping[int, float]  # of all steps: those with so many guesses
    costs: StepCosts | None
    first: float = 0.0  # by which the first step is longer, in plain steps
    light_shares: Mapping[int, float] = field(default_factory=dict)  # of all steps: those by the light part
    light_costs: StepCosts | None = None


def pool(texts: Sequence[TextAcceptance], times: Sequence[TextTimes], *, split: bool) -> Pooled:
    """Rates by slot, shares of numbers of guesses, and costs of these texts. split: see ``step_costs``."""
    depth = max((len(text.reached) for text in texts), default=0)
    rates: list[float] = []
    for slot in range(depth):
        there = [text for text in texts if len(text.reached) > slot]
        reached = sum(text.reached[slot] for text in there)
        if not reached:
            break
        rates.append(min(1.0, sum(text.kept[slot] for text in there) / reached))
    counted, lightly = Counter[int](), Counter[int]()
    for text in texts:
        counted.update(text.guesses)
        lightly.update(text.light)
    total = counted.total() + lightly.total()
    times = at_one_speed(times)
    plain = [step for one in times for step in one.plain]
    light = [step for one in times for step in one.light]
    # Where one of both kinds was not timed, it costs as the other does.
    guessed = [step for one in times for step in one.steps] or light
    costs = step_costs(plain, guessed, split=split) if plain and guessed else None
    light_costs = step_costs(plain, light, split=split) if plain and light else costs
    firsts = [one.first for one in times]
    first = float(np.median(firsts)) / costs.seconds_plain_step if costs is not None and firsts else 0.0
    return Pooled(
        rates,
        {count: steps / total for count, steps in counted.items()},
        costs,
        first,
        {count: steps / total for count, steps in lightly.items()},
        light_costs,
    )


def at_one_speed(times: Sequence[TextTimes]) -> list[TextTimes]:
    """The times as they would be, had the machine been as fast for every text: plain steps are timed beside those of a
    method, so that a machine which is busy for one text changes no cost."""
    plain = [median(map(_seconds, one.plain)) if one.plain else 0.0 for one in times]
    known = [seconds for seconds in plain if seconds]
    if not known:
        return list(times)
    common = median(known)
    out = []
    for one, seconds in zip(times, plain, strict=True):
        factor = common / seconds if seconds else 1.0
        plainly, steps, light = ([scaled(step, factor) for step in each] for each in (one.plain, one.steps, one.light))
        out.append(TextTimes(plainly, steps, one.first * factor, light))
    return out


def scaled(step: Step, factor: float) -> Step:
    """A step, a dataclass, with its times by a factor."""
    changed: Any = step
    made: Step = replace(
        changed,
        seconds_draft=step.seconds_draft * factor,
        seconds_target=step.seconds_target * factor,
        seconds_rest=step.seconds_rest * factor,
    )
    return made


def believed(measured: Interval, prompts: int) -> Interval:
    """A speedup shrunk towards 1, as logarithms, by how few prompts it was measured on; from under FEW of them without an
    interval, which would be wider than anything that is known of speedups."""
    value = measured.value ** (prompts / (prompts + PRIOR_PROMPTS)) if measured.value > 0 else measured.value
    if prompts < FEW or measured.is_point:
        return Interval(value, value, value)
    return Interval(value, min(measured.low, value), max(measured.high, value))


def _seconds(step: StepTiming) -> float:
    return step.seconds_draft + step.seconds_target + step.seconds_rest


def num_steps(rates: Sequence[float], num_tokens: int) -> float:
    """Expected steps of a text of num_tokens: each emits 1 + the guesses accepted, the last is cut.

    rates: conditional acceptance by slot. Near the end a step has no room for more guesses than tokens are left.
    """
    reach = [1.0]  # chance that at least k guesses are kept
    for rate in rates:
        reach.append(reach[-1] * rate)
    exactly = [reach[k] - (reach[k + 1] if k + 1 < len(reach) else 0.0) for k in range(len(reach))]
    steps = [0.0] * (num_tokens + 1)
    for left in range(1, num_tokens + 1):
        steps[left] = 1.0 + sum(share * steps[left - 1 - k] for k, share in enumerate(exactly) if k + 1 < left)
    return steps[num_tokens]


def step_cost_of(costs: StepCosts, shares: Mapping[int, float]) -> float:
    """Cost of steps that make each number of guesses with this share, in plain steps."""
    return sum(share * costs.at(count) for count, share in shares.items())


def predicted(pooled: Pooled, length: int, num_tokens: int) -> tuple[float, float, float] | None:
    """(tokens a step, cost of a step in plain steps, speedup) of texts of num_tokens; None without costs.

    A step makes as many guesses as were counted, at most ``length``.
    """
    if pooled.costs is None or pooled.light_costs is None or not (pooled.shares or pooled.light_shares):
        return None
    cost = step_cost_of(pooled.costs, _cut(pooled.shares, length))
    cost += step_cost_of(pooled.light_costs, _cut(pooled.light_shares, length))
    steps = num_steps(pooled.rates[:length], num_tokens)
    return num_tokens / steps, cost, num_tokens / (pooled.first + steps * cost)


def _cut(shares: Mapping[int, float], length: int) -> dict[int, float]:
    found: dict[int, float] = {}
    for count, share in shares.items():
        found[min(count, length)] = found.get(min(count, length), 0.0) + share
    return found


def predictions(
    texts: Sequence[TextAcceptance],
    times: Sequence[TextTimes],
    lengths: Sequence[int],
    *,
    num_tokens: int,
    split: bool = True,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> list[SpeedPrediction]:
    """The speedup at each length of proposal, with a 95 % interval. num_tokens: of a text, on average."""
    whole = pool(texts, times, split=split)
    values = {length: predicted(whole, length, num_tokens) for length in lengths}
    drawn: dict[int, list[float]] = {length: [] for length in lengths}
    generator = np.random.default_rng(seed & (1 << 64) - 1)  # it takes no negative one
    for _ in range(resamples if len(texts) > 1 else 0):
        some = [texts[i] for i in generator.integers(len(texts), size=len(texts))]
        timed = [times[i] for i in generator.integers(len(times), size=len(times))] if times else []
        resampled = pool(some, timed, split=split)
        for length in lengths:
            found = predicted(resampled, length, num_tokens)
            if found is not None:
                drawn[length].append(found[2])
    out = []
    for length, found in values.items():
        if found is None:
            continue
        point = Interval(found[2], found[2], found[2])
        known = interval_of(found[2], drawn[length], len(texts)) if drawn[length] else point
        out.append(SpeedPrediction(length, found[0], found[1], known))
    return out
