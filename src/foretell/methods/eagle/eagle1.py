"""EAGLE-1 (Li et al. 2401.15077): one layer predicts the target's next feature, and the target's head reads it.

The feature is the target's last hidden state *after* the final norm (what its head reads). Names are those of the
authors' checkpoints; their layer has no input norm. Further layers, which others add, are plain decoder layers, as in
vLLM. EAGLE-2 (2406.16858) is this head with another tree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from foretell.heads.pair_head import PairConfig, PairHead, PairLayer
from foretell.methods.eagle.eagle3 import fresh_matrices
from foretell.model.target import CausalModel


@dataclass(frozen=True)
class Eagle1HeadConfig(PairConfig):
    """Sizes and options."""

    tap_layer: int  # the target's last layer, whose output goes through the final norm
    fc_bias: bool = True


class Eagle1Head(PairHead):
    """The head. It returns features; the target computes their logits (``CausalModel.head``)."""

    method = "eagle1"
    config: Eagle1HeadConfig

    def __init__(self, config: Eagle1HeadConfig) -> None:
        """Weights are torch's defaults: to be loaded, or see ``fresh``."""
        super().__init__()
        self.config = config
        self.own_embedding = config.own_embedding
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList(
            [PairLayer(config, index, config.hidden_size) for index in range(config.num_layers)]
        )
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)

    @classmethod
    def fresh(
        cls, config: Eagle1HeadConfig, generator: torch.Generator, *, embedding: Tensor | None = None
    ) -> "Eagle1Head":
        """A head to be trained, its matrices as in ``Eagle3Head.fresh``, biases zero. embedding [V, H]: the target's,
        where ``own_embedding`` copies it."""
        self = cls(config)
        fresh_matrices(self, generator)
        with torch.no_grad():
            if config.own_embedding and embedding is not None:
                self.embed_tokens.weight.copy_(embedding)
        return self

    @property
    def taps(self) -> tuple[int, ...]:
        """The last layer alone."""
        return (self.config.tap_layer,)

    @property
    def decoder(self) -> Sequence[PairLayer]:
        """See ``PairHead``."""
        return cast("Sequence[PairLayer]", self.layers)

    def enter(self, embeds: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """See ``PairHead``."""
        x: Tensor = self.fc(torch.cat([embeds, features], -1))
        return x, x

    def leave(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See ``PairHead``: the predicted feature is both."""
        return hidden, hidden

    def features(self, taps: Tensor, model: CausalModel) -> Tensor:
        """See ``PairHead``: the target's final norm of its last layer's output."""
        return model.normed(taps.to(model.spec.dtype)).to(self.dtype)

    def logits(self, read: Tensor, model: CausalModel) -> Tensor:
        """See ``PairHead``: the target's head on a predicted feature."""
        return model.head(read.to(model.spec.dtype))
