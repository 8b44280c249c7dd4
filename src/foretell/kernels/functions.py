"""The functions of ``kernels/native`` with their types, and the meaning of what they return."""

from time import perf_counter

import torch
from torch import Tensor

from foretell.core.errors import ModelError
from foretell.core.platform import anonymous_memory
from foretell.kernels.build import Functions
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


FUNCTIONS = {
    "forward": "ppnnnnpppppnnnpnpnnppnppppp:n",
    "decode": "ppnnnpppppnpnpnppnpppppp:n",
    "scratch": "ppnnn:n",
    "move": "ppnpp:n",
    "states": "ppnnpp:n",
    "read": "pnn:n",
    "product": "pnpnpnn:n",
    "rows": "ppnp:n",
    "finish": "ppn:n",
    "amx_rows": "n:n",
    "l2_rows": "n:n",
}
"""Their types, as ``build.typed`` takes them."""


def native_functions() -> Functions:
    """The functions of ``native/native.c``. Raises ModelError with the reason where it is not available here."""
    lib, reason = library()
    if lib is None:
        raise ModelError(f"the native decoder is not available: {reason}")
    return Functions(lib, FUNCTIONS)


def huge_pages(num_bytes: int) -> Tensor:
    """[num_bytes] uint8 of zeros, in huge pages where the system grants them: weights stream up to a tenth faster."""
    size = 2 << 20
    memory = anonymous_memory(num_bytes + size, huge=True)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping alive
    start = -whole.data_ptr() % size
    return whole[start : start + num_bytes]


def dram_read_bandwidth(num_bytes: int = 1 << 30, *, repeats: int = 10, huge: bool = False) -> float:
    """Bytes per second at which torch's threads read a buffer larger than any cache; the best of some repeats.

    huge: request 2 MiB pages, in which ``run/native.py`` keeps weights. Without the native library torch does the
    reading, and a summation's own cost may hide part of the bandwidth.
    """
    memory = huge_pages(num_bytes) if huge else torch.empty(num_bytes, dtype=torch.uint8)
    memory.fill_(1)  # untouched pages would all be one page of zeros
    threads = torch.get_num_threads()
    native = native_functions().read if library()[0] is not None else None
    numbers = memory[: num_bytes // 4 * 4].view(torch.int32)
    best = float("inf")
    for _ in range(repeats):
        start = perf_counter()
        if native is not None:
            native(memory.data_ptr(), num_bytes, threads)
        else:
            numbers.max()
        best = min(best, perf_counter() - start)
    return num_bytes / best
