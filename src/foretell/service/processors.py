"""A logits processor inside a service: its failure, and its time, are its own request's and not the batch's."""

import logging
from collections.abc import Sequence
from time import thread_time
from typing import Protocol, runtime_checkable

import torch

from foretell.core.params import LogitsProcessor, expected_of

logger = logging.getLogger(__name__)

STEP_S = 0.15
"""CPU seconds of a step that all limited processors may take together. Beyond, those above their share are ended."""
REQUEST_S, TOKEN_S = 1.0, 0.02
"""CPU seconds that a limited processor may take in all: so many, and so many more for each token of the output."""


@runtime_checkable
class Limited(Protocol):
    """A processor whose time is limited, since a request, not the operator, chose what it does."""

    def stop(self, reason: str) -> None:
        """Permit nothing from now on, which ends the request with this reason."""


class StepBudget:
    """What limited processors have taken of one step. Used by the engine's thread alone."""

    def __init__(self, limit_s: float = STEP_S) -> None:
        self.limit_s = limit_s
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self._spent: dict[int, float] = {}

    def spend(self, caller: int, seconds: float) -> bool:
        """Whether the caller may go on: while the step has time left, or its own part is at most an equal share."""
        self._spent[caller] = mine = self._spent.get(caller, 0.0) + seconds
        return sum(self._spent.values()) <= self.limit_s or mine <= self.limit_s / len(self._spent)


class GuardedProcessor:
    """A processor whose failure ends its own request, not the batch; and so does the time that a limited one takes."""

    def __init__(self, processor: LogitsProcessor, budget: StepBudget | None = None) -> None:
        self.processor, self.budget = processor, budget
        self.seconds = 0.0  # of the engine's thread
        self._start: int | None = None  # tokens at the first call
        self._is_over = False

    @property
    def error(self) -> str:
        """Why the processor permits nothing; "" where it did not say."""
        return str(getattr(self.processor, "error", ""))

    @property
    def left_out(self) -> tuple[str, ...]:
        """What the processor does not enforce."""
        return tuple(getattr(self.processor, "left_out", ()))

    def expected(self, ids: Sequence[int]) -> Sequence[int]:
        """The processor's; none where that fails. Its time counts."""
        begun = thread_time()
        try:
            made = () if self._is_over else expected_of(self.processor, ids)
        except Exception:
            logger.exception("a logits processor failed")
            return ()
        if made and isinstance(self.processor, Limited):
            self._in_time(self.processor, thread_time() - begun, len(ids))
        return made

    def __call__(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """The processor's result. Where it fails, or is out of time, all tokens are excluded, which ends the request."""
        limited = self.processor if isinstance(self.processor, Limited) else None
        begun = thread_time() if limited is not None else 0.0
        try:
            if not self._is_over:
                made = self.processor(ids, logits)
                if isinstance(made, torch.Tensor) and made.shape == logits.shape:
                    if limited is None or self._in_time(limited, thread_time() - begun, len(ids)):
                        return made
                else:
                    logger.error(
                        "a logits processor returned %s; expected logits of shape %s", type(made), tuple(logits.shape)
                    )
        except Exception:
            logger.exception("a logits processor failed")
        return torch.full_like(logits, -torch.inf)

    def _in_time(self, limited: Limited, seconds: float, length: int) -> bool:
        self.seconds += seconds
        self._start = length if self._start is None else self._start
        allowed = REQUEST_S + TOKEN_S * max(0, length - self._start)
        if self.seconds > allowed:
            reason = f"the grammar took {self.seconds:.2f} s in all; {allowed:.2f} s are allowed so far"
        elif self.budget is not None and not self.budget.spend(id(self), seconds):
            reason = f"the grammar took more than its share of a step's {self.budget.limit_s:g} s"
        else:
            return True
        self._is_over = True
        limited.stop(f"{reason}: make it, its numbers or repetitions smaller")
        return False
