"""The functions of ``kernels/native`` with their types, and the meaning of what they return."""

import ctypes
from collections.abc import Callable

from foretell.core.errors import ModelError
from foretell.kernels.native import library

_PROBLEMS = {
    1: "a token is outside the vocabulary",
    2: "a slot is outside the cache",
    3: "a position is not the node's",
    5: "the products of a matrix's format are not loaded",
    6: "the states of a recurrent layer are not those of the committed tokens",
    7: "there is no room for the terms of a recurrent layer",
    8: "a row has an adapter, and the model has none",
}


def check(problem: int) -> None:
    """Raise RuntimeError for what a pass of ``kernels/native`` returned, if it is not 0."""
    if problem:
        raise RuntimeError(_PROBLEMS.get(problem, "out of memory"))


class NativeFunctions:
    """The library's functions, typed."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self.forward: Callable[..., int] = lib.foretell_forward
        lib.foretell_forward.argtypes = [
            pointer, pointer, *[number] * 4, *[pointer] * 5, *[number] * 3, pointer, number, pointer, *[number] * 2,
            *[pointer] * 2, number, *[pointer] * 5,
        ]  # fmt: skip
        self.decode: Callable[..., int] = lib.foretell_decode
        lib.foretell_decode.argtypes = [
            pointer, pointer, *[number] * 3, *[pointer] * 5, number, pointer, number, pointer, number,
            *[pointer] * 2, number, *[pointer] * 6,
        ]  # fmt: skip
        self.scratch: Callable[..., int] = lib.foretell_scratch
        lib.foretell_scratch.argtypes = [pointer, pointer, *[number] * 3]
        self.move: Callable[..., int] = lib.foretell_move
        lib.foretell_move.argtypes = [pointer, pointer, number, pointer, pointer]
        self.states: Callable[..., int] = lib.foretell_states
        lib.foretell_states.argtypes = [pointer, pointer, *[number] * 2, pointer, pointer]
        lib.foretell_states.restype = number
        self.read: Callable[..., int] = lib.foretell_read
        lib.foretell_read.argtypes = [pointer, number, number]
        self.product: Callable[..., int] = lib.foretell_product
        lib.foretell_product.argtypes = [pointer, number, pointer, number, pointer, number, number]
        self.rows: Callable[..., int] = lib.foretell_rows
        lib.foretell_rows.argtypes = [pointer, pointer, number, pointer]
        self.finish: Callable[..., int] = lib.foretell_finish
        lib.foretell_finish.argtypes = [pointer, pointer, number]
        self.amx_rows: Callable[[int], int] = lib.foretell_amx_rows
        lib.foretell_amx_rows.argtypes = [number]
        lib.foretell_amx_rows.restype = number
        self.l2_rows: Callable[[int], int] = lib.foretell_l2_rows
        lib.foretell_l2_rows.argtypes = [number]
        lib.foretell_l2_rows.restype = number
        for function in (
            self.forward,
            self.decode,
            self.scratch,
            self.move,
            self.read,
            self.product,
            self.rows,
            self.finish,
        ):
            function.restype = number


def native_functions() -> NativeFunctions:
    """The functions of ``native/native.c``. Raises ModelError with the reason where it is not available here."""
    lib, reason = library()
    if lib is None:
        raise ModelError(f"the native decoder is not available: {reason}")
    return NativeFunctions(lib)
