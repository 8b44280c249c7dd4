"""Low-rank updates of linear layers (LoRA, Hu et al. 2106.09685): W + (alpha / r) B A, of which A and B alone are trained.

What serves is the merged matrix, so a version with LoRA runs as fast as any other; what is kept of a version in training
is A and B, a hundredth of the weights. The embedding and the output head stay as they are: where they share a matrix, a
change of one would be one of the other.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foretell.core.errors import ConfigError

ALPHA = 2.0
"""Scale of the update at rank 1; the update is divided by the square root of the rank (rsLoRA, 2312.03732), so that one
learning rate does for every rank."""
PARTS = ("lora_a", "lora_b")


class LoraLinear(nn.Module):
    """A frozen linear layer with a trained update of low rank. It begins as the layer: B is zero."""

    def __init__(self, base: nn.Linear, rank: int, generator: torch.Generator) -> None:
        """rank: at most the smaller side is used."""
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        rank = min(rank, base.in_features, base.out_features)
        bound = 1.0 / math.sqrt(base.in_features)
        start = (2.0 * torch.rand(rank, base.in_features, generator=generator) - 1.0) * bound
        self.lora_a = nn.Parameter(start)  # [r, in]
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))  # [out, r]
        self.scale = ALPHA / math.sqrt(rank)

    def forward(self, x: Tensor) -> Tensor:
        """[..., out] of x [..., in]."""
        whole: Tensor = self.base(x)
        return whole + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)

    @torch.no_grad()
    def update(self, a: Tensor, b: Tensor) -> Tensor:
        """[out, in] of other parts."""
        return self.scale * (b.float() @ a.float())


def add_lora(module: nn.Module, rank: int, seed: int) -> dict[str, LoraLinear]:
    """Freeze a model and give its linear layers, but for the output head, updates of a rank; by the name of the layer.
    Raises ConfigError where it has none."""
    module.requires_grad_(requires_grad=False)
    output: Callable[[], Any] = getattr(module, "get_output_embeddings", lambda: None)
    head = output()
    generator = torch.Generator().manual_seed(seed)
    layers = {
        name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Linear) and layer is not head
    }
    if not layers:
        raise ConfigError("learn_lora: this draft model has no linear layer; learn all weights with learn_lora = 0")
    made: dict[str, LoraLinear] = {}
    for name, layer in layers.items():
        parent, _, own = name.rpartition(".")
        made[name] = LoraLinear(layer, rank, generator)
        setattr(module.get_submodule(parent), own, made[name])
    return made


def merged(state: dict[str, Tensor], layers: dict[str, LoraLinear], parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint's weights: state is the module's ``state_dict`` with its updates, parts the A and B to merge."""
    out = {name: value for name, value in state.items() if name.rpartition(".")[2] not in PARTS}
    for name, layer in layers.items():
        for kind in ("weight", "bias"):
            held = out.pop(f"{name}.base.{kind}", None)
            if held is not None:
                out[f"{name}.{kind}"] = held
        weight = out[f"{name}.weight"]
        update = layer.update(parts[f"{name}.lora_a"], parts[f"{name}.lora_b"])
        out[f"{name}.weight"] = weight + update.to(weight.device, weight.dtype)
    return out


def unwrap(module: nn.Module) -> None:
    """Put the linear layers back, as they were before ``add_lora``."""
    for name, layer in [(name, layer) for name, layer in module.named_modules() if isinstance(layer, LoraLinear)]:
        parent, _, own = name.rpartition(".")
        setattr(module.get_submodule(parent), own, layer.base)
