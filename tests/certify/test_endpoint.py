"""An endpoint from outside: every planted fault is found by name, and a right server passes."""

import json
from dataclasses import replace
from typing import Any

import pytest

from foretell.certify.endpoint import Endpoint, EndpointBudget, EndpointCertificate, certify_endpoint
from foretell.certify.endpoint.client import Answer
from foretell.certify.endpoint.diagnosis import settled
from foretell.certify.endpoint.report import APART, EndpointCheck
from foretell.certify.endpoint.texts import parting, tie_at
from foretell.certify.report import DEFECT, NOTHING, PASS, Finding
from foretell.core.errors import ConfigError
from tests.certify.faulty import FAULTS, faulty
from tests.stress import MINUTES

PROMPTS = [f"prompt {number}" for number in range(8)]
SMALL = {"max_tokens": 32, "samples": 120, "law_prompts": 3, "long_samples": 4}
SUBTLE = {"samples": 600, "law_prompts": 4}
"""For faults that move probabilities by a few percent."""
SAMPLED = {"no_residual", "accepts_too_often", "wrong_q", "temperature_ignored", "temperature_squared"}
"""Faults that only samples show; they take seconds."""
PLAIN = {"speculative": False}


def certified(fault: str | None = None, *, seed: int = 5, **options: Any) -> EndpointCertificate:
    """What is found of a server with a fault, compared with its own plain decoding."""
    budget = EndpointBudget(**{**SMALL, **options.pop("budget", {})})
    server = {name: options.pop(name) for name in ("logprobs", "rounded") if name in options}
    with faulty(fault, **server) as url, Endpoint(url) as endpoint:
        reference = endpoint.sibling(PLAIN) if options.pop("compared", True) else None
        return certify_endpoint(
            endpoint, options.pop("prompts", PROMPTS), reference=reference, budget=budget, seed=seed, **options
        )


def names(found: EndpointCertificate) -> list[str]:
    return [fault.name for fault in found.faults]


def test_a_right_server_passes_every_check() -> None:
    found = certified()
    assert (found.verdict, found.passed, found.faults) == ("certified", True, ())
    assert {check.verdict for check in found.checks} == {"pass"}
    assert [check.name for check in found.checks] == [
        "greedy", "penalties", "filters", "logprobs", "stream", "stop", "length", "seed", "load",
        "law at T = 0.7", "calibration at T = 0.7", "law at T = 1", "calibration at T = 1",
    ]  # fmt: skip
    powers = [check.figures["found_total_variation"] for check in found.checks[9:]]
    assert all(0.0 < power < 0.5 for power in powers)


@pytest.mark.parametrize("fault", sorted(FAULTS.keys() - SAMPLED))
def test_a_fault_of_texts_is_found_by_name(fault: str) -> None:
    found = certified(fault, skip=("law", "calibration"))
    assert names(found) == [FAULTS[fault]], found.verdict
    assert not found.passed
    assert found.verdict == f"DEFECT: {FAULTS[fault]}"
    assert all(check.findings for check in found.defects)
    named = {check for fault in found.faults for check in fault.evidence}
    assert named == {check.name for check in found.defects}


@pytest.mark.slow
@pytest.mark.parametrize("fault", sorted(FAULTS if MINUTES else SAMPLED))
def test_every_fault_is_found_by_name_among_all_checks(fault: str) -> None:
    """At length (``tests.stress``) all of them; the others are found by text checks alone in the test above. At both
    temperatures then, else at the one at which every fault of samples shows."""
    budget, temperatures = SUBTLE if fault in SAMPLED else {}, {} if MINUTES else {"temperatures": [0.7]}
    found = certified(fault, budget=budget, **temperatures)
    assert names(found) == [FAULTS[fault]], (found.verdict, [check.name for check in found.defects])


TEXTS = ("law", "calibration")


def test_another_arithmetic_is_no_fault_and_no_pass() -> None:
    """Quantised kernels of another engine beside our reading of the weights."""
    found = certified(rounded=True, skip=TEXTS)
    assert names(found) == ["other arithmetic"]
    assert not found.passed
    assert not found.defects
    scores = next(check for check in found.checks if check.name == "logprobs")
    worst = scores.figures["largest_difference"]
    assert {scores.verdict} == {one.verdict for one in scores.findings} == {"not comparable"}
    assert 0.1 < worst < 1.0
    said = f"not certified: its arithmetic differs from the reference's: log probabilities by up to {worst:.2g}"
    assert found.verdict.startswith(said)
    assert "a plain server of the same engine: --reference-url URL" in found.verdict


@pytest.mark.parametrize("fault", ["guesses_unchecked", "wrong_row", "stop_kept"])
def test_a_fault_beside_another_arithmetic_is_still_found_by_name(fault: str) -> None:
    found = certified(fault, rounded=True, skip=TEXTS)
    assert FAULTS[fault] in names(found)
    assert set(names(found)) <= {FAULTS[fault], "other arithmetic"}
    assert found.verdict.startswith("DEFECT: ")


