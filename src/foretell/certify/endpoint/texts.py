"""Texts that must be equal: with and without speculation, filtered to one token, streamed, alone and under load.

Where two texts part, the reference's log probabilities at that token give the gap between both candidates: rounding
explains a small one, and nothing but a fault a large one.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from foretell.certify.endpoint.client import Answer, Ask
from foretell.certify.endpoint.report import EndpointCheck, Session, check_of, skipped
from foretell.certify.report import DEFECT, NEAR_TIE, Finding

FREQUENCY, PRESENCE = 1.5, 0.5
ONE_TOKEN = {"top_p": 0.001}
"""A filter that leaves the likeliest token alone."""
GREEDY = "Is the greedy text the same as without speculation?"
PENALTIES = "Is it, with frequency and presence penalties?"
FILTERS = "Does top_p = 0.001 at temperature 1 give the greedy text?"
STREAM = "Does a stream give the text of a whole answer?"
LOAD = "Are answers the same alone and beside others?"


@dataclass(frozen=True)
class Parting:
    """Where two texts part."""

    position: int  # in tokens; in characters where there are no tokens
    unit: str
    given: str
    expected: str
    gap: float | None  # of logits, by the reference; None: not known
    at_least: bool  # the gap is a lower bound: the given token is not among the reported ones
    after: str
    written: bool = False  # whether the given token was written before
    preferred: bool = False  # whether it would be the better one without penalties

    def words(self) -> str:
        """One line."""
        if self.gap is None:
            gap = "logit gap not known"
        else:
            gap = f"logit gap {'at least ' if self.at_least else ''}{self.gap:.3g}"
        return f"{self.unit} {self.position}: {self.given!r} instead of {self.expected!r}, {gap}, after {self.after!r}"


def parting(given: Answer, expected: Answer, penalties: tuple[float, float] = (0.0, 0.0)) -> Parting | None:
    """Where an answer leaves the expected one; None where the texts are equal.

    penalties: frequency and presence, which the reported log probabilities do not contain.
    """
    ours, wanted = given.written, expected.written
    if given.text == expected.text and (ours == wanted or ours is None):
        return None
    if ours is None or wanted is None or not expected.top:
        if given.text == expected.text:
            return None
        at = _first_difference(given.text, expected.text)
        tail = expected.text[max(0, at - 24) : at]
        gap = tie_at(expected, at)
        return Parting(at, "character", given.text[at : at + 12], expected.text[at : at + 12], gap, False, tail)
    at = _first_difference(ours, wanted)
    tail = "".join(wanted[:at])[-24:]
    mine = ours[at] if at < len(ours) else "<end>"
    theirs = wanted[at] if at < len(wanted) else "<end>"
    if mine == theirs:  # equal tokens, and texts that differ: what is held back at the end
        return Parting(at, "token", given.text[-12:], expected.text[-12:], None, False, tail)
    top = expected.top[at] if at < len(expected.top) else given.top[at] if given.top and at < len(given.top) else {}
    counts = Counter(wanted[:at])
    gap, at_least = _gap(top, mine, theirs, lambda token: _penalty(counts[token], penalties))
    preferred = mine in top and top[mine] >= top.get(theirs, -math.inf)
    return Parting(at, "token", mine, theirs, gap, at_least, tail, counts[mine] > 0, preferred)


def tie_at(answer: Answer, character: int) -> float | None:
    """The gap of the two best tokens where a character of an answer was written; None where that is not known."""
    if not answer.tokens or not answer.top or "".join(answer.tokens) != answer.text:
        return None
    ends = list(accumulate(len(token) for token in answer.tokens))
    at = next((index for index, end in enumerate(ends) if end > character), len(ends))
    if at >= len(answer.top) or len(answer.top[at]) < 2:
        return None
    best = sorted(answer.top[at].values(), reverse=True)
    return best[0] - best[1]


def _first_difference(given: Sequence[str], expected: Sequence[str]) -> int:
    pairs = enumerate(zip(given, expected, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(given), len(expected)))


def _penalty(count: int, penalties: tuple[float, float]) -> float:
    return penalties[0] * count + penalties[1] * (count > 0)


def _gap(
    top: Mapping[str, float], mine: str, theirs: str, penalty: Callable[[str], float]
) -> tuple[float | None, bool]:
    """(gap of the scores of both tokens or None, whether it is a lower bound).

    An end of the text has no reported token: then the two best ones tell whether there was a tie at all.
    """
    if len(top) < 2:
        return None, False
    scores = sorted((value - penalty(token) for token, value in top.items()), reverse=True)
    if "<end>" in (mine, theirs):
        return scores[0] - scores[1], False
    best = top[theirs] - penalty(theirs) if theirs in top else scores[0]
    if mine in top:
        return abs(best - (top[mine] - penalty(mine))), False
    return max(0.0, best - min(top.values())), True


def judged(session: Session, where: str, found: Parting) -> Finding:
    """A near-tie or a defect."""
    near = found.gap is not None and found.gap <= session.budget.tolerance
    figures = {
        "position": found.position, "unit": found.unit, "given": found.given, "expected": found.expected,
        "gap": found.gap, "at_least": found.at_least, "written": found.written, "preferred": found.preferred,
    }  # fmt: skip
    return Finding(NEAR_TIE if near else DEFECT, where, found.words(), figures)


def _compared(session: Session, given: list[Answer], expected: list[Answer], **options: object) -> list[Finding]:
    penalties = (FREQUENCY, PRESENCE) if options.get("penalised") else (0.0, 0.0)
    out = []
    for index, (mine, theirs) in enumerate(zip(given, expected, strict=True)):
        found = parting(mine, theirs, penalties)
        most = session.budget.max_tokens
        if mine.tokens is not None and len(mine.tokens) > most:
            words = f"{len(mine.tokens)} tokens where max_tokens = {most}"
            out.append(Finding(DEFECT, session.where(index), words, {"end": "length", "tokens": len(mine.tokens)}))
        elif found is not None:
            out.append(judged(session, session.where(index), found))
        elif mine.finish != theirs.finish and mine.completion_tokens == theirs.completion_tokens:
            words = f"the same text ends by {mine.finish!r} instead of {theirs.finish!r}"
            out.append(Finding(DEFECT, session.where(index), words, {"end": "finish", "expected": theirs.finish}))
    return out


def _length(answers: list[Answer]) -> str:
    tokens = sum(len(one.tokens) if one.tokens is not None else one.completion_tokens or 0 for one in answers)
    return f"{len(answers)} texts, {tokens} tokens" if tokens else f"{len(answers)} texts"


def _largest(findings: list[Finding]) -> str:
    gaps = [found.figures["gap"] for found in findings if found.figures.get("gap") is not None]
    if not findings:
        return "all equal"
    return f"{len(findings)} part" + (f", largest logit gap {max(gaps):.3g}" if gaps else "")


def check_greedy(session: Session) -> EndpointCheck:
    """Greedy texts against the reference's."""
    if session.reference is None:
        return skipped("greedy", GREEDY, "no reference: give --reference-url, --plain or --target")
    given, expected = session.greedy(), session.greedy(reference=True)
    findings = _compared(session, given, expected)
    return check_of(
        "greedy", GREEDY, findings, len(given), _length(expected), _largest(findings),
        texts=len(given), texts_parted=len(findings),
    )  # fmt: skip


