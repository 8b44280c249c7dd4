"""A drafter's stand-in in steps in which no row guesses, of which the drafter learns later, several together.

Where guessing does not pay, what a step costs beside plain decoding is what its drafter remembers of it. After a pass code
and data are cold: many calls together take little more than one there.
"""

from dataclasses import replace

from foretell.core.noise import Noise
from foretell.core.tree import DrawMode, TokenTree, root_tree
from foretell.draft.base import Commit, Context, Drafter
from foretell.draft.shapes import Shape

TOGETHER = 64
"""Steps that a drafter observes together, at most: as many as the next step that guesses may find waiting ..."""
MOST_BYTES = 2**20
"""... and bytes of taps of a row that wait for it."""


class RestingDrafter(Drafter):
    """Proposes the root alone, and keeps the commits of such steps for a drafter that ``can_wait``."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self._waiting: list[Commit] = []
        self._most = TOGETHER

    @property
    def num_candidates(self) -> int:  # type: ignore[override]
        """The drafter's."""
        return self.drafter.num_candidates

    def told(self) -> Drafter:
        """The drafter, once it has been told of all steps."""
        if self._waiting:
            commits, self._waiting = self._waiting, []
            self.drafter.observe_all(commits)
        return self.drafter

    def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> TokenTree:
        """One node a row."""
        return root_tree(context.pending)

    def observe(self, commit: Commit) -> None:
        """Keep it. Where a row ends the drafter observes at once: what it learns of an output is for the next request."""
        if commit.taps is not None and not commit.taps.is_cpu:  # a captured graph writes them over
            commit = replace(commit, taps=commit.taps.clone())
        if commit.taps is not None and not self._waiting:
            self._most = min(TOGETHER, max(1, MOST_BYTES // max(1, commit.taps[:1].nbytes)))
        self._waiting.append(commit)
        if len(self._waiting) >= self._most or True in commit.ended:
            self.told()
