"""A tree of guesses as recurrent mixers read it: which terms each node adds up, and how far each has decayed.

A node's state is the committed one and the terms of its ancestors, each faded by what was read after it on the node's own
path. So no node has a state: all of them read the committed one, and a mask of ancestors stands where a line of guesses has
a triangle. Terms of nodes that an earlier pass has read are held at their slots; those of this pass are put beside them.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Branches:
    """n nodes of a pass among the M places of a tree, counted from the committed state. Nodes stand in the order of their
    places, so that ancestors come first."""

    at: Tensor  # [b, n] int64 the place of each node
    seen: Tensor  # [b, n, M] bool: its ancestors and itself, as far as the committed state does not hold them

    @cached_property
    def _read_before(self) -> Tensor:
        """[b, M] bool: ancestors of nodes of this pass that an earlier pass has read."""
        return self.seen.any(1).scatter(1, self.at, torch.zeros_like(self.at, dtype=torch.bool))

    def whole(self, held: Tensor, new: Tensor) -> Tensor:
        """[b, M, ...]: what is held [b, M, ...] of the nodes read before, and new [b, n, ...] of this pass's; zero where
        nothing is read, since what is held there may be anything."""
        before = self._read_before.to(held.device).view(*held.shape[:2], *[1] * (held.dim() - 2))
        kept = torch.where(before, held, torch.zeros((), dtype=held.dtype, device=held.device))
        rows = torch.arange(len(kept), device=held.device)[:, None]
        kept[rows, self.at.to(held.device)] = new.to(held.dtype)
        return kept

    def of_this_pass(self, whole: Tensor) -> Tensor:
        """[b, ..., n] the places of this pass's nodes among whole [b, ..., M]."""
        at = self.at.to(whole.device).view(len(whole), *[1] * (whole.dim() - 2), -1)
        return whole.gather(-1, at.expand(*whole.shape[:-1], -1))

    def fading(self, decay: Tensor) -> tuple[Tensor, Tensor]:
        """Of logarithms of decays [b, h, M, c]: their sums along each node's path [b, h, n, c], and behind each of its
        ancestors [b, h, n, M, c]; -inf where a node has no such ancestor."""
        seen = self.seen.to(decay.device)[:, None, :, :, None]
        summed = torch.where(seen, decay[:, :, None], torch.zeros((), dtype=decay.dtype, device=decay.device)).cumsum(3)
        path = summed[:, :, :, -1]
        return path, (path[:, :, :, None] - summed).masked_fill(~seen, -torch.inf)

    @cached_property
    def parent(self) -> Tensor:
        """[b, M] int64 the place of each place's parent; -1: the committed state, or nothing of this pass comes after."""
        places = torch.arange(self.seen.shape[2], device=self.seen.device)
        latest = torch.where(self.seen, places, -1).cummax(2).values  # ancestors come in the order of their places
        above = torch.nn.functional.pad(latest[:, :, :-1], (1, 0), value=-1)
        return torch.where(self.seen, above, -1).amax(1)

    def windows(self, before: Tensor, whole: Tensor) -> Tensor:
        """[b, n, K + 1, C] the inputs of a convolution at each node and the K before it on its path: of the last ones
        before [b, K, C] the tree, and of the tree's own, whole [b, M, C]."""
        num_rows, size = before.shape[:2]
        seen = self.seen
        depth = seen.sum(2)  # [b, n] itself included
        ago = torch.where(seen, depth[:, :, None] - seen.long().cumsum(2), -1)  # [b, n, M] 0: the node itself
        places = torch.arange(seen.shape[2], device=seen.device) + size
        found = []
        for back in range(size, -1, -1):
            inside = (ago == back).long() * places  # at most one
            found.append(torch.where(depth > back, inside.sum(2), size - 1 - back + depth))
        index = torch.stack(found, 2).to(before.device)  # [b, n, K + 1] into both
        both = torch.cat([before, whole], 1)
        at = index + torch.arange(num_rows, device=both.device)[:, None, None] * both.shape[1]
        return both.flatten(0, 1).index_select(0, at.flatten()).view(*index.shape, both.shape[2])