def failing(name: str, **figures: object) -> EndpointCheck:
    return EndpointCheck(name, "", DEFECT, "", findings=(Finding(DEFECT, "", "", figures),))


SCORES = {"unguessed_difference": 0.05, "later_difference": 0.06, "largest_difference": 0.2}
REFERENCE = replace(failing("logprobs", kind="reference"), figures=SCORES)


@pytest.mark.parametrize(
    ("checks", "apart"),
    [
        ([REFERENCE], "logprobs"),
        ([replace(REFERENCE, figures={**SCORES, "unguessed_difference": 1e-5})], ""),  # only at guesses
        ([replace(REFERENCE, figures={**SCORES, "later_difference": 0.5})], ""),  # mostly at guesses
        ([replace(REFERENCE, figures={**SCORES, "largest_difference": 1.5})], ""),  # other weights
        ([replace(failing("logprobs", kind="foreign"), figures=SCORES)], ""),  # a contradiction in itself
        ([REFERENCE, failing("greedy", gap=0.39, at_least=False)], "logprobs greedy"),
        ([REFERENCE, failing("greedy", gap=0.41, at_least=False)], "logprobs"),
        ([REFERENCE, failing("greedy", gap=0.39, at_least=True)], "logprobs"),
        ([REFERENCE, failing("greedy", gap=None)], "logprobs"),
        ([REFERENCE, failing("penalties", gap=9.0, written=False, preferred=False)], "logprobs penalties"),
        ([REFERENCE, failing("penalties", gap=9.0, written=True, preferred=True)], "logprobs"),
        ([REFERENCE, failing("penalties", end="finish")], "logprobs"),
        ([REFERENCE, failing("penalties", kind="failed")], "logprobs"),
        ([REFERENCE, failing("law at T = 1")], "logprobs law at T = 1"),
        ([REFERENCE, failing("law at T = 1", kind="failed")], "logprobs"),
        ([REFERENCE, failing("law at T = 1"), failing("calibration at T = 1")], "logprobs"),
        ([REFERENCE, failing("law at T = 1"), failing("greedy", gap=2.0, at_least=False)], "logprobs"),
        ([REFERENCE, failing("stop", kind="kept"), failing("load")], "logprobs"),
    ],
)
def test_what_another_arithmetic_explains(checks: list[EndpointCheck], apart: str) -> None:
    assert " ".join(check.name for check in settled(checks) if check.verdict == APART) == apart


def test_a_sampled_fault_is_found_by_its_law() -> None:
    found = certified("temperature_ignored", skip=("penalties", "stream", "stop", "length", "load", "filters"))
    assert names(found) == ["wrong temperature"]
    (one,) = [check for check in found.checks if check.name == "calibration at T = 0.7"]
    assert one.findings[0].figures["fitted_temperature"] == pytest.approx(1.0, abs=0.12)


@pytest.mark.slow
def test_no_false_alarm_in_clean_runs() -> None:
    """At length (``tests.stress``) twenty, else two."""
    for seed in range(20 if MINUTES else 2):
        found = certified(seed=seed, budget={"samples": 200})
        assert found.verdict == "certified", (seed, found.defects)


@pytest.mark.parametrize(("most", "taken", "words"), [(64, 8, "n = 8"), (5, 4, "n = 4"), (1, 1, "no n")])
def test_n_is_as_large_as_the_endpoint_takes(most: int, taken: int, words: str) -> None:
    """llama.cpp's server takes no more than it decodes at a time."""
    with faulty(most=most) as url, Endpoint(url) as endpoint:
        found = endpoint.probe("a prompt")
    assert found.choices == taken
    assert words in found.words()


def test_without_a_reference_the_server_is_compared_with_itself() -> None:
    found = certified(compared=False, skip=("load", "stop"))
    assert found.passed
    assert found.verdict.startswith("consistent with itself")
    skipped = {check.name for check in found.checks if check.verdict == "not checked"}
    assert skipped == {"greedy", "penalties", "law at T = 0.7", "law at T = 1"}
    assert names(certified("scores_of_draft", compared=False, skip=("load", "law", "calibration"))) == [
        "foreign log probabilities"
    ]


def test_without_log_probabilities_texts_are_compared_whole() -> None:
    options: dict[str, Any] = {"logprobs": False, "temperatures": [1.0], "skip": ("load", "stop", "length", "seed")}
    clean = certified(**options, budget={"law_tokens": 2})
    assert clean.passed
    assert {check.name for check in clean.checks if not check.passed} == {"logprobs", "calibration at T = 1"}
    assert "certified, but for what was not checked: logprobs" in clean.verdict
    found = certified("guesses_unchecked", **options)
    assert names(found) == ["unverified tokens"]
    assert "logit gap not known" in found.defects[0].findings[0].what


def test_what_cannot_be_checked_is_no_pass() -> None:
    left = ("filters", "logprobs", "stream", "stop", "length", "seed", "load", "law", "calibration")
    found = certified(compared=False, skip=left)
    assert not found.passed
    assert found.verdict == "not certified: nothing was checked"


