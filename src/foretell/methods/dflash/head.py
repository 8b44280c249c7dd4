"""Block drafters: a whole block of guesses in one pass of a few layers (DFlash, 2602.06036).

The target's features take the place of the drafter's own text: each layer projects them, and the block's rows, with the
same weights to keys and values. The block is the embedding of the pending token, the *anchor*, and of mask tokens
after it. Two descendants are options here: the causal block of JetSpec (2606.18394, section 3), and DSpark's
(2607.05147) anchor that predicts, Markov head and confidence head. Embedding and head are the target's and are never
stored, but where the drafter has a vocabulary of its own: then it has these rows of the target's head (speculators).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import Tensor, nn

from foretell.core.errors import ConfigError
from foretell.core.noise import int64_seed
from foretell.heads.draft_vocabulary import ReducedHead
from foretell.heads.head import Head, HeadConfig
from foretell.heads.modules import MLP, Attention, AttentionShape, RMSNorm, rotary, turn
from foretell.methods.medusa.head import norm_weight
from foretell.model.target import CausalModel


class MarkovHead(nn.Module):
    """A bigram of low rank: logits of a token given the one before it (DSpark, section 3; the "vanilla" kind)."""

    def __init__(self, vocab_size: int, rank: int, num_outputs: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, num_outputs, bias=False)


class ConfidenceHead(nn.Module):
    """The logit of a guess's acceptance, from its row and the Markov head's vector of the token before it."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, 1)


def start_without_effect(head: nn.Module) -> None:
    """Set zeros in these parts of a head, by which an untrained part changes no guess, and each has an even chance."""
    for module in head.modules():
        if isinstance(module, MarkovHead):
            nn.init.zeros_(module.markov_w2.weight)
        elif isinstance(module, ConfidenceHead):
            nn.init.zeros_(module.proj.weight)
            nn.init.zeros_(module.proj.bias)


Memory = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(layer, keys, values of context and block [B, kv heads, n + Q, d]) -> all keys and values that the block attends to."""


@dataclass(frozen=True)
class DFlashHeadConfig(HeadConfig):
    """Sizes and kind of a block drafter."""

    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    block_size: int  # rows of a block, the anchor's included
    layer_ids: tuple[int, ...]  # target layers whose outputs are the features
    mask_token_id: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    causal: bool = False  # rows of a block see the rows before them only (JetSpec)
    # Of each layer: how many last positions a row sees; 0 is all. Empty: all layers see all
    windows: tuple[int, ...] = ()
    windows_causal: bool = True  # in layers with a window, rows of a block see the rows before them only
    sample_from_anchor: bool = False  # the anchor's row makes the first guess (DSpark); else it makes none
    markov_rank: int = 0  # > 0: logits of a guess get W1[token before it] W2 (DSpark)
    confidence: bool = False  # predict the acceptance of each guess (DSpark)
    # DV: guess these tokens alone, by an output head of its own; None: the target's.
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        """Refuse invalid sizes."""
        super().__post_init__()
        least = 1 if self.sample_from_anchor else 2
        sized = len(self.windows) == self.num_layers and all(
            size == 0 or size >= self.block_size for size in self.windows
        )
        for good, name, expected in (
            (self.block_size >= least, "block_size", f"at least {least}"),
            (self.num_layers >= 1, "num_layers", "at least 1"),
            (len(self.layer_ids) >= 1, "layer_ids", "one target layer or more"),
            (0 <= self.mask_token_id < self.vocab_size, "mask_token_id", f"between 0 and {self.vocab_size - 1}"),
            (self.num_heads % self.num_kv_heads == 0, "num_kv_heads", f"a divisor of num_heads = {self.num_heads}"),
            (self.head_dim % 2 == 0, "head_dim", "even"),
            (
                sized or not self.windows,
                "windows",
                f"one size for each layer, 0 or at least block_size = {self.block_size}",
            ),
            (self.markov_rank >= 0, "markov_rank", "0 (no Markov head) or more"),
            (
                self.num_outputs < self.vocab_size or self.draft_vocab_size is None,
                "draft_vocab_size",
                f"below vocab_size = {self.vocab_size}, or null for the target's own head",
            ),
        ):
            if not good:
                raise ConfigError(f"{name} = {getattr(self, name)!r} of a dflash head must be {expected}")

    @property
    def num_outputs(self) -> int:
        """Tokens that it can guess."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    def first_row(self) -> int:
        """The row of a block that makes the first guess; row r stands at position anchor + r."""
        return 0 if self.sample_from_anchor else 1

    @property
    def num_guesses(self) -> int:
        """Guesses in a line that one block makes."""
        return self.block_size - self.first_row

    def window(self, layer: int) -> int:
        """How many last positions a layer sees; 0: all."""
        return self.windows[layer] if self.windows else 0

    def is_causal(self, layer: int) -> bool:
        """Whether in a layer rows of a block see the rows before them only."""
        return self.causal or (self.windows_causal and self.window(layer) > 0)

    def num_rows(self, depth: int) -> int:
        """Rows that must run for ``depth`` guesses: all of them, unless later ones are invisible to earlier ones."""
        return depth + self.first_row if all(map(self.is_causal, range(self.num_layers))) else self.block_size


