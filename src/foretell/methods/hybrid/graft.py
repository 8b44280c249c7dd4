"""Guesses of several methods in the trees of one step: by row, and in one tree."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from foretell.core.tree import TokenTree, pad_tree
from foretell.core.upload import tensor_on


def by_row(one: TokenTree, other: TokenTree, is_one: Tensor) -> TokenTree:
    """Rows of ``one`` where is_one [B], of ``other`` elsewhere."""
    width = max(one.num_nodes, other.num_nodes)
    one, other = pad_tree(one, width), pad_tree(other, width)
    here = is_one[:, None]
    q = None if other.q is None else other.q.masked_fill(here[..., None], 0.0)
    if one.q is not None:
        own = one.q.masked_fill(~here[..., None], 0.0)
        q = own if q is None else q + own
    return TokenTree(
        torch.where(here, one.tokens, other.tokens),
        torch.where(here, one.parent, other.parent),
        torch.where(here, one.drawn_by, other.drawn_by),
        q,
        max_children=max(one.max_children, other.max_children) if one.max_children and other.max_children else None,
        notes=other.notes if one.notes is None else one.notes,  # a draft model's alone
    )


def graft(tree: TokenTree, guesses: Sequence[Sequence[int]]) -> TokenTree:
    """The tree with a line of FIXED guesses in each row, along nodes that carry the same tokens as far as there are some.

    guesses: of each row the tokens, from the root on. New nodes stand behind column N - 1, hence
    behind drawn siblings, and where the tree's drafter knows that it grew none; where a token stands twice below a node,
    the first is followed.
    """
    if not tree.tokens.is_cpu:
        return graft_there(tree, guesses)
    rows: list[tuple[list[int], list[int]]] = []
    for tokens, parents, guess in zip(tree.tokens.tolist(), tree.parent.tolist(), guesses, strict=True):
        children: dict[tuple[int, int], int] = {}
        for node in range(1, len(parents)):
            if parents[node] >= 0:
                children.setdefault((parents[node], tokens[node]), node)
        at = 0
        for token in guess:
            below = children.get((at, token))
            if below is None:
                tokens.append(token)
                parents.append(at)
                below = len(tokens) - 1
            at = below
        rows.append((tokens, parents))
    width = max(tree.num_nodes, *(len(tokens) for tokens, _ in rows))
    grown = [tokens + [0] * (width - len(tokens)) for tokens, _ in rows]
    above = [parents + [-1] * (width - len(parents)) for _, parents in rows]
    return _wider(tree, tensor_on(tree.tokens.device, grown), tensor_on(tree.tokens.device, above))


def graft_there(tree: TokenTree, guesses: Sequence[Sequence[int]]) -> TokenTree:
    """The same without a read by the host: as many columns as the longest guess has tokens are added, of which some may be
    padding. ``graft`` is the slow twin."""
    before, device = tree.num_nodes, tree.tokens.device
    more, pad = max(map(len, guesses)), torch.nn.functional.pad
    wanted = tensor_on(device, [[*guess, *[-1] * (more - len(guess))] for guess in guesses])  # [B, W]
    tokens, parent = pad(tree.tokens, (0, more)), pad(tree.parent, (0, more), value=-1)
    index = torch.arange(before + more, device=device)
    at = torch.zeros_like(wanted[:, :1])  # [B, 1] the node that the guess has come to
    free = at + before  # the first column that is padding yet
    for token in wanted.unbind(1):
        child = (parent == at) & (tokens == token[:, None])
        found = torch.where(child, index, before + more).amin(1, keepdim=True)
        real, new = token[:, None] >= 0, found == before + more
        put = (index == free) & real & new
        tokens = torch.where(put, token[:, None], tokens)
        parent = torch.where(put, at, parent)
        at = torch.where(real, torch.where(new, free, found), at)
        free = free + (real & new)
    return _wider(tree, tokens, parent)


def _wider(tree: TokenTree, tokens: Tensor, parent: Tensor) -> TokenTree:
    """The tree with these tokens and parents, of which those behind its own nodes are FIXED."""
    more, pad = tokens.shape[1] - tree.num_nodes, torch.nn.functional.pad
    drawn_by, q = pad(tree.drawn_by, (0, more)), None if tree.q is None else pad(tree.q, (0, 0, 0, more))
    return replace(tree, tokens=tokens, parent=parent, drawn_by=drawn_by, q=q, max_children=None)
