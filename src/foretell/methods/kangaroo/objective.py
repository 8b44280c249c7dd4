"""Training Kangaroo's adapter (2404.18911, equation 3): soft cross entropy to p, at every position of the response."""

import torch
from torch import Tensor

from foretell.heads.modules import causal_mask
from foretell.heads.objective import LossSlot, Objective, Outcome
from foretell.heads.teacher import LabeledBatch, Teacher
from foretell.methods.kangaroo.head import KangarooHead


class KangarooObjective(Objective):
    """One slot. Cross entropy to p and forward KL differ by p's entropy, in which nothing is trained.

    One is enough also to evaluate: the shallow state and the adapter at position t read tokens up to t and nothing guessed,
    so slot k of a proposal, given that the guesses before it were right, has the distribution that slot 1 has k - 1
    positions later.
    """

    divergence = "forward_kl"
    stepwise = True

    def __init__(self, head: KangarooHead) -> None:
        self.head: KangarooHead = head

    def outcome(
        self, labeled: LabeledBatch, teacher: Teacher, generator: torch.Generator, *, training: bool
    ) -> Outcome:
        """Slot 1. Nothing is drawn."""
        row, at = labeled.batch.supervised.nonzero(as_tuple=True)
        chosen = adapted(self.head, labeled)[row, at][None].to(teacher.model.spec.dtype)  # [1, M, H]
        return Outcome([LossSlot(teacher.model.head(chosen)[0].float(), row, at)])


def adapted(head: KangarooHead, labeled: LabeledBatch) -> Tensor:
    """[B, T, H] the adapter's output at every position of a labeled batch whose taps are the head's."""
    batch = labeled.batch
    positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)[None]
    mask = causal_mask(batch.length, batch.tokens.shape[1])
    out: Tensor = head(labeled.taps.to(head.dtype), positions, mask)
    return out
