"""EAGLE-3 (Li et al. 2503.01840): one wide layer over three fused layers of the target, with its own small vocabulary.

Names and semantics are those of the authors' checkpoints: the attention's input is concat(norm(embedding of the next
token), norm(feature)), the residual is the feature itself, and the next pair feeds on the layer's output *before* the
final norm. EAGLE-3.1's two norms (``fc_norm`` before the fusion, ``norm_output`` on what is fed on) are options.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from foretoken.errors import ModelError
from foretoken.heads.base import HeadConfig
from foretoken.heads.layers import MLP, Attention, AttentionShape, RMSNorm
from foretoken.heads.pair import PairHead
from foretoken.model.target import CausalModel


@dataclass(frozen=True)
class Eagle3Config(HeadConfig):
    """Sizes and options. layer_ids: outputs of target layers, from 0, all different (the files of other engines count
    hidden states, of which the embeddings are number 0: one more)."""

    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    draft_vocab_size: int  # DV
    layer_ids: tuple[int, ...]
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    norm_before_residual: bool = False  # the residual is the normed feature
    fc_norm: bool = False  # each tapped layer is normed by itself before the fusion
    norm_output: bool = False  # the next pair feeds on the output after the final norm
    own_embedding: bool = False  # else the target's is passed in

    def __post_init__(self) -> None:
        """Refuse what would run on wrong features without a word."""
        ids = self.layer_ids
        if not ids or len(set(ids)) != len(ids) or min(ids) < 0:
            raise ModelError(f"layer_ids = {list(ids)} must be one or more different layers, counted from 0")
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ModelError(
                f"draft_vocab_size = {self.draft_vocab_size} must be between 1 and vocab_size = {self.vocab_size}"
            )


class _Layer(nn.Module):
    """The one decoder layer, as ``midlayer`` of the checkpoints."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps)  # of the embedding
        self.hidden_norm = RMSNorm(hidden, eps)  # of the feature
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.self_attn = Attention(
            AttentionShape(
                2 * hidden, hidden, config.num_heads, config.num_kv_heads, config.head_dim, config.rope_theta
            )
        )
        self.mlp = MLP(hidden, config.intermediate_size)


