"""The quality of a drafter, before any decoding is timed: acceptance by slot, calibration, costs, predicted speedup.

Accuracy against the tokens of a data set misleads; what counts is acceptance at contexts of the target's own text, slot
by slot, given that the slots before were kept, and how well the drafter's confidence predicts it. All is measured in
the engine's own steps, on chains. Contexts of one text are not independent: standard errors are over texts.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from typing import Any

import torch

from foretell.analysis.observer import Agreement, GuessSlot, Step, observe
from foretell.analysis.theory.length import expected_tokens
from foretell.core.errors import ConfigError
from foretell.core.params import SamplingParams
from foretell.draft.base import Method
from foretell.draft.config import MethodConfig
from foretell.engine.engine import Engine, Prompt, Request
from foretell.engine.recorder import StepTime
from foretell.planner.cost_model import speedup
from foretell.planner.run_costs import StepCosts, step_costs

NUM_BINS = 10
TIMED_TOKENS = 48
RULES: dict[str, Callable[[Agreement], float]] = {
    "rejection": lambda probs: probs.rejection,
    "coupled": lambda probs: probs.coupled,
    "exact": lambda probs: probs.first,
}
"""Rules whose chance to accept a guess, before it is drawn, is known from p and q; ``exact`` for the argmax of q."""


@dataclass(frozen=True)
class Mean:
    """A mean over contexts."""

    value: float
    standard_error: float | None  # over texts; None with fewer than two


@dataclass(frozen=True)
class SlotReport:
    """One slot of a proposal, 1 the first, over the contexts at which all slots before it were kept."""

    slot: int
    num_contexts: int
    num_guesses: int  # contexts at which the drafter made a guess
    num_accepted: int
    acceptance: Mean | None  # accepted / guesses
    by_rule: dict[str, Mean]  # the exact chance under each of RULES; empty where q is not known, and at temperature 0
    agreement: Mean | None  # how often p and q have their largest probability at one token
    confidence: float | None  # mean of the largest probability of q


@dataclass(frozen=True)
class Bin:
    """Contexts of similar confidence."""

    num_contexts: int
    confidence: float  # mean of the largest probability of q
    observed: float  # mean of p of that token; at temperature 0 the share at which the target chose it


@dataclass(frozen=True)
class LengthReport:
    """Predicted, not timed: steps of this many guesses."""

    num_speculative_tokens: int
    expected_tokens: float  # a step
    draft_and_verify_cost: float | None  # c_total + v in plain passes
    predicted_speedup: float | None  # expected_tokens / (c_total + v)
    predicted_speedup_with_overhead: float | None  # whole steps against whole plain steps


@dataclass(frozen=True)
class DrafterFigures:
    """Everything at one temperature."""

    temperature: float
    measured_with: str  # verifier and draws while acceptance was measured
    num_texts: int
    num_steps: int
    num_contexts: int  # at which a guess was made
    mean_acceptance_length: float  # measured: 1 + accepted / steps
    expected_length: float  # tokens a step by the product of the slots' rates
    rule: str  # whose acceptance the expectation and the predictions take: the configured one where its rate is known
    calibration_error: float | None  # ECE over NUM_BINS bins of equal width
    bins: list[Bin]
    slots: list[SlotReport]
    costs: StepCosts | None
    lengths: list[LengthReport]
    best: int  # num_speculative_tokens with the largest predicted speedup, overheads counted; 0: plain decoding
    best_speedup: float


@dataclass(frozen=True)
class DrafterReport:
    """A drafter on a target."""

    target: str
    config: dict[str, Any]
    num_speculative_tokens: int
    seed: int
    max_new_tokens: int
    temperatures: list[DrafterFigures]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        found = asdict(self)
        for at, given in zip(found["temperatures"], self.temperatures, strict=True):
            at["costs"] = given.costs.to_dict() if given.costs else None
        return found


def evaluate(
    engine: Engine,
    prompts: Sequence[Request | Prompt],
    *,
    num_speculative_tokens: int | None = None,
    temperatures: Sequence[float] = (0.0, 1.0),
    max_new_tokens: int = 128,
    seed: int = 0,
    num_timed: int = 3,
    until: Callable[[Sequence[int]], int | None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> DrafterReport:
    """Measure engine's drafter on these prompts, with chains of num_speculative_tokens (None: as configured).

    Every prompt is decoded once at each temperature while probabilities and results of its guesses are recorded, under
    the rule ``rejection`` where the method draws (at temperature 0, and for all others, ``exact``: the same
    acceptance). Then num_timed prompts are decoded again, plainly and with fewer and fewer guesses, for the costs.
    until(output) returns how many tokens of an output count (bench.first_loop; None: all). progress is called with
    (decodings done, in all).

    Raises ConfigError where there is nothing to evaluate, PromptError.
    """
    given = engine.speculative
    if given.method == "none":
        raise ConfigError("method 'none' guesses nothing, so there is nothing to evaluate: name a method")
    if not prompts or not temperatures:
        raise ConfigError(
            f"{len(prompts)} prompts and {len(temperatures)} temperatures: at least one of each is needed"
        )
    longest = given.num_speculative_tokens if num_speculative_tokens is None else num_speculative_tokens
    can = engine.method.capabilities
    chain = {"shape": "chain"} if "chain" in can.shapes else {}
    timed_config = dataclasses.replace(given, num_speculative_tokens=longest, draws="auto", **chain)
    requests = [prompt if isinstance(prompt, Request) else Request(prompt) for prompt in prompts]
    timed = [index for index in range(len(requests)) if index < num_timed]
    lengths = _timed_lengths(longest) if can.draws else [longest]
    done, total = 0, len(temperatures) * (len(requests) + len(timed) * (1 + len(lengths)))

    def tick() -> None:
        nonlocal done
        if progress is not None:
            progress(done, total)
        done += 1

    reports = []
    for temperature in temperatures:
        params = SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens)
        drawn = can.draws and temperature > 0
        rule, draws = ("rejection", "iid") if drawn else ("exact", "auto")
        config = dataclasses.replace(timed_config, verify=rule, draws=draws)
        method = _unread(engine.method)
        observed, record = observe(engine, config, method)
        counted: dict[int, int] = {}
        for index, request in enumerate(requests):
            tick()
            record.text = index
            (output,) = observed.generate_batch(
                [dataclasses.replace(request, params=dataclasses.replace(params, seed=seed + index))]
            )
            end = until(output.token_ids) if until is not None else None
            counted[index] = len(output.token_ids) if end is None else end
        steps = [step for step in record.steps if step.position + step.num_tokens <= counted[step.text]]
        costs = _costs(engine, timed_config, method, [requests[index] for index in timed], params, lengths, seed, tick)
        rate = given.verifier.name if given.verifier.name in RULES else "rejection"
        measured_with = f"{rule}, draws {draws if drawn else 'fixed'}"
        reports.append(_report(temperature, measured_with, rate, steps, longest, costs, drawn=can.draws))
    if progress is not None:
        progress(total, total)
    spec = engine.model.spec
    return DrafterReport(spec.name, given.resolved(), longest, seed, max_new_tokens, reports)


def _unread(method: Method) -> Method:
    """A method without data from the previous temperature: methods without weights may learn from what they read."""
    can = method.capabilities
    return method if can.draws or can.needs_draft or can.needs_head or can.reads_target else copy.deepcopy(method)


def _timed_lengths(longest: int) -> list[int]:
    """1, 2, 4, ... and the longest."""
    return sorted({*(2**power for power in range(7) if 2**power < longest), longest})


def _costs(
    engine: Engine, config: MethodConfig, method: Method, requests: Sequence[Request], params: SamplingParams,
    lengths: Sequence[int], seed: int, tick: Callable[[], None],
) -> StepCosts | None:  # fmt: skip
    """Costs by short runs, prompt by prompt in turn, so that a machine that slows down slows all of them."""
    lanes = [engine.with_method(None)]
    for length in lengths:
        own = dataclasses.replace(config, num_speculative_tokens=length)
        lanes.append(engine.with_method(own, method=method, drafter_errors="raise"))
    times: list[list[Any]] = [[] for _ in lanes]
    for index, request in enumerate(requests):
        short = dataclasses.replace(
            params, seed=seed + index, max_new_tokens=min(params.max_new_tokens, TIMED_TOKENS), ignore_eos=True
        )
        for lane, found in zip(lanes, times, strict=True):
            tick()
            found += step_times(lane, dataclasses.replace(request, params=short))
    steps = [step for found in times[1:] for step in found]
    if not times[0] or not steps:
        return None
    return step_costs(times[0], steps, split=engine.model.spec.device.type == "cpu")


def step_times(engine: Engine, request: Request) -> list[StepTime]:
    """Times of one decoding's steps but the first, in which a drafter may read the prompt (where there are others)."""
    with engine.recorder.timing() as steps:
        engine.generate_batch([request])
    return steps[1:] or steps


