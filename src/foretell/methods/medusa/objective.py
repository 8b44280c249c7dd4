"""How Medusa heads are trained (2401.10774, section 2.2.1, "Medusa-1"): the target is frozen."""

import torch
from torch import Tensor

from foretell.heads.objective import LossSlot, Objective, Outcome
from foretell.heads.teacher import LabeledBatch, Teacher
from foretell.methods.medusa.head import MedusaHead


class MedusaObjective(Objective):
    """Head k = 1, 2, ... at position t imitates p of token t + k + 1, which stands at t + k; its weight is decay ** k,
    as distant heads are wrong more often and would otherwise dominate the loss."""

    head: MedusaHead

    def __init__(self, head: MedusaHead, *, decay: float = 0.8) -> None:
        self.head, self.decay = head, decay

    def outcome(
        self, labeled: LabeledBatch, teacher: Teacher, generator: torch.Generator, *, training: bool
    ) -> Outcome:
        """A slot a head. Places t whose token t + k + 1 is of the response, t itself in the prompt or not: decoding begins
        with the hidden state of the prompt's last token but one."""
        model, head = teacher.model, self.head
        with torch.no_grad():
            normed = model.normed(labeled.taps.to(model.spec.dtype)).to(head.dtype)  # [B, T, H]
        supervised, slots = labeled.batch.supervised, []
        for index in range(head.config.num_heads):
            ahead = index + 1
            row, at = supervised[:, ahead:].nonzero(as_tuple=True)  # at counts from ahead: it is t itself
            said: Tensor = head(normed[row, at], index)  # [M, DV], or [M, H]
            if not head.config.own_lm_head:
                said = model.head(said[None].to(model.spec.dtype))[0]
            slots.append(LossSlot(said, row, at + ahead, self.decay**ahead, head.token_map))
        return Outcome(slots)