def check_penalties(session: Session) -> EndpointCheck:
    """Greedy texts under penalties against the reference's."""
    if session.reference is None:
        return skipped("penalties", PENALTIES, "no reference")
    fields = {"frequency_penalty": FREQUENCY, "presence_penalty": PRESENCE}
    texts: list[list[Answer]] = []
    for endpoint in (session.endpoint, session.reference):
        count = endpoint.abilities.num_logprobs
        asks = [Ask(prompt, session.budget.max_tokens, logprobs=count, fields=fields) for prompt in session.prompts]
        texts.append([endpoint.one(one) for one in asks])
    plain = session.greedy(reference=True)
    changed = sum(one.text != other.text for one, other in zip(texts[1], plain, strict=True))
    findings = _compared(session, texts[0], texts[1], penalised=True)
    note = _largest(findings) + f"; the penalties change {changed} of {len(plain)} texts"
    return check_of("penalties", PENALTIES, findings, changed, _length(texts[1]), note, texts_changed=changed)


def check_filters(session: Session) -> EndpointCheck:
    """A filter that leaves one token must give the endpoint's own greedy text."""
    endpoint, expected = session.endpoint, session.greedy()
    count = endpoint.abilities.num_logprobs
    fields = {**endpoint.abilities.neutral, **ONE_TOKEN}
    asks = [
        Ask(prompt, session.budget.max_tokens, 1.0, logprobs=count, seed=_seed(session, "filters", at), fields=fields)
        for at, prompt in enumerate(session.prompts)
    ]
    findings = _compared(session, [endpoint.one(one) for one in asks], expected)
    return check_of("filters", FILTERS, findings, len(expected), _length(expected), _largest(findings))


def check_stream(session: Session) -> EndpointCheck:
    """Streamed greedy texts against whole ones."""
    expected = session.greedy()
    findings = []
    for at, (prompt, whole) in enumerate(zip(session.prompts, expected, strict=True)):
        streamed = session.endpoint.one(Ask(prompt, session.budget.max_tokens, stream=True))
        found = parting(streamed, whole)
        if found is not None:
            finding = judged(session, session.where(at), found)
            lost = whole.text.startswith(streamed.text) or streamed.text.startswith(whole.text)
            findings.append(replace(finding, verdict=DEFECT) if lost else finding)
        elif streamed.finish != whole.finish:
            words = f"the stream ends by {streamed.finish!r}, the whole answer by {whole.finish!r}"
            findings.append(Finding(DEFECT, session.where(at), words, {"end": "finish", "given": streamed.finish}))
    return check_of("stream", STREAM, findings, len(expected), f"{len(expected)} texts", _count(findings))


def check_load(session: Session) -> EndpointCheck:
    """Greedy and seeded texts asked for together, among sampled texts of other lengths, against those asked for alone."""
    endpoint, budget = session.endpoint, session.budget
    count = endpoint.abilities.num_logprobs
    alone = session.greedy()
    asks: list[Ask] = []
    for copy in range(2):
        for at, prompt in enumerate(session.prompts):
            asks.append(Ask(prompt, budget.max_tokens, logprobs=count))
            asks.append(
                Ask(prompt, 4 + (7 * at + copy) % budget.max_tokens, 1.0, seed=_seed(session, "noise", at, copy))
            )
    found = endpoint.all(asks)
    together = [answers[0] for answers in found[::2]]
    findings = _compared(session, together[: len(alone)], alone) + _compared(session, together[len(alone) :], alone)
    looked_at = f"{len(together)} texts among {len(asks)} requests, {endpoint.concurrency} at a time"
    return check_of("load", LOAD, findings, len(together), looked_at, _largest(findings))


def _seed(session: Session, *parts: object) -> int | None:
    return session.seed_of(*parts) if session.endpoint.abilities.seed else None


def _count(findings: list[Finding]) -> str:
    return f"{len(findings)} differ" if findings else "all equal"
