"""Memory in huge pages: what is read whole at every step streams faster from them."""

import contextlib
import mmap

import torch
from torch import Tensor


def huge_pages(num_bytes: int) -> Tensor:
    """[num_bytes] uint8 of zeros, in huge pages where the system grants them: weights stream up to a tenth faster."""
    size = 2 << 20
    if hasattr(mmap, "MAP_PRIVATE"):  # by default it would be shared memory, which most systems deny huge pages
        memory = mmap.mmap(-1, num_bytes + size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    else:  # Windows
        memory = mmap.mmap(-1, num_bytes + size)
    if hasattr(memory, "madvise") and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping alive
    start = -whole.data_ptr() % size
    return whole[start : start + num_bytes]
