"""A user's logits processor inside a service: its failure ends its own request, not the batch."""

import logging
from dataclasses import dataclass

import torch

from foretoken.core.params import LogitsProcessor

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GuardedProcessor:
    """A user's processor whose failure ends its own request, not the batch."""

    processor: LogitsProcessor

    def __call__(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """The processor's result. Where it fails, all tokens are excluded, which ends the request."""
        try:
            made = self.processor(ids, logits)
            if isinstance(made, torch.Tensor) and made.shape == logits.shape:
                return made
            logger.error("a logits processor returned %s; expected logits of shape %s", type(made), tuple(logits.shape))
        except Exception:
            logger.exception("a logits processor failed")
        return torch.full_like(logits, -torch.inf)
