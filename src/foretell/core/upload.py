"""Small values of the host as tensors of a device, without waiting for it."""

from typing import Any

import torch
from torch import Tensor

_SHARED = ("mps", "meta")
"""Devices that read the host's memory, or none: nothing is pinned for them."""


def tensor_on(device: torch.device, values: Any, dtype: torch.dtype | None = None) -> Tensor:
    """``torch.tensor(values)`` on a device."""
    made = torch.tensor(values, dtype=dtype)
    return made if device.type == "cpu" else sent(made, device)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on a device. A copy from memory that is not pinned waits until all work before it is done; this one
    waits for nothing, and what is queued after it reads the values."""
    if device.type == "cpu" or device.type in _SHARED:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
