"""The library ``native/heads.c``: its structures and functions, typed."""

import ctypes
from collections.abc import Callable
from functools import cache

from foretell.kernels import native
from foretell.kernels.build import BuildError, load_library
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


class HeadFunctions:
    """The library's functions for heads. Those named ``*_scratch`` return bytes, the others 0 or an error's number."""

    def __init__(self, lib: ctypes.CDLL, core: ctypes.CDLL) -> None:
        """core: the library of ``native/native.c``."""

        def typed(name: str, *types: type, of: ctypes.CDLL = lib) -> Callable[..., int]:
            function = getattr(of, f"foretell_{name}")
            function.argtypes, function.restype = list(types), _NUMBER
            return function  # type: ignore[no-any-return]

        pointer, number = _POINTER, _NUMBER
        self.pair_scratch = typed("pair_scratch", pointer, pointer, *[number] * 4)
        self.pair = typed(
            "pair", pointer, pointer, *[number] * 4, *[pointer] * 5, *[number] * 3, pointer, pointer, number, pointer,
            pointer, number, pointer,
        )  # fmt: skip
        self.pair_logits = typed("pair_logits", pointer, number, number, pointer, pointer, number, pointer)
        self.pair_chain = typed("pair_chain", pointer, pointer, *[number] * 3, *[pointer] * 5, number, *[pointer] * 4)
        self.pair_tree_scratch = typed("pair_tree_scratch", pointer, pointer, *[number] * 3, pointer, number)
        self.pair_tree = typed("pair_tree", pointer, pointer, *[number] * 3, *[pointer] * 7, number, *[pointer] * 6)
        self.draw_scratch = typed("draw_scratch", number, number)
        self.draw = typed("draw", pointer, *[number] * 3, *[pointer] * 5)
        self.adapter_scratch = typed("adapter_scratch", pointer, pointer, *[number] * 3)
        self.adapter = typed("adapter", pointer, pointer, *[number] * 4, *[pointer] * 4, *[number] * 3, *[pointer] * 3)
        self.product = typed("product", pointer, number, pointer, number, pointer, number, number, of=core)
        self.blocks_scratch = typed("blocks_scratch", pointer, *[number] * 3)
        self.blocks = typed("blocks", pointer, *[number] * 3, pointer, pointer, number, pointer)


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


def head_functions() -> HeadFunctions:
    """Only where ``library`` has one."""
    (lib, reason), (core, _) = library(), native.library()
    assert lib is not None, reason
    assert core is not None
    return HeadFunctions(lib, core)
