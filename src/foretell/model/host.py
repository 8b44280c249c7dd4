"""Models on accelerators without float64 (Apple's): passes run there, and what they return comes to the host.

Drafters, samplers and verifiers then draw on the CPU, by the same kernels and from the same noise as everywhere: no token
depends on what the accelerator lacks. The price is one wait and one copy of the logits a pass.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import wraps
from typing import Any, ParamSpec

import torch
from torch import Tensor

from foretell.checkpoints.lora import Lora
from foretell.core.tree import Plan
from foretell.model.cache import KVCache
from foretell.model.target import WHOLE, CausalModel, Output, PassOptions, WrappedModel

P = ParamSpec("P")
CPU = torch.device("cpu")


class HostModel(WrappedModel):
    """A model whose inputs and results are CPU tensors, wherever its weights and keys and values are."""

    def __init__(self, model: CausalModel) -> None:
        super().__init__(model)
        self.device = model.spec.device
        self.spec = replace(model.spec, device=CPU)

    def add_loras(self, loras: Mapping[str, Lora]) -> None:
        """See ``CausalModel.add_loras``."""
        self.inner.add_loras(loras)
        self.loras = self.inner.loras

    def rebuilt(self, tensors: Mapping[str, Tensor]) -> "HostModel":
        """See ``CausalModel.rebuilt``."""
        return HostModel(self.inner.rebuilt(tensors))

    def forward(self, tokens: Tensor, plan: Plan, cache: KVCache, options: PassOptions = WHOLE) -> Output:
        """See ``CausalModel.forward``."""
        parts = {field.name: getattr(plan, field.name) for field in fields(Plan)}
        there: dict[str, Any] = {name: self._sent(x) if isinstance(x, Tensor) else x for name, x in parts.items()}
        if options.hidden is not None:
            options = replace(options, hidden=self._sent(options.hidden))
        output = self.inner.forward(self._sent(tokens), Plan(**there), cache, options)
        logits, taken = output.logits, output.taps
        return Output(
            None if logits is None else logits.to(CPU), output.hidden.to(CPU), None if taken is None else taken.to(CPU)
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """See ``CausalModel.logits``."""
        return self.inner.logits(self._sent(hidden)).to(CPU)

    def embed(self, tokens: Tensor) -> Tensor:
        """See ``CausalModel.embed``."""
        return self.inner.embed(self._sent(tokens)).to(CPU)

    def normed(self, hidden: Tensor) -> Tensor:
        """See ``CausalModel.normed``."""
        return self.inner.normed(self._sent(hidden)).to(CPU)

    def head(self, normed: Tensor) -> Tensor:
        """See ``CausalModel.head``."""
        return self.inner.head(self._sent(normed)).to(CPU)

    def _sent(self, value: Tensor) -> Tensor:
        return value.to(self.device)


def lacks_float64(device: torch.device) -> bool:
    """Whether an accelerator has no float64: Apple's, and some of Intel's."""
    if device.type == "xpu":
        return not torch.xpu.get_device_properties(device).has_fp64
    return device.type == "mps"


def drawn_on_host(load: Callable[P, CausalModel]) -> Callable[P, CausalModel]:
    """A loader of models, which wraps those on an accelerator without float64."""

    @wraps(load)
    def loaded(*args: P.args, **kwargs: P.kwargs) -> CausalModel:
        model = load(*args, **kwargs)
        return HostModel(model) if isinstance(model, CausalModel) and lacks_float64(model.spec.device) else model

    return loaded
