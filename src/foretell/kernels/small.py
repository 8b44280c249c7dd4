"""The small libraries in C, a file each: draws by inverting the cumulative distribution (``cdf.c``), with its twin in
torch; noise keys, the race that draws a token by them, and the greedy choice (``race.c``); suffix automata
(``suffix.c``); who sees whom in a tree (``tree.c``)."""

import ctypes
from functools import cache, partial

import torch
from torch import Tensor

from foretell.core.errors import ConfigError
from foretell.kernels.build import optional
from foretell.kernels.gpu.ops import ops

_cdf_library = cache(partial(optional, "cdf", dict.fromkeys(("invert_cdf_float", "invert_cdf_double"), "nnppp")))
_tree_library = cache(partial(optional, "tree", {"ancestors": "nnppp"}))


def invert_cdf(probs: Tensor, uniform: Tensor) -> Tensor:
    """[B] int64 draws from probs [B, V] (any positive scale) by uniform float64 [B] in (0, 1); never a token of mass 0.

    Summed in float64, so a token of any representable mass can be drawn; ``torch.multinomial`` costs ten times as much.
    On the CPU ``cdf.c`` adds the same numbers in the same order, without writing the sums: the same token.
    Raises ConfigError where distribution is not [B, V], V >= 1, or uniform not one float64 a row.
    """
    if probs.ndim != 2 or not probs.shape[1] or uniform.shape != probs.shape[:1] or uniform.dtype != torch.float64:
        raise ConfigError(
            f"invert_cdf takes distributions [B, V], V >= 1, and float64 uniforms [B]; given {tuple(probs.shape)} and "
            f"{uniform.dtype} {tuple(uniform.shape)}"
        )
    on_cpu = probs.device.type == "cpu" and probs.dtype in (torch.float32, torch.float64)
    library = _cdf_library() if on_cpu else None
    if library is not None:
        probs, uniform = probs.contiguous(), uniform.contiguous()
        winners = torch.empty(probs.shape[0], dtype=torch.int64)
        name = "double" if probs.dtype == torch.float64 else "float"
        kernel = getattr(library, f"foretell_invert_cdf_{name}")
        kernel(*probs.shape, probs.data_ptr(), uniform.data_ptr(), winners.data_ptr())
        return winners
    if (gpu := ops(probs.device.type)) is not None:
        drawn: Tensor = gpu.invert_cdf(probs, uniform)
        return drawn
    mass = probs.double().cumsum(-1)
    point = uniform[:, None] * mass[:, -1:]
    # The first token whose cumulative mass exceeds the point: right=True steps over tokens of mass 0.
    return torch.searchsorted(mass, point, right=True)[:, 0].clamp_(max=probs.shape[-1] - 1)


class Warp(ctypes.Structure):
    """How one row's distribution is made of its logits: that of ``race_logits.h``."""

    _fields_ = [
        ("inverse", ctypes.c_float),  # inverse temperature; 0: greedy
        ("top_p", ctypes.c_float),  # 1 or more: none
        ("min_p", ctypes.c_float),  # 0: none
        ("top_k", ctypes.c_int32),  # 0: none
    ]


FUNCTIONS = {
    "race": "nnpppp",
    "stream_keys": "npppnp",
    "race_top": "nnpppnpp",
    "one_hot": "nnpp",
    "draw_logits": "nnpppp",
    "walk": "nnnpnnpppnpnppnp",
}
"""Their types, as ``build.typed`` takes them."""
race_library = cache(partial(optional, "race", FUNCTIONS))
"""The C kernels of keys and race, or None where it cannot be built."""

_NUMBER, _POINTER = ctypes.c_int64, ctypes.c_void_p


class AutomatonView(ctypes.Structure):
    """The ``Automaton`` of ``suffix.c``; zeroed before ``foretell_suffix_open``."""

    _fields_ = [
        *((name, _NUMBER) for name in ("window", "num_tokens", "num_states", "num_edges", "last", "tail_state")),
        *((name, _NUMBER) for name in ("tail_size", "room_states", "room_edges", "num_slots")),
        *((name, ctypes.POINTER(ctypes.c_int32)) for name in ("length", "link", "first_edge")),
        *((name, ctypes.POINTER(_NUMBER)) for name in ("count", "latest", "earlier")),
        *((name, _POINTER) for name in ("edge_state", "edge_token", "edge_to", "next_edge", "slots")),
    ]


_SUFFIX = {
    "suffix_open": "pn:n",
    "suffix_close": "p",
    "suffix_extend": "ppn:n",
    "suffix_follow": "pppnn",
    "suffix_repeat": "pp",
    "suffix_guesses": "ppnnndnppp:n",
}
suffix_library = cache(partial(optional, "suffix", _SUFFIX))
"""The C kernels of suffix automata, or None where they cannot be built."""


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
