"""Guesses of one method put into the trees of another."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from foretell.core.tree import TokenTree
from foretell.core.upload import tensor_on


def graft(tree: TokenTree, guesses: Sequence[Sequence[int]]) -> TokenTree:
    """The tree with a line of FIXED guesses in each row, along nodes that carry the same tokens as far as there are some.

    tree: [B, N] on the host. guesses: of each row the tokens, from the root on. New nodes stand behind column N - 1, hence
    behind drawn siblings, and where the tree's drafter knows that it grew none; where a token stands twice below a node,
    the first is followed.
    """
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
    more, pad = width - tree.num_nodes, torch.nn.functional.pad
    return replace(
        tree,
        tokens=tensor_on(tree.tokens.device, [tokens + [0] * (width - len(tokens)) for tokens, _ in rows]),
        parent=tensor_on(tree.tokens.device, [parents + [-1] * (width - len(parents)) for _, parents in rows]),
        drawn_by=pad(tree.drawn_by, (0, more)),
        q=None if tree.q is None else pad(tree.q, (0, 0, 0, more)),
        max_children=None,
    )
