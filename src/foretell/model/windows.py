"""What a draft's attention reads of a long text: its first slots and its last ones (StreamingLLM, 2309.17453).

The first slots are kept because attention rests on them (*sinks*). Where a query no longer sees all, they are as far
away as they last were when one did: no distance is greater than ``most``, so a draft goes on past the positions that it was
trained for. Keys and values of a token follow from what it sees so, whatever the batch, the tree and the passes are.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.core.tree import Plan

SINKS = 4
"""First slots that are kept: the number of the paper's section 3.2."""
UNBOUNDED = 1 << 40
"""``max_positions`` of a draft that has no last one."""


@dataclass(frozen=True)
class DraftWindow:
    """The last ``size`` positions, the own one included, and the first ``sinks``."""

    size: int
    sinks: int = SINKS  # no more than the native kernels read in one segment, 256

    @property
    def most(self) -> int:
        """Slots that are read."""
        return self.size + self.sinks

    def narrows(self, own: int | None) -> bool:
        """Whether a layer whose own window is this (0 or None: it has none) sees less by it."""
        return not own or own > self.size

    def sight(self, plan: Plan) -> Tensor:
        """[B, 1, n, S] bool: the plan's mask, without what lies between sinks and window."""
        keys = plan.key_positions[:, None, None, :]
        near = plan.positions[:, None, :, None] - keys < self.size
        return plan.mask & (near | (keys < self.sinks))

    def back(self, positions: Tensor) -> Tensor:
        """By how many positions a query at these turns for the sinks: 0 or less."""
        return (self.most - 1 - positions).clamp(max=0)


def sunk_attention(
    query: Tensor,
    sunk: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scale: float,
    sinks: int,
    cap: float | None = None,
    learned: Tensor | None = None,
) -> Tensor:
    """[B, heads, n, d] of queries [B, heads, n, d], and of the same as the sinks' keys meet them; mask [B, 1, n, S] bool or
    additive; learned: see ``weights_of``. The slow twin of the native kernels: it reads all S slots."""
    scores = torch.cat((sunk @ keys[:, :, :sinks].mT, query @ keys[:, :, sinks:].mT), -1).float() * scale
    scores = scores if cap is None else torch.tanh(scores / cap) * cap
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return weights_of(scores, learned).to(values.dtype) @ values


def weights_of(scores: Tensor, learned: Tensor | None) -> Tensor:
    """The softmax of scores [..., n, S] float32; learned: [..., n, 1] of one more score, whose weight is left out."""
    if learned is None:
        return scores.softmax(-1)
    return torch.cat((scores, learned.expand(*scores.shape[:-1], 1)), -1).softmax(-1)[..., :-1]
