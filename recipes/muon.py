"""Muon for the hidden matrices, AdamW for the rest.

Muon (Jordan and others, 2024): momentum, then the update matrix is replaced by the nearest orthogonal one, found by a
few Newton-Schulz iterations with the quintic of that work. Matrices of one shape are updated as one batch: on a CPU a
few large products cost less than many small ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

QUINTIC = (3.4445, -4.7750, 2.0315)  # coefficients of x, x^3, x^5


def orthogonal(update: Tensor, steps: int = 5) -> Tensor:
    """Batch of matrices with all singular values near 1: [n, rows, columns] to the same shape."""
    a, b, c = QUINTIC
    x = update.to(torch.bfloat16)
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = torch.baddbmm(a * x, torch.baddbmm(b * square, square, square, alpha=c), x)
    return (x.mT if tall else x).to(update.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised, for two-dimensional parameters only."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, *, momentum: float = 0.95, weight_decay: float = 0.0):
        super().__init__(list(params), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update of all parameters that have a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[p.shape].append(p)
            for shape, params in by_shape.items():
                moments = []
                for p in params:
                    state = self.state[p]
                    if "momentum" not in state:
                        state["momentum"] = torch.zeros_like(p)
                    state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                    moments.append(torch.lerp(p.grad, state["momentum"], group["momentum"]))  # Nesterov
                updates = orthogonal(torch.stack(moments))
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                for p, update in zip(params, updates, strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(update, alpha=-group["lr"] * scale)


def optimizers(model: nn.Module, *, muon_lr: float, adam_lr: float, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Muon for matrices inside the layers, AdamW for the rest; each group keeps its peak rate as ``peak``."""
    inner = [p for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n]
    outer = [p for n, p in model.named_parameters() if not (p.ndim == 2 and ".layers." in n)]
    both: list[torch.optim.Optimizer] = [
        Muon(inner, muon_lr, weight_decay=weight_decay),
        torch.optim.AdamW(outer, adam_lr, betas=(0.9, 0.98), eps=1e-10, weight_decay=0.0),
    ]
    for optimizer in both:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return both
