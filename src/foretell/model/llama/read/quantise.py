"""Quantised matrices for the native decoder: of a file's blocks or of plain weights, in the order of ``native/quant.h``.

Formats have scales, some a minimum or levels: ``tests/model/llama/quantised.py`` is the twin in plain torch.
Every block kind of ``BLOCK_KINDS`` becomes a format without a change of its values: kinds of 2, 3 and 4 bits keep theirs,
those of 5 and 6 are held in 8. ``pack_into`` does it in C (``native/pack.h``).
"""

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from foretell.core.errors import ModelError
from foretell.kernels.native import library

TILE = 16  # rows of a tile of quant.h


class Format(NamedTuple):
    """One format of ``native/quant.h``."""

    number: int  # in common.h
    bits: int  # of a stored code
    unit: int  # values of k that stand together: scales, then codes
    side_bytes: int  # of the scales of one unit of a tile

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit of a tile."""
        return self.side_bytes + self.unit * TILE * self.bits // 8

    def row_bytes(self, columns: int) -> int:
        """Bytes of one row of a matrix with so many columns."""
        return -(-columns // self.unit) * self.unit_bytes // TILE


FORMATS = {
    "Q8": Format(2, 8, 64, 64),  # 32 codes and one float16 scale
    "Q8M": Format(3, 8, 64, 128),  # ... and one float16 minimum
    "Q4": Format(4, 4, 64, 64),
    "Q4M": Format(5, 4, 64, 128),
    "Q4K": Format(6, 4, 256, 320),  # scale and minimum in steps of two that 256 values share
    "Q8K": Format(7, 8, 256, 320),
    "Q8S": Format(8, 8, 256, 320),  # a scale for 16 values, in steps of one that 256 share
    "Q4N": Format(9, 4, 64, 64),
    "Q4X": Format(10, 4, 256, 192),  # scales in steps of one that 256 share
    "Q4E": Format(11, 4, 64, 32),  # a scale is a power of two
    "Q2K": Format(12, 2, 256, 320),  # as Q4K, but for 16 values
    "Q3S": Format(13, 3, 256, 320),  # as Q8S
}
FORMAT_OF = {
    "Q8_0": "Q8", "Q5_0": "Q8", "Q5_1": "Q8M", "Q4_0": "Q4", "Q4_1": "Q4M", "Q4_K": "Q4K", "Q5_K": "Q8K", "Q6_K": "Q8S",
    "IQ4_NL": "Q4N", "IQ4_XS": "Q4X", "Q2_K": "Q2K", "Q3_K": "Q3S", "MXFP4": "Q4E",
}  # fmt: skip


_KINDS: dict[str | torch.dtype, int] = {
    torch.float32: 0, torch.float16: 1, torch.bfloat16: 30,
    "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14,
    "Q2_K": 10, "Q3_K": 11, "IQ4_NL": 20, "IQ4_XS": 23, "MXFP4": 39,
}  # fmt: skip
"""GGUF's numbers, of ggml."""


def pack_into(out: Tensor, form: str, kind: str | torch.dtype, rows: Tensor, columns: int) -> None:
    """Write rows as tiles to the front of out (uint8, zeros). The first row is the first of a tile.

    rows: [n, bytes of a row] uint8 of a block kind, whose values are kept, or [n, columns] floats, which are rounded to
    format "Q8" or "Q4".
    """
    assert rows.is_contiguous()
    assert rows.device.type == "cpu"
    assert (form in ("Q8", "Q4")) if isinstance(kind, torch.dtype) else form == FORMAT_OF[kind]
    assert out.numel() >= -(-len(rows) // TILE) * TILE * FORMATS[form].row_bytes(columns)
    pack_function()(
        FORMATS[form].number, _KINDS[kind], rows.data_ptr(), len(rows), columns, rows.stride(0) * rows.itemsize,
        out.data_ptr(),
    )  # fmt: skip


def pack_function() -> Callable[..., int]:
    """``foretell_pack`` of the native library. Raises ModelError where there is none."""
    lib, reason = library()
    if lib is None:
        raise ModelError(f"quantised weights need the native decoder, which is not available: {reason}")
    pack: Callable[..., int] = lib.foretell_pack
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    lib.foretell_pack.argtypes = [number, number, pointer, number, number, number, pointer]
    return pack
