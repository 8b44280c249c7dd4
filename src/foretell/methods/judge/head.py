"""The stored form of the judge's head: a linear map of one target layer's hidden states, for the verifier ``judge``."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from foretell.core.errors import ModelError
from foretell.heads.head import Head, HeadConfig
from foretell.heads.layout import FlatLayout
from foretell.verify.lossy.judge import Judge, JudgeHead


@dataclass(frozen=True)
class JudgeHeadConfig(HeadConfig):
    """What the head reads."""

    layer: int  # whose output, before any norm
    columns: int  # W: the first so many of its H columns; an inflated target has zeros after them
    eps: float = 1e-6  # of the RMS norm over these columns
    training: dict[str, Any] = field(default_factory=dict)  # figures for people; not read by the program

    def __post_init__(self) -> None:
        """Refuse invalid sizes."""
        super().__post_init__()
        if not 1 <= self.columns <= self.hidden_size:
            raise ModelError(f"a judge of hidden size {self.hidden_size} cannot read {self.columns} columns")


class JudgeWeights(Head):
    """weight . normalise(h) + bias: the logit of "this token is acceptable", h the state after the target has read the
    token.

    normalise divides by the root mean square, without a learned weight: the residual stream grows along a text, and its
    norm says little about the token.
    """

    method = "judge"
    config: JudgeHeadConfig

    def __init__(self, config: JudgeHeadConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.zeros(config.columns))
        self.bias = nn.Parameter(torch.zeros(1))

    @property
    def taps(self) -> tuple[int, ...]:
        """The one layer."""
        return (self.config.layer,)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits [...] of hidden states [..., H] of the layer."""
        h = features(hidden, self.config)
        return h @ self.weight + self.bias

    def verifier(self, judge: Judge) -> Judge:
        """The rule with this head, which reads exactly the layers that it taps."""
        head = JudgeHead(self.weight.detach(), float(self.bias.detach()), eps=self.config.eps)
        return replace(judge, head=head, layers=self.taps)


def features(hidden: Tensor, config: JudgeHeadConfig) -> Tensor:
    """What the head is linear in: float32 [..., W] of hidden states [..., H]."""
    return nn.functional.rms_norm(hidden[..., : config.columns].float(), (config.columns,), eps=config.eps)


class JudgeLayout(FlatLayout):
    """The judge's linear head."""

    summary = "the judge's head (foretell alone)"
    head = JudgeWeights
    config = JudgeHeadConfig
