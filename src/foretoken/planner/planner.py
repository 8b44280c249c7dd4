"""How deep each row may guess in the next step, so that speculation never costs time.

Before a step the planner weighs the tokens that guesses would bring against the seconds they would take, for the whole
batch, no guess at all among the choices. What it does not know it tries only within a budget: an account holds a small
share of the time served, and every trial is charged what it is expected to lose.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from foretoken.errors import ConfigError
from foretoken.planner.acceptance import Acceptance, Curves
from foretoken.planner.allocation import Allocation, Problem, price, search
from foretoken.planner.corrections import Corrections
from foretoken.planner.costs import CostTable

Array = NDArray[np.float64]

MODES = ("auto", "on", "off")
MARGIN = 0.05  # what guessing must promise beyond plain decoding to start ...
STAY = 0.02  # ... and to go on: costs are known no better
MANY_ARRIVE = 0.25  # of those that decode
SLIM = 0.05  # what perfect guesses must gain, or guessing is not even tried
BUDGET = 0.005  # share of the time served that trials may lose
CREDIT_PASSES, MOST_CREDIT_PASSES = 1.0, 12.0  # plain passes that the account starts with, and holds at most
MOST_SURPRISE = 2.0  # plain passes that a trial may turn out dearer
LEAST_CHARGE = 0.05  # passes that a plain step among guessing ones is charged at least, or near ties would try for ever
LAG_STEPS = 32.0  # steps over which reading what a drafter lags behind is written off
PERIOD = 8  # steps between plans while nothing joins or leaves; every step while much is unknown
PERIOD_OFF = 64  # ... and while nothing guesses
PLAIN_EVERY = 16  # guessing steps before a plain one is tried, to see what it costs now
SURE = 24.0  # proposals of a method after which its rates no longer change by the step
MEMORY = 1.0 / 200.0  # of the live speedup, per step


@dataclass(frozen=True, slots=True)
class RowView:
    """What the planner is told of a row before a step."""

    request_id: str
    method: str
    max_depth: int  # the request's own limit; 0: it never guesses
    room: int  # guesses in a line that it can still use
    lag: int = 0  # tokens that its drafter has not read yet


@dataclass(frozen=True, slots=True)
class RowStep:
    """What became of a row in a step."""

    request_id: str
    method: str
    cap: int  # the depth it was allowed
    drafted: int  # the depth it was given
    accepted: int
    nodes: int | None = None  # None: a chain, as many as drafted


@dataclass(frozen=True, slots=True)
class StepObservation:
    """One step, as measured."""

    batch: int
    rows: Sequence[RowStep]
    seconds_draft: float
    seconds_target: float
    seconds_rest: float


def _steps(row: RowView) -> float:
    """Steps over which reading what a row's drafter lags behind is written off: some half of those it may still have."""
    return max(1.0, min(LAG_STEPS, row.room / 2))


@dataclass
class _Plan:
    caps: list[int]
    expected: Allocation | None = None
    plain_rate: float = 0.0
    trial: bool = False
    charged: float = 0.0  # for a trial of guesses, ahead of it


