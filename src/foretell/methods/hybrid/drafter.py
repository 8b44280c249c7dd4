"""Two methods in one (SuffixDecoding, 2411.04975, section 4: "hybrid"): repeated text from suffixes, new text from a draft.

In every step each row asks its suffix automata first. Where they promise more kept tokens than the second method has been
keeping, their guess is proposed, free of cost; else the second method guesses. What either is worth is learned from what
was kept at temperatures like the row's: a suffix proposal by its score, the second method by the mean of its proposals.
Where the second method grows trees, the first tokens of a suffix that promised less stand in them too.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from foretell.core.noise import Noise
from foretell.core.params import heat_of
from foretell.core.tree import DrawMode, TokenTree, pad_tree, root_tree
from foretell.core.upload import tensor_on
from foretell.draft.base import Capabilities, Commit, Context, Drafter, LightStep, Method, PromptChunk
from foretell.draft.chances import Mean
from foretell.draft.forwarding import ForwardingMethod
from foretell.draft.native import Node, tree_of
from foretell.draft.shapes import Chain, Shape, Sized
from foretell.draft.suffix import Suffix, SuffixDrafter
from foretell.methods.hybrid.graft import graft
from foretell.model.target import Target

BINS, BIN = 16, 0.5
"""Scores of suffix proposals have so many bins: below BIN, below 2 BIN, ... The lowest decide: a guess of one token that is
likely and one that is not both score below 1, and only the first is worth more than a second method's."""
SHARED_SIZE = 2
"""Guesses of a row's tree at most where several rows guess, if nobody chose its shape."""
MOST_GRAFTED = 4
"""Tokens of a suffix that are put into a tree of the second method at most."""


@dataclass
class Worth:
    """Kept guesses that a proposal of either method brings."""

    discount: float  # what a token by the second method is worth: its guesses cost time
    second: Mean = field(default_factory=lambda: Mean(1.0))
    suffix: list[Mean] = field(default_factory=lambda: [Mean((k + 0.4) * BIN) for k in range(BINS)])

    @property
    def means(self) -> list[Mean]:
        """All of them."""
        return [self.second, *self.suffix]

    def of(self, score: float) -> Mean:
        """The mean of suffix proposals with scores like this one."""
        return self.suffix[min(BINS - 1, int(score / BIN))]

    def num_grafted(self, score: float) -> int:
        """How many tokens of a suffix proposal of this score stand in a tree of the second method: the expected ones and as
        many again, since nodes cost little."""
        return min(MOST_GRAFTED, 1 + round(2.0 * self.of(score).value)) if score > 0.0 else 0

    def prefers_suffix(self, score: float) -> bool:
        """Whether a suffix proposal of this score brings more tokens a step, the one of the target counted."""
        return score > 0.0 and 1.0 + self.of(score).value >= self.discount * (1.0 + self.second.value)


@dataclass(slots=True)
class _Row:
    """One row, and what suffix found for it in this step."""

    worth: Worth  # one object for all rows that share it
    allowed: int = 0  # how deep suffix might guess
    guess: list[int] = field(default_factory=list)  # suffix's
    known: float = 0.0  # its score
    score: float = 0.0  # the same, 0 where the second method guessed
    preferred: bool | None = None  # whether the whole method takes suffix's, or would where it guesses


