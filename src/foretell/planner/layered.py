"""Two planners, for methods of which a part guesses for next to nothing (``hybrid``: suffix, else a draft model).

Each step is one of three: the whole method guesses, its light part alone, or nobody. The light part is planned first, and
what it is expected to bring takes the place of plain decoding when the whole method is weighed. Where steps say whose
guess the whole method proposes, its own guesses and its light part's are known apart (``shares.py``), so that text which
repeats itself speaks for both, whichever guessed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from foretell.planner.acceptance import Acceptance
from foretell.planner.costs import CostTable
from foretell.planner.ledger import Ledger, Waiting
from foretell.planner.observations import RowView, StepObservation
from foretell.planner.outlook import Cell
from foretell.planner.plan import StepPlan
from foretell.planner.planner import Planner, all_ask
from foretell.planner.shares import LightShares

LIGHT_PERIOD = 4
"""Steps of the whole method after which its light part is weighed again, while the plan stands: it takes a percent of a
small target's pass."""


class LayeredPlanner:
    """A planner of whole methods, and one of their light parts behind it. Only for mode "auto"."""

    def __init__(self, costs: CostTable, acceptance: Acceptance, parts: Mapping[str, str]) -> None:
        """parts: of each method that has one, the name of its light part; ``costs`` knows both."""
        self.parts = dict(parts)
        self._ledger = Ledger(costs.methods, num_planners=2)
        self._shares = LightShares()
        self.whole = Planner(costs, acceptance, ledger=self._ledger, shares=self._shares)
        self.light = Planner(costs, Acceptance(acceptance.max_depth, weighed=acceptance.weighed), ledger=self._ledger)
        self._waiting = Waiting(self.learn)
        self._rate = 0.0  # tokens a second that the whole method is expected to bring; 0 while it does not guess
        self._unasked = 0  # steps of the whole method since the light planner was asked
        self._rest = StepPlan([])  # of the last steps in which neither guessed
        self._lit = False  # whether the last plan was the light planner's
        self._widest: list[int] = []  # of the rows of the whole planner's plan: how deep their light parts may guess

    @property
    def acceptances(self) -> dict[str, Acceptance]:
        """See ``Planner``."""
        return {"whole": self.whole.acceptance, "light": self.light.acceptance}

    @property
    def costs(self) -> CostTable:
        """The table that is planned by."""
        return self.whole.costs

    @property
    def speedup(self) -> float | None:
        """See ``Planner``."""
        return self.whole.speedup

    @property
    def contradiction(self) -> str | None:
        """See ``Planner``."""
        return self.whole.contradiction

    @property
    def state(self) -> dict[str, float | int | str | bool | None]:
        """See ``Planner``."""
        whole = self.whole.state
        now = self.light.state if self._lit else whole
        return {**whole, "guessing": now["guessing"], "mean_depth": now["mean_depth"]}

    def outlook(self, longest: int, max_rows: int) -> list[Cell]:
        """See ``Planner``: of whole methods by their own guesses, and of light parts."""
        light = [cell for cell in self.light.outlook(longest, max_rows) if cell.method in self.parts.values()]
        return self.whole.outlook(longest, max_rows) + light

    def why_not(self, method: str) -> str:
        """See ``Planner``."""
        return self.whole.why_not(method)

    def use(self, costs: CostTable) -> None:
        """See ``Planner``."""
        self._waiting.flush()
        self._ledger = Ledger(costs.methods, self._ledger.speed, num_planners=2)
        self.whole.use(costs, self._ledger)
        self.light.use(costs, self._ledger)
        self._rate = 0.0

    def forget(self, request_id: str) -> None:
        """See ``Planner``."""
        self._waiting.flush()
        self.whole.forget(request_id)
        self._shares.forget(request_id)
        self.light.forget(request_id)
        self._rest = StepPlan([])  # which names those that it was made for

    def will_guess(self, rows: Sequence[RowView]) -> bool:
        """See ``Planner``: the whole method."""
        self._waiting.flush()
        return self.whole.will_guess(rows)

    # -- before a step -----------------------------------------------------------------------------------------------

    def plan(self, rows: Sequence[RowView], arriving: int = 0) -> StepPlan:
        """See ``Planner``; ``paid`` is 0 for all rows where light parts guess alone."""
        whole, light = self.whole, self.light
        if all_ask(rows):
            self._lit = False
            return whole.plan(rows, arriving)
        self._unasked += 1
        if self._unasked < LIGHT_PERIOD and not arriving and whole.guessing and whole.stands_for(rows):
            return self._of_whole(whole.plan(rows), rows)
        self._waiting.flush()
        self._unasked = 0
        if not (whole.guessing or light.guessing or whole.standing.trial or light.standing.trial):
            whole.age = light.age = max(whole.age, light.age)  # as in ``again``: both decide in one step
        views = [self._light_view(row) for row in rows]
        before = self._rate
        planned = self._plan_light(views, arriving, before)
        standing = light.standing
        floor = standing.expected.rate if standing.expected is not None and not standing.trial else 0.0
        if len(rows) == 1 and abs(floor - whole.floor) > 0.05 * floor:
            whole.replan()
        whole.floor = floor
        if not standing.trial:
            first = whole.plan(rows, arriving)
            now = whole.standing
            if not now.guessing:
                self._rate = 0.0
            elif now.expected is not None and not now.trial:  # a trial is one step: the rate is that of those around it
                self._rate = now.expected.rate
            if any(first.caps) or now.trial:
                return self._of_whole(first, rows)
            if before and not now.guessing:  # it gave up just now: its light part need not be better than it was
                planned = self._plan_light(views, arriving, 0.0)
        return self._of_light(planned)

    def again(self, depth_limit: int, *, lagging: bool) -> StepPlan | None:
        """See ``Planner``: whoever guesses, or neither."""
        whole, light = self.whole, self.light
        if whole.members != light.members:  # one was not asked when the rows changed: what it planned is of others
            return None
        if light.skips:
            whole.age += 1
            light.again(depth_limit, lagging=False)
            return self._rest
        if whole.guessing:
            if self._unasked + 1 >= LIGHT_PERIOD or (plan := whole.again(depth_limit, lagging=lagging)) is None:
                return None
            self._unasked += 1
            return self._widened(plan, [depth_limit])
        if not light.guessing:
            whole.age = light.age = max(whole.age, light.age)  # one of them may have decided again for a trial
        if not whole.stands or (plan := light.again(depth_limit, lagging=False)) is None:
            return None
        light.skips = min(light.skips, whole.most_skips)
        whole.age += 1
        self._unasked = 0
        self._rest = self._of_light(plan)
        return self._rest

    def _plan_light(self, views: Sequence[RowView], arriving: int, rate: float) -> StepPlan:
        """The light planner's plan where the whole method brings so many tokens a second (0: it does not guess). A trial of
        the light part takes the place of a whole step, and is charged what that would have brought."""
        if (rate > 0.0) != (self.light.floor > 0.0):
            self.light.replan()
        self.light.floor = rate
        return self.light.plan(views, arriving)

    def _light_view(self, row: RowView) -> RowView:
        part = self.parts.get(row.method)
        if part is None:  # it has no light part
            return replace(row, max_depth=0, num_unread=0)
        return replace(row, method=part, num_unread=0)

    def _of_light(self, plan: StepPlan) -> StepPlan:
        self._lit = True
        none = [0] * len(plan.caps)
        return StepPlan(
            plan.caps, none, least=plan.least, together=plan.together, inner=plan, light=True, members=plan.members
        )

    def _of_whole(self, plan: StepPlan, rows: Sequence[RowView]) -> StepPlan:
        self._widest = [row.max_depth if row.method in self.parts else 0 for row in rows]
        return self._widened(plan, [row.depth_limit for row in rows])

    def _widened(self, plan: StepPlan, limits: Sequence[int]) -> StepPlan:
        """The whole method guesses as deep as planned (``paid``), and its light part, which is asked in the same step and
        preferred only where it promises more, as deep as there is room."""
        self._lit = False
        if not any(self._widest):
            return plan
        rows = zip(plan.caps, self._widest, limits, strict=True)
        caps = [max(cap, min(most, limit)) if cap else 0 for cap, most, limit in rows]
        return StepPlan(caps, plan.caps, least=plan.least, together=plan.together, inner=plan, members=plan.members)

    # -- after a step ------------------------------------------------------------------------------------------------

    def observe(self, plan: StepPlan, step: StepObservation) -> None:
        """See ``Planner``."""
        if step.batch > 0 and step.seconds > 0.0:
            self._ledger.account.earn(step.seconds)
            self._waiting.add(plan, step)

    def learn(self, plan: StepPlan, step: StepObservation) -> None:
        """See ``Planner``: each step teaches the planner that planned it; and where its rows say what their light parts
        would have done, the other one too. So the light part is known though the whole method guesses, and is not tried in
        its place to find out."""
        inner, rows = plan.inner or plan, step.rows
        if not rows:
            (self.light if plan.light else self.whole).learn(inner, step)
            return
        self._learn_shares(step)
        if plan.light:
            rows = [replace(row, method=self.parts.get(row.method, row.method), by_light=None) for row in rows]
            self.light.learn(inner, replace(step, rows=rows))
            return
        if plan.paid is not None and rows:  # deeper ones are the light part's, and its own
            rows = [
                replace(row, cap=max(paid, row.drafted) if row.cap else 0)
                for row, paid in zip(rows, plan.paid, strict=True)
            ]
            step = replace(step, rows=rows)
        self.whole.learn(inner, step)
        known = [(row, part, row.light) for row in rows if (part := self.parts.get(row.method)) and row.light]
        if known:
            self.light.acceptance.tick()
        for row, part, (cap, drafted, accepted) in known:
            self.light.acceptance.observe(row.request_id, part, cap, drafted, accepted, heat=row.heat)

    def _learn_shares(self, step: StepObservation) -> None:
        for row in step.rows:
            if row.by_light is not None and row.cap:
                nodes, accepted = (row.num_nodes, row.accepted) if row.by_light else (0, 0)
                self._shares.observe(row.request_id, row.method, row.heat, nodes, accepted)


AnyPlanner: TypeAlias = Planner | LayeredPlanner
"""What a loop plans by."""
