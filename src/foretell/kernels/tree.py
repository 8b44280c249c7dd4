"""The library of ``tree.c``: who sees whom in a tree."""

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from foretell.kernels.build import optional


@lru_cache(maxsize=1)
def _tree_library() -> ctypes.CDLL | None:
    return optional("tree", {"ancestors": "nnppp"})


def ancestors_and_depths(parent: Tensor) -> tuple[Tensor, Tensor] | None:
    """([B, N, N] bool, [B, N] int64) of parent [B, N] int64, as ``core.tree`` defines them; None where the kernel is not to
    be had, or parent is not on the CPU."""
    library = _tree_library() if parent.is_cpu and parent.dtype == torch.int64 else None
    if library is None:
        return None
    parent = parent.contiguous()
    num_rows, num_nodes = parent.shape
    seen, depth = torch.empty(num_rows, num_nodes, num_nodes, dtype=torch.bool), torch.empty_like(parent)
    library.foretell_ancestors(num_rows, num_nodes, parent.data_ptr(), seen.data_ptr(), depth.data_ptr())
    return seen, depth
