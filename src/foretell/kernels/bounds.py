"""Bounds checks of the indices of C kernels: once per call, before an address is passed on.

A kernel trusts its arguments, so a token id or a parent outside its range would read or write other memory. Values are
read on the CPU alone: on an accelerator the check would be a host read in every step, and torch's own kernels check there.
"""

from collections.abc import Sequence
from functools import cache, partial

import torch
from torch import Tensor

from foretell.core.errors import ModelError, VocabularyMismatchError
from foretell.core.tree import TokenTree
from foretell.kernels.build import optional

_bounds_library = cache(partial(optional, "bounds", {"check_tree": "nnnpp:n", "check_indices": "nnp:n"}))


def check_tree(tree: TokenTree, vocab_size: int) -> None:
    """Check that a tree's tensors fit each other and that every token and parent is in range.

    tokens, parent and distribution are int64 [B, N]; tokens lie in [0, vocab_size), padding included; ``parent[:, 0]``
    is -1, any other parent -1 (padding) or the index of an earlier node; q, if any, is [B, N, vocab_size].
    Raises VocabularyMismatchError for a token, ModelError for all else. Values are not read on an accelerator.
    """
    known = vars(tree)
    # The step checks before the pass, ``draw`` before its kernels: once is enough
    if known.get("_checked") == vocab_size:
        return
    tokens, parent, shape = tree.tokens, tree.parent, tree.tokens.shape
    for name, given in (("tokens", tokens), ("parent", parent), ("drawn_by", tree.drawn_by)):
        if given.dtype != torch.int64 or given.shape != shape or given.ndim != 2 or not given.shape[1]:
            raise ModelError(
                f"{name} of a tree is int64 [B, N], N >= 1, as tokens is {tuple(shape)}; "
                f"given {given.dtype} {tuple(given.shape)}"
            )
    if tree.q is not None and tree.q.shape != (*shape, vocab_size):
        raise ModelError(f"q of a tree is [B, N, V] = {(*shape, vocab_size)}; given {tuple(tree.q.shape)}")
    if tokens.device.type != "cpu" or parent.device.type != "cpu":
        return
    library = _bounds_library()
    tokens, parent = tokens.contiguous(), parent.contiguous()
    if library is None:
        at = _first_bad_node(tokens, parent, vocab_size)
    else:
        at = library.foretell_check_tree(*shape, vocab_size, tokens.data_ptr(), parent.data_ptr())
    if at < 0:
        known["_checked"] = vocab_size
        return
    row, node = divmod(at, shape[1])
    token, above, where = int(tokens[row, node]), int(parent[row, node]), f"row {row}, node {node} of a tree"
    if not 0 <= token < vocab_size:
        raise VocabularyMismatchError(
            f"{where} has token id {token}; the target's ids are 0 to {vocab_size - 1}: a drafter may propose no others"
        )
    parents = f"an earlier node (0 to {node - 1}), or -1 for padding" if node else "-1, since it is the root"
    raise ModelError(f"{where} has parent {above}; it must be {parents}")


def check_shape(tree: TokenTree, shape: Sequence[int]) -> None:
    """Check that this shape is [B, N, V] for the N nodes of a tree, and the tree itself by ``check_tree``.

    Raises VocabularyMismatchError for a token outside of V, ModelError for all else.
    """
    if len(shape) != 3 or tuple(shape[:2]) != tuple(tree.tokens.shape):
        raise ModelError(f"p of a tree of {tuple(tree.tokens.shape)} nodes is [B, N, V]; given {tuple(shape)}")
    if tree.num_nodes > 1:  # a root alone is no index into p
        check_tree(tree, shape[2])


def _first_bad_node(tokens: Tensor, parent: Tensor, vocab_size: int) -> int:
    """The torch reference of ``foretell_check_tree``."""
    bad = (tokens < 0) | (tokens >= vocab_size) | (parent < -1) | (parent >= torch.arange(parent.shape[1]))
    found = bad.flatten().nonzero()
    return int(found[0]) if len(found) else -1


def check_nodes(at: Tensor, num_rows: int, num_nodes: int) -> None:
    """Check that ``at`` is int64 [num_rows] and names nodes in [0, num_nodes). Raises ModelError.

    Values are not read on an accelerator.
    """
    if at.dtype != torch.int64 or at.shape != (num_rows,):
        raise ModelError(f"nodes are int64 [B] = {(num_rows,)}; given {at.dtype} {tuple(at.shape)}")
    if at.device.type != "cpu":
        return
    library, at = _bounds_library(), at.contiguous()
    if library is None:
        found = ((at < 0) | (at >= num_nodes)).nonzero()
        row = int(found[0]) if len(found) else -1
    else:
        row = library.foretell_check_indices(num_rows, num_nodes, at.data_ptr())
    if row >= 0:
        raise ModelError(f"row {row} refers to node {int(at[row])}; its tree has nodes 0 to {num_nodes - 1}")
