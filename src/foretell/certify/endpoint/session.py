"""What the checks of an endpoint share: the endpoints, the prompts, the limits, and the greedy answers."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from foretell.certify.endpoint.client import Answer, Ask, Endpoint
from foretell.certify.endpoint.report import SKIPPED, EndpointCheck
from foretell.certify.report import Finding, few, verdict_of
from foretell.core.errors import ConfigError, require


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
