"""The parts that heads are made of: RMS norm, rotary positions, attention over a text or over slots, gated MLP.

Written once, differentiable, in plain torch: a head is one or a few layers, so its cost is its weights and its number
of operations, and training and decoding must compute the same.
"""

import math
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foretell.core.errors import ModelError
from foretell.core.tree import Plan
from foretell.model.cache import KVCache
from foretell.model.llama.traits import default_attention_factor
from foretell.model.windows import DraftWindow, sunk_attention

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


def frequencies(half: int, theta: float, scaling: RopeScaling | None, device: torch.device) -> Tensor:
    """[half] float32 radians a position, of a head of 2 * half dimensions.

    Not covered, and refused where a checkpoint is read: scalings that depend on the length of the text (dynamic,
    longrope), rotations of a part of each head, and frequencies that differ between layers.
    """
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


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis, as the Llama family has it."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), without biases."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of an attention layer."""

    inputs: int  # width of what is projected
    hidden: int  # width of what comes out
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    qk_norm: bool = False  # an RMS norm of each head's queries and keys (Qwen3)
    rms_norm_eps: float = 1e-6
    rope_scaling: RopeScaling | None = None
    bias: bool = False  # of queries, keys and values
    output_bias: bool = False
    window: int = 0  # how many last positions the caller's mask should show, the own one included; 0: all
    limit: DraftWindow | None = None  # what is seen less by than that, where a draft reads a part of its text alone


class Attention(nn.Module):
    """Rotary grouped-query attention. The caller provides the mask and the cache."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.inputs, shape.num_heads * shape.head_dim, bias=shape.bias)
        self.k_proj = nn.Linear(shape.inputs, shape.num_kv_heads * shape.head_dim, bias=shape.bias)
        self.v_proj = nn.Linear(shape.inputs, shape.num_kv_heads * shape.head_dim, bias=shape.bias)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden, bias=shape.output_bias)
        if shape.qk_norm:
            self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
            self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B, n, inputs], positions [B, n] -> [B, heads, n, head_dim], rotated."""
        q = self.q_proj(x).unflatten(-1, (self.shape.num_heads, self.shape.head_dim))
        if self.shape.qk_norm:
            q = self.q_norm(q)
        return turn(q.transpose(1, 2), *self.angles(positions, x.dtype))

    def keys(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B, n, inputs], positions [B, n] -> [B, kv heads, n, head_dim], rotated."""
        k = self.k_proj(x).unflatten(-1, (self.shape.num_kv_heads, self.shape.head_dim))
        if self.shape.qk_norm:
            k = self.k_norm(k)
        return turn(k.transpose(1, 2), *self.angles(positions, x.dtype))

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, 1, n, head_dim / 2] of positions [B, n]."""
        return rotary(positions, self.shape.head_dim, self.shape.rope_theta, dtype, self.shape.rope_scaling)

    def turned(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Queries [B, heads, n, head_dim] and keys [B, kv heads, n, head_dim] of x [B, n, inputs], rotated by ``angles``:
        as one tensor, which is half the operations."""
        shape = self.shape
        if shape.qk_norm:
            q = self.q_norm(self.q_proj(x).unflatten(-1, (shape.num_heads, shape.head_dim)))
            k = self.k_norm(self.k_proj(x).unflatten(-1, (shape.num_kv_heads, shape.head_dim)))
            both = torch.cat([q, k], 2)
        else:
            both = torch.cat([self.q_proj(x), self.k_proj(x)], -1)
            both = both.view(*both.shape[:2], -1, shape.head_dim)
        heads = turn(both.transpose(1, 2), *angles)
        return heads[:, : shape.num_heads], heads[:, shape.num_heads :]

    def values(self, x: Tensor) -> Tensor:
        """x [B, n, inputs] -> [B, kv heads, n, head_dim]."""
        v: Tensor = self.v_proj(x).unflatten(-1, (self.shape.num_kv_heads, self.shape.head_dim))
        return v.transpose(1, 2)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sunk: Tensor | None = None) -> Tensor:
        """[B, n, hidden]: attend and project. q [B, heads, n, d], k and v [B, kv heads, m, d], mask bool
        [B or 1, 1, n, m]. sunk: queries as the sinks of ``limit`` meet them, like q."""
        group = self.shape.num_heads // self.shape.num_kv_heads
        if sunk is not None:
            assert self.shape.limit is not None
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            scale, sinks = self.shape.head_dim**-0.5, self.shape.limit.sinks
            found: Tensor = self.o_proj(sunk_attention(q, sunk, k, v, mask, scale, sinks).transpose(1, 2).flatten(2))
            return found
        # The CPU's kernel reads shared keys in place: a seventh of the time at 1024 slots. Accelerator kernels with a
        # mask would fall back to the slowest one.
        shared = group > 1 and q.device.type == "cpu"
        if group > 1 and not shared:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=shared)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """A whole text at once: x [B, T, inputs], positions [B, T], mask bool [B or 1, 1, T, T] -> [B, T, hidden]."""
        return self.mix(self.queries(x, positions), self.keys(x, positions), self.values(x), mask)

    def step(self, x: Tensor, plan: Plan, cache: KVCache, layer: int) -> Tensor:
        """The nodes of a plan: x [B, n, inputs] -> [B, n, hidden]; their keys and values go to ``plan.slots``."""
        q = self.queries(x, plan.positions)
        cache.write(layer, plan.slots, self.keys(x, plan.positions), self.values(x))
        return self.mix(q, cache.keys[layer][:, :, : plan.span], cache.values[layer][:, :, : plan.span], plan.mask)


def rotary(
    positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [B, 1, n, head_dim / 2] of positions [B, n], for callers that turn more than once.

    Angles are float32 whatever dtype is.
    """
    angle = positions[:, None, :, None].float() * _frequency(head_dim // 2, theta, scaling, positions.device)
    cos, sin = angle.cos(), angle.sin()
    if scaling is not None and scaling.attention_factor != 1.0:
        cos, sin = cos * scaling.attention_factor, sin * scaling.attention_factor
    return cos.to(dtype), sin.to(dtype)


@lru_cache(maxsize=8)
def rotations(capacity: int, head_dim: int, theta: float, scaling: RopeScaling | None = None) -> tuple[Tensor, Tensor]:
    """float32 cosines and sines [capacity, head_dim / 2] of all positions, on the CPU, shared by all caches of a kind: for
    long texts they take as long as a pass of a small target. Nobody writes to them."""
    with torch.inference_mode(mode=False):  # as in ``_frequency``
        cos, sin = rotary(torch.arange(capacity)[None], head_dim, theta, torch.float32, scaling)
        return cos.view(capacity, -1).contiguous(), sin.view(capacity, -1).contiguous()


@cache
def _frequency(half: int, theta: float, scaling: RopeScaling | None, device: torch.device) -> Tensor:
    """[half] float32 radians a position."""
    # Cached beyond the call, which may be in inference mode, and read in training
    with torch.inference_mode(mode=False):
        return frequencies(half, theta, scaling, device)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, halves paired as in Llama: x [B, h, n, d] by angles that ``rotary`` gave."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def causal_mask(length: Tensor, num_tokens: int) -> Tensor:
    """[B, 1, T, T] bool: each position sees itself and earlier ones; those after length [B] see themselves alone."""
    index = torch.arange(num_tokens, device=length.device)
    seen = index[:, None] >= index[None, :]
    real = index < length[:, None]  # [B, T]
    itself = torch.eye(num_tokens, dtype=torch.bool, device=length.device)
    return ((seen & real[:, None, :]) | itself)[:, None]
