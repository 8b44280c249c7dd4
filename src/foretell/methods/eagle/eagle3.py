"""EAGLE-3 (Li et al. 2503.01840): one wide layer over three fused layers of the target, with its own small vocabulary.

Names and semantics are those of the authors' checkpoints: the attention's input is concat(norm(embedding of the next
token), norm(feature)), the residual is the feature itself, and the next pair feeds on the layer's output *before* the
final norm. EAGLE-3.1's two norms (``fc_norm`` before the fusion, ``norm_output`` on what is fed on) are options, and so
is what heads of speculators 0.9, SpecForge and modelopt have beside them: one norm of all tapped layers together
(``norm_before_fc``), further layers, Qwen3's norms of queries and keys, biases, windows, scaled rotary frequencies.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from foretell.core.errors import ModelError
from foretell.heads.draft_vocabulary import ReducedHead
from foretell.heads.modules import RMSNorm
from foretell.heads.pair_head import PairConfig, PairHead, PairLayer
from foretell.heads.repacked import OUTPUT, in_blocks, values_of
from foretell.model.target import CausalModel


@dataclass(frozen=True)
class Eagle3HeadConfig(PairConfig):
    """Sizes and options. layer_ids: outputs of target layers, from 0, all different (the files of other engines count
    hidden states, of which the embeddings are number 0: one more)."""

    draft_vocab_size: int  # DV
    layer_ids: tuple[int, ...]
    norm_before_residual: bool = False  # the residual is the normed feature
    norm_before_fc: bool = False  # all tapped layers are normed as one vector before the fusion
    fc_norm: bool = False  # each tapped layer is normed by itself before the fusion
    norm_output: bool = False  # the next pair feeds on the output after the final norm

    def __post_init__(self) -> None:
        """Refuse configurations that would silently run on wrong features."""
        super().__post_init__()
        if self.norm_before_fc and self.fc_norm:
            raise ModelError("norm_before_fc and fc_norm are both true; a head has one of them, or neither")
        ids = self.layer_ids
        if not ids or len(set(ids)) != len(ids) or min(ids) < 0:
            raise ModelError(f"layer_ids = {list(ids)} must be one or more different layers, counted from 0")
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ModelError(
                f"draft_vocab_size = {self.draft_vocab_size} must be between 1 and vocab_size = {self.vocab_size}"
            )


class _First(PairLayer):
    """The first decoder layer, as ``midlayer`` of the checkpoints."""

    def __init__(self, config: Eagle3HeadConfig) -> None:
        super().__init__(config, 0, 2 * config.hidden_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)  # of the embedding
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)  # of the feature


class Eagle3Head(ReducedHead, PairHead):
    """The head. ``d2t`` [DV] int64 holds offsets (target id = i + d2t[i]), ``t2d`` [V] bool which target ids it has."""

    method = "eagle3"
    config: Eagle3HeadConfig

    def __init__(self, config: Eagle3HeadConfig) -> None:
        """Weights are torch's defaults and the draft vocabulary the first DV ids: to be loaded, or see ``fresh``."""
        super().__init__()
        self.config = config
        self.own_embedding = config.own_embedding
        hidden, count = config.hidden_size, len(config.layer_ids)
        self.fc = nn.Linear(count * hidden, hidden, bias=False)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(count * hidden, config.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList([RMSNorm(hidden, config.rms_norm_eps) for _ in config.layer_ids])
        self.midlayer = _First(config)
        if config.num_layers > 1:
            self.layers = nn.ModuleDict({str(i): PairLayer(config, i, hidden) for i in range(1, config.num_layers)})
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.add_maps(config.draft_vocab_size, config.vocab_size)

    @classmethod
    def fresh(
        cls,
        config: Eagle3HeadConfig,
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

        Matrices are normal with variance 1 / inputs, so that outputs are as large as inputs for every size of target;
        without ``head`` this includes the output head.

        Residual streams grow with depth (to 11 in the bundled target), and fused without scaling they dominate what the
        layer adds: with tap_scale features begin as the last tapped layer's output divided by its scale, and a little
        of the others (acceptance of slot 1 there after 100 steps: 0.29 instead of 0.22).
        """
        self = cls(config)
        self.take_maps(vocabulary)
        fresh_matrices(self, generator)
        with torch.no_grad():
            if head is not None:
                self.lm_head.weight.copy_(head[self.target_ids.to(head.device)])
            if final_norm is not None:
                self.norm.weight.copy_(final_norm)
            if tap_scale is not None and not (config.fc_norm or config.norm_before_fc):
                _calm(self.fc.weight, tap_scale)
            if config.own_embedding and embedding is not None:
                self.embed_tokens.weight.copy_(embedding)
        return self

    @property
    def taps(self) -> tuple[int, ...]:
        """``layer_ids``."""
        return self.config.layer_ids

    @property
    def vocabulary(self) -> Tensor | None:
        """See ``PairHead``. Reads the device where the draft vocabulary is as large as the target's."""
        whole = self.config.draft_vocab_size == self.config.vocab_size and not bool(self.d2t.any())
        return None if whole else self.target_ids

    @property
    def decoder(self) -> Sequence[PairLayer]:
        """See ``PairHead``."""
        if self.config.num_layers == 1:
            return (self.midlayer,)
        return (self.midlayer, *cast("Iterable[PairLayer]", self.layers.values()))

    def fuse(self, taps: Tensor) -> Tensor:
        """Outputs [..., n * H] of the tapped layers to features g [..., H], in the head's dtype."""
        fused: Tensor = self.fc(self.normed_taps(taps.to(self.dtype)))
        return fused

    def normed_taps(self, taps: Tensor) -> Tensor:
        """What the fusion reads of outputs [..., n * H] in the head's dtype: as they are, but for the two options."""
        if self.config.norm_before_fc:
            taps = self.input_norm(taps)
        if self.config.fc_norm:
            parts = taps.chunk(len(self.config.layer_ids), -1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return taps

    def enter(self, embeds: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """See ``PairHead``."""
        normed = self.midlayer.hidden_norm(features)
        x = torch.cat([self.midlayer.input_layernorm(embeds), normed], -1)
        return x, normed if self.config.norm_before_residual else features

    def leave(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See ``PairHead``: what ``lm_head`` reads is after the final norm, what is fed on before it."""
        normed = self.norm(hidden)
        return normed if self.config.norm_output else hidden, normed

    def features(self, taps: Tensor, model: CausalModel) -> Tensor:
        """See ``PairHead``."""
        return self.fuse(taps)

    def borrow(self, model: CausalModel) -> None:
        """See ``Head``: rows of the output head, in the blocks that the head's other matrices have."""
        rows = model.head_rows(self.target_ids.to(model.spec.device)).cpu()
        kinds = {matrix.kind for matrix in self.packed.values()}
        if len(kinds) == 1:
            blocks = in_blocks(rows, kinds.pop())
            rows = values_of(blocks, rows.dtype)
            self.packed = {**self.packed, OUTPUT: blocks}
        self.lm_head.weight.data = rows
        self.lent = ()

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
    """Fill every matrix of a head that was just made (see ``Eagle3Head.fresh``). Biases become zero, norms stay as they
    are. What is written into the residual stream (o_proj, down_proj) begins small, so that the unrolled steps begin as
    one."""
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if parameter.dim() == 2:
                scale = 0.1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * (scale * parameter.shape[1] ** -0.5))
            elif name.endswith(".bias"):
                parameter.zero_()
