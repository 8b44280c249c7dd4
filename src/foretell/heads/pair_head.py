"""The common base of the EAGLE heads: a few layers over *pairs* (feature of position t, token at position t + 1).

Pair t is read at rotary position t and guesses token t + 2. Features of committed positions are the target's; after
them a head feeds on its own outputs. Decoding (``advance``, over a tree and a cache) and training (``unroll``, all
positions of a text at once) are made of the same three parts, ``enter``, the decoder layers and ``leave``.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foretell.checkpoints.weights import WeightSource
from foretell.core.errors import ModelError, require
from foretell.core.tree import Plan
from foretell.heads.config_keys import check_heads
from foretell.heads.head import Head, HeadConfig
from foretell.heads.modules import MLP, Attention, AttentionShape, RMSNorm, RopeScaling
from foretell.model.cache import KVCache
from foretell.model.target import CausalModel


@dataclass(frozen=True)
class PairConfig(HeadConfig):
    """Sizes and options of the decoder layers: those of a Llama model, or of a Qwen3 (``qk_norm``)."""

    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    _: KW_ONLY
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    own_embedding: bool = False  # else the target's is passed in
    num_layers: int = 1
    rope_scaling: RopeScaling | None = None
    qk_norm: bool = False  # an RMS norm of each head's queries and keys
    attention_bias: bool = False  # of queries, keys and values
    output_bias: bool = False  # of the attention's output
    windows: tuple[int, ...] = ()  # of each layer: how many last positions it sees; 0 is all. Empty: all layers see all

    def __post_init__(self) -> None:
        """Refuse invalid sizes."""
        super().__post_init__()
        require(self.num_layers >= 1, "num_layers", self.num_layers, "at least 1", ModelError)
        check_heads(self.num_heads, self.num_kv_heads, self.head_dim)
        if self.windows and (len(self.windows) != self.num_layers or min(self.windows) < 0):
            raise ModelError(f"windows = {list(self.windows)} must be one size of at least 0 for each layer")
        if len(set(self.windows) - {0}) > 1:
            raise ModelError(f"windows = {list(self.windows)}: all windows of a head are of one size")

    def attention(self, index: int, inputs: int) -> AttentionShape:
        """Of layer ``index``, which projects vectors of ``inputs`` numbers."""
        return AttentionShape(
            inputs, self.hidden_size, self.num_heads, self.num_kv_heads, self.head_dim, self.rope_theta,
            qk_norm=self.qk_norm, rms_norm_eps=self.rms_norm_eps, rope_scaling=self.rope_scaling,
            bias=self.attention_bias, output_bias=self.output_bias, window=self.windows[index] if self.windows else 0,
        )  # fmt: skip


class PairLayer(nn.Module):
    """A decoder layer. The first layer of a head has its own way in (``PairHead.enter``) and other norms before it."""

    def __init__(self, config: PairConfig, index: int, inputs: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.self_attn = Attention(config.attention(index, inputs))
        self.post_attention_layernorm = RMSNorm(hidden, config.rms_norm_eps)
        self.mlp = MLP(hidden, config.intermediate_size)
        if index:
            self.input_layernorm = RMSNorm(hidden, config.rms_norm_eps)

    def close(self, residual: Tensor, attended: Tensor) -> Tensor:
        """The layer's output, from the residual before attention and the attention's output, [..., H] each."""
        residual = residual + attended
        out: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return out


@dataclass(frozen=True)
class FamilyLayer:
    """A head's decoder layer where it is one of a target's family, and the head's way in and out, for native kernels."""

    config: Any  # transformers': of a model that has this layer alone
    weights: WeightSource  # of that model
    in_blocks: bool  # whether matrices of it are as a GGUF file holds them
    projection: nn.Linear  # [2 H] -> [H], of [embedding; feature]
    token_norm: Tensor  # [H] each, as the family stores norms
    feature_norm: Tensor
    last_norm: Tensor
    feeds_normed: bool  # the next pair feeds on the normed output


