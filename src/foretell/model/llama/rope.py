"""Rotary frequencies of the types that stretch a model's context, as transformers computes them: linear, Llama 3's
(2407.21783), YaRN (2309.00071) and LongRoPE (2402.13753) before its switch."""

import math
from typing import Any

import torch
from torch import Tensor


def scaled_frequencies(
    rope: dict[str, Any], rotated: int, max_positions: int, *, truncate: bool = True
) -> tuple[Tensor, float]:
    """[rotated / 2] float32 frequencies, and the factor on cos and sin. rope: an entry of ``rope_parameters`` of any of
    these types; rotated: values of a head; truncate: YaRN's bounds are whole dimensions."""
    kind, base, factor = rope["rope_type"], rope["rope_theta"], rope.get("factor")
    exponent = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    if kind == "linear":
        return 1.0 / (base**exponent) / factor, 1.0
    original = rope["original_max_position_embeddings"]
    if kind == "llama3":
        return _llama3(1.0 / (base**exponent), rope, original), 1.0
    factor = max_positions / original if factor is None else factor
    scale = rope.get("attention_factor")
    if kind == "longrope":
        if scale is None:
            scale = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
        return 1.0 / (torch.tensor(rope["short_factor"], dtype=torch.float32) * base**exponent), scale
    if scale is None:
        one, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
        scale = _yarn_scale(factor, one) / _yarn_scale(factor, all_dim) if one and all_dim else _yarn_scale(factor)
    bounds = [_dimension(rope.get(key) or usual, rotated, base, original) for key, usual in _TURNS]
    low, high = (math.floor(bounds[0]), math.ceil(bounds[1])) if truncate else bounds
    low, high = max(low, 0), min(high, rotated - 1)
    width = high - low if high != low else 0.001
    kept = 1 - ((torch.arange(rotated // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    periods = base**exponent
    return 1.0 / (factor * periods) * (1 - kept) + 1.0 / periods * kept, float(scale)


_TURNS = (("beta_fast", 32), ("beta_slow", 1))
"""YaRN: dimensions of more turns over the original context are kept, those of fewer are interpolated."""


def _yarn_scale(factor: float, weight: float = 1) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _dimension(turns: float, rotated: int, base: float, original: int) -> float:
    """The dimension that makes so many turns over the original context."""
    return (rotated * math.log(original / (turns * 2 * math.pi))) / (2 * math.log(base))


def _llama3(frequencies: Tensor, rope: dict[str, Any], original: int) -> Tensor:
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    lengths = 2 * math.pi / frequencies
    found = torch.where(lengths > original / low, frequencies / factor, frequencies)
    smooth = (original / lengths - low) / (high - low)
    between = ~(lengths < original / high) & ~(lengths > original / low)
    return torch.where(between, (1 - smooth) * found / factor + smooth * found, found)
