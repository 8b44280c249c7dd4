"""Attention masks for each kind of layer, and the cache that an unmodified transformers model writes its K and V to.

Masks are 4-D, [B, 1, n, S] over the first S = ``plan.span`` slots: transformers passes those through untouched
(``masking_utils._preprocess_mask_arguments``). Models that alternate kinds of layers take a dict of them.
"""

import inspect
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from foretell.core.errors import ModelError
from foretell.core.tree import Plan
from foretell.model.cache import KVCache

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
KNOWN_KINDS = frozenset((FULL, SLIDING, CHUNKED))
RECURRENT = ("linear_attention", "conv")


@dataclass(frozen=True)
class MaskRecipe:
    """How one model's masks are made: which kinds of layers it has, and the form in which it takes masks."""

    kinds: tuple[str, ...]  # of FULL, SLIDING, CHUNKED; one alone where the model takes a single mask
    as_dict: bool  # the model takes {kind: mask}; else the mask of kinds[0] serves all layers
    window: int | None = None  # a sliding layer sees positions in (position - window, position]
    chunk: int | None = None  # a chunked layer sees the positions of its own chunk
    blank: tuple[str, ...] = ()  # kinds of layers that get none: recurrent ones
    additive: torch.dtype | None = None  # eager attention adds the mask to its scores: None means boolean

    def masks(self, plan: Plan) -> Tensor | dict[str, Tensor | None]:
        """The masks of a plan [B, 1, n, S]: bool, True where a node sees a slot, or 0 and the dtype's lowest value."""
        made = {kind: self._form(self._mask(kind, plan)) for kind in self.kinds}
        return {**made, **dict.fromkeys(self.blank)} if self.as_dict else made[self.kinds[0]]

    def _mask(self, kind: str, plan: Plan) -> Tensor:
        if kind == FULL:
            return plan.mask
        # By position, never by slot: in a tree, slots do not give a node's distance from its ancestors.
        key = plan.key_positions[:, None, None, :]  # [B, 1, 1, S]
        query = plan.positions[:, None, :, None]  # [B, 1, n, 1]
        if kind == SLIDING:
            assert self.window is not None
            return plan.mask & (key > query - self.window)
        assert self.chunk is not None
        return plan.mask & (key.div(self.chunk, rounding_mode="floor") == query // self.chunk)

    def _form(self, mask: Tensor) -> Tensor:
        if self.additive is None:
            return mask
        zero = torch.zeros((), dtype=self.additive, device=mask.device)
        # The lowest finite value, not -inf: a row of -inf alone would be NaN, and this is what transformers adds too.
        return torch.where(mask, zero, torch.finfo(self.additive).min)


def mask_recipe(decoder: torch.nn.Module, config: Any, dtype: torch.dtype, *, name: str) -> MaskRecipe:
    """The recipe for a transformers decoder: from its configuration and from what its module imports.

    config is the text configuration. Raises ModelError where the attention implementation cannot take 4-D masks.
    """
    implementation = getattr(config, "_attn_implementation", None) or "eager"
    if implementation not in ("eager", "sdpa"):
        raise ModelError(
            f"{name}: attention implementation {implementation!r} takes no tree masks; expected 'sdpa' or 'eager': "
            "call model.set_attn_implementation('sdpa') first"
        )
    additive = dtype if implementation == "eager" else None
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    module = sys.modules[type(decoder).__module__]
    # A configuration may carry a window that its model never reads, so ask the modeling file which masks it makes.
    slides = window is not None and hasattr(module, "create_sliding_window_causal_mask")
    chunks = chunk is not None and hasattr(module, "create_chunked_causal_mask")
    # Beside recurrent layers a single 4-D mask serves all others, and a dict must name each kind.
    recurrent = hasattr(module, "create_recurrent_attention_mask")
    if _takes_dict(decoder) and (slides or chunks or not recurrent):
        kinds = (FULL, *((SLIDING,) if slides else ()), *((CHUNKED,) if chunks else ()))
        return MaskRecipe(
            kinds, True, window if slides else None, chunk if chunks else None, RECURRENT if recurrent else (), additive
        )
    return MaskRecipe((SLIDING if slides else FULL,), False, window if slides else None, additive=additive)


def _takes_dict(decoder: torch.nn.Module) -> bool:
    """Whether the forward accepts masks keyed by layer type: transformers' idiom, read in its source."""
    try:
        source = inspect.getsource(inspect.unwrap(type(decoder).forward))
    except (OSError, TypeError):  # a model defined where no source is kept
        return False
    return "attention_mask, dict" in source


class _OwnCache(Cache):  # type: ignore[misc]  # transformers is Any to mypy
    """A cache of transformers without layers of its own: positions and masks are given explicitly."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    @property
    def is_compileable(self) -> bool:
        """False: with an empty list of layers the base class returns True, and models then prepare masks for a static
        cache."""
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: no model needs one length for all rows."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """0, as above."""
        return 0


class SlotCache(_OwnCache):
    """The cache object passed to the model: writes K and V into a plan's slots and returns the first S slots.

    One object per pass. It does not use transformers' cache layers: those keep one length for all rows, and their
    sliding form drops slots that are needed again after a rejected branch.
    """

    def __init__(self, memory: KVCache, plan: Plan) -> None:
        super().__init__()
        self._memory = memory
        self._plan = plan

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [B, heads, n, dim] of one layer; return its K and V [B, heads, S, dim]."""
        self._memory.write(layer_idx, self._plan.slots, key_states, value_states)
        span = self._plan.span
        return self._memory.keys[layer_idx][:, :, :span], self._memory.values[layer_idx][:, :, :span]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """S keys from slot 0, for models whose own mask is replaced later (``own.py``)."""
        return self._plan.span, 0


@dataclass(frozen=True)
class LayerMemory:
    """What one layer keeps for each token, as seen in a probe."""

    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device


class RecordingCache(_OwnCache):
    """Notes the shape, dtype and device of every layer's K and V, and stores nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, LayerMemory] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return K and V unchanged."""
        heads, key_dim, value_dim = key_states.shape[1], key_states.shape[3], value_states.shape[3]
        self.seen[layer_idx] = LayerMemory(heads, key_dim, value_dim, key_states.dtype, key_states.device)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """All keys are the queries' own."""
        return query_length, 0
