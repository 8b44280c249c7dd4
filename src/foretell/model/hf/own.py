"""Positions, masks and biases that some families make by themselves, given to the modules that read them.

Most models take positions and masks as arguments. A few make them from the number of cached tokens, as if slots were
positions, and hand them on to their layers: ALiBi's biases (Bloom, MPT, Falcon-RW), local attention (GPT-Neo), learned
and sinusoidal positions (Bart and its kin). Their code stays as it is; for the time of one pass hooks replace those
arguments by the plan's. ``probe.py`` then judges such a model as it judges any other.
"""

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from foretell.core.tree import Plan
from foretell.model.cache import KVCache
from foretell.model.hf.attention import FULL, SLIDING, MaskRecipe, SlotCache
from foretell.model.hf.runner import forwards, hooked


class OwnAttention(ABC):
    """What one family makes of its own, and how it is replaced during a pass."""

    flat_mask: bool = False
    """The model wants [B, S] masks of ones, because it counts them; its layers are given the real ones."""

    @abstractmethod
    @contextmanager
    def during(self, plan: Plan, recipe: MaskRecipe, memory: KVCache) -> Iterator[None]:
        """Hooks that hold while the context is open."""
        yield


@contextmanager
def replaced(owns: list[OwnAttention], plan: Plan, recipe: MaskRecipe, memory: KVCache) -> Iterator[None]:
    """All of a model's own arguments replaced while the context is open."""
    with ExitStack() as stack:
        for own in owns:
            stack.enter_context(own.during(plan, recipe, memory))
        yield


def own_arguments(decoder: nn.Module, layers: nn.ModuleList, config: Any) -> list[OwnAttention]:
    """What a decoder makes of its own, by what its modules are and take; config is its text configuration."""
    found: list[OwnAttention] = []
    embeddings = [module for name, module in decoder.named_modules() if _counts_positions(name, module)]
    if embeddings:
        found.append(Positions(embeddings))
    kind = getattr(config, "model_type", "")
    takes = inspect.signature(type(layers[0]).forward).parameters
    if "alibi" in takes and (kind == "bloom" or getattr(config, "alibi", False)):
        found.append(Alibi(decoder, layers, config))
    if "position_bias" in takes and kind == "mpt":
        found.append(RowBiases(decoder, layers, config))
    if getattr(config, "attention_types", None) is not None:
        found.append(LocalAttention(layers, config))
    return found


def _counts_positions(name: str, module: nn.Module) -> bool:
    takes = list(inspect.signature(type(module).forward).parameters)[1:]
    return "past_key_values_length" in takes[1:] and takes[0] != "position_ids" and "position" in name


