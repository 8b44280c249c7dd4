"""The cache of ``native.py``: keys and values whose addresses the C code is given once."""

from collections.abc import Callable

import torch
from torch import Tensor

from foretell.kernels.functions import check
from foretell.model.bound import BoundCache
from foretell.model.llama.shape import LlamaShape


class NativeCache(BoundCache):
    """The cache of a native model."""

    def __init__(
        self, shape: LlamaShape, dtype: torch.dtype, rope: tuple[Tensor, Tensor],
        move: Callable[[int, int, int, int], int], num_rows: int, capacity: int,
    ) -> None:  # fmt: skip
        """rope: as ``BoundCache`` has it; move: of the model, from (this cache's address, number of slots, the addresses of
        the slots from which and to which), to what ``check`` takes."""
        shapes = [(shape.num_kv_heads * shape.attends(layer), shape.head_dim) for layer in range(shape.num_layers)]
        self._move = move
        super().__init__(num_rows, capacity, shapes, dtype, rope)

    def move(self, src: Tensor, dst: Tensor) -> None:
        """See ``KVCache.move``."""
        src, dst = src.contiguous(), dst.contiguous()
        assert src.shape == dst.shape
        assert src.shape[0] == self.num_rows
        check(self._move(self.address, src.shape[1], src.data_ptr(), dst.data_ptr()))

    def rows(self, start: int, stop: int) -> "NativeCache":
        """See ``KVCache.rows``."""
        view = super().rows(start, stop)
        assert isinstance(view, NativeCache)
        view._move = self._move
        return view
