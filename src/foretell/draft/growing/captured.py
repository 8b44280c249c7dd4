"""A whole proposal as one captured graph: what a drafter has not read yet, and then the growth of its chain or tree.

``grow.grow`` after ``Expander.begin`` is the same launch by launch: the slow twin. All that the host knows of a proposal
comes in one tensor, so that a growth asks the host for nothing.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foretell.core.graphs import Feed, Graphs, bucket
from foretell.core.noise import Noise
from foretell.core.tree import DrawMode
from foretell.core.upload import tensor_on
from foretell.draft.base import Context
from foretell.draft.growing.frontier import Expander, Grown
from foretell.draft.growing.grow import grow
from foretell.draft.shapes import Shape
from foretell.model.cache import KVCache
from foretell.model.prefill import FEW


@dataclass(frozen=True)
class Known:
    """What the host knows of each row before a proposal."""

    # That the drafter has not read, at most ``FEW`` of each row; none: it does not guess
    tokens: Sequence[Sequence[int]]
    starts: Sequence[int]  # the slots of their first ones
    bases: Sequence[int]  # see ``Expander.begin``
    limits: Sequence[int]  # how deep it may guess


@dataclass(frozen=True)
class Fed:
    """The same on a device, [B] int64 each, in a graph's own memory. Rows and columns may be padding."""

    tokens: Tensor  # [B, FEW]: on an accelerator a pass over eight takes as long as one over two
    counts: Tensor  # how many of them are real
    starts: Tensor
    bases: Tensor
    limits: Tensor
    lengths: Tensor  # of the texts, as ``Context.length``
    pending: Tensor
    span: int  # no text is longer

    @classmethod
    def of(cls, packed: Tensor, span: int) -> "Fed":
        """From ``_packed``."""
        counts, starts, bases, limits, lengths, pending = packed[:, :6].unbind(1)
        return cls(packed[:, 6:], counts, starts, bases, limits, lengths, pending, span)


def _packed(known: Known, context: Context, num_rows: int) -> list[list[int]]:
    """[num_rows, 6 + FEW] what ``Fed`` holds; rows of zeros behind those of the context write where nobody reads."""
    columns = zip(
        known.tokens, known.starts, known.bases, known.limits, context.lengths, context.history.ids, strict=True
    )
    rows = [
        [len(tokens), start, base, limit, length, ids[-1], *tokens, *[0] * (FEW - len(tokens))]
        for tokens, start, base, limit, length, ids in columns
    ]
    return rows + [[0] * (6 + FEW)] * (num_rows - len(rows))


def why_not(context: Context) -> str:
    """Why a proposal cannot be one graph, whatever drafter makes it; "" where it can."""
    if context.processors.reads_history:
        return "processors read the text on the host while a draft grows"
    if context.draft_logits is not None:
        return "an observer reads the draft's logits"
    return ""


def grow_captured(
    graphs: Graphs,
    expander: Callable[[Fed, Sequence[Tensor], KVCache], Expander],
    cache: KVCache,
    known: Known,
    context: Context,
    shape: Shape,
    draws: DrawMode,
    noise: Noise,
    others: Sequence[Feed] = (),
) -> Grown:
    """``grow.grow`` of an expander that reads ``Fed`` and the other feeds, of which shape[0] is left to this function, in
    these rows of the drafter's cache. The result is valid until the next call."""
    num_rows, most = context.num_rows, max(known.limits)
    rows = min(bucket(num_rows), cache.reserve)
    span = bucket(max(context.lengths) + 1, 64)
    processors = graphs.processors(context.processors, rows)
    history = context.history
    key: Hashable = (rows, span, most, shape, draws, processors.kind, *(feed.shape[1:] for feed in others))

    def grown(packed: Tensor, seeds: Tensor, *given: Tensor) -> Grown:
        fed = Fed.of(packed, span)
        whole = Context(
            history=history,
            processors=processors,
            length=fed.lengths,
            lengths=[span] * rows,
            pending=fed.pending,
            predictions=[],
            depth_limit=[most] * rows,
            limits=fed.limits,
        )
        mine = expander(fed, given, cache.rows(0, rows))
        return grow(mine, whole, [most] * rows, shape, draws, Noise(seeds, fed.lengths))

    feeds = [
        Feed(tensor_on(context.device, _packed(known, context, rows)), (rows, 6 + FEW)),
        Feed(noise.seeds, (rows,), constant=True),
        *(replace(feed, shape=(rows, *feed.shape[1:])) for feed in others),
    ]
    made = graphs.run(key, feeds, grown, outcome=lambda made: torch.stack([made.tree.tokens, made.tree.parent]))
    return Grown(made.tree.rows(0, num_rows), made.slots[:num_rows])


def move_captured(graphs: Graphs, cache: KVCache, kept: Sequence[Sequence[int]], bases: Sequence[int]) -> None:
    """Move the slots kept[b], counted from bases[b], of each row onto bases[b], bases[b] + 1, ...: ``KVCache.move``."""
    rows, width = min(bucket(len(kept)), cache.reserve), bucket(max(map(len, kept)))
    onto = list(range(width))  # behind a short path, and in rows that keep nothing, a slot is moved onto itself
    packed = [[base, *path, *onto[len(path) :]] for base, path in zip(bases, kept, strict=True)]
    packed += [[0, *onto]] * (rows - len(kept))

    def moved(packed: Tensor) -> Tensor:
        base = packed[:, :1]
        cache.rows(0, rows).move(base + packed[:, 1:], base + torch.arange(width, device=packed.device))
        return base

    feed = Feed(tensor_on(cache.keys[0].device, packed), (rows, 1 + width))
    graphs.run((rows, width), [feed], moved)


def fits(tokens: Sequence[Sequence[int]]) -> bool:
    """Whether what a proposal reads first is as little as in a usual step."""
    return max(map(len, tokens)) <= FEW
