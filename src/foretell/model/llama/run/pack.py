"""Linear maps for the lean decoder: plain, and prepacked by oneDNN.

On CPU, ``F.linear`` in float32 goes to MKL, which at 2 to 8 rows takes 1.7 to 2.7 times as long as at one; oneDNN with
weights reordered once reads them at nearly twice the rate and is flat to 8 rows. Packed weights are opaque: the plain
tensor is not needed after packing and should be freed at once.

oneDNN compiles a kernel for every new number of rows: 0.7 to 3.5 ms and half a MiB each, of which it keeps 1,024.
Batches with trees have hundreds of different numbers of rows, so ``bucket`` rounds them up to a few.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from foretell.model.llama.mixture import Mixture, route

_BUCKETS = ((16, 1), (32, 2), (64, 4), (256, 8))  # up to so many rows in steps of ...
_LARGE_BUCKET = 32


def bucket(num_rows: int) -> int:
    """The least number of rows, not below num_rows, for which kernels are made: a few percent more, and 64 up to 512."""
    step = next((step for limit, step in _BUCKETS if num_rows <= limit), _LARGE_BUCKET)
    return -(-num_rows // step) * step


class Linear(Protocol):
    """x [..., in] -> [..., out], in x's dtype."""

    def __call__(self, x: Tensor) -> Tensor:
        """The product, in x's dtype."""
        ...


class PlainLinear:
    """``F.linear`` on the plain [out, in] weight: every device and dtype, and the packed one's twin."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        return F.linear(x, self.weight, self.bias)


class PackedLinear:
    """A weight in oneDNN's own blocked layout; one packing serves every number of rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        # The hint is the number of rows that the layout is chosen for: 8 was as good at every other number too.
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, 8)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return out


def packing_unsupported(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why weights of this dtype cannot be prepacked there; None where they can."""
    if device.type != "cpu":
        return f"packing is for the CPU, not {device.type}"
    if not torch._C._has_mkldnn or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return "this torch was built without oneDNN's prepacked linear"
    if dtype == torch.bfloat16:
        supported = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        return None if supported else "this CPU has no bf16 instructions that oneDNN uses"
    return None if dtype == torch.float32 else f"oneDNN packing serves float32 and bfloat16, not {dtype}"


def make_linear(weight: Tensor, bias: Tensor | None, *, packed: bool) -> Linear:
    """A linear map that owns what it needs of weight [out, in] and bias [out]."""
    return PackedLinear(weight, bias) if packed else PlainLinear(weight, bias)


Activated = Callable[..., Tensor]
"""What an MLP makes of gate, which it may overwrite, and up; without a gate of up."""
MIN_ROWS = 4  # oneDNN is slower at 1 or 2 rows than at 4


@dataclass(frozen=True)
class GatedMLP:
    """One expert, or the MLP of a layer without: H -> H."""

    gate_up: Linear  # H -> 2 * inner; without a gate inner
    down: Linear  # inner -> H
    activated: Activated
    parts: int = 2  # 1: there is no gate

    def __call__(self, x: Tensor) -> Tensor:
        """[..., H] of x [..., H]."""
        return self.down(self.activated(*self.gate_up(x).chunk(self.parts, -1)))

    def padded(self, x: Tensor) -> Tensor:
        """[n, H] of x [n, H], at a number of rows that kernels are made for."""
        return self(F.pad(x, (0, 0, 0, bucket(max(len(x), MIN_ROWS)) - len(x))))[: len(x)]


@dataclass(frozen=True)
class Experts:
    """The experts of one layer. They are added in the order of their weights, in float32."""

    mixture: Mixture
    router: Tensor  # [experts, H]; of sigmoid routers in float32, in which transformers multiplies it
    each: tuple[GatedMLP, ...]
    bias: Tensor | None = None  # [experts] float32, of the router
    shared: GatedMLP | None = None
    shared_gate: Tensor | None = None  # [1, H]; None: the shared one's weight is 1
    router_bias: Tensor | None = None  # [experts], of the router's product

    def __call__(self, x: Tensor) -> Tensor:
        """[..., H] of normed rows x [..., H]."""
        rows = x.flatten(0, -2)
        logits = F.linear(rows.to(self.router.dtype), self.router, self.router_bias)
        chosen, weights = route(logits, self.mixture, self.bias)  # [n, k]
        num_chosen = chosen.shape[1]
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=len(self.each)).tolist()
        parts = rows.new_empty(len(flat), rows.shape[1])
        for expert, places in zip(self.each, torch.split(order, counts), strict=True):
            if len(places):
                parts[places] = expert.padded(rows[places // num_chosen])
        wide = torch.promote_types(rows.dtype, torch.float32)
        terms = parts.view(len(rows), num_chosen, -1).to(wide) * weights[..., None].to(wide)
        out = terms.sum(1)
        if self.shared is not None:
            part, gate = self.shared.padded(rows).to(wide), self.shared_gate
            out += part if gate is None else F.linear(rows, gate).to(wide).sigmoid() * part
        return out.to(rows.dtype).view(x.shape)
