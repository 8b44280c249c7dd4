"""How an EAGLE-1 head is trained: regression of the next feature, and a little of the target's distribution
(2401.15077)."""

import torch
from torch.nn import functional as F

from foretell.heads.objective import LossSlot, Objective, Outcome
from foretell.heads.teacher import LabeledBatch, Teacher
from foretell.methods.eagle.eagle1 import Eagle1Head
from foretell.methods.eagle.objective_eagle3 import places, require_slots, unrolled


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
