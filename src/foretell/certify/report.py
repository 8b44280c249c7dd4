"""The contents of a certificate: the result of each check, its largest deviation and where that occurred."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from foretell.certify.weights import WeightsDistance

PASS, NEAR_TIE, DEFECT, LOSSY, NOTHING = "pass", "near-tie", "DEFECT", "lossy", "nothing to check"
"""Verdicts. NEAR_TIE: something differs, and rounding explains it. LOSSY: measured, never certified."""

DRAWS = "draws"
REMEDY = (
    "Where nothing was guessed at a temperature above 0, give more or other prompts, longer texts, or another method"
)
MAX_FINDINGS = 20
"""Most findings that a check keeps of each verdict."""


@dataclass(frozen=True)
class Finding:
    """One place where something differed."""

    verdict: str  # NEAR_TIE or DEFECT; of endpoints also APART
    where: str  # prompt, position, node: for people
    what: str  # the figures, in words
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """The result of one check of one verifier."""

    name: str  # "contract", "window", "draws", "law", "joint", "noise" or "tokens"
    verifier: str
    shape: str
    verdict: str
    num_contexts: int  # what was compared: nodes, draws, distributions or tokens, as ``unit`` says
    unit: str
    deviation: float | None  # the largest; None where nothing was compared
    tolerance: float | None
    measure: str  # what deviation is
    where: str = ""  # of the largest deviation
    findings: tuple[Finding, ...] = ()
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether the check found no defect. A lossy rule does not pass: it was measured."""
        return self.verdict in (PASS, NEAR_TIE)


@dataclass(frozen=True)
class Certificate:
    """All checks of one target, one way of guessing, and some verifiers."""

    checks: tuple[Check, ...]
    left_out: tuple[str, ...]  # combinations that are not legal, with the reason
    settings: dict[str, Any]
    seconds: float
    weights_distance: WeightsDistance | None = None  # of a quantised target from the same model without quantisation

    @property
    def defects(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.verdict == DEFECT)

    @property
    def unseen(self) -> tuple[Check, ...]:
        """The checks that had nothing to check, without those of draws where a drafter draws from no distribution."""
        return tuple(check for check in self.checks if check.verdict == NOTHING and check.name != DRAWS)

    @property
    def looked_at(self) -> dict[str, dict[str, str]]:
        """Verifier -> check -> how much of what was compared, all shapes together."""
        found: dict[str, dict[str, tuple[int, str]]] = {}
        for check in self.checks:
            of_rule = found.setdefault(check.verifier, {})
            of_rule[check.name] = of_rule.get(check.name, (0, ""))[0] + check.num_contexts, check.unit
        return {
            verifier: {name: f"{count} {unit}" for name, (count, unit) in checks.items()}
            for verifier, checks in found.items()
        }

    @property
    def passed(self) -> bool:
        """No defect, and every check of every rule had something to check."""
        return bool(self.checks) and not self.defects and not self.unseen

    @property
    def verdict(self) -> str:
        """The last line of the report."""
        lossy = sorted({check.verifier for check in self.checks if check.verdict == LOSSY})
        if self.defects:
            return "DEFECT"
        if not any(check.passed or check.verdict == LOSSY for check in self.checks):
            return "not certified: nothing was checked"
        if self.unseen:
            by_rule: dict[str, list[str]] = {}
            for check in self.unseen:
                by_rule.setdefault(check.verifier, []).append(f"{check.name} ({check.shape})")
            rules = "; ".join(f"{verifier}: {', '.join(names)}" for verifier, names in by_rule.items())
            return f"not certified: nothing to check for {rules}. {REMEDY}"
        exact = [check for check in self.checks if check.passed and check.verifier not in lossy]
        if not exact:
            return f"not certified: {', '.join(lossy)} {'is' if len(lossy) == 1 else 'are'} lossy"
        return "certified" + (f", but for the lossy {', '.join(lossy)}" if lossy else "")

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON values."""
        checks = [{**dataclasses.asdict(check), "passed": check.passed} for check in self.checks]
        return {
            "verdict": self.verdict,
            "passed": self.passed,
            "looked_at": self.looked_at,
            "checks": checks,
            "left_out": list(self.left_out),
            "settings": self.settings,
            "seconds": self.seconds,
            "weights_distance": None if self.weights_distance is None else self.weights_distance.to_dict(),
        }


def verdict_of(findings: list[Finding], num_contexts: int) -> str:
    """The verdict of a check that found these."""
    if any(finding.verdict == DEFECT for finding in findings):
        return DEFECT
    if not num_contexts:
        return NOTHING
    return NEAR_TIE if findings else PASS


def few(findings: list[Finding]) -> tuple[Finding, ...]:
    """At most MAX_FINDINGS of each verdict, defects first."""
    return tuple(
        finding
        for verdict in (DEFECT, NEAR_TIE)
        for finding in [found for found in findings if found.verdict == verdict][:MAX_FINDINGS]
    )
