"""A drafter that is opened at its first proposal and closed after many steps without one.

Reading every prompt with a draft model costs time and memory. A service must not spend them on rows that never guess.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from foretell.core.noise import Noise
from foretell.core.probs import History, Processors
from foretell.core.tree import DrawMode, TokenTree, root_tree
from foretell.draft.base import Commit, Context, Drafter, LightStep, Method
from foretell.draft.forwarding import Forwarding
from foretell.draft.shapes import Shape
from foretell.model.target import Target

IDLE_STEPS = 16
"""Steps without a guess after which the drafter is closed. Opening it again reads the texts once, which costs about as
much as keeping it up to date would have."""


class LazyDrafter(Forwarding):
    """For methods that can be opened in the middle of a text: ``Capabilities.opens_late``."""

    can_join = True
    """One whose drafters cannot add rows is closed, and opened for all rows."""

    def __init__(self, method: Method, num_rows: int, capacity: int, target: Target) -> None:
        """The arguments of ``Method.open``."""
        super().__init__(None)
        self.method, self.capacity, self.target = method, capacity, target
        self.num_rows = num_rows
        self.num_idle = 0

    def _open(self, context: Context) -> Drafter:
        if self.inner is None:
            self.inner = self.method.open(context, self.capacity, self.target)
        return self.inner

    def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> TokenTree:
        """The drafter's proposal. Where no row has room for a guess: the root alone, and the drafter is not opened."""
        if self.inner is None and not any(depth_limit > 0 for depth_limit in context.depth_limit):
            return root_tree(context.pending)
        return self._open(context).propose(context, shape, draws, noise)

    def observe(self, commit: Commit) -> None:
        """Forwarded to the drafter if it is open."""
        self._idle(0 if commit.tree.num_nodes > 1 else self.num_idle + 1)
        super().observe(commit)

    def observe_all(self, commits: Sequence[Commit]) -> None:
        """Forwarded to the drafter, which is open; it is closed as ``observe`` would close it, after them."""
        self._idle(self.num_idle + len(commits))
        super().observe_all(commits)

    def _idle(self, num_idle: int) -> None:
        """It has not guessed in so many steps."""
        if self.inner is not None:
            self.num_idle = num_idle
            if num_idle >= IDLE_STEPS:
                self.inner = None

    def keep(self, rows: Sequence[int]) -> None:
        """Forwarded to the drafter if it is open."""
        self.num_rows = len(rows)
        super().keep(rows)

    def join(self, other: Drafter, context: Context) -> None:
        """Where only one side is open, the other is opened for its rows first. A drafter that cannot add rows is
        closed, and opened for all rows at the next proposal."""
        assert isinstance(other, LazyDrafter)
        opened = [side.inner for side in (self, other) if side.inner is not None]
        if not all(drafter.can_join for drafter in opened):
            self.inner, opened = None, []
        if opened:
            mine = context.num_rows - other.num_rows
            first, last = part(context, 0, mine), part(context, mine, context.num_rows)
            self._open(first).join(other._open(last), context)
        self.num_rows = context.num_rows

    def catch_up(self, context: Context, row: int, most: int) -> int:
        """Forwarded to the drafter, which is opened first."""
        return self._open(context).catch_up(context, row, most)

    def num_unread(self, context: Context) -> list[int]:
        """Tokens not read by the drafter: the whole text while it is closed."""
        return list(context.lengths) if self.inner is None else self.inner.num_unread(context)


def part(context: Context, start: int, stop: int, *, processors: Processors | None = None) -> Context:
    """The context of rows [start, stop), as a drafter may read it; with their processors, where given."""
    rows = slice(start, stop)
    return Context(
        history=History(context.history.ids[rows], context.history.num_prompt[rows], (context.history, start)),
        processors=processors or context.processors.keep(range(start, stop)),
        length=context.length[rows],
        lengths=context.lengths[rows],
        pending=context.pending[rows],
        predictions=context.predictions[rows],
        depth_limit=context.depth_limit[rows],
        paid_limit=None if context.paid_limit is None else context.paid_limit[rows],
        least_chance=context.least_chance,
        probe=context.probe,
        graphs=context.graphs,
    )


def open_drafter(method: Method, context: Context, capacity: int, target: Target) -> Drafter:
    """``Method.open``, called now or at the first proposal."""
    if method.capabilities.opens_late:
        return LazyDrafter(method, context.num_rows, capacity, target)
    return method.open(context, capacity, target)


_T = TypeVar("_T")
MOST_COMMITS = 64
"""Commits that wait at most: as many as the next step that guesses may have to read ..."""
MOST_TAP_BYTES = 2**20
"""... and bytes of their taps, of one row."""


class WaitingDrafter(Forwarding):
    """Commits of steps without guesses wait here, if the inner drafter ``can_wait``. Any other call comes after them.

    Where guessing does not pay, what a step costs beside plain decoding is what its drafter remembers of it. After
    a pass code and data are cold: many calls together take little more than one there.
    """

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner)
        self._commits: list[Commit] = []
        self._most = MOST_COMMITS
        self._waits = False

    def _call(self, call: Callable[[Drafter], _T], instead: _T) -> _T:
        if self._commits:
            commits, self._commits = self._commits, []
            self._read(lambda inner: inner.observe_all(commits), None)
        return super()._call(call, instead)

    @property
    def light_steps(self) -> Sequence[LightStep | None] | None:
        """See ``Drafter``; of steps that wait it is not known."""
        return None if self._commits else super().light_steps

    def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> TokenTree:
        """The root alone where no row may guess, and the inner drafter is not asked if it ``can_wait``."""
        self._waits = max(context.depth_limit) <= 0 and self.can_wait
        return root_tree(context.pending) if self._waits else super().propose(context, shape, draws, noise)

    def observe(self, commit: Commit) -> None:
        """Where a row ends, nothing waits: what a drafter learns of an output is for the next request."""
        if not self._waits:
            super().observe(commit)
            return
        if commit.taps is not None and not commit.taps.is_cpu:  # a captured graph writes them over
            commit = replace(commit, taps=commit.taps.clone())
        if commit.taps is not None and not self._commits:
            self._most = min(MOST_COMMITS, max(1, MOST_TAP_BYTES // max(1, commit.taps[:1].nbytes)))
        self._commits.append(commit)
        if len(self._commits) >= self._most or True in commit.ended:
            self._call(lambda inner: None, None)

    def observe_all(self, commits: Sequence[Commit]) -> None:
        """Steps without guesses, of an inner drafter that ``can_wait``."""
        self._waits = True
        for commit in commits:
            self.observe(commit)

    def join(self, other: Drafter, context: Context) -> None:
        """See ``Drafter``: other's rows have just been read, and nothing waits for them."""
        self._call(lambda inner: inner.join(other, context), None)
