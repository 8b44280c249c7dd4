"""Inputs of a mixer that are read again, in front of new ones; and modules with another forward for a while."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


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
