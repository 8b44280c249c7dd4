"""The contents of a certificate: the result of each check, its largest deviation and where that occurred."""

import dataclasses
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from foretell.core.errors import ConfigError
from foretell.core.tree import layout
from foretell.model.load import load_model
from foretell.model.target import CausalModel

CHUNK = 64  # positions of one pass


@dataclass(frozen=True)
class WeightsDistance:
    """Over all positions of some texts. See the module's docstring."""

    weights: str  # how the measured model holds its matrices
    num_positions: int
    mean_kl: float  # nats
    largest_kl: float
    mean_tv: float  # 0 to 1
    largest_tv: float
    same_top: float  # share of positions with the same most likely token

    @property
    def words(self) -> str:
        """For people."""
        return (
            f"{self.weights} weights: the text follows the quantised model's distribution. From the unquantised model's, "
            f"over {self.num_positions} positions: KL {self.mean_kl:.1e} nats (largest {self.largest_kl:.1e}), total "
            f"variation {self.mean_tv:.3f} (largest {self.largest_tv:.3f}), same most likely token {self.same_top:.1%}"
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


@torch.no_grad()
def weights_distance(model: CausalModel, unquantised: CausalModel, texts: Sequence[Sequence[int]]) -> WeightsDistance:
    """The distance of model from unquantised after every prefix of every text. Raises ConfigError where the two differ in
    their vocabulary, or there is no text.

    Speculation changes no distribution; quantised weights do. The distance is measured position by position over
    given texts, at temperature 1 without filters: Kullback-Leibler divergence from the unquantised distribution
    (nats), total variation (half the sum of absolute differences), and how often both have the same most likely
    token.
    """
    if model.spec.vocab_size != unquantised.spec.vocab_size:
        raise ConfigError(
            f"{model.spec.name!r} has {model.spec.vocab_size} tokens and {unquantised.spec.name!r} "
            f"{unquantised.spec.vocab_size}: expected one model twice"
        )
    kl, tv, same = [], [], []
    for ids in texts:
        for mine, its in zip(log_probs(model, ids), log_probs(unquantised, ids), strict=True):
            kl.append((its.exp() * (its - mine)).sum(-1))
            tv.append((its.exp() - mine.exp()).abs().sum(-1) / 2)
            same.append(its.argmax(-1) == mine.argmax(-1))
    if not kl:
        raise ConfigError("no text: give at least one of at least one token")
    all_kl, all_tv = torch.cat(kl), torch.cat(tv)
    return WeightsDistance(
        weights=model.spec.weights or str(model.spec.dtype).removeprefix("torch."),
        num_positions=len(all_kl),
        mean_kl=float(all_kl.mean()),
        largest_kl=float(all_kl.max()),
        mean_tv=float(all_tv.mean()),
        largest_tv=float(all_tv.max()),
        same_top=float(torch.cat(same).double().mean()),
    )


def log_probs(model: CausalModel, ids: Sequence[int]) -> list[Tensor]:
    """Chunks [n, V] float64 of the log probabilities after each prefix of a text."""
    device = model.spec.device
    text, found = torch.tensor([list(ids)], device=device), []
    capacity = -(-len(ids) // CHUNK) * CHUNK
    cache = model.new_cache(1, capacity)
    for start in range(0, len(ids), CHUNK):
        part = text[:, start : start + CHUNK]
        parent = torch.arange(-1, part.shape[1] - 1, device=device)[None]
        logits = model.forward(part, layout(parent, torch.tensor([start], device=device), capacity), cache).logits
        assert logits is not None
        found.append(logits[0].double().log_softmax(-1))
    return found


def unquantised_of(model: CausalModel) -> CausalModel:
    """The same model in float32 with its matrices dequantised. Raises ModelError where it cannot be loaded again."""
    return load_model(model.spec.name, dtype="float32", device=str(model.spec.device), weights="fp32")


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


@dataclass
class Tally:
    """What a check has compared so far, and the deviation that is largest beside what is allowed there."""

    count: int = 0
    deviation: float = 0.0
    tolerance: float = 0.0
    where: str = ""
    findings: list[Finding] = field(default_factory=list)
    share: float = -1.0  # of the deviation in its tolerance

    def add(self, deviation: float, tolerance: float, where: str, share: float | None = None) -> None:
        """A place. share: what ranks it, where that is not the deviation over the tolerance."""
        self.count += 1
        share = deviation / tolerance if share is None else share
        if share > self.share:
            self.share, self.deviation, self.tolerance, self.where = share, deviation, tolerance, where

    def check(
        self, name: str, verifier: str, shape: str, unit: str, measure: str, figures: dict[str, Any], *,
        exact: bool = True, decisive: int | None = None,
    ) -> Check:  # fmt: skip
        """The check; exact: of the rule. decisive: how many of the places decide, where not all do."""
        verdict = verdict_of(self.findings, self.count if decisive is None else decisive, exact=exact)
        return Check(
            name, verifier, shape, verdict, self.count, unit, self.deviation if self.count else None,
            self.tolerance if self.count and exact else None, measure, self.where, few(self.findings), figures,
        )  # fmt: skip


def verdict_of(findings: list[Finding], num_contexts: int, *, exact: bool = True) -> str:
    """The verdict of a check that found these. exact: of the rule; another is measured alone."""
    if not exact and num_contexts:
        return LOSSY
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
