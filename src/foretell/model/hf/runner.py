"""Calling transformers modules by the names that their forward has for a cache, a mask and positions.

Outputs of chosen decoder layers, by forward hooks that exist for one pass.

Hooks, and not ``output_hidden_states``: that keeps every layer's output of every row, and its last entry comes *after*
the final norm. Tap i is the output of layer i: ``hidden_states[i + 1]`` of transformers, except for the last layer.
"""

import inspect
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


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


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Every part of a module in training mode is in eval mode inside, and as it was afterwards. Whether it is in
    training mode is asked of the module itself, not of its parts: that is done once a pass."""
    if not module.training:
        yield
        return
    trained = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in trained:
            part.training = True


def residual_of(output: Any) -> Tensor:
    """The residual stream in what a decoder layer returned: older models return tuples that begin with it."""
    stream = output[0] if isinstance(output, tuple) else output
    assert isinstance(stream, Tensor)
    return stream


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Hooks for as long as the context is open."""
    handles = list(handles)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def capture(layers: nn.ModuleList, wanted: Collection[int]) -> Iterator[dict[int, Tensor]]:
    """Fill the yielded dict with the outputs [B, n, H] of layers ``wanted`` during a pass; no hook is left behind."""
    outputs: dict[int, Tensor] = {}

    def note(index: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            outputs[index] = residual_of(output)

        return hook

    with hooked(layers[index].register_forward_hook(note(index)) for index in sorted(set(wanted))):
        yield outputs
