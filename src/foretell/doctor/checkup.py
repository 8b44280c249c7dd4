"""This machine, this target, these drafters: what is measured of each, the predicted speedup, one recommendation."""

import dataclasses
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from foretell.analysis.drafter import RULES
from foretell.analysis.observer import GuessSlot, Record, observe
from foretell.bench.stats import best_of, first_loop
from foretell.core.errors import ConfigError, ForetellError
from foretell.core.params import SamplingParams
from foretell.doctor.candidates import Candidate
from foretell.doctor.machine import Machine, look
from foretell.doctor.predict import Prediction, TextAcceptance, TextTimes, pool, predictions
from foretell.doctor.warn import Warned, about_choice, about_method, about_run
from foretell.draft.base import Method
from foretell.draft.config import MethodConfig
from foretell.engine.config import speculative_config
from foretell.engine.engine import Engine, Request
from foretell.engine.recorder import StepTime
from foretell.planner.observed import StepCosts

TIMED_TOKENS = 32
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
    predictions: list[Prediction]

    @property
    def best(self) -> Prediction | None:
        """The length with the largest predicted speedup."""
        return max(self.predictions, key=lambda one: one.speedup.value, default=None)


@dataclass(frozen=True)
class Checkup:
    """The doctor's report on a machine, a target and what can guess for it."""

    target: str
    temperature: float
    num_prompts: int
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

    @property
    def share_of_limit(self) -> float | None:
        """Of the memory's bandwidth, that a plain pass of the target reaches; above 1 the weights stay in caches."""
        least = self.machine.least_pass_seconds
        return least / self.plain_pass_seconds if least and self.plain_pass_seconds else None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "machine": self.machine.to_dict(), "share_of_limit": self.share_of_limit}


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
    flags: Sequence[str] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> Checkup:
    """Examine every candidate on the prompts (token ids), and recommend one.

    target: as the command line has it. guesses: a guess of each prompt's answer, for methods that read one. num_timed:
    prompts by which costs are timed, a few short runs each. flags: further options of the recommended command. progress
    is called with what is done next. Raises ConfigError where no prompt fits.
    """
    room = engine.model.spec.max_positions
    fitting = [index for index, ids in enumerate(prompts) if 0 < len(ids) < room - 1]
    if not fitting:
        raise ConfigError(f"none of {len(prompts)} prompts fits the context of {room} tokens")
    params = SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
    requests = [
        Request(list(prompts[index]), params, guesses[index] if index < len(guesses) else None) for index in fitting
    ]
    progress("memory and machine")
    machine = look(engine, bandwidth=bandwidth)
    found: list[Examined] = []
    not_tried, warned = dict(left), []
    passes: list[StepCosts] = []
    looped = lengths = 0.0
    for candidate in tried:
        called = candidate.method if candidate.drafter is None else f"{candidate.method} ({candidate.drafter})"
        progress(called)
        try:
            own = engine.with_method(candidate.config, speculation="on", drafter_errors="raise")
        except ForetellError as error:
            not_tried[called] = str(error)
            continue
        texts, times, agreement, ended = _measure(own, requests, params, num_timed)
        split = engine.model.spec.device.type == "cpu"
        whole = pool(texts, times, split=split)
        longest = own.speculative.num_speculative_tokens
        mean = sum(text.num_tokens for text in texts) / len(texts)
        made = list(range(1, min(longest, len(whole.rates)) + 1)) if _nested(own.method) else [longest]
        if whole.costs is not None:
            passes.append(whole.costs)
        looped, lengths = ended, mean
        steps = sum(sum(text.guesses.values()) + sum(text.light.values()) for text in texts)
        one = Examined(
            method=candidate.method,
            drafter=candidate.drafter,
            verify=own.speculative.verifier.name,
            slots=whole.rates,
            agreement=agreement,
            mean_acceptance_length=sum(text.num_tokens for text in texts) / max(1, steps),
            guess_cost=whole.costs.per_guess if whole.costs is not None else None,
            best_case=_best_case(whole.costs, whole.light_costs),
            predictions=predictions(texts, times, made, num_tokens=max(1, round(mean)), split=split, seed=seed),
        )
        found.append(one)
        warned += about_method(engine, own, one)
    plain_step = median(one.seconds_plain_step for one in passes) if passes else None
    plain_pass = median(one.seconds_plain_pass for one in passes) if passes else None
    warned = [*about_run(machine, plain_pass, looped=looped, tokens=lengths, prompts=len(fitting)), *warned]
    config, conclusion = recommend(found, len(fitting))
    warned += about_choice(found, config)
    return Checkup(
        target=target,
        temperature=temperature,
        num_prompts=len(fitting),
        tokens_a_text=lengths,
        machine=machine,
        plain_step_seconds=plain_step,
        plain_pass_seconds=plain_pass,
        methods=sorted(found, key=lambda one: -(one.best.speedup.value if one.best else 0.0)),
        left=not_tried,
        warnings=warned,
        command=command_of(target, config, temperature, flags),
        conclusion=conclusion,
        recommended=config,
    )


