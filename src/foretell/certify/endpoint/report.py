"""What the checks of an endpoint share, and what was found of it: checks, faults by name, and a verdict."""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from foretell.certify.endpoint.client import Answer, Ask, Endpoint
from foretell.certify.report import DEFECT, NEAR_TIE, NOTHING, PASS, Finding, few, verdict_of
from foretell.core.errors import ConfigError, require

SKIPPED = "not checked"
"""Verdict: the endpoint does not take what the check needs, or there is nothing to compare with."""

APART = "not comparable"
"""Verdict: the reference computes otherwise, and that explains what differs."""

LAWS = ("law", "calibration")
"""The checks of how sampled texts are distributed."""


@dataclass(frozen=True)
class EndpointCheck:
    """The result of one check."""

    name: str
    question: str
    verdict: str  # PASS, NEAR_TIE, DEFECT, APART, NOTHING or SKIPPED
    looked_at: str  # how much was compared, in words
    summary: str = ""  # the largest deviation or the reason, in words
    findings: tuple[Finding, ...] = ()
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether it ran and found no defect."""
        return self.verdict in (PASS, NEAR_TIE)


@dataclass(frozen=True)
class Fault:
    """What is wrong, by name, and what usually causes it."""

    name: str
    what: str
    evidence: tuple[str, ...]  # names of the checks that show it


@dataclass(frozen=True)
class EndpointCertificate:
    """All checks of one endpoint."""

    checks: tuple[EndpointCheck, ...]
    faults: tuple[Fault, ...]
    settings: dict[str, Any]
    seconds: float

    @property
    def defects(self) -> tuple[EndpointCheck, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.verdict == DEFECT)

    @property
    def has_reference(self) -> bool:
        """Whether there was something to compare texts with."""
        return bool(self.settings.get("reference"))

    @property
    def unseen(self) -> str | None:
        """Why the distribution of sampled texts is not known; None where it was looked at."""
        laws = [check for check in self.checks if check.name.startswith(LAWS)]
        empty = [check for check in laws if check.verdict == NOTHING]
        if empty:
            return f"nothing to check for {empty[0].name}: {empty[0].summary}"
        if not any(check.passed for check in laws):
            return f"neither {' nor '.join(LAWS)} was looked at, so how sampled texts are distributed is not known"
        return None

    @property
    def passed(self) -> bool:
        """No fault, at least one check ran, and one of how sampled texts are distributed."""
        return not self.faults and any(check.passed for check in self.checks) and self.unseen is None

    @property
    def verdict(self) -> str:
        """The last line of the report."""
        if self.defects:
            return "DEFECT: " + ", ".join(fault.name for fault in self.faults)
        if self.faults:
            what = self.faults[0].what
            return f"not certified: {what[0].lower()}{what[1:]}"
        if not any(check.passed for check in self.checks):
            return "not certified: nothing was checked"
        if self.unseen is not None:
            return f"not certified: {self.unseen}"
        left = [check.name for check in self.checks if not check.passed]
        if not self.has_reference:
            return "consistent with itself (no reference: that it is the target's text was not checked)"
        return "certified" + (f", but for what was not checked: {', '.join(left)}" if left else "")

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return {
            "verdict": self.verdict,
            "passed": self.passed,
            "faults": [dataclasses.asdict(fault) for fault in self.faults],
            "checks": [{**dataclasses.asdict(check), "passed": check.passed} for check in self.checks],
            "settings": self.settings,
            "seconds": self.seconds,
        }


def asked(certificate: EndpointCertificate) -> list[tuple[str, str]]:
    """What was compared with what, and how."""
    s = certificate.settings
    reference = s["reference"]
    rows = [("Endpoint", _named(s)), ("Endpoint takes", s["takes"])]
    if reference is None:
        rows.append(("Reference", "none: compared with itself alone"))
    else:
        rows += [("Reference", _named(reference)), ("Reference takes", reference["takes"])]
    temperatures = ", ".join(f"{value:g}" for value in s["temperatures"]) or "none above 0"
    rows += [
        ("Prompts", f"{s['num_prompts']}, up to {s['max_tokens']} tokens each, temperature 0 and {temperatures}"),
        ("Rounding", f"logit gaps up to {s['tolerance']:g} count as rounding"),
        ("False alarms", f"of the statistical checks together at most {s['alpha']:g} a run"),
        ("Seed", str(s["seed"])),
        ("Time", f"{certificate.seconds:.0f} s"),
    ]
    return rows


def _named(given: dict[str, object]) -> str:
    fields = given["fields"]
    return f"{given['model']} at {given['url']}" + (f" with {fields}" if fields else "")


def with_findings(certificate: EndpointCertificate) -> list[EndpointCheck]:
    """The checks that have something to show."""
    return [check for check in certificate.checks if check.findings]


@dataclass(frozen=True)
class EndpointBudget:
    """How much is asked, and how sure the answer is."""

    max_tokens: int = 48  # of greedy and of calibration texts
    law_tokens: int = 8  # of the short texts whose joint distribution is compared
    samples: int = 200  # short texts of each prompt and temperature, of each endpoint; four times as many to confirm
    law_prompts: int = 4
    long_samples: int = 8  # long texts of each prompt and temperature for calibration; four times as many to confirm
    alpha: float = 1e-3  # probability of any false alarm of the statistical checks together
    screen: float = 0.01  # p-values below it are checked again with fresh samples, and those alone decide
    tolerance: float = 0.1  # logit gap, and difference of a log probability, that rounding may explain

    def __post_init__(self) -> None:
        for name in ("max_tokens", "law_tokens", "samples", "law_prompts", "long_samples"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        if self.max_tokens < 8:
            raise ConfigError(
                f"max_tokens = {self.max_tokens} must be at least 8: speculation takes a few tokens to begin"
            )
        if not 0 < self.alpha < 1 or not self.tolerance >= 0:
            raise ConfigError(
                f"alpha = {self.alpha} must lie between 0 and 1, and tolerance = {self.tolerance} must not be negative"
            )


@dataclass
class Session:
    """One run of all checks."""

    endpoint: Endpoint
    reference: Endpoint | None
    prompts: Sequence[str]
    temperatures: Sequence[float]
    budget: EndpointBudget
    seed: int
    progress: Callable[[str], None] = lambda what: None
    _greedy: dict[bool, list[Answer]] = field(default_factory=dict)

    def seed_of(self, *parts: object) -> int:
        """A seed below 2^31 that depends on the run's and on what it is for."""
        digest = hashlib.sha256(repr((self.seed, *parts)).encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1

    def greedy(self, *, reference: bool = False) -> list[Answer]:
        """The greedy answer of every prompt, each asked for alone."""
        if reference not in self._greedy:
            asked = self.reference if reference else self.endpoint
            assert asked is not None
            count = asked.abilities.num_logprobs
            self._greedy[reference] = [
                asked.one(Ask(prompt, self.budget.max_tokens, logprobs=count)) for prompt in self.prompts
            ]
        return self._greedy[reference]

    def where(self, index: int) -> str:
        """A prompt, for people."""
        prompt = self.prompts[index]
        return f"prompt {index} ({prompt[:37] + '...' if len(prompt) > 40 else prompt!r})"


def check_of(
    name: str, question: str, findings: list[Finding], count: int, looked_at: str, summary: str = "", **figures: object
) -> EndpointCheck:
    """A check of these findings; count: how much was compared."""
    verdict = verdict_of(findings, count)
    return EndpointCheck(name, question, verdict, looked_at, summary, few(findings), dict(figures))


def skipped(name: str, question: str, reason: str) -> EndpointCheck:
    """A check that could not be made."""
    return EndpointCheck(name, question, SKIPPED, "-", reason)
