"""Quantised matrices for the native decoder: of a file's blocks or of plain weights, in the order of ``native/quant.h``.

A weight is ``scale * (code - offset)``, ``scale * code + minimum`` for formats with a minimum, or ``scale * levels[code]``.
Every block kind of ``BLOCK_KINDS`` becomes a format without a change of its values: kinds of 2, 3 and 4 bits keep theirs,
those of 5 and 6 are held in 8. ``pack_into`` does it in C (``native/pack.h``); everything after it, and ``unpack.py``, does
the same in plain torch, bit for bit, and is its twin.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from foretell.core.errors import ModelError
from foretell.kernels.native import library

TILE = 16  # rows of a tile of quant.h
BLOCK = 32  # values of k that share a scale (16 in Q8S, Q2K and Q3S)
IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What codes of IQ4_NL and IQ4_XS stand for (``ggml-common.h``)."""
E2M1_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice what codes of MXFP4 stand for (OCP Microscaling Formats 1.0, section 5.3.3); -0 is 0."""


class Format(NamedTuple):
    """One format of ``native/quant.h``."""

    number: int  # in common.h
    bits: int  # of a stored code
    offset: int  # what a stored code is larger by
    unit: int  # values of k that stand together: scales, then codes
    side_bytes: int  # of the scales of one unit of a tile
    levels: tuple[int, ...] | None = None  # the 16 values of codes that are numbers in a table

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit of a tile."""
        return self.side_bytes + self.unit * TILE * self.bits // 8

    def row_bytes(self, columns: int) -> int:
        """Bytes of one row of a matrix with so many columns."""
        return -(-columns // self.unit) * self.unit_bytes // TILE


FORMATS = {
    "Q8": Format(2, 8, 128, 64, 64),  # 32 codes and one float16 scale
    "Q8M": Format(3, 8, 0, 64, 128),  # ... and one float16 minimum
    "Q4": Format(4, 4, 8, 64, 64),
    "Q4M": Format(5, 4, 0, 64, 128),
    "Q4K": Format(6, 4, 0, 256, 320),  # scale and minimum in steps of two that 256 values share
    "Q8K": Format(7, 8, 0, 256, 320),
    "Q8S": Format(8, 8, 128, 256, 320),  # a scale for 16 values, in steps of one that 256 share
    "Q4N": Format(9, 4, 0, 64, 64, IQ4_LEVELS),
    "Q4X": Format(10, 4, 0, 256, 192, IQ4_LEVELS),  # scales in steps of one that 256 share
    "Q4E": Format(11, 4, 0, 64, 32, E2M1_LEVELS),  # a scale is a power of two
    "Q2K": Format(12, 2, 0, 256, 320),  # as Q4K, but for 16 values
    "Q3S": Format(13, 3, 4, 256, 320),  # as Q8S
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


@dataclass(frozen=True)
class Blocks:
    """Rows of a quantised matrix in plain tensors; K is a multiple of the format's unit, padded with codes 0."""

    format: str  # a key of FORMATS
    codes: Tensor  # [rows, K] uint8, as stored
    scale: Tensor  # float16 [rows, K / 32], or [rows, K / 256] where there are steps; of Q4E uint8: e is 2^(e - 128)
    minimum: Tensor | None = None  # the same; to be subtracted where there are steps, else added
    scale_steps: Tensor | None = None  # [rows, K / 32 or K / 16], uint8 with minima, else int8
    minimum_steps: Tensor | None = None  # the same shape, uint8

    def integers(self) -> Tensor:
        """[rows, K] int64: what is multiplied by scales."""
        form, codes = FORMATS[self.format], self.codes.long()
        return codes - form.offset if form.levels is None else torch.tensor(form.levels)[codes]

    def scales(self) -> Tensor:
        """[rows, blocks] float32: the scale of each block (of 16 in Q8S, Q2K and Q3S)."""
        if self.scale.dtype == torch.uint8:
            power = self.scale.int()
            return torch.where(power < 2, 0x200000 << power, (power - 1) << 23).view(torch.float32)
        return _stepped(self.scale, self.scale_steps)

    def minima(self) -> Tensor | None:
        """[rows, blocks] float32: what is added to each weight of a block; None for formats without."""
        if self.minimum is None:
            return None
        return -_stepped(self.minimum, self.minimum_steps) if self.minimum_steps is not None else self.minimum.float()

    def values(self) -> Tensor:
        """[rows, K] float32: the weights, exactly as the formats define them."""
        scales, minima = self.scales(), self.minima()
        width = self.codes.shape[1] // scales.shape[1]
        weights = self.integers().float() * scales.repeat_interleave(width, 1)
        return weights if minima is None else weights + minima.repeat_interleave(width, 1)


def _stepped(size: Tensor, steps: Tensor | None) -> Tensor:
    if steps is None:
        return size.float()
    return (size.float()[..., None] * steps.float().view(*size.shape, -1)).flatten(1)


# ------------------------------------------------------------------------------------------------ from weights --------


def round_to_int8(weight: Tensor) -> Blocks:
    """Plain weights [rows, columns] in blocks of 32: scale = largest / 127 in float16, codes -127 to 127 (as Q8_0)."""
    blocks = _in_blocks(weight)  # [rows, blocks, 32]
    scale = (blocks.abs().amax(-1) / 127).half()
    codes = (blocks / _divisor(scale)).round_().clamp_(-127, 127)
    return padded(Blocks("Q8", rows_of(codes.add_(128).to(torch.uint8)), scale))


def round_to_int4(weight: Tensor) -> Blocks:
    """Plain weights [rows, columns] in blocks of 32, codes -8 to 7 (as Q4_0).

    -8 stands for the value of largest size; then the scale of least squares for these codes is taken, and the codes are
    rounded again. The result has a smaller error than GGUF's own rounding to Q4_0, which is the first step alone.
    """
    blocks = _in_blocks(weight)
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)).squeeze(-1)
    scale = (largest / -8).half()
    codes = (blocks / _divisor(scale)).round_().clamp_(-8, 7)
    with_codes, size = (blocks.double() * codes).sum(-1), codes.double().square().sum(-1)
    better = (with_codes / size.clamp_(min=1.0)).float().half()
    scale = torch.where(better == 0, scale, better)
    codes = (blocks / _divisor(scale)).round_().clamp_(-8, 7)
    return padded(Blocks("Q4", rows_of(codes.add_(8).to(torch.uint8)), scale))


