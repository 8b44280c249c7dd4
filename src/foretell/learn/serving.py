"""The serving side of one adapter: a method whose weights change between two steps.

A proposal and its q come from one set of weights, because weights are swapped only where a proposal begins: the
verifier then judges every guess by the distribution that it was drawn from, whatever is learned meanwhile.
"""

from collections import OrderedDict

from foretell.core.noise import Noise
from foretell.core.tree import DrawMode, TokenTree
from foretell.draft.base import Capabilities, Context, Drafter, Method
from foretell.draft.forwarding import Forwarding, ForwardingMethod
from foretell.draft.shapes import Shape
from foretell.model.target import Target

KEPT = 2
"""Versions kept beside the base."""


class LearnedMethod(ForwardingMethod):
    """A loaded method and the versions made of it. Thread-safe where it says so."""

    def __init__(self, base: Method) -> None:
        self.base = self.part = base
        self.name = base.name
        self.capabilities: Capabilities = base.capabilities
        self.exit_layer, self.max_positions = base.exit_layer, base.max_positions
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
    def runs_as(self) -> str | None:
        """See ``Method``."""
        return self.serving[1].runs_as

    def open(self, context: Context, capacity: int, target: Target) -> Drafter:
        """A drafter of the version that serves now, which goes on with later ones."""
        return LearnedDrafter(self, context, capacity, target)


class LearnedDrafter(Forwarding):
    """A drafter of one version, which adopts the next where a proposal begins."""

    def __init__(self, method: LearnedMethod, context: Context, capacity: int, target: Target) -> None:
        super().__init__(method.serving[1].open(context, capacity, target))
        self.method = method
        self.changes = method.changes

    def _renew(self) -> None:
        if self.changes != self.method.changes:
            self.changes = self.method.changes
            self.adopt(self.method.serving[1])

    def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> TokenTree:
        """The newest version's proposal, with that version's q."""
        self._renew()
        return super().propose(context, shape, draws, noise)

    def join(self, other: Drafter, context: Context) -> None:
        """Both sides adopt the newest version first: one cache holds the keys of one version."""
        assert isinstance(other, LearnedDrafter)
        self._renew()
        other._renew()
        super().join(other, context)

    def num_unread(self, context: Context) -> list[int]:
        """Of the newest version: a draft model reads the texts again after a swap, which the planner counts."""
        self._renew()
        return super().num_unread(context)

    def catch_up(self, context: Context, row: int, most: int) -> int:
        """See ``Drafter``."""
        self._renew()
        return super().catch_up(context, row, most)
