"""Several methods in one (SuffixDecoding, 2411.04975, section 4: "hybrid"): repeated text from suffixes, new text from a
draft.

In every step each row asks its suffix automata first. Where they promise more kept tokens than the second method has been
keeping, their guess is proposed, free of cost; else the second method guesses. What either is worth is learned from what
was kept at temperatures like the row's: a suffix proposal by its score, the second method by the mean of its proposals.
Where the second method grows trees, the first tokens of a suffix that promised less stand in them too.

Behind suffix may stand further *members*: the row takes the one that has been keeping most. One that looks its guess up
for nothing counts where it has found one. Which of them guesses is decided before anything is drawn.
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
from foretell.core.tree import DrawMode, TokenTree, root_tree
from foretell.core.upload import tensor_on
from foretell.draft.base import Capabilities, Commit, Context, Drafter, LightStep, Method, PromptChunk
from foretell.draft.chances import Mean
from foretell.draft.forwarding import ForwardingMethod, joined_layers
from foretell.draft.native import Node, tree_of
from foretell.draft.shapes import Chain, Shape, Sized
from foretell.draft.suffix import Suffix, SuffixDrafter
from foretell.methods.hybrid.graft import by_row, graft
from foretell.model.target import Target
from foretell.verify.base import pick_layers

BINS, BIN = 16, 0.5
"""Scores of suffix proposals have so many bins: below BIN, below 2 BIN, ... The lowest decide: a guess of one token that is
likely and one that is not both score below 1, and only the first is worth more than a second method's."""
SHARED_SIZE = 2
"""Guesses of a row's tree at most where several rows guess, if nobody chose its shape."""
MOST_GRAFTED = 4
"""Tokens of a suffix that are put into a tree of the second method at most."""


@dataclass
class Worth:
    """Kept guesses that a proposal of each method brings."""

    discount: float  # what a token by the second method is worth: its guesses cost time
    second: Mean = field(default_factory=lambda: Mean(1.0))
    suffix: list[Mean] = field(default_factory=lambda: [Mean((k + 0.4) * BIN) for k in range(BINS)])

    others: list[Mean] = field(default_factory=list)  # of the members behind the second

    @property
    def means(self) -> list[Mean]:
        """All of them."""
        return [self.second, *self.suffix, *self.others]

    def of(self, score: float) -> Mean:
        """The mean of suffix proposals with scores like this one."""
        return self.suffix[min(BINS - 1, int(score / BIN))]

    def num_grafted(self, score: float) -> int:
        """How many tokens of a suffix proposal of this score stand in a tree of the second method: the expected ones and as
        many again, since nodes cost little."""
        return min(MOST_GRAFTED, 1 + round(2.0 * self.of(score).value)) if score > 0.0 else 0

    def best(self, found: Sequence[bool | None]) -> tuple[int, float]:
        """(which member promises most, the first of equal ones; tokens a step by it). found: whether each has looked up a
        guess; None: it would compute one."""
        each = zip(found, [self.second, *self.others], strict=True)
        promised = [(self.discount if one is None else float(one)) * (1.0 + mean.value) for one, mean in each]
        return promised.index(max(promised)), max(promised)

    def prefers_suffix(self, score: float, promised: float | None = None) -> bool:
        """Whether a suffix proposal of this score brings more tokens a step, the one of the target counted, than the best
        member has promised (None: than the second method)."""
        promised = self.discount * (1.0 + self.second.value) if promised is None else promised
        return score > 0.0 and 1.0 + self.of(score).value >= promised


@dataclass(slots=True)
class _Row:
    """One row, and what suffix found for it in this step."""

    worth: Worth  # one object for all rows that share it
    allowed: int = 0  # how deep suffix might guess
    guess: list[int] = field(default_factory=list)  # suffix's
    known: float = 0.0  # its score
    score: float = 0.0  # the same, 0 where a member guessed
    member: int = 0  # which promised most
    grafts: bool = False  # whether its tree may hold tokens of suffix's
    preferred: bool | None = None  # whether the whole method takes suffix's, or would where it guesses


