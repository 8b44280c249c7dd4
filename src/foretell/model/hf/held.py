"""Inputs of a mixer that are read again, and what its linear layers return for them.

A linear layer reads each token alone: what it returned for a token when that was a guess, it would return again. So on the
CPU, where its products are most of what reading again costs, its outputs are held beside the mixer's inputs, and it
computes new tokens alone. What mixes tokens (a convolution, the recurrence) runs over old and new ones.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn


class Places:
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


class LinearOutputs:
    """What the linear layers of a mixer return in one call of it, whose inputs are [b, width, H]."""

    def __init__(self, places: Places, held: Mapping[str, Tensor] | None, *, again: bool = False) -> None:
        """held: by layer its outputs [b, behind, out] for the held inputs, None where they are not known. again: the call
        has no new inputs."""
        self.places, self.held, self.again = places, held, again
        self.new: dict[str, Tensor] = {}  # by layer: [b, num_new, out], of the call's new inputs
        self._seen: set[str] = set()

    def of(self, name: str, run: Callable[[Tensor], Tensor], given: Tensor) -> Tensor:
        """What layer ``name`` returns for given; run computes it. An input that is not of the call's shape is no line of
        its tokens, and a second call of a layer is another thing than the first: both are computed."""
        places = self.places
        if given.dim() != 3 or given.shape[:2] != (places.num_rows, places.width) or name in self._seen:
            return run(given)
        self._seen.add(name)
        known = None if self.held is None else self.held.get(name)
        if self.again:
            return run(given) if known is None else known
        if places.behind and known is not None:
            new = self.new[name] = run(places.new(given))
            return places.join(known, new)
        whole = run(given)
        self.new[name] = places.new(whole)
        return whole


@contextmanager
def answering(layers: Mapping[str, nn.Linear], outputs: LinearOutputs | None) -> Iterator[None]:
    """Let the linear layers of a mixer answer by ``outputs`` while the context is open: changes them meanwhile. None:
    they compute."""
    if outputs is None:
        yield
        return
    with forwards({layer: _forward(name, layer.forward, outputs) for name, layer in layers.items()}):
        yield


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


def _forward(name: str, run: Callable[[Tensor], Tensor], outputs: LinearOutputs) -> Callable[[Tensor], Tensor]:
    def forward(given: Tensor) -> Tensor:
        return outputs.of(name, run, given)

    return forward


def linear_layers(module: nn.Module, dtype: torch.dtype) -> dict[str, nn.Linear]:
    """The linear layers of a mixer on the CPU whose outputs have a dtype, by name; quantised ones are not among them."""
    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear) and layer.weight.dtype == dtype and layer.weight.device.type == "cpu"
    }
