"""The cache of a native hybrid: keys and values of its attention, states and terms of its mixers (``native/mixer.h``).

A row has one committed state of each mixer. What passes add to it lies in ``terms``, a slot's at slot % room, until the
next pass adds those that were accepted.
"""

import ctypes
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretell.kernels import structures
from foretell.kernels.functions import check
from foretell.model.cache import BoundCache
from foretell.model.llama.mixers import CONV, STATE, TERMS
from foretell.model.llama.shape import LlamaShape
from foretell.model.recurrent import BASE, READ, RecurrentCache, Saved, States


class NativeCache(BoundCache):
    """The cache of a native model."""

    def __init__(
        self, shape: LlamaShape, dtype: torch.dtype, rope: tuple[Tensor, Tensor],
        move: Callable[[int, int, int, int], int], num_rows: int, capacity: int,
    ) -> None:  # fmt: skip
        """rope: as ``BoundCache`` has it; move: of the model, from (this cache's address, number of slots, the addresses of
        the slots from which and to which), to what ``check`` takes."""
        shapes = [(shape.num_kv_heads * shape.attends(layer), shape.head_dim) for layer in range(shape.num_layers)]
        self._move = move
        super().__init__(num_rows, capacity, shapes, dtype, rope, shape.value_dims)

    def move(self, src: Tensor, dst: Tensor) -> None:
        """See ``KVCache.move``."""
        src, dst = src.contiguous(), dst.contiguous()
        assert src.shape == dst.shape
        assert src.shape[0] == self.num_rows
        check(self._move(self.address, src.shape[1], src.data_ptr(), dst.data_ptr()))

    def rows(self, start: int, stop: int) -> "NativeCache":
        """See ``KVCache.rows``."""
        view = super().rows(start, stop)
        assert isinstance(view, NativeCache)
        view._move = self._move
        return view


Fold = Callable[[int, int, int, int, int | None], int]


class NativeStates(States):
    """States and terms of all rows of a reserve."""

    sides = 1
    moves = 0
    """How often memory has moved."""

    def room(self, mixer: int) -> int:
        """Slots of a row whose terms there is room for."""
        return self.held[mixer][TERMS].shape[1]

    def grow(self, reserve: int) -> None:
        """See ``States.grow``."""
        super().grow(reserve)
        self.moves += 1

    def hold(self, mixer: int, count: int) -> dict[str, Tensor]:
        """See ``States.hold``; what is held moves to its places in more room."""
        old = self.held[mixer][TERMS]
        if old.shape[1] < count:
            new = self.held[mixer][TERMS] = old.new_zeros(old.shape[0], max(count, 2 * old.shape[1]), old.shape[2])
            self._spread(old, new, self.meta[mixer, :, BASE])
            self.moves += 1
        return self.held[mixer]

    def take(self, other: States, start: int, stop: int, at: int) -> None:
        """See ``States.take``."""
        rows = slice(at, at + stop - start)
        self.meta[:, rows] = other.meta[:, start:stop]
        for mixer, tensors in enumerate(other.tensors):
            for key, memory in tensors.items():
                self.tensors[mixer][key][:, rows] = memory[:, start:stop]
            theirs = other.held[mixer][TERMS][start:stop]
            mine = self.hold(mixer, theirs.shape[1])[TERMS][rows]
            self._spread(theirs, mine, other.meta[mixer, start:stop, BASE])

    @staticmethod
    def _spread(old: Tensor, new: Tensor, bases: NDArray[np.int64]) -> None:
        """Copy terms [b, m, size] of the slots from bases [b] on to their places in more room."""
        slots = torch.from_numpy(bases)[:, None] + torch.arange(old.shape[1])
        rows = torch.arange(len(old))[:, None]
        new[rows, slots % new.shape[1]] = old[rows, slots % old.shape[1]]


class HybridCache(RecurrentCache, NativeCache):
    """The cache of a native model with mixers."""

    states_kind = NativeStates
    states: NativeStates

    def __init__(
        self, shape: LlamaShape, dtype: torch.dtype, rope: tuple[Tensor, Tensor],
        move: Callable[[int, int, int, int], int], fold: Fold, num_rows: int, capacity: int,
    ) -> None:  # fmt: skip
        """As ``NativeCache``; fold: of the model, from (this cache's address, layer, number of tokens, addresses of a
        convolution's and of a scan's state to be written: those of row 0 after so many tokens), to what ``check`` takes."""
        self._fold, self._num_layers = fold, shape.num_layers
        self._layers = [layer for layer, mixer in enumerate(shape.mixers) if mixer is not None]
        layouts = [mixer.layout(layer) for layer, mixer in enumerate(shape.mixers) if mixer is not None]
        super().__init__(shape, dtype, rope, move, num_rows, capacity, layouts=layouts)
        self._bind()

    def _bind(self) -> None:
        """See ``BoundCache._bind``."""
        super()._bind()
        if not hasattr(self, "states"):
            return
        states, first = self.states, self.first
        self._views = (structures.MixerState * self._num_layers)()
        for mixer, layer in enumerate(self._layers):
            tensors, terms = states.tensors[mixer], states.held[mixer][TERMS]
            self._views[layer] = structures.MixerState(
                tensors[CONV][0, first:].data_ptr(),
                tensors[STATE][0, first:].data_ptr() if STATE in tensors else None,
                terms[first:].data_ptr(), terms.shape[1], states.meta[mixer, first:].ctypes.data,
            )  # fmt: skip
        self._moves = states.moves
        self.view.states = ctypes.addressof(self._views)

    def bind(self) -> None:
        """Before a pass: read the addresses again where another view of the reserve has moved its memory."""
        if self._moves != self.states.moves:
            self._bind()

    def make_room(self, slots: Tensor) -> None:
        """Make room for the terms of a pass over slots [B, n]."""
        last = slots.amax(1).numpy() + 1
        for mixer in range(len(self._layers)):
            bases = self.states.meta[mixer, self.first : self.first + self.num_rows, BASE]
            self.states.hold(mixer, int((last - bases).max()))
        self._bind()

    def move(self, src: Tensor, dst: Tensor) -> None:
        """See ``KVCache.move``; terms move as keys and values do."""
        self.bind()
        NativeCache.move(self, src, dst)

    def rows(self, start: int, stop: int) -> "HybridCache":
        """See ``KVCache.rows``."""
        view = super().rows(start, stop)
        assert isinstance(view, HybridCache)
        view._fold, view._num_layers, view._layers = self._fold, self._num_layers, self._layers
        view._bind()
        return view

    def save(self, most: int) -> Saved | None:
        """See ``RecurrentCache.save``: the states after the last of at most ``most`` tokens that were read."""
        self.bind()
        states, row = self.states, self.first
        meta = states.meta[:, row]
        position = min(most, int(meta[:, READ].min()))
        if position <= 0 or (meta[:, BASE] > position).any():
            return None
        found = []
        for mixer, layer in enumerate(self._layers):
            after = {key: torch.empty_like(memory[0, row]) for key, memory in states.tensors[mixer].items()}
            state = after[STATE].data_ptr() if STATE in after else None
            count = position - int(meta[mixer, BASE])
            check(self._fold(self.address, layer, count, after[CONV].data_ptr(), state))
            found.append(after)
        return Saved(position, found)
