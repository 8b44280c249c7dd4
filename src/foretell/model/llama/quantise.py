"""Quantised matrices for the native decoder: from a file's blocks or from plain weights, into the order of ``quant.h``.

A weight is ``scale * (code - offset)``, or ``scale * code + minimum`` for formats with a minimum. Every block kind of GGUF
becomes one of seven formats without a change of its values: 4-bit kinds keep 4 bits, the others are held in 8.
``pack_into`` does it in C (``pack.h``); everything after it does the same in plain torch, bit for bit, and is its twin.
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
from foretell.model.packed import BLOCK_KINDS

TILE = 16  # rows of a tile of quant.h
BLOCK = 32  # values of k that share a scale (16 in Q8S)


class Format(NamedTuple):
    """One format of ``quant.h``."""

    number: int  # in common.h
    bits: int  # of a stored code
    offset: int  # what a stored code is larger by
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
    "Q8": Format(2, 8, 128, 64, 64),  # 32 codes and one float16 scale
    "Q8M": Format(3, 8, 0, 64, 128),  # ... and one float16 minimum
    "Q4": Format(4, 4, 8, 64, 64),
    "Q4M": Format(5, 4, 0, 64, 128),
    "Q4K": Format(6, 4, 0, 256, 320),  # scale and minimum in steps of two that 256 values share
    "Q8K": Format(7, 8, 0, 256, 320),
    "Q8S": Format(8, 8, 128, 256, 320),  # a scale for 16 values, in steps of one that 256 share
}
FORMAT_OF = {
    "Q8_0": "Q8", "Q5_0": "Q8", "Q5_1": "Q8M", "Q4_0": "Q4", "Q4_1": "Q4M", "Q4_K": "Q4K", "Q5_K": "Q8K", "Q6_K": "Q8S",
}  # fmt: skip


_KINDS: dict[str | torch.dtype, int] = {
    torch.float32: 0, torch.float16: 1, torch.bfloat16: 30,
    "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14,
}  # fmt: skip
"""GGUF's numbers (``ggml.h``)."""


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
    scale: Tensor  # float16 [rows, K / 32], or [rows, K / 256] where there are steps
    minimum: Tensor | None = None  # the same; to be subtracted where there are steps, else added
    scale_steps: Tensor | None = None  # [rows, K / 32] uint8, or [rows, K / 16] int8
    minimum_steps: Tensor | None = None  # [rows, K / 32] uint8

    def scales(self) -> Tensor:
        """[rows, blocks] float32: the scale of each block (of 16 in Q8S)."""
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
        shifted = self.codes.float() - FORMATS[self.format].offset
        weights = shifted * scales.repeat_interleave(width, 1)
        return weights if minima is None else weights + minima.repeat_interleave(width, 1)


def _stepped(size: Tensor, steps: Tensor | None) -> Tensor:
    if steps is None:
        return size.float()
    return (size.float()[..., None] * steps.float().view(*size.shape, -1)).flatten(1)


# ------------------------------------------------------------------------------------------------ from files ----------


def unpack(kind: str, data: Tensor) -> Blocks:
    """The rows of a GGUF matrix: data [rows, bytes of a row] uint8 (``ggml-common.h`` has the layouts)."""
    layout = BLOCK_KINDS[kind]
    raw = data.view(len(data), -1, layout.size)  # [rows, blocks, bytes]
    blocks = _UNPACK[kind](raw)
    return blocks if kind.endswith("_K") else _padded(blocks)


def _half(raw: Tensor, start: int) -> Tensor:
    """[rows, blocks] float16 at a byte offset of each block."""
    return raw[..., start : start + 2].contiguous().view(torch.float16).squeeze(-1)


def _nibbles(raw: Tensor) -> Tensor:
    """[..., n] bytes -> [..., 2 n]: all low halves, then all high halves."""
    return torch.cat((raw & 15, raw >> 4), -1)


