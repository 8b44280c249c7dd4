"""The certificate itself: its verdict, what it keeps, and its JSON."""

import json
from dataclasses import replace

import pytest

from foretell.certify.report import DEFECT, LOSSY, NEAR_TIE, NOTHING, PASS, Certificate, Check, Finding, few, verdict_of
from foretell.cli.output import as_json

ONE = Check("window", "rejection", "chain", PASS, 3, "nodes", 1e-6, 1e-4, "largest difference")


def certificate(*checks: Check) -> Certificate:
    return Certificate(checks, ("block, tree: branches",), {"seed": 0}, 1.5)


@pytest.mark.parametrize(
    ("verdicts", "passed", "said"),
    [
        ([PASS], True, "certified"),
        ([PASS, NEAR_TIE], True, "certified"),
        ([PASS, DEFECT], False, "DEFECT"),
        ([LOSSY, DEFECT], False, "DEFECT"),
        ([NOTHING], False, "not certified: nothing was checked"),
        ([], False, "not certified: nothing was checked"),
    ],
)
def test_verdict(verdicts: list[str], passed: bool, said: str) -> None:
    found = certificate(*(replace(ONE, verdict=verdict) for verdict in verdicts))
    assert (found.passed, found.verdict) == (passed, said)


@pytest.mark.parametrize("name", ["window", "law", "joint", "noise", "tokens"])
@pytest.mark.parametrize("verdict", [PASS, LOSSY])
def test_a_check_that_had_nothing_to_check_is_no_certificate(name: str, verdict: str) -> None:
    """Whatever the others found; a drafter that draws from no distribution has no draws."""
    empty = replace(ONE, name=name, verdict=NOTHING, num_contexts=0, shape="one guess")
    found = certificate(replace(ONE, verdict=verdict), empty, replace(ONE, verifier="other"))
    assert not found.passed
    assert found.verdict.startswith(f"not certified: nothing to check for rejection: {name} (one guess). ")
    assert found.to_dict()["passed"] is False
    assert certificate(ONE, replace(empty, name="draws")).passed
    assert certificate(ONE, replace(ONE, shape="static")).looked_at == {"rejection": {"window": "6 nodes"}}


def test_a_lossy_rule_is_never_certified() -> None:
    lossy = replace(ONE, verifier="typical", name="law", verdict=LOSSY)
    window = replace(ONE, verifier="typical")
    assert not lossy.passed
    assert certificate(lossy, window).verdict == "not certified: typical is lossy"
    assert certificate(lossy, ONE).verdict == "certified, but for the lossy typical"
    other = replace(lossy, verifier="top_n")
    assert certificate(lossy, other).verdict == "not certified: top_n, typical are lossy"


def test_findings() -> None:
    tie, fault = Finding(NEAR_TIE, "here", "a"), Finding(DEFECT, "there", "b", {"gap": float("inf")})
    assert verdict_of([], 0) == NOTHING
    assert verdict_of([], 1) == PASS
    assert verdict_of([tie], 1) == NEAR_TIE
    assert verdict_of([tie, fault], 1) == verdict_of([fault], 0) == DEFECT
    kept = few([tie] * 50 + [fault] * 2)
    assert [finding.verdict for finding in kept] == [DEFECT] * 2 + [NEAR_TIE] * 20


def test_json() -> None:
    fault = Finding(DEFECT, "there", "b", {"gap": float("inf")})
    found = json.loads(as_json(certificate(replace(ONE, verdict=DEFECT, findings=(fault,))).to_dict()))
    assert found["verdict"] == "DEFECT"
    assert found["passed"] is False
    assert found["left_out"] == ["block, tree: branches"]
    assert found["checks"][0]["passed"] is False
    assert found["checks"][0]["findings"][0]["figures"] == {"gap": None}
    assert found["checks"][0]["tolerance"] == 1e-4
