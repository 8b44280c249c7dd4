"""The interface between shapes and draft models: what growing a tree needs of a drafter, and its result."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from foretell.core.errors import ConfigError
from foretell.core.tree import DrawnBy, Plan, TokenTree
from foretell.core.upload import tensor_on
from foretell.draft.base import Context
from foretell.model.prefill import round_up


class Expander(Protocol):
    """The interface of drafters that return logits: every shape can be grown on them."""

    capacity: int

    def begin(self, context: Context, limits: Sequence[int]) -> tuple[Tensor, Tensor]:
        """([B, 1, V] logits after each row's pending token, [B] the slot where that lies): its cache then ends at that
        token. Rows whose limit is 0 may be skipped: their values are undefined."""

    def logits(self, tokens: Tensor, plan: Plan) -> Tensor:
        """[B, W, V] logits after W new nodes, tokens [B, W]; ``plan`` covers those nodes of the tree being grown."""

    @property
    def chance(self) -> Tensor | None:
        """[B, W] predicted probability that the target keeps each node read by the last call of ``logits``, given that it
        keeps the nodes above it: ``acceptance.head.predicted``. None where no acceptance head is loaded. Called once,
        right after that call, by shapes with ``asks_acceptance``; ``Drafter`` returns None by default."""


def note(context: Context, logits: Tensor) -> None:
    """Keep a copy of the draft's logits if the context records them: an expander may reuse its buffers."""
    if context.draft_logits is not None:
        context.draft_logits.append(logits.detach().clone())


def chance_of(expander: Expander) -> Tensor:
    """[B, W] ``Expander.chance`` of the nodes it just read. Raises ConfigError where it returns None."""
    chance = expander.chance
    if chance is None:
        raise ConfigError(NO_FORESIGHT)
    return chance


NO_FORESIGHT = (
    "shape 'specdec' stops where a trained acceptance head expects a rejection, and none is loaded: give one as "
    "'acceptance', or choose shape 'adaptive', which needs no training"
)
"""Why a drafter without acceptance head cannot grow ``specdec``."""


@dataclass(frozen=True)
class Grown:
    """A tree, and the slots of its nodes in the cache of the drafter that grew it."""

    tree: TokenTree
    slots: Tensor  # [B, N] int64: node i's KV lies this many slots after the root's; -1: it was never fed

    @classmethod
    def of_chain(cls, tree: TokenTree, num_tokens: int) -> "Grown":
        """A chain grown node by node, of which every node but the num_tokens-th was fed."""
        slots = torch.arange(tree.num_nodes)
        return cls(tree, slots.masked_fill(slots == num_tokens, -1).expand_as(tree.tokens))


def pick(plan: Plan, nodes: Tensor) -> Plan:
    """The plan of nodes [W] of those covered: ``Plan.nodes`` for nodes that do not lie side by side."""
    return replace(
        plan, ancestry=plan.ancestry[:, nodes], slots=plan.slots[:, nodes], positions=plan.positions[:, nodes]
    )


def limits_of(context: Context, limits: Sequence[int]) -> Tensor:
    """[B] int64: how deep each row may guess."""
    return tensor_on(context.device, limits) if context.limits is None else context.limits


def span_for(expander: Expander, context: Context, num_nodes: int) -> int:
    """Slots that attention must read while a tree of num_nodes grows, rounded up so that kernels see few shapes."""
    return min(expander.capacity, round_up(max(context.lengths) + num_nodes, 64))


def with_q(q: Tensor | None, parent: Tensor, labels: Tensor) -> Tensor | None:
    """q [B, N, V] as a TokenTree wants it: zero where a node has no drawn child, None where no node was drawn.

    Writes into q, of which only the rows of nodes that have drawn children need to be filled in before. (On an
    accelerator q is kept where by chance nothing was drawn: to see that would be a host read.)
    """
    if q is None:
        return None
    drawn = (labels == DrawnBy.IID) | (labels == DrawnBy.WITHOUT_REPLACEMENT)
    if q.device.type != "cpu":
        return q.masked_fill_(~_has(parent, drawn)[:, :, None], 0.0)
    if not bool(drawn.any()):
        return None
    q[~_has(parent, drawn)] = 0.0
    return q


def _has(parent: Tensor, which: Tensor) -> Tensor:
    """[B, N] bool: nodes of which some child is one of these [B, N]."""
    return torch.zeros_like(parent).scatter_add_(1, parent.clamp(min=0), which.long()) > 0