_Member = tuple[Method, Drafter]


class HybridDrafter(Drafter):
    """A drafter of each kind for the same rows; all observe every step, so each can guess in any of them."""

    can_join = True

    def __init__(
        self, suffix: SuffixDrafter, members: Sequence[_Member], worths: Sequence[Worth], shape: Shape, coupled: bool
    ) -> None:
        """worths: of each row, one for all where they share it. shape: what members grow that can; coupled: only where
        they draw COUPLED, and else a chain."""
        self.suffix, self.members, self.shape, self.coupled = suffix, members, shape, coupled
        self.rows = [_Row(worth) for worth in worths]
        self._has_proposed = False  # since the last step
        self._light: list[LightStep] | None = None
        self._layers = joined_layers([method.taps for method, _ in members])
        self._free = [is_free(method) for method, _ in members]
        self.can_wait = all(drafter.can_wait for _, drafter in members)  # suffix can, and be joined
        self.can_join = all(drafter.can_join for _, drafter in members)  # type: ignore[misc]

    def read_prompt(self, chunk: PromptChunk) -> None:
        """See ``Drafter``."""
        for method, drafter in self.members:
            if method.taps:
                taps = pick_layers(chunk.taps, self._layers, method.taps)
                drafter.read_prompt(chunk if taps is chunk.taps or taps is None else replace(chunk, taps=taps))

    def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> TokenTree:
        """FIXED chains in rows that follow a suffix, trees of the best member in all others that may spend time."""
        self._has_proposed = True
        if not any(context.depth_limit):  # asked not to guess, as in most steps where guessing does not pay
            for row in self.rows:
                row.allowed, row.guess, row.known, row.score, row.preferred = 0, [], 0.0, 0.0, None
            return root_tree(context.pending)
        found = self.suffix.guesses(context, shape)
        paid = context.depth_limit if context.paid_limit is None else context.paid_limit
        most = list(map(min, context.depth_limit, paid))
        reduced = _limited(context, most) if any(self._free) else context
        each = zip(self.members, self._free, strict=True)
        looked = [one.propose(reduced, shape, draws, noise) if free else None for (_, one), free in each]
        has = [[None] * len(most) if tree is None else tree.valid[:, 1:].any(1).tolist() for tree in looked]
        shape = Chain(self.shape.depth) if self.coupled and draws != DrawMode.COUPLED else self.shape
        nodes: list[list[Node]] = []
        limits = [[0] * len(most) for _ in looked]
        for at, (row, (guess, score), limit) in enumerate(zip(self.rows, found, context.depth_limit, strict=True)):
            row.allowed, row.guess, row.known = limit, [token for _, token in guess], score
            row.member, promised = row.worth.best([each[at] for each in has])
            row.grafts = looked[row.member] is None and not shape.is_chain
            row.preferred = row.worth.prefers_suffix(score, promised)
            follows = row.preferred or (score > 0.0 and not paid[at])
            row.score = score if follows else 0.0
            nodes.append(guess if follows else [])
            limits[row.member][at] = 0 if follows else min(most[at], self.shape.depth)
        num_guessing = sum(map(any, zip(*limits, strict=True))) if self.coupled else 1
        other: TokenTree | None = None
        for (method, one), wanted, tree in zip(self.members, limits, looked, strict=True):
            if not any(wanted):
                continue
            if tree is None:
                own = shape if shape.name in method.capabilities.shapes else Chain(shape.depth)
                own = shape_of(own, max(wanted), num_guessing)
                tree = self._grafted(one.propose(_limited(context, wanted), own, draws, noise), wanted)
            # No other row has a guess in the first: each is of the best member, of suffix, or may not guess.
            other = tree if other is None else by_row(tree, other, tensor_on(context.device, list(map(bool, wanted))))
        if other is None:
            return tree_of(context, nodes)
        chosen = [row.score > 0.0 for row in self.rows]
        if not any(chosen):
            return other
        return by_row(tree_of(context, nodes), other, tensor_on(context.device, chosen))

    def _grafted(self, tree: TokenTree, limits: Sequence[int]) -> TokenTree:
        """A member's tree with the first tokens of suffixes, where it may hold them."""
        grafts = [
            row.guess[: row.worth.num_grafted(row.known)] if limit > 0 and row.grafts else []
            for row, limit in zip(self.rows, limits, strict=True)
        ]
        return graft(tree, grafts) if tree.q is None and any(grafts) else tree

    def observe(self, commit: Commit) -> None:
        """See ``Drafter``; and learn what the proposals were worth."""
        self.suffix.observe(commit)
        for method, drafter in self.members:
            drafter.observe(self._own(commit, method))
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
                mean = row.worth.of(row.score) if row.score else [row.worth.second, *row.worth.others][row.member]
                mean.add(len(path) - 1.0)
            if guessed and not row.score and row.known > 0.0 and row.grafts:  # at least so much of suffix's was right
                row.worth.of(row.known).add(float(light.accepted))

    def _own(self, commit: Commit, method: Method) -> Commit:
        """With the taps that a member reads."""
        taps = pick_layers(commit.taps, self._layers, method.taps)
        return commit if taps is commit.taps else replace(commit, taps=taps)

    def observe_all(self, commits: Sequence[Commit]) -> None:
        """See ``Drafter``: none has guessed, so there is nothing to learn."""
        self.suffix.observe_all(commits)
        for method, drafter in self.members:
            drafter.observe_all([self._own(commit, method) for commit in commits])
        self._light = None

    @property
    def light_steps(self) -> Sequence[LightStep] | None:
        """Suffix's guesses of the last step, those too that a member's stood in for."""
        return self._light

    def keep(self, rows: Sequence[int]) -> None:
        """See ``Drafter``."""
        self._light = None
        self.suffix.keep(rows)
        for _, drafter in self.members:
            drafter.keep(rows)
        self.rows = [self.rows[row] for row in rows]

    def join(self, other: Drafter, context: Context) -> None:
        """See ``Drafter``."""
        assert isinstance(other, HybridDrafter)
        self._light = None
        self.suffix.join(other.suffix, context)
        for (_, mine), (_, its) in zip(self.members, other.members, strict=True):
            mine.join(its, context)
        self.rows += other.rows

    def num_unread(self, context: Context) -> list[int]:
        """See ``Drafter``: of the member that would read most."""
        return list(map(max, zip(*(drafter.num_unread(context) for _, drafter in self.members), strict=True)))

    def taps_of(self, row: int) -> Tensor | None:
        """See ``Drafter``: where one member alone reads any."""
        readers = [drafter for method, drafter in self.members if method.taps]
        return readers[0].taps_of(row) if len(readers) == 1 else None

    def catch_up(self, context: Context, row: int, most: int) -> int:
        """See ``Drafter``: each member reads so much."""
        return max(drafter.catch_up(context, row, most) for _, drafter in self.members)


