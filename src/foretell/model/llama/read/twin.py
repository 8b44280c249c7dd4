"""The arithmetic of ``native/quant.h`` in plain torch, bit for bit: its slow twin in tests."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from foretell.model.llama.read.quantise import BLOCK, Blocks

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
