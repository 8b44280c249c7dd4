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

from foretoken.engine.acceptance import Acceptance, Curves
from foretoken.engine.costs import Corrections, CostTable
from foretoken.errors import ConfigError

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

MODES = ("auto", "on", "off")
MARGIN = 0.015  # guessing starts when it promises this much more than plain decoding; it stops at none
SLIM = 0.05  # what perfect guesses must gain, or guessing is not even tried
BUDGET = 0.005  # share of the time served that trials may lose
CREDIT_PASSES, MOST_CREDIT_PASSES = 1.0, 12.0  # plain passes that the account starts with, and holds at most
LEAST_CHARGE = 0.05  # passes that a plain step among guessing ones is charged at least, or near ties would try for ever
LAG_STEPS = 32.0  # steps over which reading what a drafter lags behind is written off
PERIOD = 8  # steps between plans while nothing joins or leaves; every step while much is unknown
PERIOD_OFF = 64  # ... and while nothing guesses
PLAIN_EVERY = 16  # guessing steps before a plain one is tried, to see what it costs now
SURE = 24.0  # proposals of a method after which its rates no longer change by the step
LIMITS = 6  # depths tried as a common limit of a batch, in a search
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


@dataclass(frozen=True)
class Problem:
    """One allocation to make. Arrays are [B, L] by row and depth - 1, or [B]."""

    kept: Array  # P(kept to this depth), 0 where the row may not go so deep; falls with depth
    drafted: Array  # P(drafted to this depth)
    branching: Array  # [B] nodes for each position
    method: Ints  # [B]
    entry: Array  # [B] seconds that a row's first guess costs beside its drafting
    draft: Array  # [M, L, B + 1] seconds that the r-th row to reach a depth adds; [..., 0] is unused
    curve: tuple[Array, Array]  # (nodes beyond the roots, seconds) of the pass
    plain: float  # seconds of a plain step
    guess_factor: float = 1.0  # what a guessing pass takes, over what ``curve`` says

    @property
    def batch(self) -> int:
        """B."""
        return len(self.kept)


@dataclass(frozen=True)
class Allocation:
    """A depth for each row, and what it is expected to bring and cost."""

    caps: list[int]
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def _pass_seconds(problem: Problem, nodes: Array, none: Array | None) -> Array:
    """Expected seconds of the pass with so many expected nodes beyond the roots. none: P(no row drafted at all)."""
    xs, ys = problem.curve
    if none is None:
        return np.interp(nodes, xs, ys) * problem.guess_factor
    some = np.maximum(1.0 - none, 1e-9)
    guessing = np.interp(nodes / some, xs, ys) * problem.guess_factor
    return none * problem.plain + some * guessing


def price(problem: Problem, caps: Sequence[int]) -> Allocation:
    """What one choice of depths brings and costs."""
    num_rows, depth = problem.kept.shape
    on = np.arange(depth)[None] < np.asarray(caps)[:, None]
    if not on.any():
        return Allocation(list(caps), float(num_rows), problem.plain)
    nodes = np.asarray((problem.drafted * on * problem.branching[:, None]).sum())
    seconds = float((problem.entry * on[:, 0]).sum())
    for method in range(len(problem.draft)):
        rows = (on & (problem.method == method)[:, None]).sum(axis=0)
        seconds += sum(float(problem.draft[method, level, 1 : count + 1].sum()) for level, count in enumerate(rows))
    none = np.asarray(np.prod(1.0 - problem.drafted[:, 0] * on[:, 0]))
    seconds += float(_pass_seconds(problem, nodes, none if none > 1e-12 else None))
    return Allocation(list(caps), num_rows + float((problem.kept * on).sum()), seconds)


def search(problem: Problem) -> Allocation | None:
    """The best choice with at least one guess; None where no row may guess.

    Positions are taken in the order of P(kept | drafted), which falls with depth, so every prefix of the order is a
    choice of depths; each prefix is priced, under each of several common limits of depth. Of equal numbers of drafting
    rows, passes and nodes the greedy choice keeps most, so with one method, drafting that costs the same for each row
    at a depth beyond the first, and always a proposal, the result is the best there is; else near it (tests/ measure it).
    """
    num_rows, depth = problem.kept.shape
    if num_rows == 1:
        return _search_row(problem)
    worth = np.minimum.accumulate(problem.kept / np.maximum(problem.drafted, 1e-12), axis=1)
    flat = worth.T.ravel()  # by depth, so that of equals the shallow comes first
    order = np.argsort(-flat, kind="stable")
    order = order[: np.count_nonzero(problem.kept.T.ravel()[order] > 0.0)]
    if not len(order):
        return None
    level, row = np.divmod(order, num_rows)
    method = problem.method[row]
    num_methods = len(problem.draft)
    group = method * depth + level
    rank = _ranks(group, num_methods * depth)
    cost = problem.draft[method, level, rank] + np.where(level == 0, problem.entry[row], 0.0)
    kept, nodes = problem.kept[row, level], problem.drafted[row, level] * problem.branching[row]
    missing = None
    if (problem.drafted[row, level] < 0.999).any():
        first = np.minimum(problem.drafted[row, 0], 1.0 - 1e-9)
        missing = np.where(level == 0, np.log1p(-first), 0.0)

    def run(limits: Ints) -> tuple[float, Allocation, Ints]:
        """The best prefix under the best of these limits, [C, M] depths by method."""
        mask = level[None] < limits[:, method]
        tokens = num_rows + np.cumsum(np.where(mask, kept, 0.0), axis=1)
        count = np.cumsum(np.where(mask, nodes, 0.0), axis=1)
        none = None if missing is None else np.exp(np.cumsum(np.where(mask, missing, 0.0), axis=1))
        seconds = np.cumsum(np.where(mask, cost, 0.0), axis=1) + _pass_seconds(problem, count, none)
        rate = np.where(mask, tokens / seconds, 0.0)
        combo, last = divmod(int(rate.argmax()), rate.shape[1])
        caps = np.bincount(row[: last + 1][mask[combo, : last + 1]], minlength=num_rows)
        found = Allocation(caps.tolist(), float(tokens[combo, last]), float(seconds[combo, last]))
        return float(rate[combo, last]), found, limits[combo]

    deepest = int(level.max()) + 1
    depths = np.array(_limits(deepest))
    together = np.repeat(depths[:, None], num_methods, axis=1)
    if num_methods == 1:
        return run(together)[1]
    alone = [np.where(np.arange(num_methods) == one, depths[:, None], 0) for one in range(num_methods)]
    best = run(np.concatenate([together, *alone]))
    for _ in range(2):  # then each method's limit in turn, the others' held
        for one in range(num_methods):
            choices = np.tile(best[2], (len(depths) + 1, 1))
            choices[:, one] = [0, *depths]
            best = max(best, run(choices[choices.any(axis=1)]), key=lambda found: found[0])
    return best[1]


