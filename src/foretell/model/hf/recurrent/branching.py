"""Recurrent mixers of known scan over a tree of guesses, or over some of its nodes, those above them having been read.

The committed state is that of ``rewind.py``, and so is what is held: the terms of a node, as many places behind that state
as its slot lies behind the committed position. ``Branches`` says which of these a node adds up. Commit moves those of the
accepted nodes together (``RecurrentCache.move``), and from then on they are a line.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretell.model.hf.reading import Ints
from foretell.model.hf.recurrent.branches import Branches
from foretell.model.hf.recurrent.known import name_of
from foretell.model.hf.recurrent.rewind import HandedInputs, RewindDecision, Rewinding
from foretell.model.recurrent import BASE, LIVE, READ, SIDE, Key


class NodeInputs(HandedInputs):
    """The last inputs of convolutions, each node's own."""

    def __init__(self, states: Mapping[Key, Tensor], branches: Branches, held: Mapping[str, Tensor]) -> None:
        super().__init__(states)
        self.branches, self.held = branches, held

    def extend(self, key: Key, given: Tensor) -> Tensor:
        """[b, C, n * (K + 1)]: see ``Branches.windows``, those of each node one after another."""
        lines = self.inputs[name_of(key)] = given.transpose(1, 2)
        whole = self.branches.whole(self.held[name_of(key)].to(lines.dtype), lines)
        return self.branches.windows(self.states[key].to(lines.dtype), whole).flatten(1, 2).transpose(1, 2)


@dataclass(frozen=True)
class BranchGrowth:
    """Where a pass over a tree goes on, the same in mixers that stand at the same positions."""

    now: RewindDecision
    branches: Branches
    order: Tensor | None  # [b, n] the nodes in the order of their slots; None: they stand in it
    back: Tensor | None  # [b, n] the way back


class Branching(Rewinding):
    """One mixer in one pass over nodes of a tree."""

    def _go_on(self, hidden: Tensor) -> Any:
        rewind = self.mixer.rewind
        assert rewind is not None
        growth: BranchGrowth = self._once(self._grow)
        now, branches = growth.now, growth.branches
        places = branches.seen.shape[2]
        held = self.states.hold(self.index, places)
        states = {name: memory[now.at] for name, memory in self.tensors.items()}
        if now.moved.any():
            states = self._put(now.at, rewind.after(states, self._held(now, int(now.moved.max())), now.moved))
            if now.behind.any():
                self._shift(held, now)
        earlier = self._held(now, places)
        rewind.branches = branches
        if rewind.scan is not None:
            rewind.scan.branches, rewind.scan.earlier = branches, earlier
        try:
            opened = NodeInputs(states, branches, earlier)
            result, inputs = self._run(rewind, _picked(hidden, growth.order), opened, None)
        finally:
            rewind.branches = None
            if rewind.scan is not None:
                rewind.scan.branches, rewind.scan.earlier = None, {}
        rows = torch.from_numpy(self.rows[:, None])
        for name, given in inputs.items():
            held[name][rows, branches.at.to(given.device)] = given.to(held[name].dtype)
        self.states.meta[self.index][self.rows] = now.meta
        if isinstance(result, tuple):
            return (_picked(result[0], growth.back), *result[1:])
        return _picked(result, growth.back)

    def _grow(self, meta: Ints) -> BranchGrowth:
        start, committed = self.start, self.committed
        # A wide pass may have read the root too, which is committed for certain.
        is_live = (meta[:, LIVE] >= committed) & (meta[:, LIVE] <= start)
        meta[is_live, SIDE] ^= 1
        meta[is_live, BASE] = meta[is_live, READ] = meta[is_live, LIVE]
        if ((meta[:, BASE] > start) | (meta[:, READ] < committed)).any():
            raise self._lost(meta)
        moved = np.maximum(committed - meta[:, BASE], 0)
        meta[:, BASE] += moved
        behind = np.maximum(meta[:, READ] - meta[:, BASE], 0)
        stop = self.cache.reading.stop[self.places]
        meta[:, READ] = self._read_up_to(meta, moved, stop)
        meta[:, LIVE] = -1
        return _growth(self._decision(meta, moved, behind, wide=False), *self._tree(meta[:, BASE]))

    def _tree(self, base: Ints) -> tuple[Tensor, Tensor]:
        """``Branches.at`` and ``seen`` of a state at positions base [b], the nodes as they stand in the plan."""
        plan = self.cache.plan
        slots, seen = plan.slots, plan.ancestry
        if len(self.places) < self.num_rows:
            chosen = torch.from_numpy(self.places).to(slots.device)
            slots, seen = slots[chosen], seen[chosen]
        at = (slots - torch.from_numpy(base)[:, None].to(slots.device)).clamp(min=0)  # padding may lie before it
        inside = base - self.committed  # nodes that the state holds already
        if inside.any():
            places = torch.arange(seen.shape[2], device=seen.device) + torch.from_numpy(inside)[:, None].to(seen.device)
            index = places.clamp(max=seen.shape[2] - 1)[:, None].expand_as(seen)
            seen = seen.gather(2, index) & (places < seen.shape[2])[:, None]
        return at, seen[..., : int(at.max()) + 1]


def _growth(now: RewindDecision, at: Tensor, seen: Tensor) -> BranchGrowth:
    if at.shape[1] == 1 or bool((at.diff(dim=1) > 0).all()):
        return BranchGrowth(now, Branches(at, seen), None, None)
    order = at.argsort(1)
    ordered = Branches(at.gather(1, order), seen.gather(1, order[:, :, None].expand_as(seen)))
    return BranchGrowth(now, ordered, order, order.argsort(1))


def _picked(lines: Tensor, order: Tensor | None) -> Tensor:
    """[b, n, ...] in another order [b, n]."""
    return lines if order is None else lines[torch.arange(len(lines))[:, None], order.to(lines.device)]