class Eagle3Head(PairHead):
    """The head. ``d2t`` [DV] int64 holds offsets (target id = i + d2t[i]), ``t2d`` [V] bool which target ids it has."""

    method = "eagle3"
    config: Eagle3Config
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config) -> None:
        """Weights are torch's defaults and the draft vocabulary the first DV ids: to be loaded, or see ``fresh``."""
        super().__init__()
        self.config = config
        self.own_embedding = config.own_embedding
        hidden, count = config.hidden_size, len(config.layer_ids)
        self.fc = nn.Linear(count * hidden, hidden, bias=False)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList([RMSNorm(hidden, config.rms_norm_eps) for _ in config.layer_ids])
        self.midlayer = _Layer(config)
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)

    @classmethod
    def fresh(
        cls,
        config: Eagle3Config,
        generator: torch.Generator,
        *,
        vocabulary: tuple[Tensor, Tensor] | None = None,
        head: Tensor | None = None,
        final_norm: Tensor | None = None,
        tap_scale: Sequence[float] | None = None,
        embedding: Tensor | None = None,
    ) -> "Eagle3Head":
        """A head to be trained. vocabulary: (d2t, t2d) of ``draft_vocabulary``; head [V, H]: the target's, whose rows of
        the draft vocabulary the head starts from; final_norm [H]: the weight of the target's norm before that head;
        tap_scale: root mean square of each tapped layer's output; embedding [V, H]: the target's, where
        ``own_embedding`` copies it.

        Matrices are normal with variance 1 / inputs, so that what they put out is as large as what they are given,
        whatever the size of the target; without ``head`` the head of the vocabulary is, too.

        Residual streams grow with depth (to 11 in the bundled target), and fused as they are they drown what the layer
        adds: with tap_scale features begin as the last tapped layer's output divided by its scale, and a little of the
        others (acceptance of slot 1 there after 100 steps: 0.29 instead of 0.22).
        """
        self = cls(config)
        if vocabulary is not None:
            self.d2t.copy_(vocabulary[0])
            self.t2d.copy_(vocabulary[1])
        fresh_matrices(self, generator)
        with torch.no_grad():
            if head is not None:
                self.lm_head.weight.copy_(head[self.target_ids.to(head.device)])
            if final_norm is not None:
                self.norm.weight.copy_(final_norm)
            if tap_scale is not None and not config.fc_norm:
                _calm(self.fc.weight, tap_scale)
            if config.own_embedding and embedding is not None:
                self.embed_tokens.weight.copy_(embedding)
        return self

    @property
    def taps(self) -> tuple[int, ...]:
        """``layer_ids``."""
        return self.config.layer_ids

    @property
    def target_ids(self) -> Tensor:
        """[DV] int64 target id of each column of the logits."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @property
    def vocabulary(self) -> Tensor | None:
        """See ``PairHead``. Reads the device where the draft vocabulary is as large as the target's."""
        whole = self.config.draft_vocab_size == self.config.vocab_size and not bool(self.d2t.any())
        return None if whole else self.target_ids

    @property
    def attention(self) -> Attention:
        """See ``PairHead``."""
        return self.midlayer.self_attn

    def fuse(self, taps: Tensor) -> Tensor:
        """Outputs [..., n * H] of the tapped layers to features g [..., H], in the head's dtype."""
        taps = taps.to(self.dtype)
        if self.config.fc_norm:
            parts = taps.chunk(len(self.config.layer_ids), -1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        fused: Tensor = self.fc(taps)
        return fused

    def enter(self, embeds: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """See ``PairHead``."""
        normed = self.midlayer.hidden_norm(features)
        x = torch.cat([self.midlayer.input_layernorm(embeds), normed], -1)
        return x, normed if self.config.norm_before_residual else features

    def leave(self, residual: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """See ``PairHead``: what ``lm_head`` reads is after the final norm, what is fed on before it."""
        residual = residual + attended
        residual = residual + self.midlayer.mlp(self.midlayer.post_attention_layernorm(residual))
        normed = self.norm(residual)
        return normed if self.config.norm_output else residual, normed

    def features(self, taps: Tensor, model: CausalModel) -> Tensor:
        """See ``PairHead``."""
        return self.fuse(taps)

    def logits(self, read: Tensor, model: CausalModel) -> Tensor:
        """See ``PairHead``: the head's own."""
        out: Tensor = self.lm_head(read)
        return out


def _calm(fusion: Tensor, scale: Sequence[float]) -> None:
    """Rescale a fresh fusion matrix [H, n * H], in place, to inputs of n layers of these root mean squares."""
    hidden = len(fusion)
    for part, size in zip(fusion.chunk(len(scale), 1), scale, strict=True):
        part.mul_(0.3 / max(size, 1e-6))
    fusion[:, -hidden:] += torch.eye(hidden, dtype=fusion.dtype, device=fusion.device) / max(scale[-1], 1e-6)


def fresh_matrices(head: nn.Module, generator: torch.Generator) -> None:
    """Fill every matrix of a head that was just made (see ``Eagle3Head.fresh``); vectors stay as they are. What is written
    into the residual stream (o_proj, down_proj) begins small, so that the unrolled steps begin as one."""
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if parameter.dim() == 2:
                scale = 0.1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * (scale * parameter.shape[1] ** -0.5))


def draft_vocabulary(counts: Tensor | Sequence[int], size: int) -> tuple[Tensor, Tensor]:
    """(d2t [size] int64 offsets, t2d [V] bool) of the ``size`` most frequent ids by counts [V], ties to the lower id.

    Ids stand in ascending order: the draft's column i is target id i + d2t[i]. Raises ModelError where size is not
    between 1 and V.
    """
    counts = torch.as_tensor(counts)
    if not 1 <= size <= len(counts):
        raise ModelError(f"a draft vocabulary of {size} ids was asked for, of a target that has {len(counts)}")
    chosen = counts.argsort(descending=True, stable=True)[:size].sort().values
    t2d = torch.zeros(len(counts), dtype=torch.bool, device=counts.device)
    t2d[chosen] = True
    return chosen - torch.arange(size, device=counts.device), t2d
