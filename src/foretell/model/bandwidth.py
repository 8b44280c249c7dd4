"""How fast this machine reads memory: a lower bound of every decode step, which must read all weights once."""

from time import perf_counter

import torch

from foretell.kernels.functions import huge_pages, native_functions
from foretell.kernels.native import library


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