def _report(
    temperature: float, measured_with: str, rate: str, steps: Sequence[Step], longest: int, costs: StepCosts | None, *,
    drawn: bool,
) -> DrafterFigures:  # fmt: skip
    """Figures of the steps of one temperature."""
    slots = [_slot(number, steps, temperature) for number in range(1, longest + 1)]
    known = [bool(slot.by_rule) for slot in slots if slot.num_guesses]
    rule = rate if known and all(known) else "measured"
    rates: list[float] = []
    for slot in slots:
        chance = slot.by_rule.get(rule) if rule != "measured" else slot.acceptance
        if chance is None:
            break
        # A drafter with probabilities guesses wherever there is room; others may find no guess.
        rates.append(chance.value if drawn else chance.value * slot.num_guesses / slot.num_contexts)
    whole = [step for step in steps if step.depth_limit >= longest] or list(steps)
    accepted = sum(slot.accepted for step in whole for slot in step.slots)
    lengths = [_length(count, rates, [step.num_guesses for step in whole], costs) for count in range(1, len(rates) + 1)]
    predicted = {x.num_speculative_tokens: x.predicted_speedup_with_overhead or 0.0 for x in lengths}
    best = max(predicted, key=lambda count: predicted[count], default=0)
    pays = best > 0 and predicted[best] > 1.0
    error, bins = calibration([slot.agreement for step in steps for slot in step.slots if slot.agreement is not None])
    return DrafterFigures(
        temperature=temperature,
        measured_with=measured_with,
        num_texts=len({step.text for step in steps}),
        num_steps=len(steps),
        num_contexts=sum(slot.num_guesses for slot in slots),
        mean_acceptance_length=1.0 + accepted / max(1, len(whole)),
        expected_length=expected_tokens(rates, len(rates)),
        rule=rule,
        calibration_error=error,
        bins=bins,
        slots=[slot for slot in slots if slot.num_contexts],
        costs=costs,
        lengths=lengths,
        best=best if pays else 0,
        best_speedup=predicted[best] if pays else 1.0,
    )