class DFlashLayer(nn.Module):
    """A Qwen3 layer whose keys and values come from context features as well."""

    def __init__(self, config: DFlashHeadConfig, index: int) -> None:
        super().__init__()
        shape = AttentionShape(
            config.hidden_size, config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim,
            config.rope_theta, qk_norm=True, rms_norm_eps=config.rms_norm_eps, window=config.window(index),
        )  # fmt: skip
        self.self_attn = Attention(shape)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        angles: tuple[Tensor, Tensor],
        mask: Tensor,
        remember: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        far: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """x [B, Q, H] rows of blocks, context [B, n, H], angles of the n + Q positions -> [B, Q, H]. far: angles by which
        sinks meet the rows, where the layer reads a part of its text alone.

        Features are normed once for all layers (``hidden_norm``), rows by each layer, so features skip the layer's
        norm.
        """
        attention, num_rows = self.self_attn, x.shape[1]
        size = (-1, attention.shape.head_dim)
        rows = self.input_layernorm(x)
        both = torch.cat((context, rows), 1)  # [B, n + Q, H]
        cos, sin = angles
        q = attention.q_norm(attention.q_proj(rows).unflatten(-1, size)).transpose(1, 2)
        k = attention.k_norm(attention.k_proj(both).unflatten(-1, size)).transpose(1, 2)
        v = attention.v_proj(both).unflatten(-1, size).transpose(1, 2)
        keys, values = remember(turn(k, cos, sin), v)
        sunk = None if far is None or attention.shape.limit is None else turn(q, *far)
        mixed = attention.mix(turn(q, cos[:, :, -num_rows:], sin[:, :, -num_rows:]), keys, values, mask, sunk)
        x = x + mixed
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DFlashHead(ReducedHead, Head):
    """The block drafter: ``rows`` is what training and decoding share. With a vocabulary of its own it has ``lm_head``,
    and the maps ``d2t`` and ``t2d`` of ``common.reduced``."""

    method = "dflash"
    config: DFlashHeadConfig

    def __init__(self, config: DFlashHeadConfig) -> None:
        super().__init__()
        self.config = config
        size, rank = config.hidden_size, config.markov_rank
        self.layers = nn.ModuleList(DFlashLayer(config, index) for index in range(config.num_layers))
        self.fc = nn.Linear(len(config.layer_ids) * size, size, bias=False)
        self.hidden_norm = RMSNorm(size, config.rms_norm_eps)
        self.norm = RMSNorm(size, config.rms_norm_eps)
        self.markov_head = MarkovHead(config.vocab_size, rank, config.num_outputs) if rank else None
        self.confidence_head = ConfidenceHead(size + rank) if config.confidence else None
        self.lm_head: nn.Linear | None = None
        if config.draft_vocab_size is not None:
            self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
            self.add_maps(config.draft_vocab_size, config.vocab_size)

    @classmethod
    def fresh(
        cls,
        config: DFlashHeadConfig,
        *,
        seed: int = 0,
        model: CausalModel | None = None,
        vocabulary: tuple[Tensor, Tensor] | None = None,
        output: Tensor | None = None,
        tap_scale: Sequence[float] | None = None,
    ) -> Self:
        """An untrained head, float32, a function of its arguments alone. vocabulary: (d2t, t2d) of
        ``draft_vocabulary``; output [V, H]: the target's head, whose rows of that vocabulary are copied; tap_scale: root
        mean square of each tapped layer's output.

        Linear layers keep the scale of what they read (what is added to the residual stream less, by depth; what is
        fused, given tap_scale, each layer alike). The Markov head starts without effect. With
        ``model`` the final norm starts as the target's own: what its head reads.
        """
        head, generator = cls(config), torch.Generator().manual_seed(int64_seed(seed))
        head.take_maps(vocabulary)
        for name, parameter in head.named_parameters():
            if parameter.dim() == 2:
                deviation = parameter.shape[1] ** -0.5
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    deviation /= math.sqrt(2 * config.num_layers)
                nn.init.normal_(parameter, std=deviation, generator=generator)
        start_without_effect(head)
        with torch.no_grad():
            if head.lm_head is not None and output is not None:
                head.lm_head.weight.copy_(output[head.target_ids.to(output.device)])
            for part, scale in zip(head.fc.weight.chunk(len(config.layer_ids), 1), tap_scale or (), strict=False):
                part.div_(max(scale, 1e-6))
            if model is not None:
                head.norm.weight.copy_(norm_weight(model))
        return head

    @property
    def vocabulary(self) -> Tensor | None:
        """``target_ids``; None: all of the target's."""
        return None if self.lm_head is None else self.target_ids

    def logits(self, normed: Tensor, model: CausalModel) -> Tensor:
        """normed [..., n, H] -> [..., n, DV], without the Markov head's part."""
        if self.lm_head is None:
            return model.head(normed.to(model.spec.dtype))
        out: Tensor = self.lm_head(normed.to(self.dtype))
        return out

    @property
    def bytes_per_token(self) -> int:
        """See ``Head``."""
        return self.new_cache(0, 1).bytes_per_slot + self.config.hidden_size * self.dtype.itemsize

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers whose outputs are the features."""
        return self.config.layer_ids

    def fuse(self, taps: Tensor) -> Tensor:
        """taps [B, n, T * H] -> context [B, n, H]."""
        context: Tensor = self.hidden_norm(self.fc(taps.to(self.dtype)))
        return context

    def rows(
        self, blocks: Tensor, context: Tensor, positions: Tensor, masks: Sequence[Tensor], memory: Memory
    ) -> Tensor:
        """blocks [B, Q, H] embeddings, context [B, n, H], positions [B, n + Q] of both, masks bool, of each layer
        broadcastable to [B, 1, Q, keys that memory answers with] -> [B, Q, H], normed: what the target's head reads."""
        head_dim, theta = self.config.head_dim, self.config.rope_theta
        angles = rotary(positions, head_dim, theta, blocks.dtype)
        own, far = positions[:, -blocks.shape[1] :], None
        if self.window is not None:
            far = rotary(own + self.window.back(own), head_dim, theta, blocks.dtype)
        for index, layer in enumerate(self.layers):
            remember: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = partial(memory, index)
            blocks = layer(blocks, context, angles, masks[index], remember, far)
        normed: Tensor = self.norm(blocks)
        return normed

    def last_seen(self, slots: Tensor) -> Tensor:
        """[layers, B, Q] of blocks whose rows lie in slots [B, Q]: the last slot that each row sees, in each layer."""
        causal = [self.config.is_causal(index) for index in range(self.config.num_layers)]
        return torch.stack([slots if each else slots[:, -1:].expand_as(slots) for each in causal])

    def masks(self, slots: Tensor, span: int) -> list[Tensor]:
        """What the rows of blocks in slots [B, Q] see of the first ``span`` slots, in each layer: [B, 1, Q, span] bool."""
        keys, out = torch.arange(span, device=slots.device), []
        for layer, seen in zip(self.layers, self.last_seen(slots), strict=True):
            shape: AttentionShape = layer.get_submodule("self_attn").shape  # type: ignore[assignment]
            mask, distance = keys <= seen[..., None], slots[..., None] - keys
            if shape.limit is not None:
                mask = mask & ((distance < shape.limit.size) | (keys < shape.limit.sinks))
            elif shape.window:
                mask = mask & (distance < shape.window)
            out.append(mask[:, None])
        return out

    def forward(self, taps: Tensor, blocks: Tensor, anchors: Tensor) -> Tensor:
        """Many blocks on one text, packed: taps [B, T, T' * H] of all its positions, blocks [B, A, Q, H] embeddings,
        anchors [B, A] int64 positions of the blocks' first rows -> [B, A, Q, H], normed."""
        num_rows, num_tokens = taps.shape[:2]
        size = blocks.shape[2]
        text = torch.arange(num_tokens, device=anchors.device).expand(num_rows, -1)
        positions = torch.cat((text, block_positions(anchors, size).flatten(1)), 1)
        config = self.config
        masks = [
            block_mask(anchors, num_tokens, size, causal=config.is_causal(index), window=config.window(index))
            for index in range(config.num_layers)
        ]
        normed = self.rows(blocks.flatten(1, 2), self.fuse(taps), positions, masks, lambda _, k, v: (k, v))
        return normed.view(num_rows, -1, *blocks.shape[2:])

    def bias(self, before: Tensor) -> Tensor:
        """The Markov head's logits [..., DV] of what follows the tokens before [...]. Only where there is one."""
        assert self.markov_head is not None
        logits: Tensor = self.markov_head.markov_w2(self.markov_head.markov_w1(before))
        return logits

    def confidence(self, normed: Tensor, before: Tensor) -> Tensor:
        """[...] logit of the chance that the guess of a row, normed [..., H], is kept, given that the token before it,
        [...], was. Only where there is such a head."""
        assert self.confidence_head is not None
        if self.markov_head is not None:
            normed = torch.cat((normed, self.markov_head.markov_w1(before)), -1)
        logit: Tensor = self.confidence_head.proj(normed)
        return logit[..., 0]


