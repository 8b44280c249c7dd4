"""Recurrent mixers whose scan is known: the state at the last accepted token is taken up, and nothing is read again.

A row's committed state stays where it is while a pass goes on from it, and what the pass computed of each token is held.
The next pass moves that state on by as many of these as were accepted, of all rows in one product. A drafter that reads
its guesses one by one begins behind what is committed: the state there is made for that call alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretell.model.hf.reading import HELD_LIMIT, Call, Ints, Opened
from foretell.model.hf.recurrent.known import STATE, Rewind, contiguous, name_of
from foretell.model.recurrent import BASE, LIVE, READ, SIDE, Key

Rows = tuple[Any, Any]
"""Index of some rows of a memory [2, R, ...]: slices where they lie together, so that nothing is copied."""


class HandedInputs(Opened):
    """The last inputs of convolutions; scans have their states of their own."""

    def __init__(self, states: Mapping[Key, Tensor]) -> None:
        self.states = states
        self.inputs: dict[str, Tensor] = {}  # new ones [b, n, C]

    def before(self, key: Key) -> None:
        """None: so every mixer asks for the last inputs by ``extend``, also for one token."""

    def extend(self, key: Key, given: Tensor) -> Tensor:
        """See ``Opened``."""
        lines = self.inputs[name_of(key)] = given.transpose(1, 2)
        return torch.cat([self.states[key].to(lines.dtype), lines], 1).transpose(1, 2)

    def replace(self, key: Key, state: Tensor) -> None:
        """The scan knows."""


@dataclass(frozen=True)
class RewindDecision:
    """Where a pass goes on, the same in mixers that stand at the same positions."""

    meta: Ints  # [b, 4] as it is afterwards
    at: Rows  # of the committed states
    other: Rows  # of the other side
    held: Any  # index of the rows in what is held
    moved: Ints  # [b] tokens by which the committed state moves on
    behind: Ints  # [b] tokens between that and the pass
    count: Ints  # [b] new tokens
    wide: bool  # nothing of them is held


class Rewinding(Call):
    """One mixer in one pass."""

    def _go_on(self, hidden: Tensor) -> Any:
        rewind = self.mixer.rewind
        assert rewind is not None
        now: RewindDecision = self._once(self._decide)
        states = {name: memory[now.at] for name, memory in self.tensors.items()}
        held = self.states.held[self.index]
        if now.moved.any():
            states = self._put(now.at, rewind.after(states, self._held(now, int(now.moved.max())), now.moved))
            if now.behind.any():
                self._shift(held, now)
        if now.behind.any():
            states = dict(rewind.after(states, self._held(now, int(now.behind.max())), now.behind))
        count = torch.from_numpy(now.count) if now.wide else None
        result, inputs = self._run(rewind, hidden, HandedInputs(states), count)
        if now.wide:
            last = rewind.inputs_after(states, inputs, now.count)
            self._put(now.other, last if rewind.scan is None else {**last, STATE: rewind.scan.state})
        else:
            self._hold(inputs, now)
        self.states.meta[self.index][self.rows] = now.meta
        return result

    def _once(self, decide: Callable[[Ints], Any]) -> Any:
        """What a pass decides of its rows, from their numbers: once for all mixers that stand at the same positions."""
        meta = self.states.meta[self.index][self.rows]
        known, key = self.cache.decided, meta.tobytes()
        if key not in known:
            known[key] = decide(meta)
        return known[key]

    def _decide(self, meta: Ints) -> RewindDecision:
        start = self.start
        is_live = meta[:, LIVE] == start
        meta[is_live, SIDE] ^= 1
        meta[is_live, BASE] = meta[is_live, READ] = start[is_live]
        if ((meta[:, BASE] > start) | (meta[:, READ] < start)).any():
            raise self._lost(meta)
        # Never past what is committed: a drafter that reads its guesses one by one may have to go back there.
        moved = np.maximum(np.minimum(start, self.committed) - meta[:, BASE], 0)
        meta[:, BASE] += moved
        behind = start - meta[:, BASE]
        wide = int(self.count.max()) > HELD_LIMIT
        meta[:, LIVE] = start + self.count if wide else -1
        meta[:, READ] = start if wide else self._read_up_to(meta, moved, start + self.count)
        return self._decision(meta, moved, behind, wide=wide)

    def _read_up_to(self, meta: Ints, moved: Ints, stop: Ints) -> Ints:
        """Where what is held ends. A tree's nodes may be read again one by one, and then those after them are held still;
        the first pass behind a text begins anew."""
        anew = (self.start <= self.committed) & (moved > 0)
        return np.where(anew, stop, np.maximum(meta[:, READ], stop))

    def _decision(self, meta: Ints, moved: Ints, behind: Ints, *, wide: bool) -> RewindDecision:
        rows, sides = self.rows, meta[:, SIDE]
        together = contiguous(rows) and bool((sides == sides[0]).all())
        line = slice(int(rows[0]), int(rows[-1]) + 1)
        at: Rows = (int(sides[0]), line) if together else (torch.from_numpy(sides), torch.from_numpy(rows))
        other: Rows = (int(sides[0]) ^ 1, line) if together else (torch.from_numpy(sides ^ 1), at[1])
        held = line if contiguous(rows) else torch.from_numpy(rows)
        return RewindDecision(meta, at, other, held, moved, behind, self.count, wide)

    def _run(
        self, rewind: Rewind, hidden: Tensor, opened: HandedInputs, count: Tensor | None
    ) -> tuple[Any, dict[str, Tensor]]:
        """What the mixer returns, and what it has kept of the new tokens, by name."""
        layer, scan = self.mixer.layout.layer, rewind.scan
        rewind.width = hidden.shape[1]
        self.cache.open[layer] = opened
        if scan is not None:
            scan.state, scan.count = opened.states[STATE], count
        try:
            result = rewind.run(hidden, *self.args, **self.kwargs)
        finally:
            del self.cache.open[layer]
        return result, opened.inputs if scan is None else {**opened.inputs, **scan.kept}

    # -- memory ----------------------------------------------------------------------------------------------------

    def _put(self, at: Rows, states: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        for name, memory in self.tensors.items():
            memory[at] = states[name].to(memory.dtype)
        return dict(states)

    def _held(self, now: RewindDecision, count: int) -> dict[str, Tensor]:
        """[b, count, size] what is held since the committed state."""
        return {name: kept[now.held, :count] for name, kept in self.states.held[self.index].items()}

    def _shift(self, held: dict[str, Tensor], now: RewindDecision) -> None:
        """What is held begins behind the committed state, which has moved on."""
        for kept in held.values():
            for row, count, left in zip(self.rows, now.moved, now.behind, strict=True):
                kept[row, :left] = kept[row, count : count + left].clone()

    def _hold(self, inputs: dict[str, Tensor], now: RewindDecision) -> None:
        """Hold what was kept of the new tokens behind what is held already."""
        width, first = int(now.count.max()), int(now.behind[0])
        held = self.states.hold(self.index, int(now.behind.max()) + width)
        even = isinstance(now.held, slice) and bool((now.behind == first).all())
        for name, given in inputs.items():
            if even:
                held[name][now.held, first : first + width] = given[:, :width]
                continue
            rows = torch.from_numpy(self.rows[:, None])
            at = torch.from_numpy(now.behind[:, None] + np.arange(width))
            held[name][rows, at] = given[:, :width].to(held[name].dtype)
