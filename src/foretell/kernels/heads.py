"""The library ``native/heads.c``: its structures and functions, typed."""

import ctypes
from functools import cache

from foretell.kernels import native
from foretell.kernels.build import BuildError, Functions, load_library
from foretell.kernels.structures import Matrix, Model

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64


class Pair(ctypes.Structure):
    """A head over pairs: its decoder layers as a model, and its own way in and out."""

    _fields_ = [
        ("model", Model),
        ("fc", Matrix),
        *((name, _POINTER) for name in ("fc_bias", "token_norm", "feature_norm")),
        *((name, _NUMBER) for name in ("normed_residual", "normed_output", "num_outputs")),
        ("ids", _POINTER),
    ]


class Draw(ctypes.Structure):
    """How the tokens of a chain are drawn; ``how`` is 0 (argmax), 1 (COUPLED) or 2 (IID)."""

    _fields_ = [
        *((name, _NUMBER) for name in ("how", "depth", "vocab")),
        *(
            (name, _POINTER)
            for name in ("inverse_temperature", "keys", "table", "uniforms", "top_k", "top_p", "min_p", "q")
        ),
    ]


class Growth(ctypes.Structure):
    """How a tree of guesses grows: ``native/grow.h``."""

    _fields_ = [
        *((name, _NUMBER) for name in ("kind", "size", "width", "depth")),
        *((name, ctypes.c_float) for name in ("least", "gain")),
    ]


class Blocks(ctypes.Structure):
    """Heads of residual blocks, side by side."""

    _fields_ = [
        *((name, _NUMBER) for name in ("num_heads", "num_blocks", "hidden", "num_outputs")),
        ("blocks", ctypes.POINTER(Matrix)),
        ("biases", ctypes.POINTER(_POINTER)),
        ("outs", ctypes.POINTER(Matrix)),
        ("out_biases", ctypes.POINTER(_POINTER)),
        ("ids", _POINTER),
    ]


class Markov(ctypes.Structure):
    """A bigram of low rank."""

    _fields_ = [("first", Matrix), ("second", Matrix)]


FUNCTIONS = {
    "pair_scratch": "ppnnnn",
    "pair": "ppnnnnpppppnnnppnppnp",
    "pair_logits": "pnnppnp",
    "pair_chain": "ppnnnpppppnpppp",
    "pair_tree_scratch": "ppnnnpn",
    "pair_tree": "ppnnnpppppppnpppppp",
    "draw_scratch": "pnnn",
    "draw": "ppnnnpppppp",
    "flash_scratch": "ppnnnnn",
    "flash": "ppnnnnppppnnppp",
    "adapter": "ppnnnnppppnnnppp",
    "blocks_scratch": "pnnn",
    "blocks": "pnnnppnp",
}
"""Types of the arguments, as ``build.typed`` takes them: ``*_scratch`` return bytes, the others 0 or an error's number."""


def library() -> tuple[ctypes.CDLL | None, str | None]:
    """The library of heads, or None and the reason why there is none. It may be compiled at the first call."""
    core, reason = native.library()
    return (None, reason) if core is None else _library(native.variant() or "")


@cache
def _library(variant: str) -> tuple[ctypes.CDLL | None, str | None]:
    core, _ = native.library()
    assert core is not None
    try:
        lib = load_library("heads", variant)
    except BuildError as error:
        return None, str(error)
    lib.foretell_open_heads(native.address_in(core, "foretell_core"))
    return lib, None


def head_functions() -> Functions:
    """Only where ``library`` has one."""
    lib, reason = library()
    assert lib is not None, reason
    return Functions(lib, {name: f"{types}:n" for name, types in FUNCTIONS.items()})
