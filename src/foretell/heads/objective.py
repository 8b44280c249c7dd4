"""The interface of training objectives: what the trainer needs of each method.

A *slot* is one guess of a proposal: slot 1 follows the pending token, slot 2 the first guess, and so on, each given
that the guesses before it were right (they are the text's own tokens: teacher forcing). Slots are what acceptance is
counted by, so losses and metrics are functions of slots, the same for all methods.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from foretell.heads.teacher import LabeledBatch, Teacher


@dataclass(frozen=True)
class LossSlot:
    """Distributions of the draft at M places of a batch, and where the target's distribution for the same token stands."""

    logits: Tensor  # [M, Vd] of q; gradient flows
    row: Tensor  # [M] int64 row of the batch
    at: Tensor  # [M] int64 position of the target's logits for the same next token: labeled.logits[row, at]
    weight: float | Tensor = 1.0  # of the slot in the loss, or of each place: [M]
    vocab: Tensor | None = None  # [Vd] int64 target ids of the draft's columns; None: the same vocabulary


@dataclass(frozen=True)
class Outcome:
    """The result of a head on a labeled."""

    slots: list[LossSlot]  # slot 1 first
    extra: Tensor | None = None  # a scalar to add to the loss (feature regression, confidence): gradient flows
    figures: dict[str, float] = field(default_factory=dict)  # further metrics for the log


class Objective(ABC):
    """A head with the way it is trained. The loss is sum over slots of weight * mean divergence(p, q), plus extra."""

    head: nn.Module
    divergence: str = "forward_kl"  # a name of ``train.losses``
    share: float = 0.0
    """Share of training done, 0 to 1: set by the trainer before each step."""
    stepwise: bool = False
    """Whether slot 1 determines all slots: slot k of a proposal has the distribution that slot 1 has k - 1 positions
    later. True where the drafter computes its distribution from the text alone (draft models, early exits), False where
    it feeds on its own guesses."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose outputs ``outcome`` reads in ``labeled.taps``: the head's; a draft model has none."""
        return getattr(self.head, "taps", ())

    @abstractmethod
    def outcome(
        self, labeled: LabeledBatch, teacher: Teacher, generator: torch.Generator, *, training: bool
    ) -> Outcome:
        """All slots of all supervised places. Random choices (noise, anchors) come from generator alone. With
        training=False nothing is dropped or noised, and slots beyond those trained may be unrolled."""
