"""Calling transformers modules by the names that their forward has for a cache, a mask and positions."""

import inspect
from typing import Any

from torch import Tensor, nn


class ModuleRunner:
    """One module, a decoder or a whole language model, and the names of its arguments."""

    def __init__(self, module: nn.Module) -> None:
        self._run: Any = module
        names = inspect.signature(inspect.unwrap(type(module).forward)).parameters
        self._cache = "past_key_values" if "past_key_values" in names or "cache_params" not in names else "cache_params"
        # A model without attention has no positions, and hands what it does not know to its kernels.
        self._takes_positions = "position_ids" in names or self._cache == "past_key_values"

    def __call__(self, tokens: Tensor, positions: Tensor, cache: Any, masks: Any = None) -> Any:
        """What the module returns for tokens [B, n] at positions [B, n]. cache None: nothing is remembered."""
        given: dict[str, Any] = {} if cache is None else {self._cache: cache}
        if self._takes_positions:
            given["position_ids"] = positions
        return self._run(input_ids=tokens, attention_mask=masks, use_cache=cache is not None, **given)
