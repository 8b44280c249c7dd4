"""The memory of recurrent layers: what a text has left in them, at two positions of each row.

Keys and values lie at positions, so a rejected guess is undone by not counting it. A recurrent or convolution state is the
sum of a whole text and cannot be taken apart. So each row keeps the state of a position that is committed for certain
(``BASE``), the state after the last pass (``LIVE``), and the inputs that the layer has read since the first. Whatever is
rejected, the state at any later position is the first one and a few inputs read again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretell.model.cache import KVCache

Key = tuple[str, int]
"""("conv" or "recurrent", number): one state of a mixer, as transformers names it."""
BASE, LIVE, READ, SIDE = range(4)
"""Columns of ``States.meta``: position of the committed state; position of the state after the last pass, -1 where that is
not known; position up to which inputs are held; which of the two places (0, 1) holds the committed state."""
_FIRST_INPUTS = 32  # of a row; more are allocated when a pass needs them
MIN_SPACING, MAX_SPACING = 256, 2048
"""Bounds of ``RecurrentCache.spacing``, tokens."""


class Rewindable(Protocol):
    """Of a mixer of which more than its inputs is known: states at any position of which something is held."""

    def after(
        self, states: Mapping[Key, Tensor], held: Mapping[str, Tensor], count: NDArray[Any]
    ) -> Mapping[Key, Tensor]:
        """States [b, ...] after count [b] of the tokens of which held [b, m, size] is known, from states."""


@dataclass(frozen=True)
class MixerLayout:
    """What one recurrent mixer of a model keeps for a row."""

    layer: int  # of the decoder
    shapes: dict[Key, tuple[int, ...]]
    dtypes: dict[Key, torch.dtype]
    held: dict[str, tuple[int, torch.dtype]]  # sizes of what is held of a token, by name
    device: torch.device
    fill: dict[Key, float] = field(default_factory=dict)  # what a state holds before any token, where that is not zero
    rewind: "Rewindable | None" = None

    @property
    def num_bytes(self) -> int:
        """Bytes of one state of a row."""
        return sum(int(np.prod(shape)) * self.dtypes[key].itemsize for key, shape in self.shapes.items())


@dataclass(frozen=True)
class Saved:
    """The states of one row after its first ``position`` tokens, a copy."""

    position: int
    tensors: list[dict[Key, Tensor]]  # of each mixer

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes."""
        return sum(x.numel() * x.element_size() for states in self.tensors for x in states.values())


