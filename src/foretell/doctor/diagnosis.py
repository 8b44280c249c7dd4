"""What is said of a head: its slots, what was tried, what was found."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Slot:
    """One guess of a line, 1 the first, given that those before it were kept; sampled at temperature 1, teacher-forced."""

    slot: int
    acceptance: float
    agreement: float  # the share of places at which head and target have one most probable token
    expected: float | None  # acceptance after training, as the head's record has it


@dataclass(frozen=True)
class HeadFinding:
    """One mistake, named."""

    fault: str  # one of FAULTS
    evidence: str
    remedy: str


@dataclass(frozen=True)
class HeadTrial:
    """One variant, or one template, beside the head as it is."""

    fault: str
    change: str
    accepted: float  # guesses accepted a step, expected
    gain: float  # share of those of the head as it is
    standard_errors: float | None  # of the log chance of acceptance; None for other texts


@dataclass(frozen=True)
class HeadDiagnosis:
    """What was measured of a head, and what it says."""

    head: str
    method: str
    target: str
    num_texts: int
    num_tokens: int  # of answers
    slots: list[Slot]
    accepted: float  # guesses accepted in a step of NUM_SLOTS, expected
    expected_accepted: float | None
    stated: float | None  # how sure the head is of its first guess, mean ...
    true: float | None  # ... and how often it would be right
    trials: list[HeadTrial]
    findings: list[HeadFinding]
    notes: list[str] = field(default_factory=list)

    @property
    def is_healthy(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)
