"""Residual blocks x + silu(W x + b) through the C kernels (``kernels/native/blocks.h``): Medusa's and acceptance heads."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from foretell.heads.native import Memory, Vocabulary, addresses
from foretell.kernels import heads


class NativeBlocks:
    """Heads side by side: of each some blocks, and a linear layer or none. Outputs are float32."""

    def __init__(
        self, memory: Memory, blocks: Sequence[Sequence[nn.Linear]], outs: Sequence[nn.Linear], size: int,
        vocabulary: Vocabulary | None = None,
    ) -> None:  # fmt: skip
        """blocks[k]: the linear layers [size, size] of head k; outs[k]: its last one, or none at all. vocabulary: the
        tokens of the outputs; None: they are no tokens."""
        self.memory, self.size = memory, size
        linears = [linear for head in blocks for linear in head]
        self._blocks = addresses([memory.matrix(linear) for linear in linears])
        self._outs = addresses([memory.matrix(linear) for linear in outs])
        self._biases = _pointers([memory.vector(linear.bias) for linear in linears])
        self._out_biases = _pointers([memory.vector(linear.bias) for linear in outs])
        num_outputs = outs[0].out_features if outs else 0
        self.width = size if not outs else num_outputs if vocabulary is None else vocabulary.size
        self.view = heads.Blocks(
            len(blocks), len(blocks[0]), size, num_outputs, self._blocks, self._biases,
            self._outs if outs else None, self._out_biases, None if vocabulary is None else vocabulary.address,
        )  # fmt: skip
        self.address = ctypes.addressof(self.view)

    def __call__(self, x: Tensor, num_heads: int = 1) -> Tensor:
        """x [B, size] -> outputs [B, num_heads, width] of the first heads; -inf at tokens that no output has."""
        x, threads, functions = x.float().contiguous(), torch.get_num_threads(), self.memory.functions
        out = torch.empty(len(x), num_heads, self.width)
        with self.memory.lock:
            scratch = self.memory.scratch(functions.blocks_scratch(self.address, len(x), num_heads, threads))
            functions.blocks(
                self.address, threads, len(x), num_heads, x.data_ptr(), out.data_ptr(), self.width, scratch
            )
        return out


def _pointers(places: Sequence[int | None]) -> "ctypes.Array[ctypes.c_void_p]":
    return (ctypes.c_void_p * len(places))(*places)
