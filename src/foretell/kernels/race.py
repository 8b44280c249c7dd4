"""The library of ``race.c``: noise keys, the race that draws a token by them, and the greedy choice."""

import ctypes
from functools import lru_cache

from foretell.kernels.build import BuildError, load_library


@lru_cache(maxsize=1)
def race_library() -> ctypes.CDLL | None:
    """The C kernels of keys and race, or None where it cannot be built."""
    try:
        library = load_library("race")
    except BuildError:
        return None
    library.foretell_race.argtypes = [ctypes.c_int64] * 2 + [ctypes.c_void_p] * 4
    library.foretell_stream_keys.argtypes = [ctypes.c_int64] + [ctypes.c_void_p] * 3 + [ctypes.c_int64, ctypes.c_void_p]
    library.foretell_race_top.argtypes = (
        [ctypes.c_int64] * 2 + [ctypes.c_void_p] * 3 + [ctypes.c_int64] + [ctypes.c_void_p] * 2
    )
    library.foretell_one_hot.argtypes = [ctypes.c_int64] * 2 + [ctypes.c_void_p] * 2
    library.foretell_one_hot.restype = None
    library.foretell_race.restype = library.foretell_stream_keys.restype = None
    library.foretell_race_top.restype = None
    return library
