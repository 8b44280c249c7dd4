"""Tree shapes, each written once for every drafter that can tell the logits of a frontier. Chains are grown here."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from foretoken.draft.base import Context, choose
from foretoken.draft.dynamic import grow_dyspec, grow_eagle2, grow_opt_tree
from foretoken.draft.frontier import Expander, Grown
from foretoken.draft.shape import Adaptive, Chain, Delayed, DySpec, Eagle2, OptTree, Sequoia, Shape, Static
from foretoken.draft.template import grow_template
from foretoken.noise import Noise
from foretoken.sampling import Paths, warp
from foretoken.tree import Draws, Law, TokenTree, chain_parent, chain_tree, layout

CHAIN_LAWS = {
    Draws.FIXED: Law.FIXED,
    Draws.COUPLED: Law.COUPLED,
    Draws.LIST: Law.COUPLED,
    Draws.IID: Law.IID,
    Draws.WITHOUT_REPLACEMENT: Law.IID,
    Draws.GREEDY: Law.IID,
}
"""What each way of drawing is where a node has one child."""


def grow(
    expander: Expander, context: Context, limits: Sequence[int], shape: Shape, draws: Draws, noise: Noise
) -> Grown:
    """A tree of this shape behind each row's pending token, none of row b's nodes deeper than limits[b] (of which the
    largest is at least 1). The drafter's law goes through the same ``warp`` as the target's."""
    return _GROWERS[type(shape)](expander, context, limits, shape, draws, noise)


def _grow_adaptive(
    expander: Expander, context: Context, limits: Sequence[int], shape: Adaptive, draws: Draws, noise: Noise
) -> Grown:
    return Grown.of_chain(chain(expander, context, limits, CHAIN_LAWS[draws], noise, stop=shape), max(limits))


def unsure(law: Tensor, shape: Adaptive) -> Tensor:
    """[B] bool: where a chain is to stop before a token is drawn from law [B, V]."""
    return _RULES[shape.rule](law, shape.threshold)


def _entropy(law: Tensor) -> Tensor:
    """[B] in nats."""
    entropy: Tensor = torch.special.entr(law).sum(-1)
    return entropy


_RULES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "probability": lambda law, threshold: law.amax(-1) < threshold,
    "svip": lambda law, threshold: _entropy(law).sqrt() > threshold,
    "adaedl": lambda law, threshold: 1.0 - (0.2 * _entropy(law)).sqrt() < threshold,
}


def _grow_chain(
    expander: Expander, context: Context, limits: Sequence[int], shape: Shape, draws: Draws, noise: Noise
) -> Grown:
    return Grown.of_chain(chain(expander, context, limits, CHAIN_LAWS[draws], noise), max(limits))


def chain(
    expander: Expander,
    context: Context,
    limits: Sequence[int],
    law: Law,
    noise: Noise,
    *,
    stop: Adaptive | None = None,
) -> TokenTree:
    """limits[b] guesses one after the other, each drawn by ``law`` from the expander's processed law; fewer where the
    rule ``stop`` finds the drafter unsure before it draws (a row at temperature 0 is as unsure as at temperature 1).

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
    if stop is not None:
        room = torch.tensor(limits, device=device)
        going, count = room > 0, room.clamp(max=1) + 1
    for node in range(1, num_tokens + 1):
        paths = Paths(tokens, plan.ancestry[:, node - 1 : node])
        drawn_from = warp(logits, context.processors, context.history, paths)[:, 0]  # [B, V]
        if stop is not None and node > 1:
            softened = context.processors.softened
            told = drawn_from
            if softened is not context.processors:
                told = warp(logits, softened, context.history, paths)[:, 0]
            going = going & (room >= node) & ~unsure(told, stop)
            if device.type == "cpu" and not bool(going.any()):
                tokens = tokens[:, :node]
                break
            assert count is not None
            count = count + going
        tokens[:, node] = choose(drawn_from, law, noise, depth=node - 1, node=node)
        if law == Law.IID:
            laws.append(drawn_from)
        if node < num_tokens:
            logits = expander.logits(tokens[:, node : node + 1], plan.nodes(node, node + 1))
    q = torch.stack([*laws, torch.zeros_like(laws[0])], 1) if laws else None  # the leaf has no children
    if q is not None and count is not None:
        leaf = torch.arange(q.shape[1], device=device) + 1 >= count[:, None]  # or behind it
        q = q.masked_fill(leaf[:, :, None], 0.0)
    return chain_tree(tokens, count, law=law, q=q)


_Grower = Callable[[Expander, Context, Sequence[int], Any, Draws, Noise], Grown]
_GROWERS: dict[type[Shape], _Grower] = {
    Chain: _grow_chain,
    Adaptive: _grow_adaptive,
    Static: grow_template,
    Delayed: grow_template,
    Sequoia: grow_template,
    DySpec: grow_dyspec,
    Eagle2: grow_eagle2,
    OptTree: grow_opt_tree,
}
