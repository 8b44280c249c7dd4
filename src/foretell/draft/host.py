"""Trees that were found on the host, as one batch of FIXED nodes."""

from collections import Counter
from collections.abc import Sequence

import torch

from foretell.core.tree import TokenTree, root_tree
from foretell.core.upload import tensor_on
from foretell.draft.base import Context

Node = tuple[int, int]
"""(parent, token) of a guess: guesses are numbered from 1 as they stand in their list; 0 is the root."""


def depth_first(nodes: Sequence[Node]) -> list[Node]:
    """The same tree, depth first, siblings as they stood: nodes must come after their parents.

    The line of first children comes first, and keeps its cache slots when it is accepted.
    """
    children: list[list[int]] = [[] for _ in range(len(nodes) + 1)]
    for node, (parent, _) in enumerate(nodes, start=1):
        children[parent].append(node)
    ordered: list[Node] = []
    stack = [(node, 0) for node in reversed(children[0])]
    while stack:
        node, parent = stack.pop()
        ordered.append((parent, nodes[node - 1][1]))
        stack += [(child, len(ordered)) for child in reversed(children[node])]
    return ordered


def tree_of(context: Context, rows: Sequence[Sequence[Node]]) -> TokenTree:
    """One FIXED tree a row, of guesses in depth-first order; rows may have none."""
    if not any(rows):
        return root_tree(context.pending)
    width = 1 + max(map(len, rows))
    tokens = [[0, *(token for _, token in nodes), *[0] * (width - 1 - len(nodes))] for nodes in rows]
    parents = [[-1, *(parent for parent, _ in nodes), *[-1] * (width - 1 - len(nodes))] for nodes in rows]
    most = max(max(Counter(parent for parent, _ in nodes).values(), default=1) for nodes in rows)
    tensor = tensor_on(context.device, tokens, torch.int64)
    tensor[:, 0] = context.pending
    parent = tensor_on(context.device, parents, torch.int64)
    return TokenTree(tensor, parent, torch.zeros_like(tensor), max_children=most)