class PairHead(Head):
    """Decoder layers over pairs. B rows, n pairs of each, T pairs of a text, H the target's hidden size."""

    config: PairConfig
    own_embedding: bool = False
    """Whether the head has ``embed_tokens`` of its own."""
    module: str = ""
    """What a target's checkpoint has as its head, run by transformers where not natively; "": foretell's own modules."""
    dequantised: str = ""
    """The kinds of its matrices that torch holds dequantised."""

    @property
    @abstractmethod
    def decoder(self) -> Sequence[PairLayer]:
        """The layers, in the order in which they run."""

    @property
    def vocabulary(self) -> Tensor | None:
        """[DV] int64 target ids of the columns of ``logits``; None where they are the target's own."""
        return None

    @abstractmethod
    def features(self, taps: Tensor, model: CausalModel) -> Tensor:
        """Outputs [B, n, T * H] of the tapped layers of this target to features [B, n, H], in the head's dtype."""

    @abstractmethod
    def logits(self, read: Tensor, model: CausalModel) -> Tensor:
        """[B, n, DV] of what ``leave`` returned second [B, n, H]."""

    def family_layer(self) -> FamilyLayer | None:
        """None: the layers are those of ``decoder``."""
        return None

    def embed(self, tokens: Tensor, model: CausalModel) -> Tensor:
        """[B, n, H] embeddings of tokens [B, n], in the head's dtype."""
        if self.own_embedding:
            own: Tensor = F.embedding(tokens, self.get_parameter("embed_tokens.weight"))
            return own
        return model.embed(tokens).to(self.dtype)

    @abstractmethod
    def enter(self, embeds: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings and features [..., H] of pairs to (what attention projects [..., inputs], the residual [..., H])."""

    @abstractmethod
    def leave(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The last layer's output [..., H] to (the feature that the next pair feeds on, what the head of the vocabulary
        reads), [..., H] each."""

    @property
    def bytes_per_token(self) -> int:
        """Of a row's memory: keys and values of the layers, and a feature."""
        return self.new_cache(0, 1).bytes_per_slot + self.config.hidden_size * self.dtype.itemsize

    def advance(self, embeds: Tensor, features: Tensor, plan: Plan, cache: KVCache) -> tuple[Tensor, Tensor]:
        """The pairs of a plan, embeds and features [B, n, H]: what ``leave`` returns. Writes their keys and values."""
        x, hidden = self.enter(embeds, features)
        angles = self.decoder[0].self_attn.angles(plan.positions, x.dtype)
        for index, layer in enumerate(self.decoder):
            if index:
                x = layer.input_layernorm(hidden)
            attention = layer.self_attn
            q, k = attention.turned(x, angles)
            cache.write(index, plan.slots, k, attention.values(x))
            keys, values = cache.keys[index][:, :, : plan.span], cache.values[index][:, :, : plan.span]
            sunk, limit = None, attention.shape.limit
            if limit is not None:
                far = attention.angles(plan.positions + limit.back(plan.positions), x.dtype)
                sunk, _ = attention.turned(x, far)
            hidden = layer.close(hidden, attention.mix(q, keys, values, _sight(plan, attention.shape), sunk))
        return self.leave(hidden)

    def unroll(self, embeds: Tensor, features: Tensor, num_steps: int) -> list[tuple[Tensor, Tensor]]:
        """Training-time test (EAGLE-3, 2503.01840): num_steps guesses in a line after every pair of a text, in parallel.

        embeds and features [B, T, H]: index t holds the embedding of token t + 1 and the target's feature of position
        t. Step j at index t is the pair that a chain drafted after pair t would hold at depth j, its tokens being the
        text's own: token t + 1 + j, with the output of step j - 1 as feature, at rotary position t + j; it sees the
        target's pairs 0 .. t and the line's own steps 1 .. j. Returns of each step what ``leave`` returns, [B, T, H].
        Index t of step j is defined where t + j < T and pair t is real: texts are padded on the right.
        """
        num_pairs = embeds.shape[1]
        positions = torch.arange(num_pairs, device=embeds.device).expand(embeds.shape[:2])
        keys: list[list[Tensor]] = [[] for _ in self.decoder]  # of each layer, of each step
        values: list[list[Tensor]] = [[] for _ in self.decoder]
        out: list[tuple[Tensor, Tensor]] = []
        for step in range(num_steps):
            shifted = F.pad(embeds[:, step:], (0, 0, 0, min(step, num_pairs)))
            x, hidden = self.enter(shifted, features)
            angles = self.decoder[0].self_attn.angles(positions + step, x.dtype)
            for index, layer in enumerate(self.decoder):
                if index:
                    x = layer.input_layernorm(hidden)
                attention = layer.self_attn
                q, k = attention.turned(x, angles)
                keys[index].append(k)
                values[index].append(attention.values(x))
                hidden = layer.close(hidden, _attend(attention, q, keys[index], values[index]))
            features, read = self.leave(hidden)
            out.append((features, read))
        return out


def _sight(plan: Plan, shape: AttentionShape) -> Tensor:
    """[B, 1, n, S] bool: the plan's mask, without what lies before each node's window."""
    window, limit = shape.window, shape.limit
    if limit is not None:
        return limit.sight(plan)
    if not window:
        return plan.mask
    distance = plan.positions[:, None, :, None] - plan.key_positions[:, None, None, :]
    return plan.mask & (distance < window)


def _attend(attention: Attention, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """[B, T, H]: queries [B, heads, T, d] see keys[0] [B, kv heads, T, d] up to their own index, and of each later one
    only their own index: T + j scores a query instead of T * (j + 1). A window counts positions: those of step j are j
    further on."""
    num_pairs, step, window = q.shape[2], len(keys) - 1, attention.shape.window
    all_pairs = torch.ones(num_pairs, num_pairs, dtype=torch.bool, device=q.device)
    if step == 0:
        seen = all_pairs.tril().triu(1 - window) if window else all_pairs.tril()
        return attention.mix(q, keys[0], values[0], seen[None, None])
    hidden = all_pairs.triu(1)
    if window:  # of the line's own steps, too, only the last ones are seen
        hidden = hidden | all_pairs.tril(step - window)
        keys, values = [keys[0], *keys[1:][-window:]], [values[0], *values[1:][-window:]]
    group = attention.shape.num_heads // attention.shape.num_kv_heads
    if group > 1:
        keys = [key.repeat_interleave(group, 1) for key in keys]
        values = [value.repeat_interleave(group, 1) for value in values]
    q = q * attention.shape.head_dim**-0.5
    scores = [(q @ keys[0].transpose(2, 3)).masked_fill(hidden, -torch.inf)]
    scores += [(q * key).sum(-1, keepdim=True) for key in keys[1:]]
    share = torch.cat(scores, -1).softmax(-1)
    mixed = share[..., :num_pairs] @ values[0]
    for index, value in enumerate(values[1:]):
        column = num_pairs + index
        mixed = mixed + share[..., column : column + 1] * value
    out: Tensor = attention.o_proj(mixed.transpose(1, 2).flatten(2))
    return out
