"""The residual of the target's distribution after rejected drafts: one pass over a row of p and q per rejected child,
in C.

After any number of rejected children the rest of p at a node is ``(keep p - take q)+`` with two scalars, but for the
tokens of the children themselves, so a whole tree is tried without storing a residual: the only [B, V] tensor is the
distribution that is left at the node where the walk stopped. ``try_tree`` returns None where the kernel cannot serve
(another device, another dtype, no compiler, ``FORETELL_NATIVE=0``); callers then use their slow reference in torch.
"""

import ctypes
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from foretell.core.tree import TokenTree
from foretell.kernels.bounds import check_nodes, check_shape
from foretell.kernels.build import optional

_TYPES = {torch.float32: "float", torch.float64: "double"}

SUM_TOLERANCE = 1e-3
"""By how much a row of q may miss the sum 1. Children of a row that misses it by more (a drafter's scores, or part of a
distribution) count as FIXED, which is sound however they were drawn; accepting them by such a q is not."""


@dataclass(frozen=True)
class Tried:
    """A tree whose children were all tried in order; float64, zero on padding. N nodes with the root.

    The rest of p at node i, after all its children were rejected, is ``(keep[i] p - take[i] q)+`` at some scale, but
    ``kept[j]`` at the token of each child j.
    """

    start: Tensor  # [B, N] by rejection: P(child i is accepted | the siblings before were not); else the ratio at i
    end: Tensor  # [B, N] by traversal: what is left of start after all children of i were rejected; the root's is 1
    keep: Tensor  # [B, N]
    take: Tensor  # [B, N]
    kept: Tensor  # [B, N] entry j belongs to the parent of j


_FUNCTIONS = {
    "try_tree": "nnnippppppppppp:i",
    "rest": "nnnppppppppp",
    "select": "nnnpppppppp:i",
    "selected_rest": "nnnpppppp:i",
}
_OF_TYPES = {f"{name}_{kind}": types for name, types in _FUNCTIONS.items() for kind in _TYPES.values()}
residual_library = cache(partial(optional, "residual", _OF_TYPES))
"""The C kernels, or None where they cannot be built."""


def kernel_of(function: str, p: Tensor, q: Tensor | None) -> "ctypes._NamedFuncPointer | None":
    """The kernel for distributions of this device and dtype; None where there is none."""
    if p.device.type != "cpu" or p.dtype not in _TYPES:
        return None
    if q is not None and (q.dtype != p.dtype or q.device != p.device):
        return None
    library = residual_library()
    return None if library is None else getattr(library, f"foretell_{function}_{_TYPES[p.dtype]}")


def call(kernel: "ctypes._NamedFuncPointer", *given: int | Tensor | None) -> int:
    """What a kernel returns that is given numbers, and tensors by their addresses. What it writes to is contiguous."""
    held = [x.contiguous() if isinstance(x, Tensor) else x for x in given]  # alive until it returns
    failed: int = kernel(*(x.data_ptr() if isinstance(x, Tensor) else x for x in held))
    return failed


def try_tree(tree: TokenTree, p: Tensor, *, ahead: bool) -> tuple[Tensor, Tried] | None:
    """(stops [B, N] in the dtype of p, what residual needs) of recursive rejection (ahead=False: a node before its
    children) or traversal (ahead=True: a node after its subtree). None where the kernel cannot serve.

    p [B, N, V]. Reads one row of p and q for each child but, with ahead=False, the last of a node, for which q alone is
    read (is it a distribution?); FIXED children cost a scalar. Temporaries: [B, N].
    Raises VocabularyMismatchError or ModelError for a tree whose tokens or parents are out of range.
    """
    check_shape(tree, p.shape)
    kernel = kernel_of("try_tree", p, tree.q)
    if kernel is None:
        return None
    out = torch.empty(6, *p.shape[:2], dtype=torch.float64)
    if call(kernel, *p.shape, int(ahead), tree.tokens, tree.parent, tree.drawn_by, p, tree.q, *out):
        return None
    return out[5].to(p.dtype), Tried(*out[:5])


def rest_at(tree: TokenTree, p: Tensor, tried: Tried, at: Tensor) -> Tensor:
    """[B, V] the rest of p (any scale) at node at[b], all children rejected; p itself where nothing is left.

    Only after ``try_tree`` with the same tree and p. A row of p that is not finite is returned as it is.
    Raises as ``try_tree`` does, and for a node that the tree does not have.
    """
    kernel = kernel_of("rest", p, tree.q)
    assert kernel is not None, "try_tree ran"
    check_shape(tree, p.shape)
    check_nodes(at, *tree.tokens.shape)
    assert tried.keep.shape == tree.tokens.shape, "tried is of another tree"
    out = torch.empty(p.shape[0], p.shape[2], dtype=p.dtype)
    call(kernel, *p.shape, tree.tokens, tree.parent, p, tree.q, tried.keep, tried.take, tried.kept, at, out)
    return out


def is_distribution(q: Tensor) -> Tensor:
    """[...] bool: whether rows of q [..., V] are finite and sum to 1. For the slow references."""
    return (q.sum(-1, dtype=torch.float64) - 1.0).abs() <= SUM_TOLERANCE


def excess(p: Tensor, q: Tensor, keep: Tensor, take: Tensor) -> Tensor:
    """[R] float64: sum (keep p - take q)+ of rows p, q [R, V] with scalars keep, take [R]. For the slow references."""
    return subtract(p, q, keep, take).double().sum(-1)


def subtract(p: Tensor, q: Tensor, keep: Tensor, take: Tensor) -> Tensor:
    """[R, V] ``(keep p - take q)+`` in the dtype of p, with scalars keep, take [R]; a NaN stays one. For the slow
    references."""
    return (keep.to(p.dtype)[:, None] * p - take.to(p.dtype)[:, None] * q).clamp(min=0.0)


def rank(p: Tensor, q: Tensor) -> Tensor:
    """int32, the place of tokens by p / q, larger for more: the ratio rounded down to 6 bits, 0 where q is none."""
    ratio = torch.where(q > 0, p / torch.where(q > 0, q, 1.0), 0.0).float()
    return torch.where(ratio > 0, ratio.view(torch.int32) >> 18, 0)


def below(p: Tensor, q: Tensor) -> Tensor:
    """[R, V] float64: the mass of q at the tokens before each, by (``rank``, id), of rows p, q [R, V].

    A strict order that the context alone decides. For the slow reference; the kernel needs no sort, since ranks are
    2^13.
    """
    order = rank(p, q).sort(dim=-1, stable=True).indices
    mass = q.double().gather(-1, order).cumsum(-1)
    before = torch.nn.functional.pad(mass, (1, 0))[..., :-1]
    return torch.empty_like(before).scatter_(-1, order, before)
