"""What the EAGLE heads share: one layer over *pairs* (feature of position t, token at position t + 1).

Pair t is read at rotary position t and guesses token t + 2. Features of committed positions are the target's; behind
them a head feeds on its own outputs. Decoding (``advance``, over a tree and a cache) and training (``unroll``, all
positions of a text at once) are made of the same three parts, ``enter``, the attention's projections and ``leave``.
"""

from abc import abstractmethod

import torch
from torch import Tensor
from torch.nn import functional as F

from foretoken.heads.base import Head
from foretoken.heads.layers import Attention, rotate
from foretoken.model.cache import KVCache
from foretoken.model.target import CausalModel
from foretoken.tree import Plan


class PairHead(Head):
    """One decoder layer over pairs. B rows, n pairs of each, T pairs of a text, H the target's hidden size."""

    own_embedding: bool = False
    """Whether the head has ``embed_tokens`` of its own."""

    @property
    @abstractmethod
    def attention(self) -> Attention:
        """The layer's attention."""

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
    def leave(self, residual: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """Residual and attention's output [..., H] to (the feature that the next pair feeds on, what the head of the
        vocabulary reads), [..., H] each."""

    def new_cache(self, num_rows: int, capacity: int) -> KVCache:
        """An empty cache of this layer: slot i holds pair i, tree nodes lie behind."""
        shape, device = self.attention.shape, self.attention.q_proj.weight.device
        return KVCache(num_rows, capacity, [(shape.num_kv_heads, shape.head_dim)], self.dtype, [device])

    def advance(self, embeds: Tensor, features: Tensor, plan: Plan, cache: KVCache) -> tuple[Tensor, Tensor]:
        """The pairs of a plan, embeds and features [B, n, H]: what ``leave`` returns. Writes their keys and values."""
        x, residual = self.enter(embeds, features)
        q, k, v = self._project(x, plan.positions)
        cache.write(0, plan.slots, k, v)
        keys, values = cache.keys[0][:, :, : plan.span], cache.values[0][:, :, : plan.span]
        return self.leave(residual, self.attention.mix(q, keys, values, plan.mask))

    def _project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, heads, n, d], keys and values [B, kv heads, n, d] of x [B, n, inputs]. Queries and keys are turned as
        one tensor: half the operations, and a drafted token is worth few."""
        attention, shape = self.attention, self.attention.shape
        both: Tensor = torch.cat([attention.q_proj(x), attention.k_proj(x)], -1)
        heads = both.view(*both.shape[:2], -1, shape.head_dim).transpose(1, 2)
        turned = rotate(heads, positions, shape.rope_theta)
        return turned[:, : shape.num_heads], turned[:, shape.num_heads :], attention.values(x)

    def unroll(self, embeds: Tensor, features: Tensor, num_steps: int) -> list[tuple[Tensor, Tensor]]:
        """Training-time test (EAGLE-3, 2503.01840): num_steps guesses in a line behind every pair of a text, in parallel.

        embeds and features [B, T, H]: index t holds the embedding of token t + 1 and the target's feature of position
        t. Step j at index t is the pair that a chain drafted behind pair t would hold at depth j, its tokens being the
        text's own: token t + 1 + j, with the output of step j - 1 as feature, at rotary position t + j; it sees the
        target's pairs 0 .. t and the line's own steps 1 .. j. Returns of each step what ``leave`` returns, [B, T, H].
        Index t of step j means something where t + j < T and pair t is real: texts are padded on the right.
        """
        num_pairs = embeds.shape[1]
        positions = torch.arange(num_pairs, device=embeds.device).expand(embeds.shape[:2])
        keys: list[Tensor] = []
        values: list[Tensor] = []
        out: list[tuple[Tensor, Tensor]] = []
        for step in range(num_steps):
            shifted = F.pad(embeds[:, step:], (0, 0, 0, min(step, num_pairs)))
            x, residual = self.enter(shifted, features)
            q, k, v = self._project(x, positions + step)
            keys.append(k)
            values.append(v)
            features, read = self.leave(residual, _attend(self.attention, q, keys, values))
            out.append((features, read))
        return out


def _attend(attention: Attention, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """[B, T, H]: queries [B, heads, T, d] see keys[0] [B, kv heads, T, d] up to their own index, and of each later one
    only their own index: T + j scores a query instead of T * (j + 1)."""
    if len(keys) == 1:
        num_pairs = q.shape[2]
        causal = torch.ones(num_pairs, num_pairs, dtype=torch.bool, device=q.device).tril()
        return attention.mix(q, keys[0], values[0], causal[None, None])
    group = attention.shape.num_heads // attention.shape.num_kv_heads
    if group > 1:
        keys = [key.repeat_interleave(group, 1) for key in keys]
        values = [value.repeat_interleave(group, 1) for value in values]
    num_pairs = q.shape[2]
    q = q * attention.shape.head_dim**-0.5
    later = torch.ones(num_pairs, num_pairs, dtype=torch.bool, device=q.device).triu(1)
    scores = [(q @ keys[0].transpose(2, 3)).masked_fill(later, -torch.inf)]
    scores += [(q * key).sum(-1, keepdim=True) for key in keys[1:]]
    share = torch.cat(scores, -1).softmax(-1)
    mixed = share[..., :num_pairs] @ values[0]
    for index, value in enumerate(values[1:]):
        column = num_pairs + index
        mixed = mixed + share[..., column : column + 1] * value
    out: Tensor = attention.o_proj(mixed.transpose(1, 2).flatten(2))
    return out
