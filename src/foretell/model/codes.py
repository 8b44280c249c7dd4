"""Keys and values as codes of int8, by torch: the slow twin of ``code_slot`` and ``open_slot`` in ``native/slots.h``.

A slot of a head is ``head_dim`` codes and behind them the bytes of a float32, the scale: number i is scale * code i. The
scale stands in the slot so that whatever moves, copies or keeps slots carries it along.
"""

import torch
from torch import Tensor

SCALE_BYTES = 4
_TINY = 1e-30


def spread_of(bias: Tensor, heads: int) -> Tensor:
    """[heads, d] float32: what queries are multiplied by, and keys divided, before the latter are rounded.

    A bias makes some numbers of all keys hundreds of times as large as others, which one scale would round away (Qwen2.5:
    up to 158). Rotation mixes number i with i + d / 2, so both have one factor: the root of the mean square of their
    biases and of 1, what a normed stream's products come to. bias [heads * d] of the keys' matrix. Sums are float64 and the
    factors bf16, so that they are the same on every machine.
    """
    squares = bias.double().view(heads, 2, -1).square().mean(1, keepdim=True) + 1.0
    return squares.sqrt().expand(-1, 2, -1).reshape(heads, -1).bfloat16().float()


def to_codes(x: Tensor) -> Tensor:
    """x [..., d] as [..., d + SCALE_BYTES] int8: scale = largest / 127, ties to even. Where x is not finite the scale is
    not either."""
    wide = x.float()
    largest = wide.abs().amax(-1, keepdim=True)
    empty = largest <= _TINY
    # Not "127.0 / largest": torch makes that a reciprocal and a product, rounded twice.
    inverse = torch.where(empty, torch.zeros_like(largest), torch.full_like(largest, 127.0) / largest)
    codes = torch.round(wide * inverse).nan_to_num(0.0).clamp(-127, 127).to(torch.int8)
    scale = torch.where(empty, torch.zeros_like(largest), largest / 127.0)
    return torch.cat((codes, scale.contiguous().view(torch.int8)), -1)


def from_codes(slots: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., d] of slots [..., d + SCALE_BYTES] int8: scales and codes are multiplied in float32."""
    scale = slots[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return (slots[..., :-SCALE_BYTES].float() * scale).to(dtype)
