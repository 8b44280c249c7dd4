"""Memory in huge pages: what is read whole at every step streams faster from them."""

import torch
from torch import Tensor

from foretell.core.platform import anonymous_memory


def huge_pages(num_bytes: int) -> Tensor:
    """[num_bytes] uint8 of zeros, in huge pages where the system grants them: weights stream up to a tenth faster."""
    size = 2 << 20
    memory = anonymous_memory(num_bytes + size, huge=True)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping alive
    start = -whole.data_ptr() % size
    return whole[start : start + num_bytes]
