"""Kangaroo's adapter (Liu et al. 2404.18911, section 3.2): attention between a shallow exit and the target's head.

The target's first layers are the draft model. RMS norm, attention with a residual (no MLP) and RMS norm follow, in
place of the other layers and the target's final norm. The target's own head, frozen, reads the result.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from foretell.core.errors import ModelError
from foretell.core.tree import Plan
from foretell.heads.config_keys import check_heads
from foretell.heads.head import Head, HeadConfig
from foretell.heads.layout import FlatLayout
from foretell.heads.modules import Attention, AttentionShape, RMSNorm, causal_mask, rotary, turn
from foretell.heads.teacher import LabeledBatch, LossSlot, Objective, Outcome, Teacher
from foretell.methods.medusa.head import norm_weight
from foretell.model.cache import KVCache
from foretell.model.target import CausalModel, ModelSpec


@dataclass(frozen=True)
class KangarooHeadConfig(HeadConfig):
    """Sizes of the adapter. exit_layer: how many of the target's layers run before it, [0, exit_layer)."""

    exit_layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        """Refuse invalid sizes."""
        super().__post_init__()
        check_heads(self.num_heads, self.num_kv_heads, self.head_dim)


class AdapterLayer(nn.Module):
    """x + attention(norm(x)): a decoder layer without its MLP."""

    def __init__(self, config: KangarooHeadConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.self_attn = Attention(
            AttentionShape(
                size, size, config.num_heads, config.num_kv_heads, config.head_dim, config.rope_theta,
                rms_norm_eps=config.rms_norm_eps,
            )
        )  # fmt: skip
        self.input_layernorm = RMSNorm(size, config.rms_norm_eps)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """[B, T, H] -> [B, T, H]; see ``Attention.forward``."""
        mixed: Tensor = self.self_attn(self.input_layernorm(x), positions, mask)
        return x + mixed


class KangarooHead(Head):
    """Shallow hidden states in, normed states for the target's head out. Names are those of the authors' AdapterModel."""

    method = "kangaroo"
    config: KangarooHeadConfig

    def __init__(self, config: KangarooHeadConfig) -> None:
        super().__init__()
        self.config = config
        # The authors' module can stack several; all published ones have one
        self.layers = nn.ModuleList([AdapterLayer(config)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    @classmethod
    def fresh(
        cls,
        model: CausalModel,
        *,
        exit_layer: int = 2,
        head_dim: int = 64,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        rope_theta: float = 10000.0,
        rms_norm_eps: float = 1e-6,
    ) -> "KangarooHead":
        """An untrained adapter that computes the plain early exit: its attention adds nothing yet, and its norm is the
        target's final one. Heads by default: as many of head_dim as fill the hidden size, all with keys of their own.

        Raises ModelError where the target has no such exit.
        """
        size = model.spec.hidden_size
        num_heads = num_heads or max(1, size // head_dim)
        head = cls(
            KangarooHeadConfig(
                hidden_size=size, vocab_size=model.spec.vocab_size, exit_layer=exit_layer, num_heads=num_heads,
                num_kv_heads=num_kv_heads or num_heads, head_dim=head_dim, rope_theta=rope_theta,
                rms_norm_eps=rms_norm_eps,
            )
        )  # fmt: skip
        head.check_target(model.spec, name="a fresh head")
        with torch.no_grad():
            nn.init.zeros_(head.layer.self_attn.o_proj.weight)
            head.norm.weight.copy_(norm_weight(model))
        return head.to(model.spec.device)

    @property
    def bytes_per_token(self) -> int:
        """See ``Head``."""
        return self.new_cache(0, 1).bytes_per_slot

    @property
    def taps(self) -> tuple[int, ...]:
        """The output of the last shallow layer."""
        return (self.config.exit_layer - 1,)

    @property
    def layer(self) -> AdapterLayer:
        """The one layer."""
        layer = self.layers[0]
        assert isinstance(layer, AdapterLayer)
        return layer

    def check_target(self, spec: ModelSpec, *, name: str) -> None:
        """See ``Head.check_target``; the exit must also leave at least one layer to the target."""
        super().check_target(spec, name=name)
        if self.config.exit_layer >= spec.num_layers:
            raise ModelError(
                f"{name}: this {self.method} head exits after layer {self.config.exit_layer}, and {spec.name!r} has "
                f"{spec.num_layers}: an exit must leave at least one layer to verify with"
            )

    def forward(self, hidden: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """A whole text: shallow states [B, T, H], positions [B, T], mask bool [B or 1, 1, T, T] -> [B, T, H]."""
        out: Tensor = self.norm(self.layer(hidden, positions, mask))
        return out

    # -- decoding --------------------------------------------------------------------------------------------------

    def step(self, hidden: Tensor, plan: Plan, cache: KVCache) -> Tensor:
        """The nodes of a plan: shallow states [B, n, H] -> [B, n, H]; keys and values go to ``plan.slots``."""
        layer, x = self.layer, hidden.to(self.dtype)
        attention, size = layer.self_attn, (-1, self.config.head_dim)
        angles = rotary(plan.positions, self.config.head_dim, self.config.rope_theta, x.dtype)  # once for both
        y = layer.input_layernorm(x)
        q = turn(attention.q_proj(y).unflatten(-1, size).transpose(1, 2), *angles)
        k = turn(attention.k_proj(y).unflatten(-1, size).transpose(1, 2), *angles)
        cache.write(0, plan.slots, k, attention.values(y))
        mixed = attention.mix(q, cache.keys[0][:, :, : plan.span], cache.values[0][:, :, : plan.span], plan.mask)
        out: Tensor = self.norm(x + mixed)
        return out

    def remember(self, hidden: Tensor, slots: Tensor, cache: KVCache) -> None:
        """Keys and values alone, of known text: shallow states [B, n, H], slots [B, n] equal to positions."""
        layer = self.layer
        x = layer.input_layernorm(hidden.to(self.dtype))
        cache.write(0, slots, layer.self_attn.keys(x, slots), layer.self_attn.values(x))


class KangarooLayout(FlatLayout):
    """The adapter's checkpoint; its tensors are named as in the authors' AdapterModel."""

    summary = "Kangaroo's adapter (foretell alone)"
    head = KangarooHead
    config = KangarooHeadConfig


class KangarooObjective(Objective):
    """One slot. Cross entropy to p and forward KL differ by p's entropy, in which nothing is trained.

    One is enough also to evaluate: the shallow state and the adapter at position t read tokens up to t and nothing guessed,
    so slot k of a proposal, given that the guesses before it were right, has the distribution that slot 1 has k - 1
    positions later.
    """

    divergence = "forward_kl"
    stepwise = True

    def __init__(self, head: KangarooHead) -> None:
        self.head: KangarooHead = head

    def outcome(
        self, labeled: LabeledBatch, teacher: Teacher, generator: torch.Generator, *, training: bool
    ) -> Outcome:
        """Slot 1. Nothing is drawn."""
        row, at = labeled.batch.supervised.nonzero(as_tuple=True)
        chosen = adapted(self.head, labeled)[row, at][None].to(teacher.model.spec.dtype)  # [1, M, H]
        return Outcome([LossSlot(teacher.model.head(chosen)[0].float(), row, at)])


def adapted(head: KangarooHead, labeled: LabeledBatch) -> Tensor:
    """[B, T, H] the adapter's output at every position of a labeled batch whose taps are the head's."""
    batch = labeled.batch
    positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)[None]
    mask = causal_mask(batch.length, batch.tokens.shape[1])
    out: Tensor = head(labeled.taps.to(head.dtype), positions, mask)
    return out
