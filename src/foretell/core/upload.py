"""Small values of the host as tensors of a device, without waiting for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import local
from typing import Any

import torch
from torch import Tensor

_SHARED = ("mps", "meta")
"""Devices that read the host's memory, or none: nothing is pinned for them."""


class _Refused(local):
    why = ""  # in this thread: why nothing may be sent


_refused = _Refused()


@contextmanager
def refused_within(where: str) -> Iterator[None]:
    """Within, in this thread, nothing is sent to a device: it would be sent once, and read by every later launch."""
    _refused.why = where
    try:
        yield
    finally:
        _refused.why = ""


def tensor_on(device: torch.device, values: Any, dtype: torch.dtype | None = None) -> Tensor:
    """``torch.tensor(values)`` on a device."""
    made = torch.tensor(values, dtype=dtype)
    return made if device.type == "cpu" else sent(made, device)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on a device. A copy from memory that is not pinned waits until all work before it is done; this one
    waits for nothing, and what is queued after it reads the values."""
    if device.type == "cpu" or device.type in _SHARED:
        return tensor.to(device)
    if _refused.why:
        raise RuntimeError(f"values of the host are sent to {device} within {_refused.why}")
    return tensor.pin_memory().to(device, non_blocking=True)