class States:
    """States and held inputs of all rows of a reserve, shared by every view of it."""

    sides: ClassVar[int] = 2
    """States that a row has of each: the committed one and, where there are two, that after the last pass."""

    def __init__(self, layouts: Sequence[MixerLayout], reserve: int) -> None:
        self.layouts = list(layouts)
        self.reserve = reserve
        self.meta = np.zeros((len(self.layouts), reserve, SIDE + 1), dtype=np.int64)
        self.tensors: list[dict[Key, Tensor]] = [
            {
                key: torch.zeros(self.sides, reserve, *shape, dtype=one.dtypes[key], device=one.device)
                for key, shape in one.shapes.items()
            }
            for one in self.layouts
        ]
        self.held: list[dict[str, Tensor]] = [
            {
                name: torch.zeros(reserve, _FIRST_INPUTS, width, dtype=dtype, device=one.device)
                for name, (width, dtype) in one.held.items()
            }
            for one in self.layouts
        ]

    def grow(self, reserve: int) -> None:
        """Make room for more rows."""
        more = reserve - self.reserve
        if more <= 0:
            return
        self.reserve = reserve
        self.meta = np.concatenate([self.meta, np.zeros((len(self.layouts), more, SIDE + 1), dtype=np.int64)], 1)
        for one, tensors in enumerate(self.tensors):
            for key, old in tensors.items():
                tensors[key] = torch.cat([old, old.new_zeros(self.sides, more, *old.shape[2:])], 1)
            for name, old in self.held[one].items():
                self.held[one][name] = torch.cat([old, old.new_zeros(more, *old.shape[1:])])

    def reset(self, start: int, stop: int) -> None:
        """Rows [start, stop) have read nothing."""
        self.meta[:, start:stop] = 0
        self.meta[:, start:stop, LIVE] = -1
        for one, tensors in zip(self.layouts, self.tensors, strict=True):
            for key, memory in tensors.items():
                memory[:, start:stop] = one.fill.get(key, 0.0)

    def reorder(self, rows: Sequence[int]) -> None:
        """Row i becomes what row rows[i] was."""
        moved = [(place, row) for place, row in enumerate(rows) if place != row]
        if not moved:
            return
        places, sources = [place for place, _ in moved], [row for _, row in moved]
        self.meta[:, places] = self.meta[:, sources]
        for tensors in self.tensors:
            for memory in tensors.values():
                memory[:, places] = memory[:, sources]
        for held in self.held:
            for inputs in held.values():
                inputs[places] = inputs[sources]

    def take(self, other: "States", start: int, stop: int, at: int) -> None:
        """Copy rows [start, stop) of another model's memory of the same layouts to rows at, at + 1, ..."""
        count = stop - start
        self.meta[:, at : at + count] = other.meta[:, start:stop]
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            for key, memory in mine.items():
                memory[:, at : at + count] = theirs[key][:, start:stop]
        for one, held in enumerate(other.held):
            for name, inputs in held.items():
                self.hold(one, inputs.shape[1])[name][at : at + count, : inputs.shape[1]] = inputs[start:stop]

    def move(self, first: int, src: NDArray[Any], dst: NDArray[Any]) -> None:
        """What is held of the tokens at slots src [B, D] of rows first, first + 1, ... is that of slots dst from now on.
        All are read before any is written."""
        rows, at = np.nonzero(src != dst)
        source, place, rows = src[rows, at], dst[rows, at], rows + first
        for one, meta in enumerate(self.meta):
            held = source < meta[rows, READ]  # layers that have not read them have nothing to move
            if not held.any():
                continue
            base = meta[rows[held], BASE]
            origin, goal = source[held] - base, place[held] - base
            here = torch.from_numpy(rows[held])
            for inputs in self.hold(one, int(max(origin.max(), goal.max())) + 1).values():
                inputs[here, torch.from_numpy(goal)] = inputs[here, torch.from_numpy(origin)]
            np.maximum.at(meta[:, READ], rows[held], place[held] + 1)

    def hold(self, mixer: int, count: int) -> dict[str, Tensor]:
        """What is held of a mixer's tokens, each [R, M, size] (``MixerLayout.held``), with room for count or more."""
        held = self.held[mixer]
        for name, inputs in held.items():
            if inputs.shape[1] < count:
                more = max(count, 2 * inputs.shape[1]) - inputs.shape[1]
                held[name] = torch.cat([inputs, inputs.new_zeros(inputs.shape[0], more, inputs.shape[2])], 1)
        return held

    def save(self, row: int, most: int) -> Saved | None:
        """A copy of a row's latest states after at most ``most`` tokens; None where only the empty one is known."""
        meta = self.meta[:, row]
        if not len(meta):
            return None
        live = meta[:, LIVE]
        is_live = bool((live == live[0]).all()) and 0 < live[0] <= most
        if not is_live and all(one.rewind is not None for one in self.layouts):
            return self._saved_at(row, min(most, int(meta[:, READ].min())))
        position = int(live[0] if is_live else meta[0, BASE])
        if not is_live and not ((meta[:, BASE] == position).all() and 0 < position <= most):
            return None
        return Saved(
            position,
            [
                {key: memory[meta[one, SIDE] ^ int(is_live), row].clone() for key, memory in tensors.items()}
                for one, tensors in enumerate(self.tensors)
            ],
        )

    def _saved_at(self, row: int, position: int) -> Saved | None:
        """A copy of a row's states after its first ``position`` tokens; None where they cannot be made."""
        if position <= 0 or (self.meta[:, row, BASE] > position).any():
            return None
        found = []
        for one, tensors in enumerate(self.tensors):
            side, base = self.meta[one, row, SIDE], self.meta[one, row, BASE]
            states = {key: memory[side, row : row + 1] for key, memory in tensors.items()}
            held, rewind = {name: x[row : row + 1] for name, x in self.held[one].items()}, self.layouts[one].rewind
            assert rewind is not None
            after = rewind.after(states, held, np.array([position - base]))
            found.append({key: x[0].clone() for key, x in after.items()})
        return Saved(position, found)

    def load(self, row: int, saved: Saved) -> None:
        """Put a row back to what ``save`` has copied."""
        self.meta[:, row] = (saved.position, -1, saved.position, 0)
        for mine, theirs in zip(self.tensors, saved.tensors, strict=True):
            for key, memory in mine.items():
                memory[0, row] = theirs[key]


