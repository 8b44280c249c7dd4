"""Tree shapes, each written once for all drafters that return logits of a frontier. Chains are grown here."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from foretoken.draft.base import Context, choose
from foretoken.draft.dynamic import grow_dyspec, grow_eagle2, grow_opt_tree
from foretoken.draft.frontier import Expander, Grown, chance_of, note, span_for
from foretoken.draft.shape import Adaptive, Chain, Delayed, DySpec, Eagle2, OptTree, Sequoia, Shape, SpecDec, Static
from foretoken.draft.template import grow_template
from foretoken.model.prefill import real_nodes
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
"""The way of drawing that each one reduces to where a node has one child."""


Stop = Callable[[int, Callable[[], Tensor]], Tensor]
"""(node, law) -> [B] bool: rows that are to stop before this node, the second guess or a later one, is drawn. law() is the
[B, V] law that it would be drawn from (a row at temperature 0 is as unsure as at temperature 1)."""


def grow(
    expander: Expander, context: Context, limits: Sequence[int], shape: Shape, draws: Draws, noise: Noise
) -> Grown:
    """A tree of this shape behind each row's pending token, none of row b's nodes deeper than limits[b] (of which the
    largest is at least 1). The drafter's law goes through the same ``warp`` as the target's.

    Raises ConfigError where the shape needs an acceptance head that the expander does not have.
    """
    return _GROWERS[type(shape)](expander, context, limits, shape, draws, noise)


def _grow_adaptive(
    expander: Expander, context: Context, limits: Sequence[int], shape: Adaptive, draws: Draws, noise: Noise
) -> Grown:
    def stop(node: int, law: Callable[[], Tensor]) -> Tensor:
        return unsure(law(), shape)

    return Grown.of_chain(chain(expander, context, limits, CHAIN_LAWS[draws], noise, stop=stop), max(limits))


def _grow_specdec(
    expander: Expander, context: Context, limits: Sequence[int], shape: SpecDec, draws: Draws, noise: Noise
) -> Grown:
    all_kept: Tensor | None = None  # [B] predicted probability that the target keeps every guess so far

    def stop(node: int, law: Callable[[], Tensor]) -> Tensor:
        nonlocal all_kept
        chance = chance_of(expander)[:, 0]
        all_kept = chance if all_kept is None else all_kept * chance
        if node <= shape.min:
            return torch.zeros_like(chance, dtype=torch.bool)
        return 1.0 - all_kept > shape.threshold

    return Grown.of_chain(chain(expander, context, limits, CHAIN_LAWS[draws], noise, stop=stop), max(limits))


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
    stop: Stop | None = None,
) -> TokenTree:
    """limits[b] guesses one after the other, each drawn by ``law`` from the expander's processed law; fewer where the
    rule ``stop`` says so. It is called before each guess but the first, which is always made. It reads q and the
    earlier guesses, so whether a guess is made never depends on its own token.

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
    note(context, logits)
    plan = layout(parent, base, expander.capacity, span=span_for(expander, context, num_tokens + 1))
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
            told = partial(_softened, logits, context, paths, drawn_from)
            going = going & (room >= node) & ~stop(node, told)
            if device.type == "cpu" and not bool(going.any()):
                tokens = tokens[:, :node]
                break
            assert count is not None
            count = count + going
        tokens[:, node] = choose(drawn_from, law, noise, depth=node - 1, node=node)
        if law == Law.IID:
            laws.append(drawn_from)
        if node < num_tokens:
            here = plan.nodes(node, node + 1)
            if count is not None and device.type == "cpu":  # rows without this node are left out of the products
                here = replace(here, real=real_nodes([int(limit >= node) for limit in limits], 1))
            logits = expander.logits(tokens[:, node : node + 1], here)
            note(context, logits)
    q = torch.stack([*laws, torch.zeros_like(laws[0])], 1) if laws else None  # the leaf has no children
    if q is not None and count is not None:
        leaf = torch.arange(q.shape[1], device=device) + 1 >= count[:, None]  # or behind it
        q = q.masked_fill(leaf[:, :, None], 0.0)
    return chain_tree(tokens, count, law=law, q=q)


def _softened(logits: Tensor, context: Context, paths: Paths, law: Tensor) -> Tensor:
    """[B, V] law, but for rows at temperature 0 as at temperature 1."""
    softened = context.processors.softened
    return law if softened is context.processors else warp(logits, softened, context.history, paths)[:, 0]


_Grower = Callable[[Expander, Context, Sequence[int], Any, Draws, Noise], Grown]
_GROWERS: dict[type[Shape], _Grower] = {
    Chain: _grow_chain,
    Adaptive: _grow_adaptive,
    SpecDec: _grow_specdec,
    Static: grow_template,
    Delayed: grow_template,
    Sequoia: grow_template,
    DySpec: grow_dyspec,
    Eagle2: grow_eagle2,
    OptTree: grow_opt_tree,
}
