"""Recurrent modules that keep their states outside transformers' cache: RecurrentGemma's blocks in attributes, RWKV's in
tensors of all layers that are passed along. A keeper calls such a module from given states and returns those after it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from foretell.model.recurrent import Key

CONV, RECURRENT = ("conv", 0), ("recurrent", 0)


class StateKeeper(ABC):
    """How one module is called. Its states are listed by the names that transformers' cache would give them."""

    fill: ClassVar[dict[Key, float]] = {}
    """What a state holds before any token, where that is not zero."""

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module

    @abstractmethod
    def states(self, given: Tensor) -> dict[Key, Tensor]:
        """States of one row, as the module has left them after reading given [1, n, H] in the probe, or as large."""

    @abstractmethod
    def call(
        self,
        run: Callable[..., Any],
        given: Tensor,
        positions: Tensor,
        states: dict[Key, Tensor],
        kwargs: dict[str, Any],
    ) -> tuple[Any, dict[Key, Tensor]]:
        """What run, the module's own forward, returns for given [b, n, H] at positions [b, n], and the states after it."""


class GriffinKeeper(StateKeeper):
    """RecurrentGemma: the block keeps the convolution's inputs, its RG-LRU the recurrent state."""

    def states(self, given: Tensor) -> dict[Key, Tensor]:
        """See ``StateKeeper``."""
        found = self._take()
        return {key: torch.zeros_like(x) for key, x in found.items()}

    def call(
        self,
        run: Callable[..., Any],
        given: Tensor,
        positions: Tensor,
        states: dict[Key, Tensor],
        kwargs: dict[str, Any],
    ) -> tuple[Any, dict[Key, Tensor]]:
        """See ``StateKeeper``; position 0 begins a text."""
        self.module.conv1d_state, self.module.rg_lru.recurrent_states = states[CONV], states[RECURRENT]
        result = run(given, **{**kwargs, "position_ids": positions})
        return result, self._take()

    def _take(self) -> dict[Key, Tensor]:
        block = self.module
        found = {CONV: block.conv1d_state, RECURRENT: block.rg_lru.recurrent_states}
        block.conv1d_state = block.rg_lru.recurrent_states = None
        return found


class RwkvKeeper(StateKeeper):
    """RWKV-4: five states, of which the feed-forward part reads the first and the attention the others."""

    fill: ClassVar[dict[Key, float]] = {("recurrent", 4): -1e38}  # the greatest exponent so far
    numbers: ClassVar[dict[str, tuple[int, ...]]] = {"RwkvFeedForward": (0,), "RwkvSelfAttention": (1, 2, 3, 4)}

    def states(self, given: Tensor) -> dict[Key, Tensor]:
        """See ``StateKeeper``."""
        wide = getattr(self.module, "attention_hidden_size", given.shape[-1])
        # Number 0 and 1 hold the last input, the others sums in float32.
        return {
            ("recurrent", k): given.new_zeros(1, given.shape[-1])
            if k < 2
            else torch.zeros(1, wide, device=given.device)
            for k in self.numbers[type(self.module).__name__]
        }

    def call(
        self,
        run: Callable[..., Any],
        given: Tensor,
        positions: Tensor,
        states: dict[Key, Tensor],
        kwargs: dict[str, Any],
    ) -> tuple[Any, dict[Key, Tensor]]:
        """See ``StateKeeper``. Rows with one token are called one by one: transformers mixes them up."""
        if given.shape[1] == 1 and len(given) > 1:
            parts = [
                self.call(
                    run, given[row : row + 1], positions, {k: x[row : row + 1] for k, x in states.items()}, kwargs
                )
                for row in range(len(given))
            ]
            joined = {key: torch.cat([after[key] for _, after in parts]) for key in states}
            return (torch.cat([result[0] for result, _ in parts]), kwargs.get("state")), joined
        layer = self.module.layer_id
        passed: list[Any] = [None] * 5
        for (_, number), state in states.items():
            passed[number] = state.new_zeros(*state.shape, layer + 1)
            passed[number][..., layer] = state
        result = run(given, **{**kwargs, "state": passed})
        return (result[0], kwargs.get("state")), {key: passed[key[1]][..., layer] for key in states}


def keeper_of(module: nn.Module) -> StateKeeper | None:
    """The keeper of a module; None where it has no states of its own."""
    if hasattr(module, "conv1d_state") and hasattr(getattr(module, "rg_lru", None), "recurrent_states"):
        return GriffinKeeper(module)
    return RwkvKeeper(module) if type(module).__name__ in RwkvKeeper.numbers else None