def _bits(raw: Tensor) -> Tensor:
    """[..., 4] bytes -> [..., 32]: their bits, lowest first."""
    return ((raw[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(-2)


def _rows(codes: Tensor) -> Tensor:
    return codes.reshape(len(codes), -1)


def _q8_0(raw: Tensor) -> Blocks:
    return Blocks("Q8", _rows(raw[..., 2:] ^ 128), _half(raw, 0))  # signed codes, plus 128


def _q4_0(raw: Tensor) -> Blocks:
    return Blocks("Q4", _rows(_nibbles(raw[..., 2:])), _half(raw, 0))


def _q4_1(raw: Tensor) -> Blocks:
    return Blocks("Q4M", _rows(_nibbles(raw[..., 4:])), _half(raw, 0), _half(raw, 2))


def _q5_0(raw: Tensor) -> Blocks:
    codes = _nibbles(raw[..., 6:]) | _bits(raw[..., 2:6]) << 4
    return Blocks("Q8", _rows(codes + (128 - 16)), _half(raw, 0))


def _q5_1(raw: Tensor) -> Blocks:
    codes = _nibbles(raw[..., 8:]) | _bits(raw[..., 4:8]) << 4
    return Blocks("Q8M", _rows(codes), _half(raw, 0), _half(raw, 2))


def _steps(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of 6 bits from 12 bytes a block of 256: 8 of each, [rows, 8 * blocks]."""
    first, second, third = raw[..., 4:8], raw[..., 8:12], raw[..., 12:16]
    scales = torch.cat((first & 63, (third & 15) | (first >> 6) << 4), -1)
    minima = torch.cat((second & 63, (third >> 4) | (second >> 6) << 4), -1)
    return _rows(scales), _rows(minima)


def _q4_k(raw: Tensor) -> Blocks:
    scales, minima = _steps(raw)
    codes = _nibbles(torch.unflatten(raw[..., 16:], -1, (4, 32)))  # [rows, blocks, 4, 64]
    return Blocks("Q4K", _rows(codes), _half(raw, 0), _half(raw, 2), scales, minima)


def _q5_k(raw: Tensor) -> Blocks:
    scales, minima = _steps(raw)
    codes = _nibbles(torch.unflatten(raw[..., 48:], -1, (4, 32)))
    high = raw[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1  # [rows, blocks, 8, 32]
    return Blocks("Q8K", _rows(codes) | _rows(high) << 4, _half(raw, 0), _half(raw, 2), scales, minima)


def _q6_k(raw: Tensor) -> Blocks:
    low = _nibbles(torch.unflatten(raw[..., :128], -1, (2, 64)))  # [rows, blocks, 2, 128]
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
    high = torch.unflatten(raw[..., 128:192], -1, (2, 1, 32)) >> shifts[:, None] & 3  # [rows, blocks, 2, 4, 32]
    codes = _rows(low) | _rows(high) << 4
    steps = _rows(raw[..., 192:208]).view(torch.int8)
    return Blocks("Q8S", codes + (128 - 32), _half(raw, 208), scale_steps=steps)


_UNPACK: dict[str, Callable[[Tensor], Blocks]] = {
    "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip


# ------------------------------------------------------------------------------------------------ from weights --------


def round_to_int8(weight: Tensor) -> Blocks:
    """Plain weights [rows, columns] in blocks of 32: scale = largest / 127 in float16, codes -127 to 127 (as Q8_0)."""
    blocks = _in_blocks(weight)  # [rows, blocks, 32]
    scale = (blocks.abs().amax(-1) / 127).half()
    codes = (blocks / _divisor(scale)).round_().clamp_(-127, 127)
    return _padded(Blocks("Q8", _rows(codes.add_(128).to(torch.uint8)), scale))


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
    return _padded(Blocks("Q4", _rows(codes.add_(8).to(torch.uint8)), scale))


def _in_blocks(weight: Tensor) -> Tensor:
    weight = weight.float()
    return torch.unflatten(F.pad(weight, (0, -weight.shape[1] % BLOCK)), -1, (-1, BLOCK))


def _divisor(scale: Tensor) -> Tensor:
    scale = scale.float()[..., None]
    return torch.where(scale == 0, torch.ones_like(scale), scale)  # a block of zeros


def _padded(blocks: Blocks) -> Blocks:
    """Up to whole units of 64, with scales 0."""
    missing = -blocks.scale.shape[1] % 2
    if not missing:
        return blocks
    minimum = None if blocks.minimum is None else F.pad(blocks.minimum, (0, missing))
    codes = F.pad(blocks.codes, (0, missing * BLOCK))
    return Blocks(blocks.format, codes, F.pad(blocks.scale, (0, missing)), minimum)


# ------------------------------------------------------------------------------------------------ into tiles ----------


def interleave(blocks: Blocks) -> Tensor:
    """[tiles, bytes] uint8: tiles of 16 rows in the order of ``quant.h``; rows behind the last are zero."""
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
        codes = _rows(low | high << 4)
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
        if blocks.minimum_steps is not None:
            minima = side(blocks.minimum_steps).view(len(out), units, -1, TILE)
            steps = torch.stack((steps, minima), 3)  # scale and minimum of a block side by side
        out[..., 64 : form.side_bytes] = steps.reshape(len(out), units, -1)
    return out.flatten(1)