class Planner:
    """Plans steps and learns from them. Not thread-safe: the engine thread's own."""

    def __init__(self, costs: CostTable, acceptance: Acceptance, *, mode: str = "auto") -> None:
        if mode not in MODES:
            raise ConfigError(f"speculation is one of {', '.join(MODES)}; given {mode!r}")
        self.costs = costs
        self.acceptance = acceptance
        self.mode = mode
        self.corrections = Corrections(costs.methods)
        self._grids: dict[tuple[str, int], Array] = {}
        self._able: dict[tuple[str, int], bool] = {}
        self._ids: list[str] = []
        self._standing = _Plan([])
        self._caps: list[int] = []
        self._age, self._patience = 0, 1
        self._lagging = False
        self._guessing = False
        self._account: float | None = None
        self._need = math.inf  # credit at which a trial that was too dear before can be paid
        self._tokens = self._plain_seconds = self._seconds = 0.0
        self._since_plain = PLAIN_EVERY
        self.trials = 0
        self.trial_seconds = 0.0

    @property
    def speedup(self) -> float | None:
        """Tokens a second now, over what plain decoding would bring by the costs as corrected. None before any step, and in
        the modes that measure no costs."""
        return self._plain_seconds / self._seconds if self._seconds and self.mode == "auto" else None

    @property
    def state(self) -> dict[str, float | int | str | bool | None]:
        """For logs and metrics."""
        return {
            "mode": self.mode,
            "guessing": self._guessing,
            "mean_depth": sum(self._caps) / len(self._caps) if self._caps else 0.0,
            "speedup": self.speedup,
            "trials": self.trials,
            "trial_seconds": self.trial_seconds,
            "correction_plain": self.corrections.plain,
            "correction_guess": self.corrections.guess,
            **{f"correction_draft_{method}": factor for method, factor in self.corrections.draft.items()},
        }

    def forget(self, request_id: str) -> None:
        """A request has ended; what stood for it does not stand for another, even one of the same name."""
        self.acceptance.forget(request_id)
        self._ids = []

    def will_guess(self, rows: Sequence[RowView]) -> bool:
        """Whether guessing stands, beyond a trial, and would for these rows too: for what is worth preparing."""
        if self.mode != "auto" or not self._guessing:
            return self.mode == "on"
        plain = self._plain(len(rows))
        found = self._problem(rows, plain)
        best = None if found is None else search(found[0])
        return best is not None and best.rate > len(rows) / plain * (1.0 + STAY)

    def plan(self, rows: Sequence[RowView], arriving: int = 0) -> list[int]:
        """The greatest depth each row may guess in the next step, 0 for none.

        arriving: rows that join soon. Where they are many, guessing is not begun: what pays now may not with them.
        """
        if self.mode != "auto":
            on = self.mode == "on"
            self._caps = [max(min(row.max_depth, row.room), 0) if on else 0 for row in rows]
            self._guessing = any(self._caps)
            return list(self._caps)
        if arriving > MANY_ARRIVE * len(rows) and not self._guessing:
            self._ids, self._caps = [], [0] * len(rows)
            return list(self._caps)
        ids = [row.request_id for row in rows]
        self._age += 1
        due = self._age >= self._patience or (
            not self._guessing and self._account is not None and self._account >= self._need
        )
        if ids != self._ids or due:
            self._ids, self._age = ids, 0
            self._standing = self._decide(rows)
            self._patience = 1 if self._standing.trial else self._period(rows)
        caps = self._standing.caps
        self._lagging = any(row.lag > 2 for row in rows)
        self._caps = [cap if cap <= row.room else max(row.room, 0) for cap, row in zip(caps, rows, strict=True)]
        return list(self._caps)

    def _period(self, rows: Sequence[RowView]) -> int:
        if not self._guessing:
            return PERIOD_OFF
        sure = all(self.acceptance.seen(method) >= SURE for method in {row.method for row in rows})
        return PERIOD if sure else 1

    def _decide(self, rows: Sequence[RowView]) -> _Plan:
        batch, plain = len(rows), self._plain(len(rows))
        off = _Plan([0] * batch, None, batch / plain)
        self._need = math.inf
        found = self._problem(rows, plain)
        if found is None:
            self._guessing = False
            return off
        problem, curves = found
        best = search(problem)
        bar = off.plain_rate * (1.0 + (STAY if self._guessing else MARGIN))
        self._guessing = best is not None and best.rate > bar
        if best is None or not self._guessing:
            return self._try_guessing(rows, problem, curves, off)
        return self._try_other(problem, curves, _Plan(best.caps, best, off.plain_rate))

    def _plain(self, batch: int) -> float:
        """Seconds of a step without guesses."""
        return self.costs.verify(batch, batch) * self.corrections.plain if batch else 1.0

    def _problem(self, rows: Sequence[RowView], plain: float) -> tuple[Problem, Curves] | None:
        """What ``search`` is asked, and the rows' curves; None where no row can win."""
        able = [
            row.max_depth > 0
            and row.room > 0
            and row.method in self.corrections.draft
            and self._can_win(row, len(rows))
            for row in rows
        ]
        if not any(able):
            return None
        curves = self.acceptance.curves([row.request_id for row in rows], [row.method for row in rows])
        batch, depth = curves.kept.shape
        names = sorted({row.method for row, can in zip(rows, able, strict=True) if can})
        place = {name: index for index, name in enumerate(names)}
        limits = np.array(
            [min(row.max_depth, row.room, depth) if can else 0 for row, can in zip(rows, able, strict=True)]
        )
        depth = int(limits.max())
        allowed = np.arange(depth)[None] < limits[:, None]
        factors = self.corrections
        entry = np.array(
            [
                self.costs.catch_up(row.method, row.lag) * factors.draft[row.method] / _steps(row)
                if row.lag > 1 and can
                else 0.0
                for row, can in zip(rows, able, strict=True)
            ]
        )
        problem = Problem(
            kept=np.where(allowed, curves.kept[:, :depth], 0.0),
            drafted=curves.drafted[:, :depth],
            branching=curves.branching,
            method=np.array([place.get(row.method, 0) for row in rows]),
            entry=entry,
            draft=np.stack([self._grid(name, batch)[:depth] * factors.draft[name] for name in names]),
            curve=self.costs.verify_curve(batch),
            plain=plain,
            guess_factor=factors.guess,
        )
        return problem, curves

    def _grid(self, method: str, batch: int) -> Array:
        """[L, B + 1]: seconds that the r-th row to reach each depth adds to a method's drafting."""
        key = (method, batch)
        if key not in self._grids:
            depths, counts = range(self.acceptance.max_depth + 1), range(batch + 1)
            whole = np.array([[self.costs.draft(method, rows, depth) for rows in counts] for depth in depths])
            by_depth = np.maximum(np.diff(whole, axis=0), 0.0)
            grown = np.maximum(np.diff(by_depth, axis=1, prepend=0.0), 0.0)
            grown[:, 0] = 0.0
            self._grids[key] = grown
        return self._grids[key]

    def _can_win(self, row: RowView, batch: int) -> bool:
        """Whether perfect guesses would pay, by the costs alone."""
        key = (row.method, batch)
        if key not in self._able:
            self._able[key] = self.costs.best_case(row.method, batch, self.acceptance.max_depth) > 1.0 + SLIM
        return self._able[key]

    # Trials: what the optimistic curve says would win, a few rows at a time, while the account has credit.

    def _try_guessing(self, views: Sequence[RowView], problem: Problem, curves: Curves, off: _Plan) -> _Plan:
        """Nothing guesses: let one or a few rows, if they may yet turn out to pay."""
        credit = self._credit(problem.plain)
        depth = problem.kept.shape[1]
        allowed = problem.kept > 0.0
        hopeful = np.where(allowed, np.maximum(curves.hopeful[:, :depth], problem.kept), 0.0)
        doubt = float(np.exp(-self.corrections.doubt))
        hope = search(replace(problem, kept=hopeful, guess_factor=problem.guess_factor * doubt))
        if hope is None or hope.rate <= off.plain_rate * (1.0 + MARGIN):
            return off
        rows = np.argsort(-hopeful[:, 0], kind="stable")
        spread = np.array([_steps(view) for view in views])
        problem = replace(problem, entry=problem.entry * spread)  # a trial that fails has read it all for nothing
        best: tuple[float, Allocation, float] | None = None
        for count in (1, 4) if problem.batch >= 16 else (1,):
            for cap in sorted({1, 2, max(hope.caps)}):
                caps = np.zeros(problem.batch, dtype=np.int64)
                caps[rows[:count]] = np.minimum(cap, allowed[rows[:count]].sum(axis=1))
                choice = price(problem, caps.tolist())
                loss = choice.seconds - choice.tokens / off.plain_rate
                lessons = sum(1.0 + problem.kept[row, : caps[row] - 1].sum() for row in rows[:count] if caps[row])
                value = lessons / max(loss, 0.02 * problem.plain)
                self._need = min(self._need, max(loss, 0.0))
                if loss <= credit and (best is None or value > best[0]):
                    best = (value, choice, loss)
        if best is None:
            return off
        self._charge(best[2])
        return _Plan(best[1].caps, best[1], off.plain_rate, trial=True, charged=max(best[2], 0.0))

    def _try_other(self, problem: Problem, curves: Curves, standing: _Plan) -> _Plan:
        """Some rows guess: try a row that does not, or a plain step, if that may yet turn out to pay."""
        expected = standing.expected
        assert expected is not None
        credit = self._credit(problem.plain)
        if credit <= 0.0:
            return standing
        hope = standing.plain_rate * float(np.exp(self.corrections.doubt))
        loss = max(problem.plain - problem.batch / expected.rate, LEAST_CHARGE * problem.plain)
        if hope > expected.rate and loss <= credit and self._since_plain >= PLAIN_EVERY:
            self._charge(loss)
            return _Plan([0] * problem.batch, None, standing.plain_rate, trial=True)
        caps = np.array(expected.caps)
        hopeful = np.where((caps == 0) & (problem.kept[:, 0] > 0.0), curves.hopeful[:, 0], 0.0)
        row = int(hopeful.argmax())
        if hopeful[row] <= 0.0:
            return standing
        caps[row] = 1
        if hopeful[row] / expected.rate <= problem.draft[problem.method[row], 0, min(int((caps > 0).sum()), len(caps))]:
            return standing  # its drafting alone costs more than the token is worth
        choice = price(problem, caps.tolist())
        gain = choice.tokens - problem.kept[row, 0] + hopeful[row]
        loss = choice.seconds - choice.tokens / expected.rate
        if gain / choice.seconds <= expected.rate or loss > credit:
            return standing
        self._charge(loss)
        return _Plan(choice.caps, choice, standing.plain_rate, trial=True)

    def _credit(self, plain: float) -> float:
        if self._account is None:
            self._account = CREDIT_PASSES * plain
        self._account = min(self._account, MOST_CREDIT_PASSES * plain)
        return self._account

    def _charge(self, loss: float) -> None:
        assert self._account is not None
        self._account -= max(loss, 0.0)
        self.trials += 1
        self.trial_seconds += max(loss, 0.0)

    def observe(self, step: StepObservation) -> None:
        """Told after every step."""
        seconds = step.seconds_draft + step.seconds_target + step.seconds_rest
        if step.batch < 1 or seconds <= 0.0:
            return
        self.acceptance.tick()
        self.corrections.tick()
        self._since_plain = self._since_plain + 1 if any(row.drafted for row in step.rows) else 0
        drafted = accepted = nodes = 0
        asked: dict[str, list[int]] = {}
        if any(self._caps) or any(row.cap for row in step.rows):
            for row in step.rows:
                accepted += row.accepted
                if row.cap < 1:
                    continue
                drafted += row.drafted
                nodes += row.drafted if row.nodes is None else row.nodes
                asked.setdefault(row.method, []).append(row.cap)
                self.acceptance.observe(row.request_id, row.method, row.cap, row.drafted, row.accepted, row.nodes)
        if not asked:
            self.corrections.observe("plain", seconds, self.costs.verify(step.batch, step.batch))
        else:
            kind = "guess" if nodes else "plain"
            measured = step.seconds_target + step.seconds_rest
            self.corrections.observe(kind, measured, self.costs.verify(step.batch, step.batch + nodes))
            if len(asked) == 1 and not self._lagging:  # catching up is no part of what the table says
                ((method, caps),) = asked.items()
                self.corrections.observe_draft(
                    method, step.seconds_draft, self._draft_seconds(method, caps, step.batch)
                )
        plain = self._plain(step.batch)
        if self._account is not None:
            self._account += BUDGET * seconds
            if self._standing.charged and drafted:
                # What it really cost counts: opening a drafter is in no table. Not all of it, though: machines stand still.
                lost = seconds - (step.batch + accepted) / step.batch * plain
                more = min(max(lost - self._standing.charged, 0.0), MOST_SURPRISE * plain)
                self._standing.charged = 0.0
                self._account -= more
                self.trial_seconds += more
        self._plain_seconds += MEMORY * ((step.batch + accepted) / step.batch * plain - self._plain_seconds)
        self._seconds += MEMORY * (seconds - self._seconds)

    def _draft_seconds(self, method: str, caps: list[int], batch: int) -> float:
        if method not in self.corrections.draft:
            return 0.0
        grid = self._grid(method, batch)
        caps = [min(cap, len(grid)) for cap in caps]
        depth = max(caps)
        if min(caps) == depth:  # as in most steps
            return self.costs.draft(method, len(caps), depth)
        counts = [sum(cap > level for cap in caps) for level in range(depth)]
        return float(sum(grid[level, 1 : count + 1].sum() for level, count in enumerate(counts)))