class HybridDrafter(Drafter):
    """A drafter of each kind for the same rows; both observe every step, so each can guess in any of them."""

    can_join = True

    def __init__(
        self, suffix: SuffixDrafter, second: Drafter, worths: Sequence[Worth], shape: Shape, coupled: bool = False
    ) -> None:
        """worths: of each row, one for all where they share it. shape: what the second method grows. coupled: only where
        it draws COUPLED, and else a chain."""
        self.suffix, self.second, self.shape, self.coupled = suffix, second, shape, coupled
        self.rows = [_Row(worth) for worth in worths]
        self._has_proposed = False  # since the last step
        self._grafts = False  # whether the second method's trees of this step may hold tokens of suffixes
        self._light: list[LightStep] | None = None

    @property
    def can_wait(self) -> bool:  # type: ignore[override]
        """The second method's: suffix can."""
        return self.second.can_wait

    def read_prompt(self, chunk: PromptChunk) -> None:
        """See ``Drafter``."""
        self.second.read_prompt(chunk)

    def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> TokenTree:
        """FIXED chains in rows that follow a suffix, the second method's trees in all others that may spend time."""
        self._has_proposed = True
        if not any(context.depth_limit):  # asked not to guess, as in most steps where guessing does not pay
            for row in self.rows:
                row.allowed, row.guess, row.known, row.score, row.preferred = 0, [], 0.0, 0.0, None
            return root_tree(context.pending)
        found = self.suffix.guesses(context, shape)
        paid = context.depth_limit if context.paid_limit is None else context.paid_limit
        nodes: list[list[Node]] = []
        limits: list[int] = []
        for row, (guess, score), limit, most in zip(self.rows, found, context.depth_limit, paid, strict=True):
            row.allowed, row.guess, row.known = limit, [token for _, token in guess], score
            row.preferred = row.worth.prefers_suffix(score)
            follows = row.preferred or (score > 0.0 and not most)
            row.score = score if follows else 0.0
            nodes.append(guess if follows else [])
            limits.append(0 if follows else min(limit, most, self.shape.depth))
        if not any(limits):
            return tree_of(context, nodes)
        reduced = copy.copy(context)
        reduced.depth_limit = limits
        shape = Chain(self.shape.depth) if self.coupled and draws != DrawMode.COUPLED else self.shape
        self._grafts = not shape.is_chain
        num_guessing = sum(limit > 0 for limit in limits) if self.coupled else 1
        other = self.second.propose(reduced, shape_of(shape, max(limits), num_guessing), draws, noise)
        if self._grafts and other.q is None:
            grafts = [
                row.guess[: row.worth.num_grafted(row.known)] if limit > 0 else []
                for row, limit in zip(self.rows, limits, strict=True)
            ]
            other = graft(other, grafts) if any(grafts) else other
        chosen = [row.score > 0.0 for row in self.rows]
        if not any(chosen):
            return other
        return _by_row(tree_of(context, nodes), other, tensor_on(context.device, chosen))

    def observe(self, commit: Commit) -> None:
        """See ``Drafter``; and learn what the proposals were worth."""
        self.suffix.observe(commit)
        self.second.observe(commit)
        self._light = None
        if not self._has_proposed:
            return
        self._has_proposed = False
        self._light = [
            LightStep.of(row.allowed, row.guess, emitted, proposed=row.score > 0.0, preferred=row.preferred)
            for row, emitted in zip(self.rows, commit.tokens, strict=True)
        ]
        if commit.tree.num_nodes == 1:
            return
        width = commit.guessed or [max(0, count - 1) for count in commit.tree.valid.sum(1).tolist()]
        for row, light, path, guessed in zip(self.rows, self._light, commit.path, width, strict=True):
            if guessed:
                (row.worth.of(row.score) if row.score else row.worth.second).add(len(path) - 1.0)
            if guessed and not row.score and row.known > 0.0 and self._grafts:  # at least so much of suffix's was right
                row.worth.of(row.known).add(float(light.accepted))

    def observe_all(self, commits: Sequence[Commit]) -> None:
        """See ``Drafter``: neither has guessed, so there is nothing to learn."""
        self.suffix.observe_all(commits)
        self.second.observe_all(commits)
        self._light = None

    @property
    def light_steps(self) -> Sequence[LightStep] | None:
        """Suffix's guesses of the last step, those too that the second method's stood in for."""
        return self._light

    def keep(self, rows: Sequence[int]) -> None:
        """See ``Drafter``."""
        self._light = None
        self.suffix.keep(rows)
        self.second.keep(rows)
        self.rows = [self.rows[row] for row in rows]

    def join(self, other: Drafter, context: Context) -> None:
        """See ``Drafter``."""
        assert isinstance(other, HybridDrafter)
        self._light = None
        self.suffix.join(other.suffix, context)
        self.second.join(other.second, context)
        self.rows += other.rows

    def num_unread(self, context: Context) -> list[int]:
        """See ``Drafter``."""
        return self.second.num_unread(context)

    def taps_of(self, row: int) -> Tensor | None:
        """See ``Drafter``."""
        return self.second.taps_of(row)

    def catch_up(self, context: Context, row: int, most: int) -> int:
        """See ``Drafter``."""
        return self.second.catch_up(context, row, most)


@lru_cache(maxsize=256)
def shape_of(shape: Shape, depth: int, num_rows: int) -> Shape:
    """The shape at most so deep, for so many rows that guess. The nodes that a pass reads for little more than one are
    those of all rows together: trees of a size are small where there are several. Not so where they are less deep: who
    plans by depth takes it that first guesses are kept as often whatever the depth."""
    if isinstance(shape, Sized):
        size = shape.size if num_rows == 1 else min(shape.size, SHARED_SIZE, depth)
        return replace(shape, depth=min(shape.depth, depth), size=size)
    return replace(shape, depth=min(shape.depth, depth)) if shape.is_chain else shape