def recommend(found: Sequence[Examined], num_prompts: int) -> tuple[dict[str, Any], str]:
    """(speculative configuration, why): the fastest by prediction among those whose interval, as the best of all that were
    tried, is above plain decoding; a single prompt gives no interval, and no recommendation."""
    known = [(one, one.best) for one in found if one.best is not None]
    wide = [best_of(best.speedup, len(known), num_prompts) for _, best in known]
    paying = [
        (one, best, value)
        for (one, best), value in zip(known, wide, strict=True)
        if value.low > 1.0 and not value.is_point
    ]
    if not paying:
        near = max((value.value for value in wide), default=None)
        most = "nothing could be measured" if near is None else f"the best is predicted at {near:.2f} times"
        return {"method": "none"}, f"no method is expected to beat plain decoding here with certainty: {most}"
    one, best, value = max(paying, key=lambda found: found[2].value)
    config: dict[str, Any] = {"method": one.method, **({"model": one.drafter} if one.drafter is not None else {})}
    config["num_speculative_tokens"] = best.num_speculative_tokens
    others = [other.method for other, _, its in paying if other is not one and its.high >= value.low]
    near_by = f"; {', '.join(others)} may do as well" if others else ""
    of = f", as the best of {len(known)}" if len(known) > 1 else ""
    return config, (
        f"{one.method} with {best.num_speculative_tokens} guesses is expected to be {value.value:.2f} times as fast as "
        f"plain decoding [{value.low:.2f}, {value.high:.2f}{of}]{near_by}"
    )


def command_of(target: str, config: Mapping[str, Any], temperature: float, flags: Sequence[str] = ()) -> str:
    """The command line that generates so."""
    words = ["foretell", "generate", "--target", target, *flags, "--method", config["method"]]
    if config.get("model") is not None:
        words += ["--draft", str(config["model"])]
    if "num_speculative_tokens" in config:
        words += ["--num-speculative-tokens", str(config["num_speculative_tokens"])]
    if temperature:
        words += ["--temperature", f"{temperature:g}"]
    return " ".join(shlex.quote(word) for word in words) + ' "PROMPT"'


def _measure(
    own: Engine, requests: Sequence[Request], params: SamplingParams, num_timed: int
) -> tuple[list[TextAcceptance], list[TextTimes], float | None, float]:
    """(acceptance of every text, times of some, share of first guesses that are the target's first choice, share of texts
    that looped)."""
    config, method = own.speculative, own.method
    can = method.capabilities
    chain: dict[str, Any] = {"shape": "chain"} if "chain" in can.shapes else {}
    drawn = can.draws and params.temperature > 0
    rule, draws = ("rejection", "iid") if drawn else ("exact", "auto")
    observed, record = observe(
        own, dataclasses.replace(config, **{"verify": rule, "draws": draws, **chain}), _fresh(method)
    )
    rate = config.verifier.name if config.verifier.name in RULES else "rejection"
    texts, looped = [], 0
    seed = params.seed or 0
    for index, request in enumerate(requests):
        record.text = index
        given = dataclasses.replace(request, params=dataclasses.replace(params, seed=seed + index))
        (output,) = observed.generate_batch([given])
        end = first_loop(output.token_ids)
        looped += end is not None
        count = len(output.token_ids) if end is None else end
        texts.append(_acceptance(record, index, count, rate, config.num_speculative_tokens))
    firsts = [step.slots[0].agreement for step in record.steps if step.slots]
    known = [found.agrees for found in firsts if found is not None]
    agreement = sum(known) / len(known) if known else None
    timed = dataclasses.replace(config, **{"draws": "auto", **chain})
    return texts, _times(own, timed, method, requests[:num_timed], params), agreement, looped / len(requests)


def _acceptance(record: Record, text: int, count: int, rule: str, longest: int) -> TextAcceptance:
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


def _times(
    own: Engine, config: MethodConfig, method: Method, requests: Sequence[Request], params: SamplingParams
) -> list[TextTimes]:
    """Short runs of plain decoding and of each length in turn, prompt by prompt, so that a slower machine slows all."""
    longest = config.num_speculative_tokens
    lengths = sorted({*(length for length in TIMED_LENGTHS if length < longest), longest})
    lengths = lengths if _nested(method) else [longest]
    lanes = [own.with_method(speculative_config("none"))]
    for length in lengths:
        made = dataclasses.replace(config, num_speculative_tokens=length)
        lanes.append(own.with_method(made, method=_fresh(method)))
    short = dataclasses.replace(
        params, max_new_tokens=min(params.max_new_tokens, TIMED_TOKENS), ignore_eos=True, seed=params.seed
    )
    for lane in lanes if requests else ():
        _steps(lane, requests[0], dataclasses.replace(short, max_new_tokens=WARM_UP_TOKENS))
        lane.forget()
    out = []
    for request in requests:
        found = [_steps(lane, request, short) for lane in lanes]
        plain, *guessed = found
        first = max(0.0, _extra(guessed[-1]) - _extra(plain))
        steps = [step for one in guessed for step in (one[1:] or one)]
        light = [step for step in steps if step.is_light]
        out.append(TextTimes(plain[1:] or plain, [step for step in steps if not step.is_light], first, light))
    return out


def _steps(engine: Engine, request: Request, params: SamplingParams) -> list[StepTime]:
    with engine.recorder.timing() as steps:
        engine.generate_batch([dataclasses.replace(request, params=params)])
    return steps


def _extra(steps: Sequence[StepTime]) -> float:
    """By how much the first step is longer than the median of the others."""
    return steps[0].seconds - median(step.seconds for step in steps[1:]) if len(steps) > 1 else 0.0


def _best_case(*costs: StepCosts | None) -> float | None:
    """Speedup if every guess were accepted, at the best number of guesses that was timed."""
    found = [(count + 1) / cost for one in costs if one for count, cost in one.step.items() if count]
    return max(found, default=None)
