"""What the trainer's tests share: a tiny target, texts, and the smallest objective that learns something."""

import torch
from torch import Tensor, nn

from foretell.heads.teacher import LabeledBatch, LossSlot, Objective, Outcome, Teacher
from foretell.model.load import from_module
from foretell.train.responses import Responses, pack
from tests.model.tiny import VOCAB, tiny_module

HIDDEN = 32


class Linear(Objective):
    """Slot k: a linear layer on the target's last hidden state, k positions back, with noise from the generator."""

    def __init__(self, *, num_slots: int = 2, vocab: Tensor | None = None, noise: float = 0.01) -> None:
        generator = torch.Generator().manual_seed(3)
        size = VOCAB if vocab is None else len(vocab)
        self.head = nn.ModuleList(nn.Linear(HIDDEN, size, bias=False) for _ in range(num_slots))
        for parameter in self.head.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05
        self.vocab, self.noise = vocab, noise

    @property
    def taps(self) -> tuple[int, ...]:
        return (3,)

    def outcome(
        self, labeled: LabeledBatch, teacher: Teacher, generator: torch.Generator, *, training: bool
    ) -> Outcome:
        slots = []
        for index, layer in enumerate(self.head):
            row, at = labeled.batch.supervised[:, index:].nonzero(as_tuple=True)
            hidden = labeled.taps[row, at]
            if training:
                hidden = hidden + self.noise * torch.randn(hidden.shape, generator=generator)
            slots.append(LossSlot(layer(hidden), row, at + index, 0.5**index, self.vocab))
        return Outcome(slots, figures={"places": float(len(slots[0].row)), "told": self.share})


def teacher() -> Teacher:
    return Teacher(from_module(tiny_module("qwen3")))


def texts(number: int = 24, seed: int = 0) -> Responses:
    """Random tokens: nothing to be learned of language, plenty to be learned of the target's distributions."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(number):
        start, rest = (int(torch.randint(low, high, (), generator=generator)) for low, high in ((2, 6), (4, 20)))
        made.append((torch.randint(3, VOCAB, (start + rest,), generator=generator).tolist(), start))
    return pack(made, {"target": "tiny"})