def is_free(method: Method) -> bool:
    """Whether a method looks its guesses up: they cost next to nothing, and none is drawn."""
    can = method.capabilities
    return not (can.draws or can.needs_draft or can.needs_head or can.reads_target)


def _limited(context: Context, limits: list[int]) -> Context:
    """With these limits of depth."""
    reduced = copy.copy(context)
    reduced.depth_limit = limits
    return reduced


@lru_cache(maxsize=256)
def shape_of(shape: Shape, depth: int, num_rows: int) -> Shape:
    """The shape at most so deep, for so many rows that guess. The nodes that a pass reads for little more than one are
    those of all rows together: trees of a size are small where there are several. Not so where they are less deep: who
    plans by depth takes it that first guesses are kept as often whatever the depth."""
    if isinstance(shape, Sized):
        size = shape.size if num_rows == 1 else min(shape.size, SHARED_SIZE, depth)
        return replace(shape, depth=min(shape.depth, depth), size=size)
    return replace(shape, depth=min(shape.depth, depth)) if shape.is_chain else shape


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
        others: Sequence[Method] = (),
    ) -> None:
        """second: a method that runs no layers of the target itself. shape: what it grows; coupled: only where it draws
        COUPLED, and else a chain, since one loaded method serves all verifiers. by_row: what proposals are worth is
        learned by each row alone. others: further methods like the second; those that cannot grow shape grow chains."""
        self.suffix, self.shape, self.by_row = suffix, shape, by_row
        self.second = self.part = second
        self.others, self.members = others, (second, *others)
        self.discount, self.coupled = discount, coupled
        self.max_positions = min(
            (each for one in self.members if (each := one.max_positions) is not None), default=None
        )
        self._worths: dict[int, Worth] = {}

    def _worth(self) -> Worth:
        """Before anything is seen."""
        return Worth(self.discount, others=[Mean(1.0) for _ in self.others])

    def worth_at(self, temperature: float) -> Worth:
        """What proposals are worth to rows of temperatures like this one."""
        return self._worths.setdefault(heat_of(temperature), self._worth())

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
        made = self._like(self.suffix, [part, *self.others], by_row=self.by_row)
        made._worths = self._worths
        return made

    @property
    def learned_bytes(self) -> int:
        """Suffix's."""
        return self.suffix.learned_bytes

    def memory(self) -> dict[str, Tensor]:
        """Suffix's, and ``worths`` [R, 1 + 2 M]: a heat, and value and weight of each of the M ``Worth.means``."""
        heats = sorted(self._worths.items())
        worths = [
            [float(heat), *(x for mean in worth.means for x in (mean.value, mean.weight))] for heat, worth in heats
        ]
        return {
            **self.suffix.memory(),
            "worths": torch.tensor(worths, dtype=torch.float64).reshape(-1, 1 + 2 * len(self._worth().means)),
        }

    def recall(self, memory: Mapping[str, Tensor]) -> None:
        """Both."""
        self.suffix.recall(memory)
        for heat, *figures in memory["worths"].tolist():
            worth = self._worths.setdefault(int(heat), self._worth())
            for mean, value, weight in zip(worth.means, figures[::2], figures[1::2], strict=True):
                mean.value, mean.weight = value, weight

    def fresh(self) -> "Hybrid":
        """With an empty store."""
        return self._like(self.suffix.fresh(), [one.fresh() for one in self.members])

    def measured(self) -> "Hybrid":
        """Where the second method always guesses, and every guess: steps of suffix's say nothing of the other's cost."""
        made = self._like(self.suffix.fresh(), [one.measured() for one in self.members], discount=math.inf)
        made.shape = Chain(self.shape.depth) if self.shape.weighs else self.shape
        return made

    def isolated(self) -> "Hybrid":
        """One object for all rows that share nothing: each learns from its own text alone, and what its own proposals are
        worth. The second method guesses for all of them at once."""
        return self._isolated

    @cached_property
    def _isolated(self) -> "Hybrid":
        return self._like(self.suffix.isolated(), [one.isolated() for one in self.members], by_row=True)

    def _like(
        self, suffix: Suffix, members: Sequence[Method], *, discount: float | None = None, by_row: bool = False
    ) -> "Hybrid":
        """Of these parts, with the same shape."""
        second, *others = members
        discount = self.discount if discount is None else discount
        return Hybrid(
            suffix, second, shape=self.shape, discount=discount, coupled=self.coupled, by_row=by_row, others=others
        )

    def open(self, context: Context, capacity: int, target: Target) -> Drafter:
        """All drafters."""
        suffix = self.suffix.open(context, capacity, target)
        assert isinstance(suffix, SuffixDrafter)
        temperatures = [params.temperature for params in context.processors.params]
        worths = [self._worth() if self.by_row else self.worth_at(each) for each in temperatures]
        members = [(method, method.open(context, capacity, target)) for method in self.members]
        return HybridDrafter(suffix, members, worths, self.shape, self.coupled)
