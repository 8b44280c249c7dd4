"""The serving side of one adapter: a method whose weights change between two steps.

A proposal and its q come from one set of weights, because weights are swapped only where a proposal begins: the
verifier then judges every guess by the distribution that it was drawn from, whatever is learned meanwhile.
"""

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor

from foretell.core.noise import Noise
from foretell.core.tree import DrawMode, TokenTree
from foretell.draft.base import Capabilities, Commit, Context, Drafter, Method, PromptChunk
from foretell.draft.shapes import Shape
from foretell.model.target import Target

KEPT = 2
"""Versions kept beside the base."""


class LearnedMethod(Method):
    """A loaded method and the versions made of it. Thread-safe where it says so."""

    def __init__(self, base: Method) -> None:
        self.base = base
        self.name = base.name
        self.capabilities: Capabilities = base.capabilities
        self.exit_layer = base.exit_layer
        self.serving: tuple[int, Method] = (0, base)
        """(number, method) of now: replaced as a whole, so that any thread may read it."""
        self.changes = 0  # how often it was replaced
        self._versions: OrderedDict[int, Method] = OrderedDict({0: base})

    def serve(self, number: int, method: Method) -> None:
        """A version that passed the gate serves from the next proposal on."""
        self._versions[number] = method
        for old in list(self._versions)[1:-KEPT]:
            del self._versions[old]
        self.serving, self.changes = (number, method), self.changes + 1

    def revert(self, number: int | None = None) -> int:
        """Serve an earlier version again: the given one, or the one before; returns its number. The base is always kept."""
        now = self.serving[0]
        earlier = [other for other in self._versions if other < now]
        number = (earlier[-1] if earlier else 0) if number is None or number not in self._versions else number
        for later in [other for other in self._versions if other > number]:
            del self._versions[later]
        self.serving, self.changes = (number, self._versions[number]), self.changes + 1
        return number

    @property
    def versions(self) -> list[int]:
        """Numbers of the versions that are kept."""
        return list(self._versions)

    @property
    def foresees(self) -> bool:
        """See ``Method``."""
        return self.base.foresees

    @property
    def chains_only(self) -> str:
        """See ``Method``."""
        return self.base.chains_only

    @property
    def taps(self) -> tuple[int, ...]:
        """See ``Method``."""
        return self.base.taps

    @property
    def prompt_taps(self) -> tuple[int, ...]:
        """See ``Method``."""
        return self.base.prompt_taps

    @property
    def bytes_per_token(self) -> int:
        """See ``Method``."""
        return self.base.bytes_per_token

    @property
    def bytes_per_row(self) -> int:
        """See ``Method``."""
        return self.base.bytes_per_row

    @property
    def runs_as(self) -> str | None:
        """See ``Method``."""
        return self.serving[1].runs_as

    def open(self, context: Context, capacity: int, target: Target) -> Drafter:
        """A drafter of the version that serves now, which goes on with later ones."""
        return LearnedDrafter(self, context, capacity, target)


class LearnedDrafter(Drafter):
    """A drafter of one version, which adopts the next where a proposal begins."""

    can_join = True

    def __init__(self, method: LearnedMethod, context: Context, capacity: int, target: Target) -> None:
        self.method = method
        self.changes = method.changes
        self.inner = method.serving[1].open(context, capacity, target)
        self.num_candidates = self.inner.num_candidates
        assert self.inner.can_join

    def _renew(self) -> None:
        if self.changes != self.method.changes:
            self.changes = self.method.changes
            self.inner.adopt(self.method.serving[1])

    @property
    def seconds_model(self) -> float:
        """See ``Drafter``."""
        return self.inner.seconds_model

    @property
    def can_wait(self) -> bool:  # type: ignore[override]
        """See ``Drafter``."""
        return self.inner.can_wait

    @property
    def chance(self) -> Tensor | None:
        """See ``Drafter``."""
        return self.inner.chance

    def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> TokenTree:
        """The newest version's proposal, with that version's q."""
        self._renew()
        return self.inner.propose(context, shape, draws, noise)

    def read_prompt(self, chunk: PromptChunk) -> None:
        """See ``Drafter``."""
        self.inner.read_prompt(chunk)

    def observe(self, commit: Commit) -> None:
        """Of the version that proposed."""
        self.inner.observe(commit)

    def observe_all(self, commits: Sequence[Commit]) -> None:
        """See ``Drafter``."""
        self.inner.observe_all(commits)

    def keep(self, rows: Sequence[int]) -> None:
        """See ``Drafter``."""
        self.inner.keep(rows)

    def join(self, other: Drafter, context: Context) -> None:
        """Both sides adopt the newest version first: one cache holds the keys of one version."""
        assert isinstance(other, LearnedDrafter)
        self._renew()
        other._renew()
        self.inner.join(other.inner, context)

    def num_unread(self, context: Context) -> list[int]:
        """Of the newest version: a draft model reads the texts again after a swap, which the planner counts."""
        self._renew()
        return self.inner.num_unread(context)

    def catch_up(self, context: Context, row: int, most: int) -> int:
        """See ``Drafter``."""
        self._renew()
        return self.inner.catch_up(context, row, most)
