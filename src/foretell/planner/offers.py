"""What guesses of some rows would bring and cost, from measured costs and acceptance: the input of a search."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from foretell.planner.acceptance import Acceptance, Curves
from foretell.planner.allocation import Problem
from foretell.planner.corrections import Corrections
from foretell.planner.costs import CostTable
from foretell.planner.observations import RowView
from foretell.planner.shares import LightShares, mixed
from foretell.planner.single import Single

Array = NDArray[np.float64]

MIN_BEST_CASE_GAIN = 0.05  # least gain of perfect guesses over plain decoding for guessing to be tried
CATCH_UP_STEPS = 32.0  # steps, at most, over which reading what a drafter lags behind is written off


def steps_ahead(row: RowView) -> float:
    """Steps over which reading what a row's drafter lags behind is written off: some half of those it may still have."""
    return max(1.0, min(CATCH_UP_STEPS, row.depth_limit / 2))


@dataclass(frozen=True)
class Question:
    """One allocation to make, and the estimates it rests on, row by row."""

    problem: Problem
    curves: Curves


class Offers:
    """Builds allocation problems with the corrected costs. Caches what depends on the table alone."""

    def __init__(
        self,
        costs: CostTable,
        acceptance: Acceptance,
        corrections: Corrections,
        shares: LightShares | None = None,
    ) -> None:
        """shares: of steps in which methods propose what their light parts guess; ``acceptance`` is of the others."""
        self.costs = costs
        self.shares = shares
        self.acceptance = acceptance
        self.corrections = corrections
        self._grids: dict[tuple[str, int], Array] = {}
        self._able: dict[tuple[str, int], bool] = {}
        self._columns: dict[str, list[float]] = {}  # of the grids of one row
        self._points: tuple[list[float], list[float]] | None = None  # the pass of one row

    def plain(self, batch: int) -> float:
        """Seconds of a step without guesses."""
        return self.costs.verify(batch, batch) * self.corrections.plain if batch else 1.0

    def of(self, rows: Sequence[RowView], plain: float) -> Question | None:
        """The allocation problem of these rows; None where no row can gain. plain: seconds of their step without
        guesses."""
        able = [self._may_guess(row, len(rows)) for row in rows]
        if not any(able):
            return None
        requests, methods, heats = zip(*[(row.request_id, row.method, row.heat) for row in rows], strict=True)
        curves, own = self.acceptance.curves(requests, methods, heats), [1.0] * len(rows)
        if self.shares is not None:
            curves, own = mixed(curves, [self.shares.of(*row) for row in zip(requests, methods, heats, strict=True)])
        batch, depth = curves.kept.shape
        names = sorted({row.method for row, can in zip(rows, able, strict=True) if can})
        place = {name: index for index, name in enumerate(names)}
        limits = np.array(
            [min(row.max_depth, row.depth_limit, depth) if can else 0 for row, can in zip(rows, able, strict=True)]
        )
        depth = int(limits.max())
        allowed = np.arange(depth)[None] < limits[:, None]
        factors = self.corrections
        drafts = {  # a method's drafting, as often as its rows make guesses of their own
            name: factors.draft[name] * fmean(share for row, share in zip(rows, own, strict=True) if row.method == name)
            for name in names
        }
        entry = [self._entry(row) if can and row.num_unread > 1 else 0.0 for row, can in zip(rows, able, strict=True)]
        problem = Problem(
            kept=np.where(allowed, curves.kept[:, :depth], 0.0),
            drafted=curves.drafted[:, :depth],
            nodes=curves.nodes[:, :depth],
            method=np.array([place.get(row.method, 0) for row in rows]),
            entry=np.array(entry),
            draft=np.stack([self._grid(name, batch)[:depth] * drafts[name] for name in names]),
            curve=self.costs.verify_curve(batch),
            plain=plain,
            guess_factor=factors.guess,
        )
        return Question(problem, curves)

    def single(self, row: RowView, plain: float) -> Single | None:
        """``of`` this row alone; None where it cannot gain."""
        method = row.method
        if not self._may_guess(row, 1):
            return None
        kept, drafted, optimistic, nodes = self.acceptance.curves_of_one(row.request_id, method, row.heat)
        own = 1.0
        if self.shares is not None:
            light, by_light, more = self.shares.of(row.request_id, method, row.heat)
            if light:  # as in ``mixed``
                own = 1.0 - light
                kept, drafted, optimistic, nodes = (
                    [line[0] * own + first, *(value * own for value in line[1:])]
                    for line, first in ((kept, by_light), (drafted, light), (optimistic, by_light), (nodes, more))
                )
        depth = min(row.max_depth, row.depth_limit, len(kept))
        if method not in self._columns:
            self._columns[method] = self._grid(method, 1)[:, 1].tolist()
        if self._points is None:
            xs, ys = self.costs.verify_curve(1)
            self._points = xs.tolist(), ys.tolist()
        return Single(
            kept[:depth], drafted[:depth], optimistic[:depth], nodes[:depth],
            self._columns[method], self.corrections.draft[method] * own,
            self._entry(row) if row.num_unread > 1 else 0.0, self._points, plain, self.corrections.guess,
        )  # fmt: skip

    def draft_seconds(self, method: str, caps: Sequence[int], batch: int) -> float:
        """Seconds of proposing by the table, uncorrected, where rows of one method guess caps deep; 0: not measured."""
        if method not in self.corrections.draft:
            return 0.0
        grid = self._grid(method, batch)
        caps = [min(cap, len(grid)) for cap in caps]
        depth = max(caps)
        if min(caps) == depth:  # as in most steps
            return self.costs.draft(method, len(caps), depth)
        counts = [sum(cap > level for cap in caps) for level in range(depth)]
        return float(sum(grid[level, 1 : count + 1].sum() for level, count in enumerate(counts)))

    def _may_guess(self, row: RowView, batch: int) -> bool:
        if row.max_depth < 1 or row.depth_limit < 1 or row.method not in self.corrections.draft:
            return False
        key = (row.method, batch)
        if key not in self._able:  # whether perfect guesses would pay, by the costs alone
            best = self.costs.best_case(row.method, batch, self.acceptance.max_depth)
            self._able[key] = best > 1.0 + MIN_BEST_CASE_GAIN
        return self._able[key]

    def _entry(self, row: RowView) -> float:
        """Seconds a step for the row's drafter to read what it lags behind."""
        return self.costs.catch_up(row.method, row.num_unread) * self.corrections.draft[row.method] / steps_ahead(row)

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
