"""The library of ``race.c``: noise keys, the race that draws a token by them, and the greedy choice."""

import ctypes
from functools import lru_cache

from foretell.kernels.build import optional


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


@lru_cache(maxsize=1)
def race_library() -> ctypes.CDLL | None:
    """The C kernels of keys and race, or None where it cannot be built."""
    return optional("race", FUNCTIONS)
