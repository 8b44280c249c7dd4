"""Where an answer must end, and what a seed must do: all against the endpoint's own greedy texts."""

from dataclasses import replace

from foretell.certify.endpoint.client import Answer, Ask
from foretell.certify.endpoint.report import EndpointCheck, Session, check_of, skipped
from foretell.certify.endpoint.scores import squeezed
from foretell.certify.report import DEFECT, NEAR_TIE, Finding

STOP = "Does a text end before its stop text, wherever that lies among the tokens?"
LENGTH = "Has a text exactly max_tokens tokens, and are they the first ones?"
SEED = "Does a seed fix the text, and do other seeds give others?"
LENGTHS = (1, 2, 3, 5, 7)


def check_stop(session: Session) -> EndpointCheck:
    """Stop texts taken from the greedy text: within a token's text, and across the border of two."""
    findings: list[Finding] = []
    count = 0
    for at, (prompt, whole) in enumerate(zip(session.prompts, session.greedy(), strict=True)):
        for stop, cut in stops_of(whole):
            given = session.endpoint.one(Ask(prompt, session.budget.max_tokens, stop=stop))
            count += 1
            expected = whole.text[:cut]
            if given.text == expected and given.finish == "stop":
                continue
            if given.text == expected:
                kind, words = "finish", f"finish_reason {given.finish!r} instead of 'stop'"
            elif given.text.startswith(expected + stop) and len(given.text) > cut + len(stop):
                kind, words = (
                    "ignored",
                    f"the text goes on for {len(given.text) - cut} characters from the stop text on",
                )
            elif given.text == expected + stop:
                kind, words = "kept", "the stop text is part of the answer"
            elif given.text.startswith(expected):
                kind, words = "kept", f"a part of the stop text is in the answer: {given.text[cut:]!r}"
            elif not whole.text.startswith(given.text) and stop not in given.text:
                continue  # another greedy text, which is judged by the checks of texts
            else:
                kind, words = "early", f"{len(given.text)} characters instead of {cut}"
            figures = {"kind": kind, "stop": stop, "expected_characters": cut, "characters": len(given.text)}
            findings.append(Finding(DEFECT, session.where(at), f"stop {stop!r}: {words}", figures))
    return check_of("stop", STOP, findings, count, f"{count} stop texts", _wrong(findings))


def stops_of(answer: Answer) -> list[tuple[str, int]]:
    """(stop text, where it first lies) of an answer: up to four, from different places."""
    text, found = answer.text, []
    borders = []
    if answer.tokens is not None and "".join(answer.tokens) == text:
        at = 0
        for token in answer.tokens:
            at += len(token)
            borders.append(at)
    else:
        borders = list(range(5, len(text), 5))
    for share in (0.15, 0.35, 0.55, 0.8):
        if not borders:
            break
        border = borders[int(share * len(borders))]
        for begin, end in ((border - 1, border + 2), (border, border + 3), (border - 2, border + 1)):
            stop = text[max(0, begin) : end]
            cut = text.find(stop)
            if len(stop) >= 2 and stop.strip() and "\ufffd" not in stop and cut > 0 and (stop, cut) not in found:
                found.append((stop, cut))
                break
    return found


def check_length(session: Session) -> EndpointCheck:
    """Short texts: their token counts, and that they begin the long one."""
    findings: list[Finding] = []
    count = 0
    logprobs = session.endpoint.abilities.num_logprobs
    for at, (prompt, whole) in enumerate(zip(session.prompts, session.greedy(), strict=True)):
        for most in LENGTHS:
            given = session.endpoint.one(Ask(prompt, most, logprobs=logprobs))
            count += 1
            problem = _length_fault(given, whole, most)
            if problem is not None:
                figures = {"max_tokens": most, "completion_tokens": given.completion_tokens}
                findings.append(Finding(DEFECT, session.where(at), f"max_tokens = {most}: {problem}", figures))
    return check_of("length", LENGTH, findings, count, f"{count} texts", _wrong(findings))


def _length_fault(given: Answer, whole: Answer, most: int) -> str | None:
    """What is wrong with the length of a short answer, or None."""
    if given.tokens is not None and len(given.tokens) > most:
        return f"{len(given.tokens)} tokens"
    if given.completion_tokens is not None and given.completion_tokens > most:
        return f"usage counts {given.completion_tokens} tokens"
    if given.finish == "length":
        if given.completion_tokens is not None and given.completion_tokens < most:
            return f"it ends by 'length' after {given.completion_tokens} tokens"
        if given.tokens is not None and len(given.tokens) < most:
            return f"log probabilities of {len(given.tokens)} tokens alone"
    if given.tokens is not None:
        spelled = squeezed("".join(given.tokens))
        if "\ufffd" not in spelled + given.text and len(squeezed(given.text)) > len(spelled):
            return f"the text is longer than its {len(given.tokens)} tokens: {given.text[-40:]!r}"
    elif given.completion_tokens is None and len(given.text) > len(whole.text):
        return "the text is longer than that of more tokens"
    return None


def check_seed(session: Session) -> EndpointCheck:
    """Sampled texts with equal seeds, with different seeds, and without."""
    endpoint = session.endpoint
    if not endpoint.abilities.seed:
        return skipped("seed", SEED, "the endpoint refuses seeds")
    most = min(24, session.budget.max_tokens)
    findings: list[Finding] = []
    alike_without = alike_with = parted = same_as_plain = 0
    for at, prompt in enumerate(session.prompts):
        seed = session.seed_of("seed", at)
        texts = [endpoint.one(Ask(prompt, most, 1.0, seed=seed)).text for _ in range(2)]
        others = [endpoint.one(Ask(prompt, most, 1.0, seed=session.seed_of("other", at, k))).text for k in range(3)]
        free = [endpoint.one(Ask(prompt, most, 1.0)).text for _ in range(3)]
        if texts[0] != texts[1]:
            parted += 1
            words = f"seed {seed} gives {texts[0][:40]!r} and then {texts[1][:40]!r}"
            findings.append(Finding(NEAR_TIE, session.where(at), words, {"kind": "ignored", "seed": seed}))
        alike_with += len({*others, texts[0]}) == 1
        alike_without += len(set(free)) == 1
        if session.reference is not None and session.reference.abilities.seed:
            same_as_plain += session.reference.one(Ask(prompt, most, 1.0, seed=seed)).text == texts[0]
    count = len(session.prompts)
    if 2 * parted >= count:  # a few may part by rounding, e.g. where the second request finds the prompt in a cache
        findings = [replace(found, verdict=DEFECT) for found in findings]
    for alike, kind, words in (
        (alike_with, "constant", "four different seeds give one text, for every prompt"),
        (alike_without, "repeats", "three requests without a seed give one text, for every prompt"),
    ):
        if alike == count:
            findings.append(Finding(DEFECT, "all prompts", words, {"kind": kind}))
    summary = f"{count - parted} of {count} repeat"
    if session.reference is not None:
        summary += f"; {same_as_plain} are also the reference's text of that seed"
    return check_of("seed", SEED, findings, count, f"{8 * count} texts", summary, same_as_reference=same_as_plain)


def _wrong(findings: list[Finding]) -> str:
    return f"{len(findings)} wrong" if findings else "all right"
