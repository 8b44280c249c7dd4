"""The cache of ``native.py``: keys and values whose addresses the C code is given once."""

from typing import TYPE_CHECKING

from torch import Tensor

from foretell.kernels.functions import check
from foretell.model.bound import BoundCache

if TYPE_CHECKING:
    from foretell.model.llama.native import NativeModel


class NativeCache(BoundCache):
    """The cache of a native model."""

    def __init__(self, model: "NativeModel", num_rows: int, capacity: int) -> None:
        shape, spec = model.shape, model.spec
        shapes = [(shape.num_kv_heads, shape.head_dim)] * shape.num_layers
        self._model = model
        super().__init__(num_rows, capacity, shapes, spec.dtype, model.rotations(capacity))

    def move(self, src: Tensor, dst: Tensor) -> None:
        """See ``KVCache.move``."""
        src, dst = src.contiguous(), dst.contiguous()
        assert src.shape == dst.shape
        assert src.shape[0] == self.num_rows
        check(self._model.native.move(self._model.address, self.address, src.shape[1], src.data_ptr(), dst.data_ptr()))

    def rows(self, start: int, stop: int) -> "NativeCache":
        """See ``KVCache.rows``."""
        view = super().rows(start, stop)
        assert isinstance(view, NativeCache)
        view._model = self._model
        return view
