"""A language model that is a table of next-token distributions: a fake ``CausalModel``.

Its distribution after a node is a function of the last few tokens on the node's own path, so all code that uses a
``CausalModel`` can be tested exactly and in milliseconds. It is batch-invariant by construction: integers are hashed,
nothing is summed in an order that depends on the shape of a pass.

It detects errors of the caller. Token ids are its "keys" and their positions its "values", written into the slots of
the plan and read back through the plan's mask: a wrong slot, position, mask or commit gives another text, never the
correct one.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from foretell.core.noise import derive_seed, exponentials, mix
from foretell.core.tree import Plan
from foretell.model.cache import KVCache
from foretell.model.target import WHOLE, CausalModel, ModelSpec, Output, PassOptions

ProbsOfContext = Callable[[tuple[int, ...]], Sequence[float] | Tensor]
"""From the last tokens (at most ``context``, the newest last) to the V probabilities of the next one."""


class TableLM(CausalModel):
    """Next-token distributions by hash of (seed, last ``context`` tokens), or by a function of those tokens.

    The residual stream [B, n, H] is: token id, number of layers that ran, number of contradictions seen (in the cache,
    or a stream of another layer), then the last ``context`` tokens, newest first, -1 before the start. Each layer keeps
    its own keys and values, so running a range of layers, taps and early exits work as with a real model; an early exit
    has a blurred distribution.
    """

    def __init__(
        self,
        vocab_size: int = 16,
        *,
        seed: int = 0,
        context: int = 2,
        sharpness: float = 1.0,
        blur: float = 0.0,
        blur_seed: int = 1,
        probs: ProbsOfContext | None = None,
        num_layers: int = 2,
        max_positions: int = 4096,
        eos_token_ids: Sequence[int] = (),
        dtype: torch.dtype = torch.float32,
        name: str = "table",
    ) -> None:
        """sharpness: distributions are normalised E ** sharpness for exponentials E: 1 is uniform on the simplex,
        larger is more peaked.

        blur in [0, 1] is the share of another table (of blur_seed) in each distribution, so that ``TableLM(seed=s,
        blur=0.3)`` is a drafter that approximates ``TableLM(seed=s)``. dtype is that of logits and cache: float32 or
        float64.
        """
        if vocab_size < 1 or context < 1 or num_layers < 1 or not 0 <= blur <= 1:
            raise ValueError(f"vocab_size {vocab_size}, context {context}, num_layers {num_layers}, blur {blur}")
        self.context = context
        self.sharpness = sharpness
        self.blur = blur
        self._seed = derive_seed(seed)
        self._blur_seed = derive_seed(seed, blur_seed)
        self._probs = probs
        self._known: dict[tuple[int, ...], Tensor] = {}
        self.spec = ModelSpec(
            name=name,
            architecture="TableLM",
            implementation="table",
            vocab_size=vocab_size,
            num_layers=num_layers,
            hidden_size=context + 3,
            max_positions=max_positions,
            dtype=dtype,
            device=torch.device("cpu"),
            weight_bytes=vocab_size * vocab_size * torch.empty((), dtype=dtype).element_size(),
            eos_token_ids=tuple(eos_token_ids),
        )

    def new_cache(self, num_rows: int, capacity: int) -> KVCache:
        """One head of size one in each layer: keys hold token ids, values positions."""
        layers = self.spec.num_layers
        return KVCache(num_rows, capacity, [(1, 1)] * layers, self.spec.dtype, [self.spec.device] * layers)

    def forward(self, tokens: Tensor, plan: Plan, cache: KVCache, options: PassOptions = WHOLE) -> Output:
        """See ``CausalModel.forward``."""
        first, stop = options.layers or (0, self.spec.num_layers)
        hidden, taps = options.hidden, options.taps
        if first == 0:
            hidden = self.embed(tokens)
        assert hidden is not None, "layers that do not start at 0 need hidden"
        tapped: dict[int, Tensor] = {}
        for layer in range(first, stop):
            hidden = self._layer(layer, hidden, plan, cache)
            if layer in taps:
                tapped[layer] = hidden
        logits = self.logits(hidden) if options.head and stop == self.spec.num_layers else None
        return Output(logits, hidden, torch.cat([tapped[tap] for tap in taps], -1) if taps else None)

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, n, V] log distribution of a residual stream."""
        return self.probs(hidden).log().to(self.spec.dtype)

    def embed(self, tokens: Tensor) -> Tensor:
        """[B, n, H] the stream before any layer: the token, and no context."""
        hidden = torch.full((*tokens.shape, self.spec.hidden_size), -1.0, dtype=self.spec.dtype)
        hidden[..., 0], hidden[..., 1:3] = tokens.to(hidden.dtype), 0.0
        return hidden

    def normed(self, hidden: Tensor) -> Tensor:
        """There is no norm."""
        return hidden

    def head(self, normed: Tensor) -> Tensor:
        """See ``logits``."""
        return self.logits(normed)

    def probs(self, hidden: Tensor) -> Tensor:
        """[B, n, V] float64 distribution of a residual stream; contradictions in the cache lead to another table."""
        ids = hidden[..., 3:].long()  # [B, n, context]
        wrong = hidden[..., 2].long()
        if self._probs is not None:
            probs = self._explicit(ids)
            probs = torch.where((wrong > 0)[..., None], self._hashed(ids, self._seed + wrong), probs)
        else:
            probs = self._hashed(ids, self._seed + wrong)
        if self.blur:
            probs = (1.0 - self.blur) * probs + self.blur * self._hashed(ids, self._blur_seed + wrong)
        early = self.spec.num_layers - hidden[..., 1:2].double()  # [B, n, 1] layers still to run
        if bool((early > 0).any()):
            other = self._hashed(ids, self._blur_seed + wrong + 1)
            share = 0.5 * early / self.spec.num_layers
            probs = (1.0 - share) * probs + share * other
        return probs

    def probs_after(self, ids: Sequence[int]) -> Tensor:
        """[V] float64: the distribution after a text, by the table alone: no cache, no plan. The twin of ``forward``."""
        hidden = torch.full((1, 1, self.spec.hidden_size), -1.0, dtype=torch.float64)
        newest = list(ids)[::-1][: self.context]
        hidden[0, 0, :3] = torch.tensor([ids[-1], self.spec.num_layers, 0.0], dtype=torch.float64)
        hidden[0, 0, 3 : 3 + len(newest)] = torch.tensor(newest, dtype=torch.float64)
        return self.probs(hidden)[0, 0]

    def _layer(self, layer: int, hidden: Tensor, plan: Plan, cache: KVCache) -> Tensor:
        """Write token ids and positions, then read the context of every node back through the mask."""
        keys, values = hidden[..., 0], plan.positions.to(hidden.dtype)  # [B, n]
        cache.write(layer, cache.places(plan.slots), keys[:, None, :, None], values[:, None, :, None])
        held_keys, held_values = cache.seen(layer, plan.span, cache.sight(plan.span), hidden.dtype)
        held_ids, held_positions = held_keys[:, 0, :, 0], held_values[:, 0, :, 0]  # [B, S]
        sight = plan.mask[:, 0]  # [B, n, S]
        distance = plan.positions[:, :, None] - plan.key_positions[:, None, :]  # [B, n, S]; the node itself: 0
        # One bin per distance, a last one for all that is out of the window or not seen.
        window = torch.where(sight & (distance >= 0), distance.clamp(max=self.context), self.context)
        ids = hidden.new_zeros(*keys.shape, self.context + 1)
        ids.scatter_add_(2, window, held_ids[:, None, :].expand_as(window).contiguous())
        count = torch.zeros_like(ids).scatter_add_(2, window, torch.ones_like(window, dtype=ids.dtype))
        expected = (plan.positions[:, :, None] >= torch.arange(self.context)).to(ids.dtype)  # [B, n, context]
        moved = sight & (held_positions[:, None, :] != plan.key_positions[:, None, :].to(ids.dtype))
        wrong = (count[..., :-1] - expected).abs().sum(-1)
        wrong += moved.sum(-1) + (sight.sum(-1) - plan.positions - 1).abs() + (hidden[..., 1] - layer).abs()
        out = hidden.clone()
        out[..., 1] = layer + 1
        out[..., 2] += wrong
        out[..., 3:] = torch.where(expected > 0, ids[..., :-1], -1.0)
        return out

    def _hashed(self, ids: Tensor, seed: Tensor | int) -> Tensor:
        """[B, n, V] float64 distributions from a hash of ids [B, n, context]."""
        key = mix(torch.zeros_like(ids[..., 0]) + seed)
        for column in ids.unbind(-1):
            key = mix(key ^ mix(column + 2))
        weight = exponentials(key, self.spec.vocab_size).double() ** self.sharpness
        return weight / weight.sum(-1, keepdim=True)

    def _explicit(self, ids: Tensor) -> Tensor:
        """[B, n, V] float64 distributions from the function given, called once for each context."""
        assert self._probs is not None
        rows = []
        for newest_first in ids.flatten(0, 1).tolist():
            context = tuple(token for token in reversed(newest_first) if token >= 0)
            if context not in self._known:
                self._known[context] = torch.as_tensor(self._probs(context), dtype=torch.float64)
            rows.append(self._known[context])
        return torch.stack(rows).view(*ids.shape[:2], self.spec.vocab_size)
