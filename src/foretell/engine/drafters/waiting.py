"""Steps in which no row guesses, of which a drafter learns later, several together.

Where guessing does not pay, what a step costs beside plain decoding is what its drafter remembers of it. After a pass code
and data are cold: many calls together take little more than one there.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from foretell.core.noise import Noise
from foretell.core.tree import DrawMode, TokenTree, root_tree
from foretell.draft.base import Commit, Context, Drafter, LightStep
from foretell.draft.forwarding import Forwarding
from foretell.draft.shapes import Shape

_T = TypeVar("_T")
MOST_COMMITS = 64
"""Commits that wait at most: as many as the next step that guesses may have to read ..."""
MOST_TAP_BYTES = 2**20
"""... and bytes of their taps, of one row."""


class WaitingDrafter(Forwarding):
    """Commits of steps without guesses wait here, if the inner drafter ``can_wait``. Any other call comes after them."""

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
