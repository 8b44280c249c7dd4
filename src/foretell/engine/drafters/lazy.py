"""A drafter that is opened at its first proposal and closed after many steps without one.

Reading every prompt with a draft model costs time and memory. A service must not spend them on rows that never guess.
"""

from collections.abc import Sequence

from foretell.core.noise import Noise
from foretell.core.probs import History, Processors
from foretell.core.tree import DrawMode, TokenTree, root_tree
from foretell.draft.base import Commit, Context, Drafter, LightStep, Method
from foretell.draft.shapes import Shape
from foretell.model.target import Target

IDLE_STEPS = 16
"""Steps without a guess after which the drafter is closed. Opening it again reads the texts once, which costs about as
much as keeping it up to date would have."""


class LazyDrafter(Drafter):
    """For methods that can be opened in the middle of a text: ``Capabilities.opens_late``."""

    can_join = True

    def __init__(self, method: Method, num_rows: int, capacity: int, target: Target) -> None:
        """The arguments of ``Method.open``."""
        self.method, self.capacity, self.target = method, capacity, target
        self.drafter: Drafter | None = None
        self.num_rows = num_rows
        self.num_idle = 0

    @property
    def seconds_model(self) -> float:
        """Seconds of the draft model's passes since it was last opened."""
        return 0.0 if self.drafter is None else self.drafter.seconds_model

    def _open(self, context: Context) -> Drafter:
        if self.drafter is None:
            self.drafter = self.method.open(context, self.capacity, self.target)
        return self.drafter

    def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> TokenTree:
        """The drafter's proposal. Where no row has room for a guess: the root alone, and the drafter is not opened."""
        if self.drafter is None and not any(depth_limit > 0 for depth_limit in context.depth_limit):
            return root_tree(context.pending)
        return self._open(context).propose(context, shape, draws, noise)

    def observe(self, commit: Commit) -> None:
        """Forwarded to the drafter if it is open."""
        if self.drafter is None:
            return
        self.num_idle = 0 if commit.tree.num_nodes > 1 else self.num_idle + 1
        if self.num_idle >= IDLE_STEPS:
            self.drafter = None
            return
        self.drafter.observe(commit)

    def observe_all(self, commits: Sequence[Commit]) -> None:
        """Forwarded to the drafter, which is open; it is closed as ``observe`` would close it, after them."""
        assert self.drafter is not None
        self.num_idle += len(commits)
        if self.num_idle >= IDLE_STEPS:
            self.drafter = None
            return
        self.drafter.observe_all(commits)

    @property
    def can_wait(self) -> bool:  # type: ignore[override]
        """The drafter's, while it is open: there is nothing to wait with before."""
        return self.drafter is not None and self.drafter.can_wait

    @property
    def light_steps(self) -> Sequence[LightStep | None] | None:
        """The drafter's, while it is open."""
        return None if self.drafter is None else self.drafter.light_steps

    def keep(self, rows: Sequence[int]) -> None:
        """Forwarded to the drafter if it is open."""
        self.num_rows = len(rows)
        if self.drafter is not None:
            self.drafter.keep(rows)

    def join(self, other: Drafter, context: Context) -> None:
        """Where only one side is open, the other is opened for its rows first. A drafter that cannot add rows is
        closed, and opened for all rows at the next proposal."""
        assert isinstance(other, LazyDrafter)
        opened = [side.drafter for side in (self, other) if side.drafter is not None]
        if not all(drafter.can_join for drafter in opened):
            self.drafter, opened = None, []
        if not opened:
            self.num_rows = context.num_rows
            return
        mine = context.num_rows - other.num_rows
        first, last = part(context, 0, mine), part(context, mine, context.num_rows)
        self._open(first).join(other._open(last), context)
        self.num_rows = context.num_rows

    def catch_up(self, context: Context, row: int, most: int) -> int:
        """Forwarded to the drafter, which is opened first."""
        return self._open(context).catch_up(context, row, most)

    def num_unread(self, context: Context) -> list[int]:
        """Tokens not read by the drafter: the whole text while it is closed."""
        return list(context.lengths) if self.drafter is None else self.drafter.num_unread(context)


def part(
    context: Context,
    start: int,
    stop: int,
    *,
    processors: Processors | None = None,
    depth_limit: list[int] | None = None,
) -> Context:
    """The context of rows [start, stop), as a drafter may read it; with their processors and room, where given."""
    rows = slice(start, stop)
    return Context(
        history=History(context.history.ids[rows], context.history.num_prompt[rows]),
        processors=processors or context.processors.keep(range(start, stop)),
        length=context.length[rows],
        lengths=context.lengths[rows],
        pending=context.pending[rows],
        predictions=context.predictions[rows],
        depth_limit=context.depth_limit[rows] if depth_limit is None else depth_limit,
        paid_limit=None if context.paid_limit is None else context.paid_limit[rows],
        draft_logits=context.draft_logits,
    )


def open_drafter(method: Method, context: Context, capacity: int, target: Target) -> Drafter:
    """``Method.open``, called now or at the first proposal."""
    if method.capabilities.opens_late:
        return LazyDrafter(method, context.num_rows, capacity, target)
    return method.open(context, capacity, target)
