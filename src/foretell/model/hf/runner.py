"""Calling transformers modules by the names that their forward has for a cache, a mask and positions.

Outputs of chosen decoder layers, by forward hooks that exist for one pass.

Hooks, and not ``output_hidden_states``: that keeps every layer's output of every row, and its last entry comes *after*
the final norm. Tap i is the output of layer i: ``hidden_states[i + 1]`` of transformers, except for the last layer.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from numpy.typing import NDArray
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
            outputs[index] = output[0] if isinstance(output, tuple) else output  # older models return tuples

        return hook

    with hooked(layers[index].register_forward_hook(note(index)) for index in sorted(set(wanted))):
        yield outputs


class CallPlaces:
    """Where the inputs of one call lie: in each row those that are held, as many as its lag, then the new ones, then, where
    the row is shorter than the call, anything."""

    def __init__(self, lag: NDArray[Any], width: int, num_new: int) -> None:
        """lag [b]; width of the call; num_new inputs of each row at most."""
        self.num_rows, self.width, self.num_new = len(lag), width, num_new
        self.behind = int(lag.max())
        self.uniform = bool((lag == self.behind).all()) and width == self.behind + num_new
        if not self.uniform:
            shift, at = torch.from_numpy(lag)[:, None], torch.arange(width)[None]
            held = torch.minimum(at, torch.tensor(max(self.behind - 1, 0)))
            self._join = torch.where(at < shift, held, self.behind + (at - shift).clamp(max=num_new - 1))
            self._new = (shift + torch.arange(num_new)[None]).clamp(max=width - 1)

    def join(self, held: Tensor | None, new: Tensor) -> Tensor:
        """[b, width, H] of held [b, behind, H] and new [b, num_new, H]."""
        both = new if held is None or not self.behind else torch.cat([held, new], 1)
        return both if self.uniform else _pick(both, self._join)

    def new(self, whole: Tensor) -> Tensor:
        """[b, num_new, H] the new ones among whole [b, width, H]; anything behind a row's last."""
        return whole[:, self.behind :] if self.uniform else _pick(whole, self._new)


def _pick(x: Tensor, index: Tensor) -> Tensor:
    """[b, n, H] of x [b, m, H] at index [b, n]: whole lines are copied, which ``gather`` does number by number."""
    rows = torch.arange(len(index))[:, None] * x.shape[1]
    flat = x.flatten(0, 1).index_select(0, (index + rows).flatten().to(x.device))
    return flat.view(*index.shape, x.shape[-1])


@contextmanager
def forwards(replaced: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """Modules (keys) with another forward while the context is open; what an instance had of its own comes back."""
    own = {module: module.__dict__["forward"] for module in replaced if "forward" in module.__dict__}
    try:
        for module, forward in replaced.items():
            module.__dict__["forward"] = forward
        yield
    finally:
        for module in replaced:
            module.__dict__.pop("forward", None)
            if module in own:
                module.__dict__["forward"] = own[module]
