"""A smaller language model of the same vocabulary as drafter (Leviathan et al. 2211.17192)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.draft import grow
from foretoken.draft.base import Capabilities, Commit, Context, Drafter, Method, Shape
from foretoken.model.prefill import feed
from foretoken.model.target import CausalModel, Target
from foretoken.noise import Noise
from foretoken.tree import Law, Plan, TokenTree, chain_tree


class ModelDrafter(Drafter):
    """The draft model with its own KV cache.

    Invariant: slots [0, filled[b]) hold KV of the first filled[b] tokens of row b's text. Drafting feeds the root and
    all guesses but the last, so after full acceptance one committed token is still missing (the classic off-by-one of
    chain drafters): ``begin`` feeds whatever is missing up to the pending token, however much that is.
    """

    def __init__(self, model: CausalModel, context: Context, capacity: int) -> None:
        self.capacity = capacity
        self.target = Target(model, context.num_rows, capacity)
        self.filled = [0] * context.num_rows
        self.num_fed = 0  # nodes of the last proposal whose KV was written

    def propose(self, context: Context, shape: Shape, law: Law, noise: Noise) -> TokenTree:
        """A chain; no guess at all where the model's context is at its end."""
        room = self.target.spec.max_positions - 1 - max(context.lengths)
        num_tokens = min(shape.num_tokens, room)
        if num_tokens < 1:
            self.num_fed = 0
            return chain_tree(context.pending[:, None])
        self.num_fed = num_tokens
        return grow.chain(self, context, num_tokens, law, noise)

    def begin(self, context: Context) -> Tensor:
        """[B, 1, V]: feed all tokens not yet in the cache, the pending one last."""
        missing = [row[filled:] for row, filled in zip(context.history.ids, self.filled, strict=True)]
        logits = feed(self.target, missing, self.filled, head=True)
        self.filled = [length + 1 for length in context.lengths]
        assert logits is not None, "the pending token is never in the cache"
        return logits

    def logits(self, tokens: Tensor, plan: Plan) -> Tensor:
        """[B, W, V] after new nodes of the chain."""
        out = self.target.forward(tokens, plan)
        assert out.logits is not None
        return out.logits

    def observe(self, commit: Commit) -> None:
        """Count as filled what was fed and kept; the text beyond it is fed at the next begin."""
        if not self.num_fed:
            return
        self.filled = [
            filled - 1 + min(self.num_fed, len(path)) for filled, path in zip(self.filled, commit.path, strict=True)
        ]

    def keep(self, rows: Sequence[int]) -> None:
        """Drop rows of the cache."""
        self.target.keep(torch.tensor(rows))
        self.filled = [self.filled[row] for row in rows]


class DraftModel(Method):
    """``--method draft_model``: any causal LM of the target's vocabulary."""

    name = "draft_model"
    capabilities = Capabilities("a smaller model of the same vocabulary", draws=True, needs_draft=True)

    def __init__(self, model: CausalModel) -> None:
        self.model = model

    def open(self, context: Context, capacity: int) -> Drafter:
        """A fresh cache for these rows."""
        return ModelDrafter(self.model, context, capacity)
