"""Quantised matrices in plain torch, bit for bit: the slow twin of ``native/pack.h`` and ``native/quant.h``.

A weight is ``scale * (code - offset)``, ``scale * code + minimum`` for formats with a minimum, or ``scale * levels[code]``.
"""

from collections.abc import Callable
from dataclasses import dataclass

import gguf
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from foretell.checkpoints.packed import BLOCK_KINDS
from foretell.model.llama.read.matrices import FORMAT_OF, FORMATS, TILE
from tests.checkpoints.gguf.make import SCALES, put_scales

BLOCK = 32  # values of k that share a scale (16 in Q8S, Q2K and Q3S, Q3I and Q3J)
IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What codes of IQ4_NL and IQ4_XS stand for (``ggml-common.h``)."""
E2M1_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice what codes of MXFP4 stand for (OCP Microscaling Formats 1.0, section 5.3.3); -0 is 0."""

_OFFSETS = {"Q8": 128, "Q4": 8, "Q8S": 128, "Q3S": 4, "Q2T": 1}  # what a stored code is larger by
_SIZES = {
    "Q3I": (1, 7, 9, 0),
    "Q3J": (8, 25, 43, 0),
    "Q4I": (4, 12, 20, 28, 36, 44, 52, 62),
    "Q4J": (1, 3, 5, 7, 9, 11, 13, 15),
}
"""Of the lists of IQ1 (in eighths), IQ2, IQ3_XXS and IQ3_S; a code's highest bit is the sign."""
LEVELS = {"Q4N": IQ4_LEVELS, "Q4X": IQ4_LEVELS, "Q4E": E2M1_LEVELS}
LEVELS |= {form: (*sizes, *(-size for size in sizes)) for form, sizes in _SIZES.items()}
_FACTORS = {"Q3I": 0.125, "Q3J": 0.125, "Q4I": 0.25, "Q4J": 1.0}  # on a float16, whose odd multiples are scales


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
        levels, codes = LEVELS.get(self.format), self.codes.long()
        return codes - _OFFSETS.get(self.format, 0) if levels is None else torch.tensor(levels)[codes]

    def scales(self) -> Tensor:
        """[rows, blocks] float32: the scale of each block (of 16 in Q8S, Q2K and Q3S)."""
        if self.scale.dtype == torch.uint8:
            power = self.scale.int()
            return torch.where(power < 2, 0x200000 << power, (power - 1) << 23).view(torch.float32)
        if self.format in _FACTORS and self.scale_steps is not None:
            return _stepped(self.scale, 2 * self.scale_steps + 1) * _FACTORS[self.format]
        if self.format == "Q2T":
            return self.scale.float().repeat_interleave(8, 1)
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
    if blocks.format in _FACTORS and blocks.scale_steps is not None:
        steps = blocks.scale_steps
        if form.bits == 3:  # of both halves of a block in one byte
            steps = steps[:, ::2] | steps[:, 1::2] << 4
        out[..., 32:160] = side(steps)
    elif blocks.scale_steps is not None:
        steps = side(blocks.scale_steps.view(torch.uint8)).view(len(out), units, -1, TILE)
        if blocks.minimum_steps is not None and form.bits == 2:  # half a byte each
            steps = side(blocks.scale_steps | blocks.minimum_steps << 4)
        elif blocks.minimum_steps is not None:
            minima = side(blocks.minimum_steps).view(len(out), units, -1, TILE)
            steps = torch.stack((steps, minima), 3)  # scale and minimum of a block side by side
        out[..., 64 : form.side_bytes] = steps.reshape(len(out), units, -1)
    return out.flatten(1)


# --------------------------------------------------------------------------------------- of a file's bytes ----------


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


def _pairs(raw: Tensor) -> Tensor:
    """[..., n] bytes -> [..., 2 n]: of each the low half, then the high one."""
    return torch.stack((raw & 15, raw >> 4), -1).flatten(-2)


def _threes(raw: Tensor) -> Tensor:
    """[..., 8] bytes -> [..., 16]: four numbers of 3 bits of each two, the lowest first."""
    words = raw[..., ::2].int() | raw[..., 1::2].int() << 8
    return (words[..., None] >> torch.tensor([0, 3, 6, 9]) & 7).flatten(-2).to(torch.uint8)


_STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "IQ2_XXS": lambda raw: (raw[..., 9:66:8] >> 4).repeat_interleave(2, -1),
    "IQ2_XS": lambda raw: _pairs(raw[..., 66:]),
    "IQ2_S": lambda raw: _pairs(raw[..., 74:]),
    "IQ3_XXS": lambda raw: raw[..., 69::4] >> 4,
    "IQ3_S": lambda raw: _pairs(raw[..., 106:]),
    "IQ1_S": lambda raw: (raw[..., 35::2] >> 4 & 7).repeat_interleave(2, -1),
    "IQ1_M": lambda raw: _threes(raw[..., 48:]),
}
"""Of each 16 values, or 32 of IQ3: s, where the scale is an odd multiple, 2 s + 1."""


