"""The library of ``suffix.c``: suffix automata."""

import ctypes
from functools import lru_cache
from typing import Any

from foretell.kernels.build import optional

_NUMBER, _POINTER = ctypes.c_int64, ctypes.c_void_p
_FIELDS: list[tuple[str, Any]] = [
    *[(name, _NUMBER) for name in ("window", "num_tokens", "num_states", "num_edges", "last", "tail_state")],
    *[(name, _NUMBER) for name in ("tail_size", "room_states", "room_edges", "num_slots")],
    *[(name, ctypes.POINTER(ctypes.c_int32)) for name in ("length", "link", "first_edge")],
    *[(name, ctypes.POINTER(_NUMBER)) for name in ("count", "latest", "earlier")],
    *[(name, _POINTER) for name in ("edge_state", "edge_token", "edge_to", "next_edge", "slots")],
]


class AutomatonView(ctypes.Structure):
    """The ``Automaton`` of ``suffix.c``; zeroed before ``foretell_suffix_open``."""

    _fields_ = _FIELDS


@lru_cache(maxsize=1)
def suffix_library() -> ctypes.CDLL | None:
    """The C kernels of suffix automata, or None where they cannot be built."""
    own = {
        "open": "pn:n",
        "close": "p",
        "extend": "ppn:n",
        "follow": "pppnn",
        "repeat": "pp",
        "guesses": "ppnnndnppp:n",
    }
    return optional("suffix", {f"suffix_{name}": types for name, types in own.items()})
