"""Blocks of a GGUF file in plain torch: the slow twin of what ``native/pack.h`` does in C, from the file's bytes on."""

from collections.abc import Callable

import torch
from torch import Tensor

from foretell.checkpoints.packed import BLOCK_KINDS
from foretell.model.llama.read.quantise import Blocks, padded, rows_of

_TWOS = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)


def unpack(kind: str, data: Tensor) -> Blocks:
    """The rows of a GGUF matrix: data [rows, bytes of a row] uint8 (``ggml-common.h`` has the layouts)."""
    layout = BLOCK_KINDS[kind]
    raw = data.view(len(data), -1, layout.size)  # [rows, blocks, bytes]
    blocks = _UNPACK[kind](raw)
    return blocks if layout.values == 256 else padded(blocks)


def _half(raw: Tensor, start: int) -> Tensor:
    """[rows, blocks] float16 at a byte offset of each block."""
    return raw[..., start : start + 2].contiguous().view(torch.float16).squeeze(-1)


def _nibbles(raw: Tensor) -> Tensor:
    """[..., n] bytes -> [..., 2 n]: all low halves, then all high halves."""
    return torch.cat((raw & 15, raw >> 4), -1)


def _bits(raw: Tensor) -> Tensor:
    """[..., 4] bytes -> [..., 32]: their bits, lowest first."""
    return ((raw[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(-2)


def _q8_0(raw: Tensor) -> Blocks:
    return Blocks("Q8", rows_of(raw[..., 2:] ^ 128), _half(raw, 0))  # signed codes, plus 128


def _q4_0(raw: Tensor) -> Blocks:
    return Blocks("Q4", rows_of(_nibbles(raw[..., 2:])), _half(raw, 0))


def _q4_1(raw: Tensor) -> Blocks:
    return Blocks("Q4M", rows_of(_nibbles(raw[..., 4:])), _half(raw, 0), _half(raw, 2))


def _q5_0(raw: Tensor) -> Blocks:
    codes = _nibbles(raw[..., 6:]) | _bits(raw[..., 2:6]) << 4
    return Blocks("Q8", rows_of(codes + (128 - 16)), _half(raw, 0))


def _q5_1(raw: Tensor) -> Blocks:
    codes = _nibbles(raw[..., 8:]) | _bits(raw[..., 4:8]) << 4
    return Blocks("Q8M", rows_of(codes), _half(raw, 0), _half(raw, 2))


def _steps(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of 6 bits from 12 bytes a block of 256: 8 of each, [rows, 8 * blocks]."""
    first, second, third = raw[..., 4:8], raw[..., 8:12], raw[..., 12:16]
    scales = torch.cat((first & 63, (third & 15) | (first >> 6) << 4), -1)
    minima = torch.cat((second & 63, (third >> 4) | (second >> 6) << 4), -1)
    return rows_of(scales), rows_of(minima)


def _q4_k(raw: Tensor) -> Blocks:
    scales, minima = _steps(raw)
    codes = _nibbles(torch.unflatten(raw[..., 16:], -1, (4, 32)))  # [rows, blocks, 4, 64]
    return Blocks("Q4K", rows_of(codes), _half(raw, 0), _half(raw, 2), scales, minima)


def _q5_k(raw: Tensor) -> Blocks:
    scales, minima = _steps(raw)
    codes = _nibbles(torch.unflatten(raw[..., 48:], -1, (4, 32)))
    high = raw[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1  # [rows, blocks, 8, 32]
    return Blocks("Q8K", rows_of(codes) | rows_of(high) << 4, _half(raw, 0), _half(raw, 2), scales, minima)


def _q6_k(raw: Tensor) -> Blocks:
    low = _nibbles(torch.unflatten(raw[..., :128], -1, (2, 64)))  # [rows, blocks, 2, 128]
    high = torch.unflatten(raw[..., 128:192], -1, (2, 1, 32)) >> _TWOS[:, None] & 3  # [rows, blocks, 2, 4, 32]
    codes = rows_of(low) | rows_of(high) << 4
    steps = rows_of(raw[..., 192:208]).view(torch.int8)
    return Blocks("Q8S", codes + (128 - 32), _half(raw, 208), scale_steps=steps)


def _iq4_nl(raw: Tensor) -> Blocks:
    return Blocks("Q4N", rows_of(_nibbles(raw[..., 2:])), _half(raw, 0))


def _mxfp4(raw: Tensor) -> Blocks:
    return Blocks("Q4E", rows_of(_nibbles(raw[..., 1:])), raw[..., 0])


def _iq4_xs(raw: Tensor) -> Blocks:
    low = torch.stack((raw[..., 4:8] & 15, raw[..., 4:8] >> 4), -1)  # [rows, blocks, 4, 2]
    high = raw[..., 2:4, None] >> _TWOS & 3  # [rows, blocks, 2, 4]
    steps = (rows_of(low) | rows_of(high) << 4).to(torch.int8) - 32
    codes = _nibbles(torch.unflatten(raw[..., 8:], -1, (8, 16)))
    return Blocks("Q4X", rows_of(codes), _half(raw, 0), scale_steps=steps)


def _two_bits(raw: Tensor) -> Tensor:
    """[rows, blocks, 64] bytes -> [rows, 256 * blocks]: of each 32 bytes the lowest two bits of all, then the next."""
    return rows_of(torch.unflatten(raw, -1, (2, 1, 32)) >> _TWOS[:, None] & 3)


def _q2_k(raw: Tensor) -> Blocks:
    steps = rows_of(raw[..., :16])
    return Blocks("Q2K", _two_bits(raw[..., 16:80]), _half(raw, 80), _half(raw, 82), steps & 15, steps >> 4)


def _q3_k(raw: Tensor) -> Blocks:
    high = raw[..., None, :32] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1  # [rows, blocks, 8, 32]
    top = raw[..., None, 104:108] >> _TWOS[:, None] & 3  # [rows, blocks, 4, 4]
    steps = (rows_of(_nibbles(raw[..., 96:104])) | rows_of(top) << 4).to(torch.int8) - 32
    return Blocks("Q3S", _two_bits(raw[..., 32:96]) | rows_of(high) << 2, _half(raw, 108), scale_steps=steps)


_UNPACK: dict[str, Callable[[Tensor], Blocks]] = {
    "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "Q2_K": _q2_k, "Q3_K": _q3_k, "MXFP4": _mxfp4,
}  # fmt: skip
