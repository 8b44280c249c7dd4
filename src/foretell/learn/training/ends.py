"""The two ends of a target, its embedding and its output head, as a model of their own.

Heads are trained through them, and captured texts bring the target's hidden states, so no layer is needed: a learner
beside a large target holds two matrices of it. Gradient flows through the head.
"""

from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F

from foretell.core.errors import ConfigError
from foretell.core.tree import Plan
from foretell.methods.medusa.head import head_weight, norm_weight
from foretell.model.cache import KVCache
from foretell.model.target import WHOLE, CausalModel, ModelSpec, Output, PassOptions

TOLERANCE = 2e-2
"""How far the norm may be from the target's, as a share: half precision rounds to 4e-3."""


@dataclass(frozen=True)
class Matrices:
    """Float32, on the CPU."""

    embedding: Tensor  # [V, H]
    head: Tensor  # [V, H]
    norm: Tensor  # [H] weight of the final RMS norm
    epsilon: float


class TargetEnds(CausalModel):
    """``embed``, ``normed`` and ``head`` of a target in float32; it has no layers to run."""

    def __init__(self, spec: ModelSpec, matrices: Matrices | None, device: torch.device) -> None:
        """matrices: None for drafters that read tokens alone."""
        self.spec = replace(spec, dtype=torch.float32, device=device, implementation="ends")
        self._held = None if matrices is None else replace(
            matrices, embedding=matrices.embedding.to(device), head=matrices.head.to(device),
            norm=matrices.norm.to(device),
        )  # fmt: skip

    @property
    def matrices(self) -> Matrices:
        """Raises ConfigError where there are none."""
        if self._held is None:
            raise ConfigError(f"{self.spec.name}: its embedding and head are not known to this learner")
        return self._held

    def embed(self, tokens: Tensor) -> Tensor:
        """[..., H] of token ids."""
        return F.embedding(tokens, self.matrices.embedding)

    def normed(self, hidden: Tensor) -> Tensor:
        """The final norm."""
        held = self.matrices
        return F.rms_norm(hidden.float(), held.norm.shape, held.norm, held.epsilon)

    def head(self, normed: Tensor) -> Tensor:
        """[..., V] logits."""
        return F.linear(normed.float(), self.matrices.head)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] of the residual stream after the last layer."""
        return self.head(self.normed(hidden))

    def new_cache(self, num_rows: int, capacity: int) -> NoReturn:
        """There are no layers."""
        raise RuntimeError("the ends of a target have no layers")

    def forward(self, tokens: Tensor, plan: Plan, cache: KVCache, options: PassOptions = WHOLE) -> Output:
        """There are no layers."""
        raise RuntimeError("the ends of a target have no layers")


@torch.no_grad()
def matrices_of(model: CausalModel) -> Matrices:
    """Of a target, for every implementation: read off its functions. Raises ConfigError where its final norm is no RMS
    norm, or its head is not linear."""
    spec = model.spec
    ids = torch.arange(spec.vocab_size, device=spec.device)
    parts = [ids[begin : begin + 8192] for begin in range(0, len(ids), 8192)]
    embedding = torch.cat([model.embed(part[None])[0].float() for part in parts]).cpu()
    head, norm = head_weight(model).cpu(), norm_weight(model).cpu()
    small = torch.full((1, 1, spec.hidden_size), 1e-3, dtype=torch.float32, device=spec.device)
    # A vector of equal numbers c comes out as c w / sqrt(c^2 + epsilon).
    shrunk = (model.normed(small.to(spec.dtype))[0, 0].float().cpu() / norm).median()
    epsilon = max(0.0, float(1e-6 / shrunk**2 - 1e-6)) if shrunk > 0 else 0.0
    found = Matrices(embedding, head, norm, epsilon)
    ends = TargetEnds(spec, found, torch.device("cpu"))
    probe = torch.randn(1, 4, spec.hidden_size, generator=torch.Generator().manual_seed(0))
    asked = probe.to(spec.device, spec.dtype)
    pairs = {
        "its final norm is not an RMS norm": (model.normed(asked).float().cpu(), ends.normed(asked.cpu())),
        "its output head is not linear": (model.head(asked).float().cpu(), ends.head(asked.cpu())),
    }
    for reason, (its, mine) in pairs.items():
        if float((its - mine).abs().max()) > TOLERANCE * float(its.abs().max()):
            raise ConfigError(f"{spec.name}: {reason}, so its heads cannot learn while serving; a draft model can")
    return found