def _few_bits(kind: str) -> Callable[[Tensor], Blocks]:
    """Ternary kinds, and those that number entries of a list: codes by what the gguf library reads where the scale is 1."""

    def unpack(raw: Tensor) -> Blocks:
        form, ones = FORMAT_OF[kind], raw.clone()
        put_scales(kind, ones.view(-1, raw.shape[-1]).numpy(), np.ones(len(raw) * raw.shape[1], np.float16))
        if kind == "IQ1_M":
            scale = (
                sum((raw[..., 49 + 2 * i].int() >> 4) << 4 * i for i in range(4)).to(torch.int16).view(torch.float16)
            )
        else:
            scale = _half(raw, SCALES[kind][0])
        steps = rows_of(_STEPS[kind](raw)) if kind in _STEPS else None
        one = Blocks(form, torch.empty(len(raw), 0), torch.ones_like(scale), scale_steps=steps).scales()
        values = torch.from_numpy(gguf.quants.dequantize(rows_of(ones).numpy(), gguf.GGMLQuantizationType[kind]).copy())
        levels = values / one.repeat_interleave(values.shape[1] // one.shape[1], 1)
        table = torch.tensor(LEVELS.get(form, (-1, 0, 1, 2)), dtype=torch.float32)
        codes = (levels[..., None] == table).int().argmax(-1)
        assert torch.equal(table[codes], levels)
        return Blocks(form, codes.to(torch.uint8), scale, scale_steps=steps)

    return unpack


_UNPACK: dict[str, Callable[[Tensor], Blocks]] = {
    "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "Q2_K": _q2_k, "Q3_K": _q3_k, "MXFP4": _mxfp4,
    **{kind: _few_bits(kind) for kind in (*_STEPS, "TQ1_0", "TQ2_0")},
}  # fmt: skip


# ------------------------------------------------------------------------------------------------ products ----------


_TINY = 1e-30


@dataclass(frozen=True)
class Rounded:
    """Activations in blocks of 32: value k is about scale * codes[k]."""

    codes: Tensor  # [rows, blocks, 32] int64
    scale: Tensor  # [rows, blocks] float32


def round_activations(x: Tensor, num_blocks: int) -> Rounded:
    """x [rows, n] float32, padded with zeros to so many blocks: scale = largest / 127, codes rounded to even."""
    blocks = F.pad(x, (0, num_blocks * BLOCK - x.shape[1])).view(len(x), num_blocks, BLOCK)
    largest = blocks.abs().amax(-1)
    empty = largest <= _TINY
    # Not "127.0 / largest": torch makes that a reciprocal and a product, rounded twice.
    inverse = torch.where(empty, torch.zeros_like(largest), torch.full_like(largest, 127.0) / largest)
    codes = torch.round(blocks * inverse[..., None])
    return Rounded(codes.long(), torch.where(empty, torch.zeros_like(largest), largest / 127.0))


def product(blocks: Blocks, x: Tensor) -> Tensor:
    """[M, rows] float32: x [M, columns] float32 times the matrix, summed in the order of the C code."""
    codes = blocks.integers()
    scales, minima = blocks.scales(), blocks.minima()  # [rows, parts]
    parts = scales.shape[1]
    rounded = round_activations(x, codes.shape[1] // BLOCK)
    left = rounded.codes.view(len(x), parts, -1).double()
    sums = torch.einsum("mpk,rpk->mrp", left, codes.view(len(codes), parts, -1).double())  # integers: exact
    scale = rounded.scale.repeat_interleave(parts // rounded.scale.shape[1], 1)
    total = scale * left.sum(-1).float()  # [M, parts]
    acc = torch.zeros(len(x), len(codes))
    for part in range(parts):
        acc = fma(sums[..., part].float(), scales[None, :, part] * scale[:, None, part], acc)
        if minima is not None:
            acc = fma(minima[None, :, part], total[:, None, part], acc)
    return acc


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c of float32 tensors, rounded once (for finite values without underflow).

    The product is exact in float64; its sum with c is rounded to odd there, so that the second rounding, to float32,
    gives what one rounding would have (Boldo and Melquiond, Emulation of FMA and correctly rounded sums, 2008).
    """
    p, c = a.double() * b.double(), c.double()
    total = p + c
    rest = (p - (total - (total - p))) + (c - (total - p))  # what rounding left out (two-sum)
    bits = total.view(torch.int64)
    even = (bits & 1 == 0) & (rest != 0)
    # One step towards the rest: up in size where it has the sign of the total.
    step = torch.where((rest > 0) == (total > 0), 1, -1)
    return torch.where(even, bits + step, bits).view(torch.float64).float()
