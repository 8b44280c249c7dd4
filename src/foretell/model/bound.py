"""A KV cache that C code knows by address."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from foretell.kernels import structures
from foretell.model.cache import KVCache


class BoundCache(KVCache):
    """Keys and values on the CPU, with ``structures.Cache`` over them: ``address``, read again whenever they move."""

    def __init__(
        self,
        num_rows: int,
        capacity: int,
        shapes: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        rope: tuple[Tensor, Tensor],
    ) -> None:
        """shapes: (kv heads, head dimension) of each layer; rope: float32 cosines and sines [capacity, d / 2]."""
        super().__init__(num_rows, capacity, shapes, dtype, [torch.device("cpu")] * len(shapes))
        self._rope = rope
        self._bind()

    def _bind(self) -> None:
        """Read the addresses again; needed after anything that replaces the tensors."""
        pointers = ctypes.c_void_p * len(self.keys)
        cos, sin = self._rope
        self._keys = pointers(*(key.data_ptr() for key in self.keys))
        self._values = pointers(*(value.data_ptr() for value in self.values))
        self.view = structures.Cache(
            self._keys, self._values, self.num_rows, self.capacity, cos.data_ptr(), sin.data_ptr(),
            coded=self._dtype == torch.int8,
        )  # fmt: skip
        self.address = ctypes.addressof(self.view)

    def _show(self) -> None:
        """See ``KVCache._show``; the rows in use begin where the reserve does, so their addresses are its."""
        super()._show()
        if hasattr(self, "_rope"):
            self._bind()

    def rows(self, start: int, stop: int) -> "BoundCache":
        """See ``KVCache.rows``."""
        view = super().rows(start, stop)
        view.__class__ = type(self)
        assert isinstance(view, BoundCache)
        view._rope = self._rope
        view._bind()
        return view