def rows_of(codes: Tensor) -> Tensor:
    """[rows, ...] -> [rows, all others]."""
    return codes.reshape(len(codes), -1)


def _in_blocks(weight: Tensor) -> Tensor:
    weight = weight.float()
    return torch.unflatten(F.pad(weight, (0, -weight.shape[1] % BLOCK)), -1, (-1, BLOCK))


def _divisor(scale: Tensor) -> Tensor:
    scale = scale.float()[..., None]
    return torch.where(scale == 0, torch.ones_like(scale), scale)  # a block of zeros


def padded(blocks: Blocks) -> Blocks:
    """Up to whole units of 64, with scales 0."""
    missing = -blocks.scale.shape[1] % 2
    if not missing:
        return blocks
    minimum = None if blocks.minimum is None else F.pad(blocks.minimum, (0, missing))
    codes = F.pad(blocks.codes, (0, missing * BLOCK))
    return Blocks(blocks.format, codes, F.pad(blocks.scale, (0, missing)), minimum)


# ------------------------------------------------------------------------------------------------ into tiles ----------


def interleave(blocks: Blocks) -> Tensor:
    """[tiles, bytes] uint8: tiles of 16 rows in the order of ``native/quant.h``; rows behind the last are zero."""
    form = FORMATS[blocks.format]
    units = blocks.codes.shape[1] // form.unit

    def tiled(part: Tensor, columns: int) -> Tensor:
        """[tiles, units, columns, 16 rows]: bytes of the parts of each unit, row beside row."""
        part = F.pad(part, (0, 0, 0, -len(part) % TILE))
        return part.view(-1, TILE, units, columns).permute(0, 2, 3, 1)

    def side(part: Tensor) -> Tensor:
        columns = part.shape[1] // units
        return tiled(part, columns).contiguous().view(-1, units, columns * TILE).view(torch.uint8)

    codes = blocks.codes
    if form.bits == 4:  # in each block of 32, k and k + 16 share a byte
        low, high = torch.unflatten(codes, -1, (-1, 2, 16)).unbind(2)
        codes = rows_of(low | high << 4)
    elif form.bits < 4:  # in each half of one, k, k + 4, k + 8 and k + 12 do; of all, k % 4 has the third bits
        fours = torch.unflatten(codes, -1, (-1, 8, 4))
        low = torch.unflatten(fours & 3, 2, (2, 4)) << torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
        third = (fours >> 2) << torch.arange(8, dtype=torch.uint8)[:, None]
        parts = [low.sum(3, dtype=torch.uint8).flatten(2), third.sum(2, dtype=torch.uint8)]
        codes = rows_of(torch.cat(parts[: form.bits - 1], -1))
    # 4 codes of a row are one int32; [tiles, units, n, 16] of them are n vectors.
    words = codes.contiguous().view(torch.int32)
    body = tiled(words, words.shape[1] // units).contiguous().view(-1, units, words.shape[1] // units * TILE)
    out = torch.zeros(len(body), units, form.unit_bytes, dtype=torch.uint8)
    out[..., form.side_bytes :] = body.view(torch.uint8)
    at = 0
    for part in (blocks.scale, blocks.minimum):
        if part is not None:
            held = side(part)
            out[..., at : at + held.shape[-1]] = held
        at += 32 if blocks.scale_steps is not None else 64
    if blocks.scale_steps is not None:
        steps = side(blocks.scale_steps.view(torch.uint8)).view(len(out), units, -1, TILE)
        if blocks.minimum_steps is not None and form.bits == 2:  # half a byte each
            steps = side(blocks.scale_steps | blocks.minimum_steps << 4)
        elif blocks.minimum_steps is not None:
            minima = side(blocks.minimum_steps).view(len(out), units, -1, TILE)
            steps = torch.stack((steps, minima), 3)  # scale and minimum of a block side by side
        out[..., 64 : form.side_bytes] = steps.reshape(len(out), units, -1)
    return out.flatten(1)