class RecurrentCache(KVCache):
    """Keys and values of the layers with attention (a layer without has none), and states of those with a recurrence."""

    states_kind: ClassVar[type[States]] = States

    def __init__(self, *args: Any, layouts: Sequence[MixerLayout], **options: Any) -> None:
        """As ``KVCache``; layouts: of the recurrent mixers."""
        super().__init__(*args, **options)
        self.first = 0  # row of ``states`` that is row 0 here
        self.states = self.states_kind(layouts, self.reserve)
        self.states.reset(0, self.reserve)

    @property
    def bytes_per_row(self) -> int:
        """Bytes of a row that do not depend on its length: the states of every mixer, and the inputs held."""
        held = sum(
            _FIRST_INPUTS * width * dtype.itemsize for one in self.states.layouts for width, dtype in one.held.values()
        )
        return self.states.sides * self._state_bytes + held

    @property
    def _state_bytes(self) -> int:
        return sum(one.num_bytes for one in self.states.layouts)

    @property
    def spacing(self) -> int:
        """Tokens between two states that are kept of a prefix: as many as have about a state's bytes in keys and values."""
        worth = self._state_bytes // max(1, self.bytes_per_slot)
        spacing = MIN_SPACING
        while spacing < min(worth, MAX_SPACING):
            spacing *= 2
        return spacing

    def move(self, src: Tensor, dst: Tensor) -> None:
        """See ``KVCache.move``; what is held of the tokens moves too. Raises RuntimeError where anything would move in a
        model whose accepted inputs are read again: only trees leave gaps."""
        if torch.equal(src, dst):
            return
        if any(one.rewind is None for one in self.states.layouts):
            raise RuntimeError("slots of a model with recurrent states were to be moved; it reads lines alone")
        super().move(src, dst)
        self.states.move(self.first, src.cpu().numpy(), dst.cpu().numpy())

    def keep(self, rows: Tensor, used: int | None = None) -> None:
        """See ``KVCache.keep``."""
        self.states.reorder(rows.tolist())
        super().keep(rows, used)

    def join(self, other: KVCache, used: int, kept: int | None = None) -> None:
        """See ``KVCache.join``."""
        assert isinstance(other, RecurrentCache)
        start = self.num_rows
        super().join(other, used, kept)
        self.states.take(other.states, other.first, other.first + other.num_rows, start)

    def open_rows(self, count: int, kept: int | None = None) -> None:
        """See ``KVCache.open_rows``; the rows have read nothing."""
        super().open_rows(count, kept)
        self.states.grow(self.reserve)
        self.states.reset(self.num_rows - count, self.num_rows)

    def rows(self, start: int, stop: int) -> "RecurrentCache":
        """See ``KVCache.rows``."""
        view = super().rows(start, stop)
        view.__class__ = type(self)
        assert isinstance(view, RecurrentCache)
        view.states, view.first = self.states, self.first + start
        return view

    def save(self, most: int) -> Saved | None:
        """Of a cache of one row: see ``States.save``."""
        return self.states.save(self.first, most)

    def load(self, saved: Saved) -> None:
        """Of a cache of one row: see ``States.load``."""
        self.states.load(self.first, saved)
