"""The library of ``race.c``: noise keys, the race that draws a token by them, and the greedy choice."""

import ctypes
from functools import lru_cache

from foretell.kernels.build import BuildError, load_library


class Warp(ctypes.Structure):
    """How one row's distribution is made of its logits: that of ``race_logits.h``."""

    _fields_ = [
        ("inverse", ctypes.c_float),  # inverse temperature; 0: greedy
        ("top_p", ctypes.c_float),  # 1 or more: none
        ("min_p", ctypes.c_float),  # 0: none
        ("top_k", ctypes.c_int32),  # 0: none
    ]


@lru_cache(maxsize=1)
def race_library() -> ctypes.CDLL | None:
    """The C kernels of keys and race, or None where it cannot be built."""
    try:
        return typed(load_library("race"))
    except BuildError:
        return None


def typed(library: ctypes.CDLL) -> ctypes.CDLL:
    """The library with the types of its functions."""
    library.foretell_race.argtypes = [ctypes.c_int64] * 2 + [ctypes.c_void_p] * 4
    library.foretell_stream_keys.argtypes = [ctypes.c_int64] + [ctypes.c_void_p] * 3 + [ctypes.c_int64, ctypes.c_void_p]
    library.foretell_race_top.argtypes = (
        [ctypes.c_int64] * 2 + [ctypes.c_void_p] * 3 + [ctypes.c_int64] + [ctypes.c_void_p] * 2
    )
    library.foretell_one_hot.argtypes = [ctypes.c_int64] * 2 + [ctypes.c_void_p] * 2
    library.foretell_one_hot.restype = None
    library.foretell_draw_logits.argtypes = [ctypes.c_int64] * 2 + [ctypes.c_void_p] * 4
    library.foretell_draw_logits.restype = None
    library.foretell_walk.argtypes = (
        [ctypes.c_int64] * 3 + [ctypes.c_void_p] + [ctypes.c_int64] * 2 + [ctypes.c_void_p] * 3 + [ctypes.c_int64]
        + [ctypes.c_void_p, ctypes.c_int64] + [ctypes.c_void_p] * 2 + [ctypes.c_int64, ctypes.c_void_p]
    )  # fmt: skip
    library.foretell_walk.restype = None
    library.foretell_race.restype = library.foretell_stream_keys.restype = None
    library.foretell_race_top.restype = None
    return library
