"""How EAGLE heads are trained: EAGLE-3 by training-time test over several slots, no feature regression (2503.01840);
EAGLE-1 by regression of the next feature, and a little of the target's distribution (2401.15077)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from foretell.core.errors import require
from foretell.heads.pair_head import PairHead
from foretell.heads.teacher import LabeledBatch, LossSlot, Objective, Outcome, Teacher, TeacherBatch
from foretell.methods.eagle.eagle1 import Eagle1Head
from foretell.model.target import CausalModel


class Eagle3Objective(Objective):
    """Slot k after anchor t: from the target's features up to position t, token t + 1 pending, the guess of token
    t + 1 + k, whose distribution the target has at position t + k. Weights of the slots are decay ** (k - 1).

    The first share ``alone`` of training uses slot 1 only. The other slots build on it, and each costs as much again.
    """

    head: PairHead

    def __init__(
        self,
        head: PairHead,
        *,
        num_slots: int = 7,
        decay: float = 0.8,
        alone: float = 0.0,
        divergence: str = "forward_kl",
    ) -> None:
        """num_slots is how many guesses in a line are unrolled, in training and in evaluation. Raises ConfigError."""
        require_slots(num_slots)
        require(0 <= alone <= 1, "alone", alone, "a share of training, between 0 and 1")
        self.head, self.num_slots, self.decay, self.divergence = head, num_slots, decay, divergence
        self.alone = alone

    @property
    def vocabulary(self) -> Tensor | None:
        """The head's, which a learner changes."""
        return self.head.vocabulary

    def outcome(
        self, labeled: LabeledBatch, teacher: Teacher, generator: torch.Generator, *, training: bool
    ) -> Outcome:
        """In training, places whose most probable token lies outside the draft vocabulary are left out (as published):
        there the restricted distribution has little mass. In evaluation none are left out."""
        features = self.head.features(labeled.taps, teacher.model)
        num_slots = 1 if training and self.share < self.alone else self.num_slots
        reads = unrolled(self.head, labeled.batch, features, teacher.model, num_slots)
        slots = []
        for index, (_, read) in enumerate(reads):
            row, anchor = places(labeled.batch, index + 1)
            at = anchor + index + 1
            if training and self.vocabulary is not None:
                known = self.head.get_buffer("t2d")[labeled.best_at(row, at)]
                row, anchor, at = row[known], anchor[known], at[known]
            logits = self.head.logits(read[row, anchor][None], teacher.model)[0]
            slots.append(LossSlot(logits, row, at, self.decay**index, self.vocabulary))
        return Outcome(slots)


def require_slots(num_slots: int) -> None:
    """Raise ConfigError where there is none."""
    require(num_slots >= 1, "num_slots", num_slots, "at least 1")


def unrolled(
    head: PairHead, batch: TeacherBatch, features: Tensor, model: CausalModel, num_slots: int
) -> list[tuple[Tensor, Tensor]]:
    """``PairHead.unroll`` on the pairs of a batch, features [B, T, H]: T - 1 pairs, [B, T - 1, H] each, a step a slot."""
    embeds = head.embed(batch.tokens[:, 1:], model)
    if not head.own_embedding:
        embeds = embeds.detach()  # the target is frozen
    return head.unroll(embeds, features[:, :-1], num_slots)


def places(batch: TeacherBatch, slot: int) -> tuple[Tensor, Tensor]:
    """(row [M], anchor [M]): all t for which position t + slot is supervised."""
    row, anchor = batch.supervised[:, slot:].nonzero(as_tuple=True)
    return row, anchor


class Eagle1Objective(Objective):
    """Loss: weight_feature * SmoothL1(predicted feature, true feature) + weight_law * divergence of slot 1.

    Training knows slot 1 alone, with uniform noise on the features it reads, since the head never sees its own outputs.
    Evaluation unrolls num_slots of them on its own features, exactly as decoding does: its slots are defined as for
    EAGLE-3.
    """

    head: Eagle1Head

    def __init__(
        self,
        head: Eagle1Head,
        *,
        num_slots: int = 7,
        weight_feature: float = 1.0,
        weight_law: float = 0.1,
        noise: float = 0.1,
        divergence: str = "forward_kl",
    ) -> None:
        """noise is added to each feature's numbers, uniform in [-noise, noise]. Raises ConfigError."""
        require_slots(num_slots)
        self.head, self.num_slots, self.divergence = head, num_slots, divergence
        self.weight_feature, self.weight_law, self.noise = weight_feature, weight_law, noise

    def outcome(
        self, labeled: LabeledBatch, teacher: Teacher, generator: torch.Generator, *, training: bool
    ) -> Outcome:
        """Slot 1 with the regression in training, all slots in evaluation."""
        with torch.no_grad():
            true = self.head.features(labeled.taps, teacher.model)  # [B, T, H]
        features = true
        if training and self.noise:
            uniform = torch.rand(true.shape, generator=generator, device=generator.device, dtype=torch.float32)
            features = true + ((2.0 * uniform - 1.0) * self.noise).to(true)
        steps = unrolled(self.head, labeled.batch, features, teacher.model, 1 if training else self.num_slots)
        slots = []
        for index, (predicted, _) in enumerate(steps):
            row, anchor = places(labeled.batch, index + 1)
            at = anchor + index + 1
            here = predicted[row, anchor]  # [M, H] of position t + index + 1
            slots.append(LossSlot(self.head.logits(here[None], teacher.model)[0], row, at, self.weight_law))
        row, anchor = places(labeled.batch, 1)
        predicted, wanted = steps[0][0][row, anchor].float(), true[row, anchor + 1].float()
        regression = F.smooth_l1_loss(predicted, wanted, reduction="sum") / max(1, wanted.numel())
        return Outcome(slots, self.weight_feature * regression, {"feature_loss": float(regression.detach())})
