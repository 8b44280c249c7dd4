"""An acceptance head that learns beside its draft model: the chance that a guess is kept changes with the draft.

Draft models alone: a head that reads the target's hidden states needs them for texts with guesses in them, which nobody
has served (``methods.acceptance.objective``, prefix "target").
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foretell.heads.teacher import LabeledBatch, Teacher
from foretell.learn.training.texts import Text
from foretell.methods.acceptance.load import load_acceptance
from foretell.methods.acceptance.objective import AcceptanceObjective, GuessPlaces, calibrate, weighted_bce
from foretell.methods.acceptance.reading import ModelReader
from foretell.methods.draft_model.drafter import ACCEPTANCE
from foretell.model.load import from_module
from foretell.model.target import ModelSpec

LEARNING_RATE = 1e-3
CLIP = 1.0  # the most that a gradient's norm may be
WEIGHT_REJECTED = 6.0  # as in the paper; calibration takes it out again


class AcceptanceStudent:
    """The head of one draft model. Not thread-safe."""

    def __init__(self, name: str, draft: ModelSpec, module: Any, teacher: Teacher) -> None:
        """name: directory of the head. module: the draft model that learns, a transformers model, read as it is at each
        call. Raises ModelError."""
        self.head = load_acceptance(name, draft).to(next(module.parameters()).device)
        self._module = module
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        reader = ModelReader(from_module(module))  # freezes it
        for parameter in trained:
            parameter.requires_grad_()
        self.objective = AcceptanceObjective(self.head, reader, prefix="target")
        self.teacher = teacher
        self.parameters = [parameter.requires_grad_() for parameter in self.head.parameters()]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=LEARNING_RATE, weight_decay=0.0)

    def places(self, labeled: LabeledBatch, text: Text, generator: torch.Generator) -> GuessPlaces:
        """Guesses of the draft model beside a text, and the chance that the target keeps each."""
        self.objective.temperatures = (text.temperature,)
        is_learning = self._module.training
        self._module.eval()  # it guesses as it will when it serves, without dropout
        try:
            return self.objective.places(labeled, self.teacher, generator)
        finally:
            self._module.train(is_learning)

    def learn(self, labeled: LabeledBatch, text: Text, generator: torch.Generator, share: float) -> None:
        """Add ``share`` of the gradient of a text's loss."""
        places = self.places(labeled, text, generator)
        if len(places.labels):
            loss = weighted_bce(self.objective.read(places), places.labels, 1.0, WEIGHT_REJECTED)
            (loss * share).backward()  # type: ignore[no-untyped-call]

    def apply(self) -> None:
        """One step of the optimiser; none where a number is not finite."""
        norm = nn.utils.clip_grad_norm_(self.parameters, CLIP)
        if bool(torch.isfinite(norm)):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def calibrate(self, places: Sequence[GuessPlaces]) -> None:
        """Platt scaling by these guesses."""
        known = [one for one in places if len(one.labels)]
        if known:
            logits = torch.cat([self.objective.read(one) for one in known])
            calibrate(self.head, logits, torch.cat([one.labels for one in known]))

    @torch.no_grad()
    def loss(self, places: Sequence[GuessPlaces]) -> float:
        """Mean cross entropy of the calibrated chance, nats per guess; 0 without any."""
        total, count = 0.0, 0
        for one in places:
            logits = self.objective.read(one) * self.head.scale + self.head.shift
            total += float(F.binary_cross_entropy_with_logits(logits, one.labels, reduction="sum"))
            count += len(one.labels)
        return total / max(1, count)

    def weights(self) -> dict[str, Tensor]:
        """A copy, named as ``DraftModel.rebuilt`` has them."""
        return {ACCEPTANCE + name: value.detach().cpu().clone() for name, value in self.head.state_dict().items()}

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Go on from these; other names are left out."""
        own = {name.removeprefix(ACCEPTANCE): value for name, value in weights.items() if name.startswith(ACCEPTANCE)}
        self.head.load_state_dict(own)