class Positions(OwnAttention):
    """Position embeddings that count from the number of cached tokens: a table of them, made by the module itself."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = modules
        self._tables: dict[nn.Module, Tensor] = {}  # [positions, H]

    @contextmanager
    def during(self, plan: Plan, recipe: MaskRecipe, memory: KVCache) -> Iterator[None]:
        """See ``OwnAttention.during``."""

        def put(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            table = self._tables.get(module)
            if table is None or len(table) < plan.span:
                table = self._tables[module] = _table(module, args[0], plan.span, output.device)
            return table[plan.positions.to(output.device)].to(output.dtype)

        with hooked(module.register_forward_hook(put) for module in self._modules):
            yield


def _table(module: nn.Module, like: Any, count: int, device: torch.device) -> Tensor:
    """[count, H]: what a module gives for positions 0 to count - 1, or for as many as it has."""
    count = min(count, getattr(module, "num_embeddings", count) - getattr(module, "offset", 0))
    asked: Any = torch.ones(1, count, dtype=torch.int64, device=device) if isinstance(like, Tensor) else (1, count)
    stated = "position_ids" in inspect.signature(type(module).forward).parameters
    positions = {"position_ids": torch.arange(count, device=device)} if stated else {}
    table: Tensor = type(module).forward(module, asked, 0, **positions)
    return table.detach().reshape(count, -1)


class _LayerArguments(OwnAttention):
    """Arguments of every layer, replaced by name."""

    def __init__(self, layers: nn.ModuleList) -> None:
        self._layers = layers

    @abstractmethod
    def _arguments(self, plan: Plan, recipe: MaskRecipe) -> list[dict[str, Any]]:
        """Of each layer."""

    @contextmanager
    def during(self, plan: Plan, recipe: MaskRecipe, memory: KVCache) -> Iterator[None]:
        """See ``OwnAttention.during``."""

        def put(given: dict[str, Any]) -> Any:
            def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
                return args, {**kwargs, **given}

            return hook

        pairs = zip(self._layers, self._arguments(plan, recipe), strict=True)
        with hooked(layer.register_forward_pre_hook(put(given), with_kwargs=True) for layer, given in pairs):
            yield


class Alibi(_LayerArguments):
    """Biases by the position of each key (Press et al. 2108.12409): softmax does not see a shift common to all keys of a
    query, so the query's own position is not needed, and neither is a chain."""

    flat_mask = True

    def __init__(self, decoder: nn.Module, layers: nn.ModuleList, config: Any) -> None:
        super().__init__(layers)
        self._biases: Any = vars(sys.modules[type(decoder).__module__])["build_alibi_tensor"]
        self._num_heads = int(config.num_attention_heads)
        self._joins_mask = config.model_type != "bloom"  # Falcon adds biases, over sqrt(d), to the mask
        self._root = (config.hidden_size // self._num_heads) ** 0.5

    def _arguments(self, plan: Plan, recipe: MaskRecipe) -> list[dict[str, Any]]:
        parameter = next(self._layers.parameters())
        device, dtype = parameter.device, parameter.dtype
        ones = torch.ones(1, plan.span, dtype=torch.int64, device=device)
        # [heads, positions], rounded as the model does
        table: Tensor = self._biases(ones, self._num_heads, dtype)[:, 0]
        keys = plan.key_positions.to(device).clamp(min=0)
        alibi = table[:, keys].transpose(0, 1)[:, :, None]  # [B, heads, 1, S]
        lowest = torch.finfo(dtype).min
        if self._joins_mask:
            mask = torch.where(plan.mask.to(device), alibi / self._root, lowest)  # [B, heads, n, S]
        else:
            mask = torch.where(plan.mask.to(device), torch.zeros((), dtype=dtype, device=device), lowest)
            alibi = alibi.flatten(0, 1)
        return [{"alibi": alibi, "attention_mask": mask}] * len(self._layers)


class LocalAttention(_LayerArguments):
    """GPT-Neo's alternation of global and local layers, whose masks lie in buffers, by slot: these are opened."""

    def __init__(self, layers: nn.ModuleList, config: Any) -> None:
        super().__init__(layers)
        self._kinds = list(config.attention_layers)
        self._window = int(config.window_size)

    def _arguments(self, plan: Plan, recipe: MaskRecipe) -> list[dict[str, Any]]:
        made = replace(recipe, kinds=(FULL, SLIDING), as_dict=True, window=self._window).masks(plan)
        assert isinstance(made, dict)
        return [{"attention_mask": made[SLIDING if kind == "local" else FULL]} for kind in self._kinds]

    @contextmanager
    def during(self, plan: Plan, recipe: MaskRecipe, memory: KVCache) -> Iterator[None]:
        """See ``OwnAttention.during``."""
        inner: list[Any] = [module for layer in self._layers for module in layer.modules() if hasattr(module, "bias")]
        closed = [(module, module.bias) for module in inner if getattr(module.bias, "dtype", None) == torch.bool]
        try:
            for module, bias in closed:
                module.bias = bias.new_ones(1, 1, 1, 1).expand(1, 1, plan.span, plan.span)
            with super().during(plan, recipe, memory):
                yield
        finally:
            for module, bias in closed:
                module.bias = bias


class RowBiases(OwnAttention):
    """MPT's ALiBi, one bias for all rows of a pass: its attention runs row by row, each with its own."""

    def __init__(self, decoder: nn.Module, layers: nn.ModuleList, config: Any) -> None:
        self._biases: Any = vars(sys.modules[type(decoder).__module__])["build_mpt_alibi_tensor"]
        self._num_heads = int(config.num_attention_heads)
        self._attention: list[Any] = [layer.attn for layer in layers]

    @contextmanager
    def during(self, plan: Plan, recipe: MaskRecipe, memory: KVCache) -> Iterator[None]:
        """See ``OwnAttention.during``."""
        table = self._biases(self._num_heads, plan.span, device=plan.slots.device)[:, 0]  # [heads, positions]
        alibi = table[:, plan.key_positions.clamp(min=0)]  # [heads, B, S]
        num_rows = len(plan.slots)
        caches = [
            SlotCache(memory.rows(row, row + 1), replace(plan, slots=plan.slots[row : row + 1]))
            for row in range(num_rows)
        ]

        def by_row(attention: Any) -> Any:
            def forward(hidden: Tensor, *, attention_mask: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
                rows = [
                    type(attention).forward(
                        attention,
                        hidden[row : row + 1],
                        position_bias=alibi[:, row, None].to(hidden.device),
                        attention_mask=attention_mask[row : row + 1],
                        past_key_values=cache,
                    )[0]
                    for row, cache in enumerate(caches)
                ]
                return torch.cat(rows), None

            return forward

        with forwards({attention: by_row(attention) for attention in self._attention}):
            yield
