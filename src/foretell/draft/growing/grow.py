"""Tree shapes, each written once for all drafters that return logits of a frontier. Chains are grown here."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from foretell.core.deferred import Deferred
from foretell.core.noise import Noise
from foretell.core.probs import Paths, logits_to_probs
from foretell.core.tree import DrawMode, DrawnBy, TokenTree, chain_parent, chain_tree, layout
from foretell.draft.base import Context, choose
from foretell.draft.growing.dynamic import grow_dyspec, grow_eagle2, grow_opt_tree
from foretell.draft.growing.frontier import Expander, Grown, chance_of, limits_of, note, span_for
from foretell.draft.growing.template import grow_template
from foretell.draft.shapes import Adaptive, Chain, DySpec, Eagle2Shape, OptTree, Sequoia, Shape, SpecDec, Static
from foretell.model.prefill import real_nodes

CHAIN_LABELS = {
    DrawMode.FIXED: DrawnBy.FIXED,
    DrawMode.COUPLED: DrawnBy.COUPLED,
    DrawMode.IID: DrawnBy.IID,
    DrawMode.WITHOUT_REPLACEMENT: DrawnBy.IID,
    DrawMode.GREEDY: DrawnBy.IID,
}
"""The way of drawing that each one reduces to where a node has one child."""
Stop = Callable[[int, Callable[[], Tensor]], Tensor]
"""(node, distribution) -> [B] bool: rows that are to stop before this node, the second guess or a later one, is drawn.
distribution() is the [B, V] distribution that it would be drawn from (a row at temperature 0 is as unsure as at
temperature 1)."""


def grow(
    expander: Expander, context: Context, limits: Sequence[int], shape: Shape, draws: DrawMode, noise: Noise
) -> Grown:
    """A tree of this shape after each row's pending token, none of row b's nodes deeper than limits[b] (of which the
    largest is at least 1). The drafter's distribution goes through the same ``logits_to_probs`` as the target's.

    Raises ConfigError where the shape needs an acceptance head that the expander does not have.
    """
    return _GROWERS[type(shape)](expander, context, limits, shape, draws, noise)


def _grow_adaptive(
    expander: Expander, context: Context, limits: Sequence[int], shape: Adaptive, draws: DrawMode, noise: Noise
) -> Grown:
    if shape.rule == "path":
        return _grow_path(expander, context, limits, shape.threshold, CHAIN_LABELS[draws], noise)

    def stop(node: int, probs: Callable[[], Tensor]) -> Tensor:
        return probs().amax(-1) < shape.threshold

    return Grown.of_chain(chain(expander, context, limits, CHAIN_LABELS[draws], noise, stop=stop), max(limits))


def _grow_path(
    expander: Expander, context: Context, limits: Sequence[int], threshold: float, label: DrawnBy, noise: Noise
) -> Grown:
    likely: Tensor | None = None  # [B] product of the largest q so far

    def enough(node: int, probs: Callable[[], Tensor]) -> Tensor:
        nonlocal likely
        top = probs().amax(-1)
        likely = top if likely is None else likely * top
        return likely < threshold

    tree = chain(expander, context, limits, label, noise, enough=enough)
    return Grown.of_chain(tree, tree.num_nodes - 1)  # the last guess was not read, wherever that was


def _grow_specdec(
    expander: Expander, context: Context, limits: Sequence[int], shape: SpecDec, draws: DrawMode, noise: Noise
) -> Grown:
    all_kept: Tensor | None = None  # [B] predicted probability that the target keeps every guess so far

    def stop(node: int, probs: Callable[[], Tensor]) -> Tensor:
        nonlocal all_kept
        chance = chance_of(expander)[:, 0]
        all_kept = chance if all_kept is None else all_kept * chance
        if node <= shape.min:
            return torch.zeros_like(chance, dtype=torch.bool)
        return 1.0 - all_kept > shape.threshold

    return Grown.of_chain(chain(expander, context, limits, CHAIN_LABELS[draws], noise, stop=stop), max(limits))


def _grow_chain(
    expander: Expander, context: Context, limits: Sequence[int], shape: Shape, draws: DrawMode, noise: Noise
) -> Grown:
    return Grown.of_chain(chain(expander, context, limits, CHAIN_LABELS[draws], noise), max(limits))


def chain(
    expander: Expander,
    context: Context,
    limits: Sequence[int],
    label: DrawnBy,
    noise: Noise,
    *,
    stop: Stop | None = None,
    enough: Stop | None = None,
) -> TokenTree:
    """limits[b] guesses one after the other, each drawn by ``label`` from the expander's processed distribution; fewer
    where the rule ``stop`` says so. It is called before each guess but the first, which is always made. It reads q and the
    earlier guesses, so whether a guess is made never depends on its own token. ``enough`` is asked after each guess, with
    what that was drawn from, whether it is a row's last: a pass sooner, as nothing is read where it is.

    The drafter's distribution goes through the same processing as the target's: same temperature, same penalties, same
    path. Where a guess is drawn with the target's noise it is not made (``Deferred``). For IID the tree carries q, the
    very tensors the tokens were drawn from.
    """
    num_rows, device, num_tokens = context.num_rows, context.device, max(limits)
    parent = chain_parent(num_tokens + 1, device).expand(num_rows, -1)
    count: Tensor | None = None
    if min(limits) < num_tokens or context.limits is not None:
        count = limits_of(context, limits) + 1
        parent = parent.masked_fill(torch.arange(num_tokens + 1, device=device) >= count[:, None], -1)
    logits, base = expander.begin(context, limits)
    note(context, logits)
    plan = layout(parent, base, expander.capacity, span=span_for(expander, context, num_tokens + 1), is_line=True)
    tokens = torch.zeros(num_rows, num_tokens + 1, dtype=torch.int64, device=device)
    tokens[:, 0] = context.pending
    distributions: list[Tensor] = []
    if label == DrawnBy.COUPLED:
        noise.coupled_keys(num_tokens + 1)  # the verifier's depths too: hashed once
    if stop is not None or enough is not None:
        depth_limit = limits_of(context, limits)
        going, count = depth_limit > 0, depth_limit.clamp(max=1) + 1
    for node in range(1, num_tokens + 1):
        paths = Paths(tokens, plan.ancestry[:, node - 1 : node])
        drawn_from = Deferred(logits, context.processors, context.history, paths)
        softened = partial(_softened, drawn_from)
        if stop is not None and node > 1:
            going = going & (depth_limit >= node) & ~stop(node, softened)
            if device.type == "cpu" and not bool(going.any()):
                tokens = tokens[:, :node]
                break
            assert count is not None
            count = count + going
        if label == DrawnBy.COUPLED and device.type == "cpu":
            keys = noise.coupled_keys(node)[:, node - 1].tolist()
            drawn = drawn_from.draw(range(num_rows), [0] * num_rows, keys)
            tokens[:, node] = torch.tensor([token for token, _ in drawn])
        else:
            won = None
            if label == DrawnBy.COUPLED:
                won = drawn_from.draw_all(noise.coupled_keys(node)[:, node - 1 :])
            if won is None:
                won = choose(drawn_from.probs[:, 0], label, noise, depth=node - 1, node=node)[:, None]
            tokens[:, node] = won[:, 0]
        if label == DrawnBy.IID:
            distributions.append(drawn_from.probs[:, 0])
        if enough is not None and node < num_tokens:
            going = going & (depth_limit > node) & ~enough(node, softened)
            if device.type == "cpu" and not bool(going.any()):
                tokens = tokens[:, : node + 1]
                break
            assert count is not None
            count = count + going
        if node < num_tokens:
            here = plan.nodes(node, node + 1)
            if count is not None and device.type == "cpu":  # rows without this node are left out of the products
                here = replace(here, real=real_nodes([int(limit >= node) for limit in limits], 1))
            logits = expander.logits(tokens[:, node : node + 1], here)
            note(context, logits)
    # The leaf has no children.
    q = torch.stack([*distributions, torch.zeros_like(distributions[0])], 1) if distributions else None
    if q is not None and count is not None:
        leaf = torch.arange(q.shape[1], device=device) + 1 >= count[:, None]  # or after it
        q = q.masked_fill(leaf[:, :, None], 0.0)
    return chain_tree(tokens, count, drawn_by=label, q=q)


def _softened(drawn_from: Deferred) -> Tensor:
    """[B, V] distribution, but for rows at temperature 0 as at temperature 1."""
    softened = drawn_from.processors.softened
    if softened is drawn_from.processors:
        return drawn_from.probs[:, 0]
    return logits_to_probs(drawn_from.logits, softened, drawn_from.history, drawn_from.paths)[:, 0]


_Grower = Callable[[Expander, Context, Sequence[int], Any, DrawMode, Noise], Grown]
_GROWERS: dict[type[Shape], _Grower] = {
    Chain: _grow_chain,
    Adaptive: _grow_adaptive,
    SpecDec: _grow_specdec,
    Static: grow_template,
    Sequoia: grow_template,
    DySpec: grow_dyspec,
    Eagle2Shape: grow_eagle2,
    OptTree: grow_opt_tree,
}
