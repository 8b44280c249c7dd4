"""Rotary frequencies of heads: plain, and scaled for longer contexts as in Llama 3.1, YaRN (2309.00071) or linearly.

Not covered, and refused where a checkpoint is read: scalings that depend on the length of the text (dynamic, longrope),
rotations of a part of each head, and frequencies that differ between layers.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foretell.core.errors import ModelError

KINDS = ("linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeScaling:
    """How frequencies are scaled. Names and defaults are those of transformers, but for the two numbers of positions."""

    kind: str  # one of KINDS
    factor: float  # by how much low frequencies are divided
    original_max_positions: int = 0  # of the pretraining; not read by linear
    low_freq_factor: float = 1.0  # llama3: wavelengths above original / low are divided by factor ...
    high_freq_factor: float = 4.0  # ... and those below original / high stay as they are
    beta_fast: float = 32.0  # yarn: rotations over the original positions from which on frequencies stay
    beta_slow: float = 1.0  # yarn: rotations up to which frequencies are divided by factor
    truncate: bool = True  # yarn: bounds are rounded to whole dimensions
    attention_factor: float = 1.0  # cosines and sines are multiplied by it (yarn)

    def __post_init__(self) -> None:
        """Raise ModelError for invalid numbers."""
        if self.kind not in KINDS:
            raise ModelError(f"rotary scaling {self.kind!r} is unknown; expected one of {', '.join(KINDS)}")
        for name in ("factor", "beta_fast", "beta_slow", "attention_factor"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ModelError(f"{name} = {value} of the rotary scaling must be a finite number above 0")
        if self.kind != "linear" and self.original_max_positions < 1:
            raise ModelError(f"rotary scaling {self.kind!r} needs original_max_position_embeddings of at least 1")
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor < math.inf:
            raise ModelError(
                f"low_freq_factor = {self.low_freq_factor} of the rotary scaling must be above 0 and below "
                f"high_freq_factor = {self.high_freq_factor}"
            )

    def as_parameters(self) -> dict[str, Any]:
        """The keys of a config.json, as transformers reads them under "rope_scaling"."""
        out: dict[str, Any] = {"rope_type": self.kind, "factor": self.factor}
        if self.kind != "linear":
            out["original_max_position_embeddings"] = self.original_max_positions
        if self.kind == "llama3":
            out |= {"low_freq_factor": self.low_freq_factor, "high_freq_factor": self.high_freq_factor}
        if self.kind == "yarn":
            out |= {"beta_fast": self.beta_fast, "beta_slow": self.beta_slow, "truncate": self.truncate}
            if self.attention_factor != default_attention_factor(self.factor):
                out["attention_factor"] = self.attention_factor
        return out


def default_attention_factor(factor: float, scale: float = 1.0) -> float:
    """YaRN's factor on cosines and sines: 0.1 * scale * ln(factor) + 1, and 1 where nothing is stretched."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def frequencies(half: int, theta: float, scaling: RopeScaling | None, device: torch.device) -> Tensor:
    """[half] float32 radians a position, of a head of 2 * half dimensions."""
    plain = theta ** (-torch.arange(half, device=device, dtype=torch.float32) / half)
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(plain, scaling)
    return _yarn(plain, theta, scaling)


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    rotations = scaling.original_max_positions * plain / (2 * math.pi)
    share = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    share = share.clamp(0, 1)  # of the frequency as it was
    return share * plain + (1 - share) * plain / scaling.factor


def _yarn(plain: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    half = len(plain)

    def dimension(rotations: float) -> float:
        """Which pair of dimensions turns so many times over the original positions."""
        return half * math.log(scaling.original_max_positions / (rotations * 2 * math.pi)) / math.log(theta)

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    width = high - low if high != low else 0.001
    divided = ((torch.arange(half, device=plain.device, dtype=torch.float32) - low) / width).clamp(0, 1)
    return divided * plain / scaling.factor + (1 - divided) * plain
