"""A mixture of experts in the lean decoder: each layer's rows are grouped by expert, on the host."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from foretell.model.llama.mixture import Mixture, route
from foretell.model.llama.run.pack import Linear, bucket

MIN_ROWS = 4  # oneDNN is slower at 1 or 2 rows than at 4


@dataclass(frozen=True)
class GatedMLP:
    """One expert, or the MLP of a layer without: H -> H."""

    gate_up: Linear  # H -> 2 * inner
    down: Linear  # inner -> H
    activation: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        """[..., H] of x [..., H]."""
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(self.activation(gate).mul_(up))

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

    def __call__(self, x: Tensor) -> Tensor:
        """[..., H] of normed rows x [..., H]."""
        rows = x.flatten(0, -2)
        chosen, weights = route(F.linear(rows.to(self.router.dtype), self.router), self.mixture, self.bias)  # [n, k]
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