def test_a_server_whose_sampled_texts_nobody_looked_at_is_not_certified() -> None:
    found = certified(skip=("filters", "stream", "stop", "length", "seed", "load", "law", "calibration"))
    assert any(check.passed for check in found.checks)
    assert not found.passed
    assert found.verdict.startswith("not certified: neither law nor calibration was looked at")
    empty = replace(found.checks[0], name="law at T = 1", verdict=NOTHING, summary="no token varies")
    one = replace(empty, name="calibration at T = 1", verdict=PASS)
    assert not replace(found, checks=(empty, one)).passed
    assert (
        replace(found, checks=(empty, one)).verdict
        == "not certified: nothing to check for law at T = 1: no token varies"
    )
    assert replace(found, checks=(one,)).passed


# -- partings ------------------------------------------------------------------------------------------------------


def answer(*tokens: str, top: tuple[dict[str, float], ...] = ()) -> Answer:
    return Answer("".join(tokens), "length", len(tokens), tokens, (-1.0,) * len(tokens), top)


TOP = ({"a": -0.1, "b": -3.0}, {"c": -0.70, "d": -0.71, "e": -5.0})


def test_the_gap_where_texts_part() -> None:
    expected = answer("a", "c", top=TOP)
    assert parting(answer("a", "c", top=TOP), expected) is None
    near = parting(answer("a", "d", top=TOP), expected)
    assert (near.position, near.given, near.expected, near.gap) == (1, "d", "c", pytest.approx(0.01))
    unknown = parting(answer("a", "x", top=TOP), expected)
    assert unknown.gap == pytest.approx(4.3)
    assert unknown.at_least
    ended = parting(answer("a", top=TOP), expected)
    assert (ended.given, ended.gap) == ("<end>", pytest.approx(0.01))
    whole = parting(Answer("ax", "length", 2), Answer("ac", "length", 2))
    assert (whole.unit, whole.position, whole.gap) == ("character", 1, None)


def test_a_text_without_tokens_beside_one_with_them() -> None:
    expected = answer("a", "c", top=TOP)
    assert parting(Answer("ac", "length", 2), expected) is None
    found = parting(Answer("ad", "length", 2), expected)
    assert (found.unit, found.position, found.gap) == ("character", 1, pytest.approx(0.01))  # of the two best there
    assert tie_at(expected, 0) == pytest.approx(2.9)
    assert tie_at(expected, 2) is None


def test_an_end_token_that_one_server_shows_is_no_difference() -> None:
    """vLLM lists it among the tokens of log probabilities, others end before it."""
    shown = Answer("ab", "stop", 3, ("a", "b", "<|end|>"), (-0.1, -0.1, -0.1), ({}, {}, {}))
    hidden = Answer("ab", "stop", 3, ("a", "b"), (-0.1, -0.1), ({"a": -0.1}, {"b": -0.1}))
    assert shown.written == hidden.written == ("a", "b")
    assert parting(shown, hidden) is None
    cut = Answer("ab", "length", 2, ("a", "b"), (-0.1, -0.1), ({}, {}))
    assert cut.written == ("a", "b")
    assert Answer("", "stop", 1, ("<|end|>",), (-0.7,), ({},)).written == ()


def test_penalties_count_in_the_gap() -> None:
    top = ({"a": -0.1, "b": -3.0}, {"a": -0.2, "b": -2.0})
    found = parting(answer("a", "a", top=top), answer("a", "b", top=top), penalties=(1.5, 0.5))
    assert found.gap == pytest.approx(0.2)  # -2.0 against -0.2 - 1.5 - 0.5
    assert found.written
    assert found.preferred


# -- reports and mistakes ------------------------------------------------------------------------------------------


def test_a_certificate_is_json() -> None:
    found = certified("guesses_unchecked", skip=("law", "calibration"))
    written = json.loads(json.dumps(found.to_dict()))
    assert written["faults"][0]["name"] == "unverified tokens"
    assert written["settings"]["reference"]["fields"] == PLAIN


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("127.0.0.1:8000", "is not a URL of a server"),
        ("ftp://127.0.0.1", "is not a URL of a server"),
        ("http://127.0.0.1:9", "nothing answers at http://127.0.0.1:9/v1"),
    ],
)
def test_a_wrong_url(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        certify_endpoint(Endpoint(url), PROMPTS)


@pytest.mark.parametrize(
    "options", [{"samples": 0}, {"max_tokens": 4}, {"alpha": 0.0}, {"alpha": 1.5}, {"tolerance": -1.0}]
)
def test_budgets_that_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        EndpointBudget(**options)


def test_checks_and_prompts_that_are_refused() -> None:
    with faulty() as url, Endpoint(url) as endpoint:
        with pytest.raises(ConfigError, match="check 'grredy' is not known"):
            certify_endpoint(endpoint, PROMPTS, skip=["grredy"])
        with pytest.raises(ConfigError, match="no prompts"):
            certify_endpoint(endpoint, [])
