"""Two planners in one, for methods of which a part guesses for next to nothing (``hybrid``: suffix, else a draft model).

Each step is one of three: the whole method guesses, its light part alone, or nobody. The light part is planned first, and
what it is expected to bring takes the place of plain decoding when the whole method is weighed. Where steps say whose
guess the whole method proposes, its own guesses and its light part's are known apart (``shares.py``), so that text which
repeats itself speaks for both, whichever guessed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from foretell.planner.acceptance import Acceptance
from foretell.planner.corrections import Corrections
from foretell.planner.costs import CostTable
from foretell.planner.observations import RowView, StepObservation
from foretell.planner.planner import Planner, all_ask
from foretell.planner.shares import LightShares

LIGHT_PERIOD = 4
"""Steps of the whole method after which its light part is weighed again, while the plan stands: it takes a percent of a
small target's pass."""


class LayeredPlanner(Planner):
    """A planner of whole methods, and one of their light parts behind it. Only for mode "auto"."""

    _has_light = True

    def __init__(self, costs: CostTable, acceptance: Acceptance, parts: Mapping[str, str], *, depth: int) -> None:
        """parts: of each method that has one, the name of its light part; ``costs`` knows both. depth: the most that a
        light part guesses."""
        self._shares = LightShares()
        super().__init__(costs, acceptance, shares=self._shares)
        self.parts = dict(parts)
        self.light = Planner(costs, Acceptance(depth), corrections=self.corrections)
        self._rate = 0.0  # tokens a second that the whole method is expected to bring; 0 while it does not guess
        self._lit = False  # whether the last step was the light planner's
        self._unasked = 0  # steps of the whole method since the light planner was asked

    @property
    def trials(self) -> int:
        """Trials so far, of both."""
        return super().trials + self.light.trials

    @property
    def trial_seconds(self) -> float:
        """Seconds that trials were charged, of both."""
        return super().trial_seconds + self.light.trial_seconds

    @property
    def state(self) -> dict[str, float | int | str | bool | None]:
        """See ``Planner``."""
        whole, light = super().state, self.light.state
        now = light if self._lit else whole
        return {**whole, "guessing": now["guessing"], "mean_depth": now["mean_depth"]}

    def use(self, costs: CostTable, corrections: Corrections | None = None) -> None:
        """See ``Planner``."""
        super().use(costs, corrections)
        self._rate = 0.0
        self.light.use(costs, self.corrections)

    def forget(self, request_id: str) -> None:
        """See ``Planner``."""
        super().forget(request_id)
        self._shares.forget(request_id)
        self.light.forget(request_id)

    def plan(self, rows: Sequence[RowView], arriving: int = 0) -> list[int]:
        """See ``Planner``; ``paid`` is 0 for all rows where light parts guess alone."""
        self.paid, self._lit = None, False
        if all_ask(rows):
            return super().plan(rows, arriving)
        self._unasked += 1
        if self._unasked < LIGHT_PERIOD and not arriving and self._goes_on(rows):
            return self._widened(rows, super().plan(rows, arriving))
        self._learn_waiting()
        self._unasked = 0
        if not (self._guessing or self.light._guessing or self.standing.trial or self.light.standing.trial):
            self._age = self.light._age = max(self._age, self.light._age)  # as in ``rest``: both decide in one step
        views = [self._light_view(row) for row in rows]
        before = self._rate
        light = self._plan_light(views, arriving, before)
        standing = self.light.standing
        self._floor = standing.expected.rate if standing.expected is not None and not standing.trial else 0.0
        if not standing.trial:
            caps = super().plan(rows, arriving)
            now = self.standing
            if not self._guessing:
                self._rate = 0.0
            elif now.expected is not None and not now.trial:  # a trial is one step: the rate is that of those around it
                self._rate = now.expected.rate
            if any(caps) or self.standing.trial:
                return self._widened(rows, caps)
            if (
                before and not self._guessing
            ):  # it has given up just now: then its light part need not be better than it was
                light = self._plan_light(views, arriving, 0.0)
        self._lit = True
        self.paid = [0] * len(rows)
        return light

    def again(self, depth_limit: int, *, lagging: bool) -> list[int] | None:
        """See ``Planner``; or while the light part guesses alone."""
        if self.light._guessing and not self._guessing:
            return self._again_light(depth_limit, lagging=lagging)
        if self._unasked + 1 >= LIGHT_PERIOD:
            return None
        caps = super().again(depth_limit, lagging=lagging)
        if caps is None:
            return None
        self._unasked += 1
        self.paid, self._lit = None, False
        ((_, method, most),) = self._ids
        if method not in self.parts:
            return caps
        self.paid = caps
        return [max(cap, min(most, depth_limit)) if cap else 0 for cap in caps]

    def _again_light(self, depth_limit: int, *, lagging: bool) -> list[int] | None:
        light = self.light
        if len(self._ids) != 1 or len(light._ids) != 1 or self.standing.trial or light.standing.trial:
            return None
        if self._age + 1 >= self._patience or light._age + 1 >= light._patience or self._account.is_due:
            return None
        self._age += 1
        light._age += 1
        self._unasked, self._lagging, light._lagging = 0, lagging, False
        self.paid, self._lit, self._caps = [0], True, [0]
        light._caps = [max(min(light.standing.caps[0], depth_limit), 0)]
        return list(light._caps)

    def _widened(self, rows: Sequence[RowView], caps: list[int]) -> list[int]:
        """The whole method guesses as deep as planned (``paid``), and its light part, which is asked in the same step and
        preferred only where it promises more, as deep as there is room."""
        if not any(row.method in self.parts for row in rows):
            return caps
        self.paid = caps
        return [
            max(cap, min(row.max_depth, row.depth_limit)) if cap and row.method in self.parts else cap
            for cap, row in zip(caps, rows, strict=True)
        ]

    def _goes_on(self, rows: Sequence[RowView]) -> bool:
        """Whether the whole method guesses in a plan that stands, so that asking its light part can wait."""
        standing = self._guessing and not self.standing.trial and self._age + 1 < self._patience
        return standing and self._ids == [(row.request_id, row.method, row.max_depth) for row in rows]

    def rest(self) -> bool:
        """See ``Planner``: where both rest."""
        light, ids = self.light, self._ids
        if self._guessing or light._guessing or not ids or not light._ids:  # at length: this is asked before every step
            return False
        if self.standing.trial or light.standing.trial:
            return False
        age = max(self._age, light._age) + 1  # one of them may have decided again for a trial
        if age >= min(self._patience, light._patience) or self._account.is_due or light._account.is_due:
            return False
        self._age = light._age = age
        self.paid, self._lit = [0] * len(self._ids), True
        return True

    def observe_rest(self, batch: int, seconds: float) -> None:
        """See ``Planner``."""
        super().observe_rest(batch, seconds)
        self.light.guessed_last, self.light._unsettled = False, self._unsettled
        if batch > 0 and seconds > 0.0:
            self.light.earn(seconds)

    def _learn_rest(self, batch: int, seconds: float, settled: bool) -> None:
        self.light._learn_rest(batch, seconds, settled)
        self._count(seconds, seconds)

    def _plan_light(self, views: Sequence[RowView], arriving: int, rate: float) -> list[int]:
        """The light planner's plan where the whole method brings so many tokens a second (0: it does not guess). A trial of
        the light part takes the place of a whole step, and is charged what that would have brought."""
        if (rate > 0.0) != (self.light._floor > 0.0):
            self.light.replan()
        self.light._floor = rate
        return self.light.plan(views, arriving)

    def _light_view(self, row: RowView) -> RowView:
        part = self.parts.get(row.method)
        if part is None:  # it has no light part
            return replace(row, max_depth=0, num_unread=0)
        return replace(row, method=part, num_unread=0)

    @property
    def _can_wait(self) -> bool:
        return not self._lit and super()._can_wait

    def _observe(self, step: StepObservation) -> None:
        """See ``Planner``: each step teaches the planner that planned it; and where its rows say what their light parts
        would have done, the other one too. So the light part is known though the whole method guesses, and is not tried in
        its place to find out."""
        self._learn_shares(step)
        if not self._lit:
            if self.paid is not None and len(self.paid) == len(
                step.rows
            ):  # deeper ones are the light part's, and its own
                rows = [
                    replace(row, cap=max(paid, row.drafted) if row.cap else 0)
                    for row, paid in zip(step.rows, self.paid, strict=True)
                ]
                step = replace(step, rows=rows)
            super()._observe(step)
            self.light._unsettled = self._unsettled
            self.light.earn(step.seconds)
            self._learn_light(step)
            return
        rows = [replace(row, method=self.parts.get(row.method, row.method), by_light=None) for row in step.rows]
        self.light._unsettled = self._unsettled
        if not any(row.drafted for row in rows):
            self._settles(step.batch, step.seconds)
        self.light._observe(replace(step, rows=rows))
        self.earn(step.seconds)
        self.guessed_last = self.light.guessed_last
        worth, seconds = self.light.last
        if seconds:
            self._count(worth, seconds)

    def _learn_shares(self, step: StepObservation) -> None:
        for row in step.rows:
            if row.by_light is not None and row.cap:
                nodes, accepted = (row.num_nodes, row.accepted) if row.by_light else (0, 0)
                self._shares.observe(row.request_id, row.method, row.heat, nodes, accepted)

    def _learn_light(self, step: StepObservation) -> None:
        known = [(row, part, row.light) for row in step.rows if (part := self.parts.get(row.method)) and row.light]
        if known:
            self.light.acceptance.tick()
        for row, part, (cap, drafted, accepted) in known:
            self.light.acceptance.observe(row.request_id, part, cap, drafted, accepted, heat=row.heat)
