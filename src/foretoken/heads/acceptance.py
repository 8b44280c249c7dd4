"""The acceptance head of SpecDec++ (Huang et al. 2405.19715): the probability that the target keeps the guess that the
drafter just read.

Residual blocks x + silu(W x + b), each with weights of its own, and a linear layer, on the frozen drafter's last hidden
state. It is trained with rejections weighted up, so its raw output is too pessimistic to be a probability: ``scale`` and
``shift`` (Platt scaling) are fitted on held-out text by ``train.objectives.acceptance.calibrate``.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foretoken.errors import ModelError
from foretoken.heads.base import Head, HeadConfig
from foretoken.heads.medusa import ResBlock
from foretoken.model.target import ModelSpec


@dataclass(frozen=True)
class AcceptanceConfig(HeadConfig):
    """Sizes, and what the head was trained on. ``hidden_size`` is here that of the *drafter's* hidden state."""

    num_layers: int  # residual blocks; 0: logistic regression
    normalize: bool  # divide each hidden state by its root mean square first
    drafter: str  # name of the method whose hidden states it reads


class AcceptanceHead(Head):
    """Names: ``blocks.{j}.linear.weight`` [H, H], ``blocks.{j}.linear.bias`` [H], ``out.weight`` [1, H], ``out.bias`` [1],
    and the float32 scalars ``scale`` and ``shift``."""

    method: ClassVar[str] = "acceptance"
    config: AcceptanceConfig
    scale: Tensor
    shift: Tensor

    def __init__(self, config: AcceptanceConfig) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(ResBlock(config.hidden_size) for _ in range(config.num_layers))
        self.out = nn.Linear(config.hidden_size, 1)
        self.register_buffer("scale", torch.ones((), dtype=torch.float32))
        self.register_buffer("shift", torch.zeros((), dtype=torch.float32))

    @property
    def taps(self) -> tuple[int, ...]:
        """None: it reads the drafter."""
        return ()

    def check_target(self, spec: ModelSpec, *, name: str) -> None:
        """Raise ModelError where the target has another vocabulary: its hidden states are not read."""
        if self.config.vocab_size != spec.vocab_size:
            raise ModelError(
                f"{name}: this acceptance head was trained for a target of vocabulary {self.config.vocab_size}, and "
                f"{spec.name!r} has {spec.vocab_size}: train one for this target with 'foretoken train acceptance'"
            )

    def check_drafter(self, method: str, hidden_size: int, *, name: str) -> None:
        """Raise ModelError where the hidden states are not those that the head was trained on."""
        if (method, hidden_size) != (self.config.drafter, self.config.hidden_size):
            raise ModelError(
                f"{name}: this acceptance head was trained on hidden states of {self.config.drafter!r}, "
                f"{self.config.hidden_size} wide, and those of {method!r} here are {hidden_size} wide: train one for this "
                "drafter with 'foretoken train acceptance'"
            )

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] after reading a guess -> [...] float32 raw logit of "the target keeps that guess"."""
        x = hidden.to(self.dtype)
        if self.config.normalize:
            x = F.rms_norm(x, x.shape[-1:], eps=1e-6)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.out(x)[..., 0].float()
        return logits


def predicted(head: AcceptanceHead, hidden: Tensor) -> Tensor:
    """[...] float32: the calibrated probability that the target keeps the guesses after which a drafter's hidden state is
    hidden [..., H], each given that it kept the guesses before it. What a drafter's ``chance`` returns."""
    return torch.sigmoid(head(hidden) * head.scale + head.shift)
