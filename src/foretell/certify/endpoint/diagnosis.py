"""From checks that failed to faults by name: what such a pattern usually comes from."""

from collections.abc import Sequence
from dataclasses import replace

from foretell.certify.endpoint.report import APART, EndpointCheck, Fault
from foretell.certify.report import DEFECT

FAILS = "requests fail"
OTHER_MODEL = "another model"
UNVERIFIED = "unverified tokens"
TEMPERATURE = "wrong temperature"
DISTRIBUTION = "wrong distribution"
PENALTIES = "penalties dropped"
FILTERS = "filters dropped"
SCORES = "foreign log probabilities"
STOP_IGNORED = "stop ignored"
STOP_KEPT = "stop kept in the text"
STOP_EARLY = "stop in the wrong place"
FINISH = "wrong finish reason"
LENGTH = "wrong length"
SEED = "seed ignored"
REPEATS = "samples repeat"
LOAD = "answers change under load"
STREAM = "stream differs"
ARITHMETIC = "other arithmetic"
SAME = 2e-3
"""Log probabilities of one arithmetic are nearer to each other, in the median over likely tokens."""
MOST = 1.0
"""Those of the same weights are nearer to each other, by whatever kernels."""

WHAT = {
    FAILS: "Requests that should be answered fail.",
    OTHER_MODEL: "Texts or log probabilities differ from the first token on, where nothing is guessed yet: other "
    "weights, another quantisation, another prompt template, or another beginning-of-text token than the reference's.",
    UNVERIFIED: "At temperature 0 the endpoint writes tokens that the target would not, by gaps that rounding cannot "
    "explain, and the first token is right. Usual causes: the extra (bonus) token comes from the draft, a guess is kept "
    "without being checked, or positions, cache slots or mask are wrong after a rejected guess.",
    TEMPERATURE: "Greedy texts and texts at temperature 1 are right, or the tokens fit another temperature: guesses are "
    "drawn or checked at another temperature than the request's.",
    DISTRIBUTION: "Greedy texts are right and sampled ones follow another distribution. Usual causes: after a rejected "
    "guess a token is drawn from the target, not from the residual; acceptance uses another q than the guess was drawn "
    "from; draft and verification share random numbers.",
    PENALTIES: "Plain greedy texts are right and penalised ones are not: the penalties are not applied at guessed "
    "positions, or do not count the guesses before them.",
    FILTERS: "A filter that leaves the likeliest token alone lets others through: top_p is not applied at "
    "guessed positions.",
    SCORES: "Log probabilities are not the target's of the tokens in the text. Usual causes: they are the draft's, those "
    "of a neighbouring position, or of the distribution after processors.",
    STOP_IGNORED: "The text goes on behind a stop text: it is not looked for within a step or across tokens.",
    STOP_KEPT: "The stop text, or a part of it, is given out as text.",
    STOP_EARLY: "The text ends elsewhere than before the first occurrence of the stop text.",
    FINISH: "finish_reason contradicts the way the text ended.",
    LENGTH: "max_tokens is not kept: the guesses of the last step are given out too, or counts do not match the text.",
    SEED: "Requests with equal seeds give different texts.",
    REPEATS: "Requests that should give different samples give the same one.",
    LOAD: "The same request has another answer beside other requests: rows are mixed up, or state leaks between them.",
    STREAM: "A stream has another text, or another end, than the whole answer.",
    ARITHMETIC: "Its arithmetic differs from the reference's: log probabilities by up to {:.2g}, and before anything is "
    "guessed as much as later. Compare with a plain server of the same engine: --reference-url URL",
}


def settled(checks: Sequence[EndpointCheck]) -> tuple[EndpointCheck, ...]:
    """The checks; APART where another arithmetic than the reference's (quantised kernels) explains all that is wrong.

    It is seen in log probabilities before the first guess. It explains partings whose gap is at most twice the largest
    difference, since the scores of both tokens move; penalties, too, since engines count them differently (llama.cpp:
    over the prompt); and samples that fit their own log probabilities.
    """
    by_name = {check.name: check for check in checks}
    figures = by_name["logprobs"].figures if "logprobs" in by_name else {}
    worst, before = figures.get("largest_difference", 0.0), figures.get("unguessed_difference", 0.0)
    if not (before > SAME and worst <= MOST and figures["later_difference"] <= 4 * before):
        return tuple(checks)

    def wrong(name: str) -> list[dict[str, object]]:
        check = by_name.get(name)
        return [] if check is None else [found.figures for found in check.findings if found.verdict == DEFECT]

    def tied(gap: object, at_least: object) -> bool:
        return isinstance(gap, float) and not at_least and gap <= 2 * worst

    apart = {"logprobs"} if all(one.get("kind") == "reference" for one in wrong("logprobs")) else set()
    if all(tied(one.get("gap"), one.get("at_least")) for one in wrong("greedy")):
        apart.add("greedy")
        penalised = by_name.get("penalties")
        if penalised and not _unanswered(penalised) and not _ends(penalised) and not _by_penalties(penalised):
            apart.add("penalties")
        laws = (check for name, check in by_name.items() if name.startswith("law") and not _unanswered(check))
        apart |= {check.name for check in laws if not wrong(check.name.replace("law", "calibration"))}
    return tuple(_apart(check) if check.verdict == DEFECT and check.name in apart else check for check in checks)


