"""Log probabilities: consistent in themselves, with the greedy text, and with the reference's."""

import math
from collections.abc import Mapping
from statistics import median

from foretell.certify.endpoint.client import Answer, Ask
from foretell.certify.endpoint.report import EndpointCheck, Session, check_of, skipped
from foretell.certify.endpoint.texts import parting
from foretell.certify.report import DEFECT, NEAR_TIE, Finding

LOGPROBS = "Are log probabilities the target's, of the very tokens of the text?"
CERTAIN = -20.0
"""Log probabilities below it are not compared: servers differ in how they write a probability of nearly 0."""


def check_logprobs(session: Session) -> EndpointCheck:
    """Every position of the greedy texts."""
    count = session.endpoint.abilities.num_logprobs
    if count is None:
        return skipped("logprobs", LOGPROBS, "the endpoint gives none")
    findings: list[Finding] = []
    looked_at, worst, compared, first = 0, 0.0, 0, 0
    unguessed: list[float] = []
    later: list[float] = []
    others = None if session.reference is None else session.greedy(reference=True)
    for at, given in enumerate(session.greedy()):
        plain = session.endpoint.one(Ask(session.prompts[at], session.budget.max_tokens))
        if plain.text != given.text:
            found = parting(plain, given)
            gap = None if found is None else found.gap
            words = f"without log probabilities the text is {plain.text[:40]!r}, with them {given.text[:40]!r}"
            near = gap is not None and gap <= session.budget.tolerance
            verdict = NEAR_TIE if near else DEFECT
            findings.append(Finding(verdict, session.where(at), words, {"kind": "text", "gap": gap}))
        for position, problem, figures in _inner(given, session.budget.tolerance):
            findings.append(Finding(DEFECT, f"{session.where(at)}, token {position}", problem, figures))
        looked_at += len(given.tokens or ())
        if others is not None and others[at].logprobs and given.logprobs:
            differences = _against(given, others[at])
            compared += len(differences)
            unguessed += _of_lists(given, others[at], range(1))
            later += _of_lists(given, others[at], range(1, len(differences)))
            for position, own, other in differences:
                difference = abs(own - other)
                worst = max(worst, difference)
                if difference > session.budget.tolerance:
                    first += position == 0
                    words = f"log probability {own:.4f}, by the reference {other:.4f}"
                    where = f"{session.where(at)}, token {position}"
                    findings.append(Finding(DEFECT, where, words, {"kind": "reference", "difference": difference}))
    summary = f"largest difference {worst:.2g} over {compared} tokens" if compared else "compared with themselves alone"
    summary = f"{len(findings)} wrong; {summary}" if findings else summary
    return check_of(
        "logprobs", LOGPROBS, findings, looked_at, f"{looked_at} tokens", summary, largest_difference=worst,
        first_tokens_differ=first, unguessed_difference=median(unguessed or [0.0]),
        later_difference=median(later or [0.0]),
    )  # fmt: skip


def _inner(given: Answer, tolerance: float) -> list[tuple[int, str, dict[str, object]]]:
    """(position, words, figures) of what contradicts itself."""
    out: list[tuple[int, str, dict[str, object]]] = []
    tokens, logprobs, top = given.tokens or (), given.logprobs or (), given.top or ()
    if not len(tokens) == len(logprobs) == len(top):
        out.append((0, f"{len(tokens)} tokens, {len(logprobs)} log probabilities, {len(top)} lists", {"kind": "count"}))
        return out
    joined = "".join(tokens)
    if "\ufffd" not in joined + given.text and squeezed(given.text) not in squeezed(joined):
        out.append((0, f"the tokens spell {joined[:40]!r}, the text is {given.text[:40]!r}", {"kind": "tokens"}))
    for position, (token, own, best) in enumerate(zip(tokens, logprobs, top, strict=True)):
        if own > 1e-3 or _mass(best) > 1.001:
            out.append(
                (position, f"a probability above 1: {math.exp(own):.4g}, sum {_mass(best):.4g}", {"kind": "sum"})
            )
        elif token in best and "\ufffd" not in token and abs(best[token] - own) > max(1e-3, 1e-3 * abs(own)):
            words = f"{token!r} has log probability {own:.4f}, and {best[token]:.4f} among the likeliest"
            out.append((position, words, {"kind": "list"}))
        elif best and max(best.values()) - own > tolerance:
            likeliest = max(best, key=lambda one: best[one])
            words = f"{token!r} was chosen greedily, {max(best.values()) - own:.3g} below {likeliest!r}"
            out.append((position, words, {"kind": "foreign", "difference": max(best.values()) - own}))
    return out


def squeezed(text: str) -> str:
    """Without white space: SentencePiece decodes a single token without the space before its word."""
    return "".join(text.split())


def _mass(best: Mapping[str, float]) -> float:
    return sum(math.exp(min(value, 1.0)) for value in best.values())


def _of_lists(given: Answer, expected: Answer, positions: range) -> list[float]:
    """Differences of the log probabilities of likely tokens that both report at these positions."""
    pairs = zip(given.top or (), expected.top or (), strict=False)
    shared = [(own, other) for at, (own, other) in enumerate(pairs) if at in positions]
    return [abs(own[token] - other[token]) for own, other in shared for token in own.keys() & other.keys()]


def _against(given: Answer, expected: Answer) -> list[tuple[int, float, float]]:
    """(position, log probability, the reference's) of the chosen tokens, as far as both texts agree."""
    out = []
    pairs = zip(given.tokens or (), given.logprobs or (), expected.tokens or (), expected.logprobs or (), strict=False)
    for position, (token, own, other_token, other) in enumerate(pairs):
        if token != other_token:
            break
        if max(own, other) > CERTAIN:
            out.append((position, own, other))
    return out
