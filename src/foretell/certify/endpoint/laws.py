"""Distributions at temperatures above 0: short texts against the reference's, long ones against their own scores.

Both screen first. What looks unlikely is sampled again, four times as often, and the fresh samples alone decide: so the
false-alarm rate is that of the second test, and the screen lowers it further.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from foretell.certify.endpoint.client import Answer, Ask, Endpoint
from foretell.certify.endpoint.report import EndpointCheck, Session, check_of, skipped
from foretell.certify.endpoint.statistics import (
    NONE,
    Draw,
    Outcome,
    Statistic,
    along_prefixes,
    at_position,
    calibration,
    fitted_temperature,
    found_deviation,
    total_variation,
)
from foretell.certify.report import DEFECT, NOTHING, Finding

LAW = "Do short sampled texts have the reference's joint distribution?"
CALIBRATION = "Are sampled tokens distributed as their own log probabilities say?"
FAR = 0.1  # of the logarithm of a temperature: nearer ones are not told apart
MORE = 4  # times the samples, to confirm


@dataclass(frozen=True)
class Tested:
    """The tests of one prompt at one temperature."""

    statistics: dict[str, Statistic]  # by what was compared
    variation: list[float]  # at each position, an estimate


def sample(
    session: Session, endpoint: Endpoint, prompt: int, temperature: float, count: int, label: str
) -> list[Outcome]:
    """Short texts as tokens, or whole where the endpoint does not show tokens."""
    tokens = session.budget.law_tokens
    abilities = endpoint.abilities
    each = abilities.choices
    shows = _shows_tokens(session)
    asks = [
        Ask(
            session.prompts[prompt], tokens, temperature, n=min(each, count - done),
            seed=session.seed_of(label, prompt, temperature, done) if abilities.seed else None,
            logprobs=abilities.num_logprobs if shows else None,
        )
        for done in range(0, count, each)
    ]  # fmt: skip
    answers = [answer for found in endpoint.all(asks) for answer in found]
    return [(answer.written or ())[:tokens] if shows else (answer.text,) for answer in answers]


def _shows_tokens(session: Session) -> bool:
    used = [session.endpoint] if session.reference is None else [session.endpoint, session.reference]
    return all(endpoint.abilities.num_logprobs is not None for endpoint in used)


def check_law(session: Session, temperature: float, num_checks: int) -> EndpointCheck:
    """Two-sample tests: of every prompt along all prefixes and at each position, and of all prompts together.

    num_checks: that share alpha. Half of this check's is for all prompts together, which finds what is a little wrong
    everywhere.
    """
    name, budget = f"law at T = {temperature:g}", session.budget
    reference = session.reference
    if reference is None:
        return skipped(name, LAW, "no reference")
    prompts = range(min(budget.law_prompts, len(session.prompts)))
    alpha = budget.alpha / num_checks / 2
    alpha_each = alpha / (len(prompts) * budget.law_tokens)

    def tested(prompt: int, samples: int, label: str) -> Tested:
        session.progress(f"{name}, prompt {prompt}")
        given = sample(session, session.endpoint, prompt, temperature, samples, label)
        expected = sample(session, reference, prompt, temperature, samples, label + " of the reference")
        return compared(given, expected)

    first = {prompt: tested(prompt, budget.samples, "screen") for prompt in prompts}
    whole = together(first.values())
    looked_at = f"{len(prompts)} x {budget.samples} texts of {budget.law_tokens} tokens"
    if not whole.dof:
        reason = "no token of these prompts varies enough to be compared: give other prompts or more samples"
        return EndpointCheck(name, LAW, NOTHING, looked_at, reason)
    power = max(
        found_deviation(whole.dof, whole.count, budget.screen, two_samples=True),
        found_deviation(whole.dof, MORE * whole.count, alpha, two_samples=True),
    )
    suspects = [
        (at, what) for at in prompts for what, one in first[at].statistics.items() if one.p_value < budget.screen
    ]
    whole_suspect = whole.p_value < budget.screen
    again = {
        prompt: tested(prompt, MORE * budget.samples, "confirm")
        for prompt in prompts
        if whole_suspect or any(prompt == at for at, _ in suspects)
    }
    findings: list[Finding] = []
    smallest = min([whole.p_value, *(one.p_value for found in first.values() for one in found.statistics.values())])
    if again:
        confirmed = [again[at].statistics.get(what, NONE) for at, what in suspects]
        smallest = min([1.0, *(one.p_value for one in confirmed)])
        if whole_suspect:
            whole = together(again.values())
            smallest = min(smallest, whole.p_value)
            if whole.p_value < alpha:
                findings.append(_found("all prompts", "along the texts", whole, []))
        for (at, what), one in zip(suspects, confirmed, strict=True):
            if one.p_value < alpha_each:
                findings.append(_found(session.where(at), what, one, again[at].variation))
    summary = f"smallest p {smallest:.2g}" + (", of fresh samples" if again else "")
    summary += f"; finds a total variation of {power:.2f} among frequent next tokens with power 0.9"
    return check_of(
        name, LAW, findings, whole.count, looked_at, summary, temperature=temperature, smallest_p=smallest, alpha=alpha,
        found_total_variation=power, screened_again=len(again),
    )  # fmt: skip


def together(tested: Iterable[Tested]) -> Statistic:
    """The tests along the texts of several prompts, which are independent, in one."""
    return sum((one.statistics.get("along the text", NONE) for one in tested), NONE)


def _found(where: str, what: str, one: Statistic, variation: Sequence[float]) -> Finding:
    words = f"{what}: chi-square {one.value:.1f} with {one.dof} degrees of freedom, p = {one.p_value:.1e}"
    if variation:
        far = max(range(len(variation)), key=lambda index: variation[index])
        words += f"; total variation about {variation[far]:.2f} at token {far}"
    return Finding(DEFECT, where, words, {"what": what, "p_value": one.p_value, "variation": list(variation)})


def compared(given: Sequence[Outcome], expected: Sequence[Outcome]) -> Tested:
    """All tests of two samples of one prompt."""
    depth = max((len(outcome) for outcome in (*given, *expected)), default=0)
    statistics = {"along the text": along_prefixes(given, expected)}
    for position in range(1, depth):
        statistics[f"token {position}"] = at_position(given, expected, position)
    kept = {what: one for what, one in statistics.items() if one.dof}
    return Tested(kept, [total_variation(given, expected, position) for position in range(depth)] or [0.0])


# -- against their own log probabilities ---------------------------------------------------------------------------


def scale(session: Session) -> tuple[str, str]:
    """("raw", ""), ("processed", "") or ("", why not): whether reported log probabilities are before temperature."""
    endpoint = session.endpoint
    if endpoint.abilities.num_logprobs is None:
        return "", "the endpoint gives no log probabilities"
    for prompt in session.prompts:
        asks = [Ask(prompt, 1, value, logprobs=endpoint.abilities.num_logprobs) for value in (0.5, 1.0)]
        cold, warm = (endpoint.one(one) for one in asks)
        if not cold.top or not warm.top:
            continue
        both = [(cold.top[0][key], warm.top[0][key]) for key in cold.top[0] if key in warm.top[0]]
        both = [(a, b) for a, b in both if min(a, b) > -100]
        if len(both) < 2 or max(b for _, b in both) - min(b for _, b in both) < 0.5:
            continue
        if all(abs(a - b) < 0.02 + 0.01 * abs(b) for a, b in both):
            return "raw", ""
        base = both[0]
        if all(abs((a - base[0]) - 2 * (b - base[1])) < 0.05 + 0.02 * abs(b - base[1]) for a, b in both):
            return "processed", ""
    return "", "its log probabilities are neither those before temperature nor those after it"


def draws_of(answers: Sequence[Answer], count: int, most: int) -> list[Draw]:
    """The tokens after the first one, which no guess precedes. Positions where two reported tokens have one text are left
    out: what was drawn there cannot be told."""
    width = min(count, max((len(top) for answer in answers for top in answer.top or ()), default=0))
    out = []
    for answer in answers:
        pairs = list(zip(answer.tokens or (), answer.top or (), strict=False))
        for token, top in pairs[1:most]:
            best = sorted(top.items(), key=lambda one: (-one[1], one[0]))[:width]
            if len(best) < width or any("\ufffd" in key for key, _ in best):
                continue
            probs = tuple(math.exp(value) for _, value in best)
            out.append(Draw(probs, next((at for at, (key, _) in enumerate(best) if key == token), None)))
    return out


def check_calibration(session: Session, temperature: float, scaled: tuple[str, str], num_checks: int) -> EndpointCheck:
    """Long sampled texts of all prompts."""
    name, budget = f"calibration at T = {temperature:g}", session.budget
    kind, reason = scaled
    if not kind:
        return skipped(name, CALIBRATION, reason)
    exponent = temperature if kind == "raw" else 1.0
    alpha = budget.alpha / num_checks
    session.progress(name)
    draws = _long(session, temperature, budget.long_samples, "long")
    found = calibration(draws, exponent)
    findings: list[Finding] = []
    looked_at = f"{found.count} tokens"
    if not found.dof:
        return EndpointCheck(name, CALIBRATION, NOTHING, looked_at, "too few tokens vary to be compared")
    power = max(
        found_deviation(found.dof, found.count, budget.screen, two_samples=False),
        found_deviation(found.dof, MORE * found.count, alpha, two_samples=False),
    )
    p_value, fitted, again = found.p_value, None, False
    if p_value < budget.screen:
        again = True
        draws = _long(session, temperature, MORE * budget.long_samples, "long again")
        found = calibration(draws, exponent)
        p_value, looked_at = found.p_value, looked_at + f" and {found.count} more"
        if p_value < alpha:
            fitted = fitted_temperature(draws)
            ranks = Counter("others" if draw.rank is None else str(draw.rank + 1) for draw in draws)
            words = f"chi-square {found.value:.1f} with {found.dof} degrees of freedom, p = {p_value:.1e}"
            explained = False
            if fitted is not None and kind == "raw":
                explained = abs(math.log(fitted / temperature)) > FAR and calibration(draws, fitted).p_value > 1e-3
                words += f"; the tokens fit temperature {fitted:.2f}{'' if explained else ' best, but not well'}"
            figures = {"p_value": p_value, "fitted_temperature": fitted, "explained": explained, "ranks": dict(ranks)}
            findings.append(Finding(DEFECT, "all prompts", words, figures))
    summary = f"p = {p_value:.2g}" + (" confirmed with fresh samples" if again else "")
    summary += f"; finds a total variation of {power:.2f} between ranks with power 0.9"
    return check_of(
        name, CALIBRATION, findings, found.count, looked_at, summary, temperature=temperature, p_value=p_value,
        alpha=alpha, log_probabilities=kind, found_total_variation=power, screened_again=again,
    )  # fmt: skip


def _long(session: Session, temperature: float, count: int, label: str) -> list[Draw]:
    endpoint = session.endpoint
    asks = [
        Ask(
            prompt, session.budget.max_tokens, temperature, logprobs=endpoint.abilities.num_logprobs,
            seed=session.seed_of(label, at, temperature, k) if endpoint.abilities.seed else None,
        )
        for at, prompt in enumerate(session.prompts)
        for k in range(count)
    ]  # fmt: skip
    answers = [answer for found in endpoint.all(asks) for answer in found]
    return draws_of(answers, endpoint.abilities.num_logprobs or 0, session.budget.max_tokens)