def _by_row(one: TokenTree, other: TokenTree, is_one: Tensor) -> TokenTree:
    """Rows of ``one`` where is_one [B], of ``other`` elsewhere; ``one`` is FIXED."""
    width = max(one.num_nodes, other.num_nodes)
    one, other = pad_tree(one, width), pad_tree(other, width)
    here = is_one[:, None]
    q = None if other.q is None else other.q.masked_fill(here[..., None], 0.0)
    return TokenTree(
        torch.where(here, one.tokens, other.tokens),
        torch.where(here, one.parent, other.parent),
        torch.where(here, one.drawn_by, other.drawn_by),
        q,
        max_children=None if other.max_children is None else max(one.max_children or 1, other.max_children),
        notes=other.notes,
    )


class Hybrid(ForwardingMethod):
    """``--method hybrid``. Its store is suffix's: outputs of requests that have ended."""

    name = "hybrid"
    capabilities = Capabilities(
        "suffix where its match promises more, else a second method (eagle3, draft_model, ...)",
        draws=True,
        needs_head=True,
        reads_target=True,
        shapes=("chain",),
        learns=True,
    )

    def __init__(
        self,
        suffix: Suffix,
        second: Method,
        *,
        shape: Shape,
        discount: float,
        coupled: bool = False,
        by_row: bool = False,
    ) -> None:
        """second: a method whose drafters can be joined, and that runs no layers of the target itself. shape: what it
        grows; coupled: only where it draws COUPLED, and else a chain, since one loaded method serves all verifiers. by_row:
        what proposals are worth is learned by each row alone."""
        self.suffix, self.shape, self.by_row = suffix, shape, by_row
        self.second = self.part = second
        self.discount, self.coupled = discount, coupled
        self.max_positions = second.max_positions
        self._worths: dict[int, Worth] = {}

    def worth_at(self, temperature: float) -> Worth:
        """What proposals are worth to rows of temperatures like this one."""
        return self._worths.setdefault(heat_of(temperature), Worth(self.discount))

    @property
    def light(self) -> Method:
        """Suffix."""
        return self.suffix

    @property
    def trained(self) -> Method:
        """The second method."""
        return self.second

    def with_trained(self, part: Method) -> "Hybrid":
        """See ``Method``: the same suffixes, and the same experience of what either part is worth."""
        made = self._like(self.suffix, second=part, by_row=self.by_row)
        made._worths = self._worths
        return made

    @property
    def learned_bytes(self) -> int:
        """Suffix's."""
        return self.suffix.learned_bytes

    def memory(self) -> dict[str, Tensor]:
        """Suffix's, and ``worths`` [R, 1 + 2 (1 + BINS)]: a heat, and value and weight of each mean."""
        heats = sorted(self._worths.items())
        worths = [
            [float(heat), *(x for mean in worth.means for x in (mean.value, mean.weight))] for heat, worth in heats
        ]
        return {
            **self.suffix.memory(),
            "worths": torch.tensor(worths, dtype=torch.float64).reshape(-1, 1 + 2 * (1 + BINS)),
        }

    def recall(self, memory: Mapping[str, Tensor]) -> None:
        """Both."""
        self.suffix.recall(memory)
        for heat, *figures in memory["worths"].tolist():
            worth = self._worths.setdefault(int(heat), Worth(self.discount))
            for mean, value, weight in zip(worth.means, figures[::2], figures[1::2], strict=True):
                mean.value, mean.weight = value, weight

    def fresh(self) -> "Hybrid":
        """With an empty store."""
        return self._like(self.suffix.fresh())

    def measured(self) -> "Hybrid":
        """Where the second method always guesses, and every guess: steps of suffix's say nothing of the other's cost."""
        made = self._like(self.suffix.fresh(), discount=math.inf)
        made.shape = Chain(self.shape.depth) if self.shape.weighs else self.shape
        return made

    def isolated(self) -> "Hybrid":
        """One object for all rows that share nothing: each learns from its own text alone, and what its own proposals are
        worth. The second method guesses for all of them at once."""
        return self._isolated

    @cached_property
    def _isolated(self) -> "Hybrid":
        return self._like(self.suffix.isolated(), by_row=True)

    def _like(
        self, suffix: Suffix, *, second: Method | None = None, discount: float | None = None, by_row: bool = False
    ) -> "Hybrid":
        """With the same second method, where no other is given, and its shape."""
        second, discount = second or self.second, self.discount if discount is None else discount
        return Hybrid(suffix, second, shape=self.shape, discount=discount, coupled=self.coupled, by_row=by_row)

    def open(self, context: Context, capacity: int, target: Target) -> Drafter:
        """Both drafters."""
        suffix = self.suffix.open(context, capacity, target)
        assert isinstance(suffix, SuffixDrafter)
        worths = [
            Worth(self.discount) if self.by_row else self.worth_at(params.temperature)
            for params in context.processors.params
        ]
        return HybridDrafter(suffix, self.second.open(context, capacity, target), worths, self.shape, self.coupled)