def _slot(number: int, steps: Sequence[Step], temperature: float) -> SlotReport:
    """Slot ``number`` of all steps that came to it."""
    reached: list[tuple[int, GuessSlot]] = [(x.text, x.slots[number - 1]) for x in steps if len(x.slots) >= number]
    made = [(text, slot) for text, slot in reached if slot.made]
    distributions = [(text, slot.agreement) for text, slot in made if slot.agreement is not None]
    sampled = distributions if temperature > 0 else []
    by_rule = {name: mean([(text, of(probs)) for text, probs in sampled]) for name, of in RULES.items()}
    return SlotReport(
        slot=number,
        num_contexts=len(reached),
        num_guesses=len(made),
        num_accepted=sum(slot.accepted for _, slot in made),
        acceptance=mean([(text, float(slot.accepted)) for text, slot in made]),
        by_rule={name: found for name, found in by_rule.items() if found is not None},
        agreement=mean([(text, float(probs.agrees)) for text, probs in distributions]),
        confidence=sum(probs.confidence for _, probs in distributions) / len(distributions) if distributions else None,
    )


def mean(values: Sequence[tuple[int, float]]) -> Mean | None:
    """The mean over contexts of (text, value), its error over texts (a ratio estimator: texts differ in length)."""
    if not values:
        return None
    average = sum(value for _, value in values) / len(values)
    texts: dict[int, float] = {}
    for text, value in values:
        texts[text] = texts.get(text, 0.0) + value - average
    count = len(texts)
    if count < 2:
        return Mean(average, None)
    spread = sum(excess * excess for excess in texts.values()) * count / (count - 1)
    return Mean(average, sqrt(spread) / len(values))


def calibration(distributions: Sequence[Agreement]) -> tuple[float | None, list[Bin]]:
    """(ECE, bins): the mean over contexts of |confidence - what came of it|, both averaged over bins of equal width first.

    Naeini et al. (AAAI 2015). What came of it is p of the drafter's most probable token: no draw adds noise.
    """
    if not distributions:
        return None, []
    confidence = torch.tensor([probs.confidence for probs in distributions], dtype=torch.float64)
    observed = torch.tensor([probs.first for probs in distributions], dtype=torch.float64)
    place = (confidence * NUM_BINS).long().clamp(0, NUM_BINS - 1)
    bins = []
    for index in range(NUM_BINS):
        inside = place == index
        if bool(inside.any()):
            bins.append(Bin(int(inside.sum()), float(confidence[inside].mean()), float(observed[inside].mean())))
    error = sum(bin_.num_contexts * abs(bin_.confidence - bin_.observed) for bin_ in bins) / len(distributions)
    return error, bins


def _length(count: int, rates: Sequence[float], guesses: Sequence[int], costs: StepCosts | None) -> LengthReport:
    """Steps of count guesses, or fewer where a step of the run found fewer."""
    tokens = expected_tokens(rates[:count], count)
    cut = [min(number, count) for number in guesses]
    shares: Mapping[int, float] = {number: cut.count(number) / len(cut) for number in sorted(set(cut))}
    passes = costs.of_pass(shares) if costs is not None else None
    whole = costs.of_step(shares) if costs is not None else None
    return LengthReport(
        count,
        tokens,
        passes,
        speedup(tokens, passes) if passes else None,
        speedup(tokens, whole) if whole else None,
    )
