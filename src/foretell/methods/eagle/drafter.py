"""EAGLE-1, -2 and -3 as drafters: a head of one or a few layers over (feature, next token) pairs, grown into any tree.

Pair i = (the target's feature of position i, token i + 1) lies in slot i at rotary position i; the pair of the pending
token, at slot length - 1, is the root of a growth, whose logits guess the token after the pending one. A drafted node's
feature is the head's own output at its parent.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.core.errors import ModelError
from foretell.core.graphs import Feed, Graphs
from foretell.core.noise import Noise
from foretell.core.tree import DrawMode, Plan, TokenTree, chain_parent, chain_tree, layout, root_tree
from foretell.core.upload import tensor_on
from foretell.draft.base import Capabilities, Context, Drafter, Method
from foretell.draft.growing import grow
from foretell.draft.growing.captured import Fed, Known, grow_captured, why_not
from foretell.draft.growing.frontier import Expander, Grown
from foretell.draft.shapes import Shape
from foretell.heads.draft_vocabulary import spread
from foretell.heads.pair_head import PairHead
from foretell.methods.chains import can_draw, growth_of, row_counts
from foretell.methods.eagle.eagle1 import Eagle1Head
from foretell.methods.eagle.eagle3 import Eagle3Head
from foretell.methods.eagle.native import NativePair
from foretell.methods.features import FeatureBuffer, FeatureDrafter
from foretell.methods.head_method import GROWN, HeadMethod, HeadMethodConfig, WindowedMethodConfig
from foretell.model.cache import BoundCache, KVCache
from foretell.model.prefill import FEW, PREFILL_CHUNK, padded_width, round_up
from foretell.model.target import CausalModel, Target


class EagleDrafter(FeatureDrafter):
    """The head with a cache of its own.

    Invariant: slots [0, filled[b]) hold pairs of the target's own features; later slots hold drafted pairs and are written
    over. Nothing is moved after a commit: the accepted nodes' pairs held guessed features, and ``begin`` computes them
    again from the true ones, as far as the pending token's. (2401.15077 and 2503.01840, whose caches do the same.)
    """

    can_join = True

    def __init__(
        self, head: PairHead, model: CausalModel, context: Context, capacity: int, native: NativePair | None = None
    ) -> None:
        """native: the same head through the C kernels; None: as the torch module."""
        self.head, self.model, self.capacity, self.native = head, model, capacity, native
        self._cache: KVCache | None = None
        self.vocabulary = head.vocabulary
        prepare = native.features if native is not None else lambda taps: head.features(taps, model)
        self.features = FeatureBuffer(context.num_rows, prepare)
        self.filled = [0] * context.num_rows
        # What a child feeds on, [B, columns, H] by column of the tree being grown, and the columns' numbers.
        dtype = head.dtype if native is None else torch.float32
        self._outputs = torch.zeros(context.num_rows, 1, head.config.hidden_size, dtype=dtype, device=context.device)
        self._columns = torch.arange(1, device=context.device)
        self.graphs: Graphs | None = None  # of proposals, while the cache lies where it lies
        self._memory = -1
        self.fed: Fed | None = None  # in a twin whose proposal is captured: what it reads first ...
        self._features = self._outputs  # ... and its features [B, FEW, F]

    @property
    def cache(self) -> KVCache:
        """Made when it is read for the first time: rows that never guess have none to join, move and free."""
        if self._cache is None:
            self._cache = (self.native or self.head).new_cache(len(self.filled), self.capacity)
        return self._cache

    @cache.setter
    def cache(self, cache: KVCache) -> None:
        self._cache = cache

    def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> TokenTree:
        """A tree as deep as each row has room for; none after a text of one token, which has no feature yet."""
        limits = [
            max(0, depth_limit) if length else 0
            for depth_limit, length in zip(context.depth_limit, context.lengths, strict=True)
        ]
        if not any(limits):
            return root_tree(context.pending)
        whole = self._whole(context, limits, shape, draws, noise)
        if whole is not None:
            return whole
        grown = self._captured(context, limits, shape, draws, noise)
        return (grow.grow(self, context, limits, shape, draws, noise) if grown is None else grown).tree

    def _captured(
        self, context: Context, limits: Sequence[int], shape: Shape, draws: DrawMode, noise: Noise
    ) -> Grown | None:
        """By a captured graph; None where that cannot be."""
        if context.graphs is None:
            return None
        if self.graphs is None or self._memory != self.cache.memory:
            self.graphs, self._memory = context.graphs.sibling(), self.cache.memory
        if reason := self._why_not(context, limits):
            self.graphs.skipped(reason)
            return None
        features, ids, starts = self._take(context, limits)
        bases = [
            length - 1 if limit else max(0, filled - 1)
            for length, filled, limit in zip(context.lengths, self.filled, limits, strict=True)
        ]

        def expander(fed: Fed, others: Sequence[Tensor], cache: KVCache) -> Expander:
            twin = copy(self)
            twin.cache, twin.fed, twin._features = cache, fed, others[0]
            twin._outputs, twin._columns = (
                others[0].new_zeros(len(others[0]), 1, self._outputs.shape[2]),
                self._columns[:1],
            )
            return twin

        return grow_captured(
            self.graphs, expander, self.cache, Known(ids, starts, bases, limits), context, shape, draws, noise,
            [Feed(features, (0, FEW, features.shape[2]))],
        )  # fmt: skip

    def _why_not(self, context: Context, limits: Sequence[int]) -> str:
        if self.native is not None:
            return "the head runs on the CPU"
        return why_not(context) or ("" if self._most_unread(limits) <= FEW else "a head reads a long text")

    def _most_unread(self, limits: Sequence[int]) -> int:
        """Pairs that a proposal reads first, of the row with most of them."""
        return max(row.count for row, limit in zip(self.features.rows, limits, strict=True) if limit)

    def _whole(
        self, context: Context, limits: list[int], shape: Shape, draws: DrawMode, noise: Noise
    ) -> TokenTree | None:
        """``grow.grow`` in one native call: a plain chain, drawn from what temperature alone changes, or a tree that C can
        grow; None: neither, or the pairs that are read first do not fit into one pass."""
        native, cache = self.native, self.cache
        if native is None or self._most_unread(limits) > PREFILL_CHUNK:
            return None
        is_chain = can_draw(native.vocabulary, context, shape)
        growth = None if is_chain else growth_of(native.vocabulary, context, shape, draws, max(limits))
        if not is_chain and growth is None:
            return None
        assert isinstance(cache, BoundCache)
        features, ids, starts = self._take(context, limits)
        read = (ids, features, starts, limits, cache, context.processors)
        if growth is not None:
            return native.tree(*read, context.pending, *growth, noise)
        label = grow.CHAIN_LABELS[draws]
        guesses, q = native.chain(*read, label, noise)
        tokens = torch.cat([context.pending[:, None], guesses], 1)
        return chain_tree(tokens, row_counts(limits), drawn_by=label, q=q)

    def begin(self, context: Context, limits: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Read all pairs up to the pending token's that are not in the cache; rows without room are skipped and stay
        behind."""
        if self.fed is not None:
            out, read = self._read_fed(self.fed)
            self._outputs[:, :1] = out
            return self._logits(read), self.fed.bases
        out, read = self._read(*self._take(context, limits))
        if all(limits):
            base = context.length - 1
        else:
            # A row without room computes unused values in slots after its own pairs.
            base = tensor_on(context.device, [max(0, filled - 1) for filled in self.filled])
        self._outputs[:, :1] = out
        return self._logits(read), base

    def _read_fed(self, fed: Fed) -> tuple[Tensor, Tensor]:
        """``_read`` of few pairs that lie on the device, in one pass."""
        num_rows, width = fed.tokens.shape
        parent = chain_parent(width, fed.tokens.device).expand(num_rows, -1)
        plan = layout(parent, fed.starts, self.capacity, span=min(self.capacity, fed.span + width), is_line=True)
        here = self.run(fed.tokens, self._features, plan)
        rows, last = torch.arange(num_rows, device=fed.tokens.device), (fed.counts - 1).clamp(min=0)
        out, read = (each[rows, last].unsqueeze(1) for each in here)
        return out, read

    def _take(self, context: Context, limits: Sequence[int]) -> tuple[Tensor, list[list[int]], list[int]]:
        """What ``_read`` takes: the pairs not yet read of rows with room, which count as read from now on."""
        features, starts, counts = self.features.take(limits)
        assert features is not None, "the pending token's pair is never in the cache"
        assert starts == self.filled
        ids = [
            row[start + 1 : start + count + 1]
            for row, start, count in zip(context.history.ids, starts, counts, strict=True)
        ]
        self.filled = [start + count for start, count in zip(starts, counts, strict=True)]
        return features, ids, starts

    def logits(self, tokens: Tensor, plan: Plan) -> Tensor:
        """[B, W, V] after W new nodes."""
        num_columns = plan.ancestry.shape[2]
        self._make_room(num_columns)
        if self.native is not None:
            assert isinstance(self.cache, BoundCache)
            return self.native.level(tokens, plan, self.cache, self._outputs)
        # A parent has a smaller column than its child in every shape: of the columns on a node's path the largest is its
        # own and the next its parent's (0 for the root, and for all nodes off the path).
        path = (plan.ancestry * self._columns[:num_columns]).topk(2, dim=2).values  # [B, W, 2]
        own, parent = path[..., 0], path[..., 1]
        features = self._outputs.gather(1, parent[:, :, None].expand(-1, -1, self._outputs.shape[2]))
        out, read = self.run(tokens, features, plan)
        self._outputs.scatter_(1, own[:, :, None].expand_as(out), out)
        return self._logits(read)

    def run(self, tokens: Tensor, features: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        """One pass of the head over pairs: tokens [B, n], features [B, n, H]; returns what ``PairHead.leave`` does;
        natively the output twice, since ``NativePair.logits`` reads that."""
        if self.native is not None:
            assert isinstance(self.cache, BoundCache)
            out = self.native.run(tokens, features, plan, self.cache)
            return out, out
        return self.head.advance(self.head.embed(tokens, self.model), features, plan, self.cache)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop rows of the cache and of the waiting features."""
        self.filled = [self.filled[row] for row in rows]
        if self._cache is not None:
            self._cache.keep(torch.tensor(rows), max(self.filled, default=0))
        self.features.keep(rows)
        self._outputs = self._outputs[: len(rows)].clone()  # never used after a growth

    def join(self, other: Drafter, context: Context) -> None:
        """Add rows to the cache and to the waiting features."""
        assert isinstance(other, EagleDrafter)
        if self._cache is not None or other._cache is not None:
            self.cache.join(other.cache, max(other.filled, default=0), max(self.filled, default=0))
        self.features.join(other.features)
        self._outputs = self._outputs.new_zeros(context.num_rows, *self._outputs.shape[1:])
        self.filled += other.filled

    def adopt(self, method: Method) -> None:
        """Pairs in the cache stay as the old weights wrote them: their features are gone."""
        assert isinstance(method, _Eagle)
        head, native = method.head, method.native
        self.head, self.native, self.vocabulary = head, native, head.vocabulary
        self.graphs = None  # whose kernels read the old weights
        self.features.prepare = native.features if native is not None else lambda taps: head.features(taps, self.model)

    def num_unread(self, context: Context) -> list[int]:
        """Number of pairs that ``begin`` would read before the pending token's pair."""
        return [max(0, row.count - 1) for row in self.features.rows]

    def catch_up(self, context: Context, row: int, most: int) -> int:
        """Read pairs of one row by itself; never the pending token's, whose output ``begin`` needs."""
        unread, start = self.num_unread(context)[row], self.filled[row]
        features = self.features.take_first(row, min(most, unread))
        if features is None:
            return unread
        count = len(features)
        ids = context.history.ids[row][start + 1 : start + count + 1]
        whole, self.cache = self.cache, self.cache.rows(row, row + 1)
        try:
            self._read(features[None], [ids], [start])
        finally:
            self.cache = whole
        self.filled[row] += count
        return unread - count

    def _read(self, features: Tensor, ids: list[list[int]], starts: list[int]) -> tuple[Tensor, Tensor]:
        """Feed known pairs, features [B, n, H], ids[b] to slots starts[b], ...; ``leave``'s outputs [B, 1, H] at each row's
        last. Rows are chains, short ones padded past their end, in slots that are not in use."""
        device, total = features.device, features.shape[1]
        num_rows, done = len(ids), 0
        out, read = features[:, :1], features[:, :1]
        while done < total:
            begun = [start + min(done, len(row)) for start, row in zip(starts, ids, strict=True)]
            width = min(PREFILL_CHUNK, total - done, self.capacity - max(begun))
            pieces = [row[done : done + width] for row in ids]
            width = padded_width(max(map(len, pieces)), self.capacity - max(begun), device)
            tokens = tensor_on(device, [piece + [0] * (width - len(piece)) for piece in pieces])
            parent = chain_parent(width, device).expand(num_rows, -1)
            span = min(self.capacity, round_up(max(begun) + width, 64))
            plan = layout(parent, tensor_on(device, begun), self.capacity, span=span)
            known = features[:, done : done + width]
            if known.shape[1] < width:
                known = torch.nn.functional.pad(known, (0, 0, 0, width - known.shape[1]))
            here = self.run(tokens, known, plan)
            if all(len(piece) == width for piece in pieces) and (width > FEW or device.type == "cpu"):
                out, read = (each[:, -1:] for each in here)
            else:
                last = tensor_on(device, [max(0, len(piece) - 1) for piece in pieces])
                rows = torch.arange(num_rows, device=device)
                going = tensor_on(device, [bool(piece) for piece in pieces])[:, None, None]
                # A row that ended in an earlier chunk keeps the outputs of that one.
                out, read = (
                    torch.where(going, new[rows, last][:, None], old)
                    for new, old in zip(here, (out, read), strict=True)
                )
            done += width
        return out, read

    def _make_room(self, num_columns: int) -> None:
        """Room for the outputs of that many columns."""
        had = self._outputs.shape[1]
        if had >= num_columns:
            return
        bigger = self._outputs.new_zeros(len(self._outputs), round_up(num_columns, 32), self._outputs.shape[2])
        bigger[:, :had] = self._outputs
        self._outputs = bigger
        self._columns = torch.arange(bigger.shape[1], device=bigger.device)

    def _logits(self, read: Tensor) -> Tensor:
        """[B, W, V]: tokens outside the draft vocabulary have -inf."""
        if self.native is not None:
            return self.native.logits(read)
        logits = self.head.logits(read, self.model)
        if self.vocabulary is None:
            return logits
        return spread(logits, self.vocabulary, self.model.spec.vocab_size)


class _Eagle(HeadMethod):
    """A head over pairs."""

    can_learn = True
    head: PairHead
    kernels = NativePair

    def open(self, context: Context, capacity: int, target: Target) -> Drafter:
        """A fresh cache for these rows."""
        return EagleDrafter(self.head, self.model, context, capacity, self.native)


class Eagle1(_Eagle):
    """``--method eagle1``."""

    name = "eagle1"
    capabilities = Capabilities(
        "a one-layer head that predicts the target's next feature",
        draws=True,
        needs_head=True,
        reads_target=True,
        shapes=GROWN,
    )
    head: Eagle1Head

    def __init__(self, head: Eagle1Head, model: CausalModel, *, weights: str = "auto") -> None:
        """See ``HeadMethod``; the head must read the last layer. Raises ModelError."""
        super().__init__(head, model, weights=weights)
        last = model.spec.num_layers - 1
        if head.config.tap_layer != last:
            raise ModelError(
                f"the draft head reads the output of target layer {head.config.tap_layer}, and an eagle1 head must read "
                f"the last one, {last} in {model.spec.name!r}"
            )


class Eagle2(Eagle1):
    """``--method eagle2``: EAGLE-1's head, by default with EAGLE-2's tree."""

    name = "eagle2"


class Eagle3(_Eagle):
    """``--method eagle3``."""

    name = "eagle3"
    capabilities = Capabilities(
        "a one-layer head over three fused layers of the target",
        draws=True,
        needs_head=True,
        reads_target=True,
        shapes=GROWN,
    )
    head: Eagle3Head


@dataclass(frozen=True)
class Eagle1Config(WindowedMethodConfig, HeadMethodConfig):
    """One layer over the target's last features."""

    method = Eagle1.name
    capabilities = Eagle1.capabilities
    made, kind = Eagle1, Eagle1Head


@dataclass(frozen=True)
class Eagle2Config(Eagle1Config):
    """EAGLE-1's weights on a dynamic tree that follows the draft probabilities."""

    method = Eagle2.name
    capabilities = Eagle2.capabilities
    made = Eagle2
    shape: str = "eagle2"


@dataclass(frozen=True)
class Eagle3Config(WindowedMethodConfig, HeadMethodConfig):
    """One layer over fused features of three target layers."""

    method = Eagle3.name
    capabilities = Eagle3.capabilities
    made, kind = Eagle3, Eagle3Head
