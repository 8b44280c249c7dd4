"""Recurrent mixers of which nothing is known: accepted inputs are read again.

A pass begins at some position of each row. Where that is the position after the last pass, the mixer goes on from the
state that it left. Otherwise guesses were rejected: it goes on from the last state that is committed for certain, and the
inputs of that mixer since then, the *lag*, are read again in front of the new ones. Only the mixers read them again: no
attention, no experts, no head. A lag of more than ``LAG_LIMIT`` is read in a call of its own, which moves that state on.

Rows of a batch have lags of different length. Shorter ones are padded at the end, and a padded row's final state is not
used (its lag grows instead); wide passes (prompts) are run in groups of equal length.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretell.model.hf.reading import HELD_LIMIT, Call, Ints, ModuleMixer, Opened, StateCache
from foretell.model.hf.runner import CallPlaces
from foretell.model.recurrent import BASE, LIVE, READ, SIDE, Key

LAG_LIMIT = 4
"""Inputs read again in front of a pass; more are read in a call of their own."""
PAD_LIMIT = 32
"""Tokens of a call up to which rows are padded to one length."""


class HandedStates(Opened):
    """States handed to a mixer, and taken from it."""

    def __init__(self, states: dict[Key, Tensor]) -> None:
        self.states = states

    def before(self, key: Key) -> Tensor:
        """See ``Opened``."""
        return self.states[key]

    def extend(self, key: Key, given: Tensor) -> Tensor:
        """See ``Opened``."""
        before = self.states[key]
        whole = torch.cat([before.to(given.dtype), given], -1)
        self.states[key] = whole[..., whole.shape[-1] - before.shape[-1] :]
        return whole

    def replace(self, key: Key, state: Tensor) -> None:
        """See ``Opened``."""
        self.states[key] = state


class ReadingAgain(Call):
    """One mixer in one pass. tokenwise: it reads token by token."""

    def __init__(
        self, index: int, mixer: ModuleMixer, run: Callable[..., Any], cache: StateCache, *, tokenwise: bool
    ) -> None:
        super().__init__(index, mixer, run, cache)
        self.tokenwise = tokenwise

    def _go_on(self, hidden: Tensor) -> Any:
        start, rows, all_meta = self.start, self.rows, self.states.meta[self.index]
        meta = all_meta[rows]  # [b, 4], a copy
        is_live = meta[:, LIVE] == start
        settled = is_live & (start <= self.committed)
        meta[settled, SIDE] ^= 1
        meta[settled, BASE] = meta[settled, READ] = start[settled]
        if ((meta[:, BASE] > start) | (~is_live & (meta[:, READ] < start))).any():
            raise self._lost(meta)
        # Never past what is committed: a drafter that reads its guesses one by one may have to go back there.
        known = np.where(is_live, 0, np.minimum(start, self.committed) - meta[:, BASE])
        late = (start - meta[:, BASE] > LAG_LIMIT) & (known > 0)
        if self.tokenwise:
            self._advance(known, meta)
        elif late.any():
            least = known[late].min()
            self._advance(np.where(known >= least, least, 0), meta)
        offset = start - meta[:, BASE]
        side = meta[:, SIDE] ^ (is_live & ~settled)
        meta[:, LIVE] = -1
        output, exact = self._read(hidden, np.where(is_live, 0, offset), side, meta)
        meta[exact, LIVE] = start[exact] + self.count[exact]
        meta[:, READ] = start
        if int(self.count.max()) <= HELD_LIMIT:
            self._hold(hidden, offset)
            meta[:, READ] += self.count
        all_meta[rows] = meta
        return output

    # -- calls -----------------------------------------------------------------------------------------------------

    def _read(self, hidden: Tensor, lag: Ints, side: Ints, meta: Ints) -> tuple[Any, Ints]:
        """Read the lag of each row and its new inputs, from the states at ``side``; put the states of rows that end where
        their call does to the other side than the committed ones. What the mixer returned for the new inputs, and which
        rows these are [b]."""
        total, num_new = lag + self.count, hidden.shape[1]
        everywhere, widest, after = np.arange(len(total)), int(total.max()), meta[:, SIDE] ^ 1
        groups = [(everywhere, widest)]
        if not self.tokenwise and widest > PAD_LIMIT:
            groups = [(np.nonzero(total == width)[0], int(width)) for width in np.unique(total)]
        exact = np.ones(len(total), dtype=bool) if self.tokenwise or len(groups) > 1 else total == widest
        output: Any = None
        for chosen, width in groups:
            whole, rows = len(groups) == 1, self.rows[chosen]
            places = CallPlaces(lag[chosen], width, int(self.count[chosen].max()))
            held = self._held(rows, places.behind) if places.behind else None
            given = (hidden if whole else hidden[chosen])[:, : places.num_new]
            result, states = self._run(
                places.join(held, given), self._pick(rows, side[chosen]), total[chosen], (self.start - lag)[chosen]
            )
            kept = exact[chosen]
            if not kept.all():
                at = torch.from_numpy(np.nonzero(kept)[0])
                states = {key: x[at.to(x.device)] for key, x in states.items()}
            self._put(rows[kept], after[chosen[kept]], states)
            first, rest = (result[0], result[1:]) if isinstance(result, tuple) else (result, None)
            first = places.new(first)
            if first.shape[1] < num_new:  # no row has as many: padding, which nobody reads
                first = torch.nn.functional.pad(first, (0, 0, 0, num_new - first.shape[1]))
            if output is None:
                output = first if whole else first.new_zeros(len(total), *first.shape[1:])
            if not whole:
                output[torch.from_numpy(chosen).to(first.device)] = first
        return (output if rest is None else (output, *rest)), exact

    def _advance(self, counts: Ints, meta: Ints) -> None:
        """Move the committed state of each row on by counts of its held inputs; they are 0 or equal, unless tokenwise."""
        chosen = np.nonzero(counts)[0]
        if not len(chosen):
            return
        rows, wanted = self.rows[chosen], counts[chosen]
        held, states = self._held(rows, int(wanted.max())), self._pick(rows, meta[chosen, SIDE])
        _, states = self._run(held, states, wanted, meta[chosen, BASE])
        meta[chosen, SIDE] ^= 1
        meta[chosen, BASE] += wanted
        self._put(rows, meta[chosen, SIDE], states)
        kept = self.states.held[self.index][""]
        for row, count, left in zip(rows, wanted, (meta[:, READ] - meta[:, BASE])[chosen], strict=True):
            if left > 0:
                kept[row, :left] = kept[row, count : count + left].clone()

    def _run(
        self, inputs: Tensor, states: dict[Key, Tensor], total: Ints, begin: Ints
    ) -> tuple[Any, dict[Key, Tensor]]:
        """The mixer over inputs [b, T, H], whose first is at positions begin [b], from states; what it returns, and the
        states after it (of rows that are shorter than T: after their own last token where it reads token by token, else
        undefined)."""
        width = inputs.shape[1]
        whole = not self.tokenwise or width == 1
        if whole or ((total == width).all() and not begin.any()):
            return self._once(inputs, states, begin)  # from nothing, every mixer can read a whole text
        pieces: list[Tensor] = []
        result: Any = None
        for at in range(width):
            going = total > at
            copies = {key: x.clone() for key, x in states.items()}
            result, after = self._once(inputs[:, at : at + 1], copies, begin + at)
            if not going.all():
                mask = torch.from_numpy(going)
                after = {
                    key: torch.where(mask.to(x.device).view(-1, *[1] * (x.dim() - 1)), x, states[key])
                    for key, x in after.items()
                }
            states = after
            pieces.append(result[0] if isinstance(result, tuple) else result)
        joined = torch.cat(pieces, 1)
        return ((joined, *result[1:]) if isinstance(result, tuple) else joined), states

    def _once(self, inputs: Tensor, states: dict[Key, Tensor], begin: Ints) -> tuple[Any, dict[Key, Tensor]]:
        keeper = self.mixer.keeper
        if keeper is not None:
            positions = torch.from_numpy(begin[:, None] + np.arange(inputs.shape[1])).to(inputs.device)
            return keeper.call(self.run, inputs, positions, states, self.kwargs)
        layer = self.mixer.layout.layer
        opened = self.cache.open[layer] = HandedStates(dict(states))
        result = self.run(inputs, *self.args, **self.kwargs)
        del self.cache.open[layer]
        return result, opened.states

    # -- memory ----------------------------------------------------------------------------------------------------

    def _pick(self, rows: Ints, side: Ints) -> dict[Key, Tensor]:
        """Copies of the states of some rows, each at its own side: the mixers write into what they are given."""
        if len(rows) == 1:
            row, one = int(rows[0]), int(side[0])
            return {key: memory[one, row : row + 1].clone() for key, memory in self.tensors.items()}
        at, sides = torch.from_numpy(rows), torch.from_numpy(side)
        return {key: memory[sides.to(memory.device), at.to(memory.device)] for key, memory in self.tensors.items()}

    def _put(self, rows: Ints, side: Ints, states: dict[Key, Tensor]) -> None:
        if len(rows) == 1:
            for key, memory in self.tensors.items():
                memory[int(side[0]), int(rows[0])] = states[key][0]
            return
        at, sides = torch.from_numpy(rows), torch.from_numpy(side)
        for key, memory in self.tensors.items():
            memory[sides.to(memory.device), at.to(memory.device)] = states[key].to(memory.dtype)

    def _held(self, rows: Ints, count: int) -> Tensor:
        """[b, count, H] the inputs of some rows since their committed states."""
        held = self.states.held[self.index][""]
        if len(rows) == 1:
            return held[int(rows[0]) : int(rows[0]) + 1, :count]
        return held[torch.from_numpy(rows).to(held.device), :count]

    def _hold(self, given: Tensor, offset: Ints) -> None:
        """Hold the new inputs behind those that are held already."""
        width = int(self.count.max())
        held = self.states.hold(self.index, int(offset.max()) + width)[""]
        if len(offset) == 1:
            held[self.rows[0], offset[0] : offset[0] + width] = given[0, :width]
            return
        rows = torch.from_numpy(self.rows[:, None]).to(held.device)
        at = torch.from_numpy(offset[:, None] + np.arange(width)).to(held.device)  # [b, w]
        held[rows, at] = given[:, :width].to(held.dtype)
