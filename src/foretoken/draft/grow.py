"""Tree shapes, each written once for every drafter that can tell the logits of a frontier."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from foretoken.draft.base import Context, choose
from foretoken.noise import Noise
from foretoken.sampling import Paths, warp
from foretoken.tree import Law, Plan, TokenTree, chain_parent, chain_tree, layout


class Expander(Protocol):
    """What model-like drafters implement, so that every shape can be grown on them."""

    capacity: int

    def begin(self, context: Context, limits: Sequence[int]) -> tuple[Tensor, Tensor]:
        """([B, 1, V] logits after each row's pending token, [B] the slot where that lies): its memory is then at that
        token. Rows whose limit is 0 may be left out: theirs mean nothing."""

    def logits(self, tokens: Tensor, plan: Plan) -> Tensor:
        """[B, W, V] logits after W new nodes, tokens [B, W]; ``plan`` covers those nodes of the tree being grown."""


def chain(expander: Expander, context: Context, limits: Sequence[int], law: Law, noise: Noise) -> TokenTree:
    """limits[b] guesses one after the other, each drawn by ``law`` from the expander's processed law.

    The drafter's law goes through the same ``warp`` as the target's: same temperature, same penalties, same path. For
    IID the tree carries q, the very tensors the tokens were drawn from.
    """
    num_rows, device, num_tokens = context.num_rows, context.device, max(limits)
    parent = chain_parent(num_tokens + 1, device).expand(num_rows, -1)
    count: Tensor | None = None
    if min(limits) < num_tokens:
        count = torch.tensor(limits, device=device) + 1
        parent = parent.masked_fill(torch.arange(num_tokens + 1, device=device) >= count[:, None], -1)
    logits, base = expander.begin(context, limits)
    plan = layout(parent, base, expander.capacity)
    tokens = torch.zeros(num_rows, num_tokens + 1, dtype=torch.int64, device=device)
    tokens[:, 0] = context.pending
    laws: list[Tensor] = []
    if law == Law.COUPLED:
        noise.coupled_keys(num_tokens + 1)  # the verifier's depths too: hashed once
    for node in range(1, num_tokens + 1):
        paths = Paths(tokens, plan.ancestry[:, node - 1 : node])
        drawn_from = warp(logits, context.processors, context.history, paths)[:, 0]  # [B, V]
        tokens[:, node] = choose(drawn_from, law, noise, depth=node - 1, node=node)
        if law == Law.IID:
            laws.append(drawn_from)
        if node < num_tokens:
            logits = expander.logits(tokens[:, node : node + 1], plan.nodes(node, node + 1))
    q = torch.stack([*laws, torch.zeros_like(laws[0])], 1) if laws else None  # the leaf has no children
    if q is not None and count is not None:
        leaf = torch.arange(num_tokens + 1, device=device) + 1 >= count[:, None]  # or behind it
        q = q.masked_fill(leaf[:, :, None], 0.0)
    return chain_tree(tokens, count, law=law, q=q)
