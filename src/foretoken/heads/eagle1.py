"""EAGLE-1 (Li et al. 2401.15077): one layer predicts the target's next feature, and the target's head reads it.

The feature is the target's last hidden state *after* the final norm (what its head reads). Names are those of the
authors' checkpoints; their layer has no input norm. EAGLE-2 (2406.16858) is this head with another tree.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from foretoken.heads.base import HeadConfig
from foretoken.heads.eagle3 import fresh_matrices
from foretoken.heads.layers import MLP, Attention, AttentionShape, RMSNorm
from foretoken.heads.pair import PairHead
from foretoken.model.target import CausalModel


@dataclass(frozen=True)
class Eagle1Config(HeadConfig):
    """Sizes and options."""

    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tap_layer: int  # the target's last layer, whose output goes through the final norm
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    fc_bias: bool = True
    own_embedding: bool = False  # else the target's is passed in


class _Layer(nn.Module):
    """The one decoder layer, as ``layers.0`` of the checkpoints."""

    def __init__(self, config: Eagle1Config) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.self_attn = Attention(
            AttentionShape(hidden, hidden, config.num_heads, config.num_kv_heads, config.head_dim, config.rope_theta)
        )
        self.post_attention_layernorm = RMSNorm(hidden, config.rms_norm_eps)
        self.mlp = MLP(hidden, config.intermediate_size)


class Eagle1Head(PairHead):
    """The head. It puts out features; their logits are the target's to compute (``CausalModel.head``)."""

    method = "eagle1"
    config: Eagle1Config

    def __init__(self, config: Eagle1Config) -> None:
        """Weights are torch's defaults: to be loaded, or see ``fresh``."""
        super().__init__()
        self.config = config
        self.own_embedding = config.own_embedding
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList([_Layer(config)])
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)

    @classmethod
    def fresh(
        cls, config: Eagle1Config, generator: torch.Generator, *, embedding: Tensor | None = None
    ) -> "Eagle1Head":
        """A head to be trained, its matrices as in ``Eagle3Head.fresh``, its bias zero. embedding [V, H]: the target's,
        where ``own_embedding`` copies it."""
        self = cls(config)
        fresh_matrices(self, generator)
        with torch.no_grad():
            if config.fc_bias:
                self.fc.bias.zero_()
            if config.own_embedding and embedding is not None:
                self.embed_tokens.weight.copy_(embedding)
        return self

    @property
    def taps(self) -> tuple[int, ...]:
        """The last layer alone."""
        return (self.config.tap_layer,)

    @property
    def layer(self) -> _Layer:
        """The one layer."""
        layer = self.layers[0]
        assert isinstance(layer, _Layer)
        return layer

    @property
    def attention(self) -> Attention:
        """See ``PairHead``."""
        return self.layer.self_attn

    def enter(self, embeds: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """See ``PairHead``."""
        x: Tensor = self.fc(torch.cat([embeds, features], -1))
        return x, x

    def leave(self, residual: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """See ``PairHead``: the predicted feature is both."""
        residual = residual + attended
        feature = residual + self.layer.mlp(self.layer.post_attention_layernorm(residual))
        return feature, feature

    def features(self, taps: Tensor, model: CausalModel) -> Tensor:
        """See ``PairHead``: the target's final norm of its last layer's output."""
        return model.normed(taps.to(model.spec.dtype)).to(self.dtype)

    def logits(self, read: Tensor, model: CausalModel) -> Tensor:
        """See ``PairHead``: the target's head on a predicted feature."""
        return model.head(read.to(model.spec.dtype))