def _apart(check: EndpointCheck) -> EndpointCheck:
    findings = (replace(one, verdict=APART) if one.verdict == DEFECT else one for one in check.findings)
    return replace(check, verdict=APART, findings=tuple(findings))


def faults_of(checks: Sequence[EndpointCheck]) -> tuple[Fault, ...]:
    """Every failed check is evidence of at least one fault."""
    failed = {check.name: check for check in checks if check.verdict == DEFECT}
    evidence: dict[str, list[str]] = {}

    def add(fault: str, check: str) -> None:
        evidence.setdefault(fault, []).append(check)

    greedy = failed.get("greedy")
    broken = None
    if greedy is not None:
        positions = [found.figures["position"] for found in greedy.findings if "position" in found.figures]
        if positions:
            scores = next((check for check in checks if check.name == "logprobs"), None)
            first = max(positions.count(0), 0 if scores is None else scores.figures.get("first_tokens_differ", 0))
            broken = OTHER_MODEL if first * 2 > len(positions) else UNVERIFIED
            add(broken, "greedy")
        for fault in _ends(greedy):
            add(fault, "greedy")
    sampled = [one for name, one in failed.items() if name.startswith(("law", "calibration")) and not _unanswered(one)]
    cause = _sampling(checks, sampled) if sampled else None
    if cause is not None and "seed" in failed:
        kinds = {found.figures.get("kind") for found in failed["seed"].findings}
        cause = REPEATS if kinds & {"constant", "repeats"} else cause
    elif cause is not None and broken is None and "load" in failed:
        cause = LOAD  # samples are asked for together
    if (
        broken is None
        and "penalties" in failed
        and not _ends_alone(failed["penalties"])
        and not (cause is None and _by_penalties(failed["penalties"]))
    ):
        # Penalised greedy texts go where plain ones do not: what else is wrong with them shows there first.
        broken = UNVERIFIED if cause in (None, DISTRIBUTION) else None
    for check in sampled:
        foreign = check.name.startswith("calibration") and "logprobs" in failed
        add(broken or (SCORES if foreign else cause or DISTRIBUTION), check.name)
    for name, check in failed.items():
        if _unanswered(check):
            add(FAILS, name)
        elif _ends_alone(check) and name not in ("greedy", "stream"):
            for fault in _ends(check):
                add(fault, name)
        elif name == "penalties":
            add(broken or PENALTIES, name)
        elif name == "filters":
            add(FILTERS, name)
        elif name == "logprobs":
            kinds = {found.figures.get("kind") for found in check.findings}
            only_greedy = broken is not None and kinds <= {"foreign", "reference"}
            add(broken if only_greedy and broken else SCORES, name)
        elif name == "stop":
            names = {"ignored": STOP_IGNORED, "kept": STOP_KEPT, "early": STOP_EARLY, "finish": FINISH}
            for kind in sorted({str(found.figures.get("kind")) for found in check.findings}):
                add(names[kind], name)
        elif name == "seed":
            for kind in sorted({str(found.figures["kind"]) for found in check.findings if found.verdict == DEFECT}):
                add(SEED if kind == "ignored" else REPEATS, name)
        elif name in ("length", "load", "stream"):
            add({"length": LENGTH, "load": LOAD, "stream": STREAM}[name], name)
    worst = 0.0
    for check in checks:
        worst = check.figures.get("largest_difference", worst)
        if check.verdict == APART:
            add(ARITHMETIC, check.name)
    return tuple(
        Fault(fault, WHAT[fault].format(worst), tuple(dict.fromkeys(names))) for fault, names in evidence.items()
    )


def _unanswered(check: EndpointCheck) -> bool:
    """Whether a request of the check failed."""
    return any(found.figures.get("kind") == "failed" for found in check.findings)


def _ends(check: EndpointCheck) -> list[str]:
    """Faults of the ends of texts alone."""
    kinds = {str(found.figures["end"]) for found in check.findings if "end" in found.figures}
    return [{"finish": FINISH, "length": LENGTH}[kind] for kind in sorted(kinds)]


def _ends_alone(check: EndpointCheck) -> bool:
    """Whether nothing but the ends of texts is wrong."""
    return all("end" in found.figures for found in check.findings if found.verdict == DEFECT)


def _sampling(checks: Sequence[EndpointCheck], failed: Sequence[EndpointCheck]) -> str:
    """Whether a temperature explains it: calibration fits another one, or temperature 1 alone is right."""
    fits = [found.figures for check in failed for found in check.findings if "explained" in found.figures]
    if fits:
        return TEMPERATURE if all(one["explained"] for one in fits) else DISTRIBUTION
    ran = [
        check for check in checks if check.name.startswith(("law", "calibration")) and "temperature" in check.figures
    ]
    right = {check.figures["temperature"] for check in ran} - {check.figures["temperature"] for check in failed}
    return TEMPERATURE if right == {1.0} else DISTRIBUTION


def _by_penalties(check: EndpointCheck) -> bool:
    """Whether the penalties explain every parting: the given token was written before, so they lower it, and most often
    it would be preferred without them."""
    parted = [found.figures for found in check.findings if found.verdict == DEFECT and "written" in found.figures]
    preferred = sum(bool(one["preferred"]) for one in parted)
    return all(one["written"] for one in parted) and 2 * preferred >= len(parted)