def block_positions(anchors: Tensor, size: int) -> Tensor:
    """[B, A, size] int64: the positions of each block's rows, anchors [B, A]."""
    return anchors[..., None] + torch.arange(size, device=anchors.device)


def block_mask(anchors: Tensor, num_tokens: int, size: int, *, causal: bool, window: int = 0) -> Tensor:
    """[B, 1, A * size, num_tokens + A * size] bool: a row sees features of positions before its anchor (the anchor's own
    is not known when the block is drafted), of which a window shows the last ones, and its own block: all of it, or up to
    itself."""
    num_rows, num_blocks = anchors.shape
    place = torch.arange(num_tokens, device=anchors.device)
    text = (place < anchors[..., None]).repeat_interleave(size, 1)  # [B, A * size, T]
    if window:
        text = text & (block_positions(anchors, size).flatten(1)[..., None] - place < window)
    row = torch.arange(num_blocks * size, device=anchors.device)
    own = (row // size)[:, None] == row // size  # [A * size, A * size]
    if causal:
        own = own.tril()
    return torch.cat((text, own.expand(num_rows, -1, -1)), 2)[:, None]


def spread_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """count different layers of a target of num_layers, evenly: from the second to the third last as the authors have it,
    from the first to the last where those are too few."""
    if count == 1:
        return (num_layers // 2,)
    first, last = (1, num_layers - 3) if num_layers - 3 >= count else (0, num_layers - 1)
    return tuple(dict.fromkeys(round(first + index * (last - first) / (count - 1)) for index in range(count)))