def _search_row(problem: Problem) -> Allocation | None:
    """The same for a batch of one: the prefixes are the depths."""
    depth = int(np.count_nonzero(problem.kept[0] > 0.0))
    if not depth:
        return None
    drafted = problem.drafted[0, :depth]
    none = np.asarray(1.0 - drafted[0]) if drafted[0] < 0.999 else None
    nodes = np.cumsum(drafted) * problem.branching[0]
    draft = np.cumsum(problem.draft[problem.method[0], :depth, 1]) + problem.entry[0]
    seconds = draft + _pass_seconds(problem, nodes, none)
    tokens = 1.0 + np.cumsum(problem.kept[0, :depth])
    best = int((tokens / seconds).argmax())
    return Allocation([best + 1], float(tokens[best]), float(seconds[best]))


def _limits(deepest: int) -> list[int]:
    """A few depths from 1 to the deepest."""
    few = min(LIMITS, deepest)
    return sorted({1 + round((deepest - 1) * place / max(few - 1, 1)) for place in range(few)})


def _ranks(group: Ints, num_groups: int) -> Ints:
    """1 for the first of each group, 2 for the second, ..."""
    order = np.argsort(group, kind="stable")
    starts = np.cumsum(np.bincount(group, minlength=num_groups))
    rank = np.empty(len(group), dtype=np.int64)
    before = np.concatenate([[0], starts[:-1]])
    rank[order] = np.arange(1, len(group) + 1) - before[group[order]]
    return rank


@dataclass
class _Plan:
    caps: list[int]
    expected: Allocation | None = None
    plain_rate: float = 0.0
    trial: bool = False


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
    def speedup(self) -> float:
        """Tokens a second now, over what plain decoding would bring by the costs as corrected; 1 before any step."""
        return self._plain_seconds / self._seconds if self._seconds else 1.0

    @property
    def state(self) -> dict[str, float | int | str | bool]:
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

    def plan(self, rows: Sequence[RowView]) -> list[int]:
        """The greatest depth each row may guess in the next step, 0 for none."""
        if self.mode != "auto":
            on = self.mode == "on"
            self._caps = [max(min(row.max_depth, row.room), 0) if on else 0 for row in rows]
            self._guessing = any(self._caps)
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
        batch = len(rows)
        plain = self.costs.verify(batch, batch) * self.corrections.plain if batch else 1.0
        off = _Plan([0] * batch, None, batch / plain)
        self._need = math.inf
        able = [
            row.max_depth > 0 and row.room > 0 and row.method in self.corrections.draft and self._can_win(row, batch)
            for row in rows
        ]
        if not any(able):
            self._guessing = False
            return off
        curves = self.acceptance.curves(ids := [row.request_id for row in rows], [row.method for row in rows])
        assert len(ids) == batch
        problem = self._problem(rows, able, curves, plain)
        best = search(problem)
        bar = off.plain_rate * (1.0 if self._guessing else 1.0 + MARGIN)
        self._guessing = best is not None and best.rate > bar
        if best is None or not self._guessing:
            return self._try_guessing(problem, curves, off)
        return self._try_other(problem, curves, _Plan(best.caps, best, off.plain_rate))

    def _problem(self, rows: Sequence[RowView], able: list[bool], curves: Curves, plain: float) -> Problem:
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
                self.costs.catch_up(row.method, row.lag) * factors.draft[row.method] / LAG_STEPS if row.lag > 1 and can
                else 0.0
                for row, can in zip(rows, able, strict=True)
            ]
        )  # fmt: skip
        return Problem(
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

    def _try_guessing(self, problem: Problem, curves: Curves, off: _Plan) -> _Plan:
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
        problem = replace(problem, entry=problem.entry * LAG_STEPS)  # a trial that fails has read it all for nothing
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
        return _Plan(best[1].caps, best[1], off.plain_rate, trial=True)

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
        if self._account is not None:
            self._account += BUDGET * seconds
        plain = self.costs.verify(step.batch, step.batch) * self.corrections.plain
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
