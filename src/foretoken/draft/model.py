"""A smaller language model of the same vocabulary as drafter (Leviathan et al. 2211.17192)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.draft import grow
from foretoken.draft.base import Capabilities, Commit, Context, Drafter, Method
from foretoken.draft.shape import Shape
from foretoken.model.prefill import feed
from foretoken.model.target import CausalModel, Target
from foretoken.noise import Noise
from foretoken.tree import Draws, Law, Plan, TokenTree, root_tree


_CHAIN_LAWS = {
    Draws.FIXED: Law.FIXED,
    Draws.COUPLED: Law.COUPLED,
    Draws.LIST: Law.COUPLED,
    Draws.IID: Law.IID,
    Draws.WITHOUT_REPLACEMENT: Law.IID,
    Draws.GREEDY: Law.IID,
}


class ModelDrafter(Drafter):
    """The draft model with its own KV cache.

    Invariant: slots [0, filled[b]) hold KV of the first filled[b] tokens of row b's text. Drafting feeds the root and
    all guesses but the last, so after full acceptance one committed token is still missing (the classic off-by-one of
    chain drafters): ``begin`` feeds whatever is missing up to the pending token, however much that is.
    """

    def __init__(self, model: CausalModel, context: Context, capacity: int) -> None:
        self.capacity = capacity
        self.target = Target(model, context.num_rows, capacity)
        self.num_tokens = model.spec.vocab_size  # a token beyond them (the target may have more) is fed as the last one
        self.knows_all = self.num_tokens >= context.processors.vocab_size
        self.filled = [0] * context.num_rows
        self.fed = [0] * context.num_rows  # nodes of the last proposal whose KV was written

    def propose(self, context: Context, shape: Shape, draws: Draws, noise: Noise) -> TokenTree:
        """Chains, each as long as its row and the model's own context have room for."""
        last = self.target.spec.max_positions - 1
        limits = [
            max(0, min(shape.depth, room, last - length))
            for room, length in zip(context.room, context.lengths, strict=True)
        ]
        self.fed = [max(limits) if limit else 0 for limit in limits]
        if not any(limits):
            return root_tree(context.pending)
        return grow.chain(self, context, limits, _CHAIN_LAWS[draws], noise)

    def begin(self, context: Context, limits: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Feed all tokens not yet in the cache, the pending one last; rows without room keep their lag."""
        missing = [
            [min(token, self.num_tokens - 1) for token in row[filled:]] if limit else []
            for row, filled, limit in zip(context.history.ids, self.filled, limits, strict=True)
        ]
        logits = feed(self.target, missing, self.filled, head=True)
        assert logits is not None, "the pending token is never in the cache"
        if all(limits):
            base = context.length
        else:
            # A row without room goes through the motions behind its own tokens, inside the model's context.
            places = [
                length if limit else filled
                for length, filled, limit in zip(context.lengths, self.filled, limits, strict=True)
            ]
            base = torch.tensor(places, device=context.device)
        self.filled = [
            length + 1 if limit else filled
            for length, filled, limit in zip(context.lengths, self.filled, limits, strict=True)
        ]
        return logits, base

    def logits(self, tokens: Tensor, plan: Plan) -> Tensor:
        """[B, W, V] after new nodes of the chain."""
        out = self.target.forward(tokens if self.knows_all else tokens.clamp(max=self.num_tokens - 1), plan)
        assert out.logits is not None
        return out.logits

    def observe(self, commit: Commit) -> None:
        """Count as filled what was fed and kept; the text beyond it is fed at the next begin."""
        self.filled = [
            filled - 1 + min(fed, len(path)) if fed else filled
            for filled, fed, path in zip(self.filled, self.fed, commit.path, strict=True)
        ]

    def keep(self, rows: Sequence[int]) -> None:
        """Drop rows of the cache."""
        self.target.keep(torch.tensor(rows))
        self.filled = [self.filled[row] for row in rows]
        self.fed = [self.fed[row] for row in rows]


class DraftModel(Method):
    """``--method draft_model``: any causal LM of the target's vocabulary."""

    name = "draft_model"
    capabilities = Capabilities("a smaller model of the same vocabulary", draws=True, needs_draft=True)

    def __init__(self, model: CausalModel) -> None:
        self.model = model

    def open(self, context: Context, capacity: int) -> Drafter:
        """A fresh cache for these rows."""
        return ModelDrafter(self.model, context, capacity)
