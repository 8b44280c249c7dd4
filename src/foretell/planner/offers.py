"""What guesses of some rows would bring and cost, from measured costs and acceptance."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np

from foretell.costs.table import PASS, CostTable
from foretell.planner.acceptance import Acceptance, Array
from foretell.planner.allocation import Problem
from foretell.planner.corrections import Corrections
from foretell.planner.observations import RowStep, RowView, StepObservation
from foretell.planner.plan import Option
from foretell.planner.several import Offer, Several
from foretell.planner.shares import LightShares, mixed
from foretell.planner.single import Single

MIN_BEST_CASE_GAIN = 0.05  # least gain of perfect guesses over plain decoding for guessing to be tried
CATCH_UP_STEPS = 32.0  # steps, at most, over which reading what a drafter lags behind is written off


def steps_ahead(row: RowView, kept: float) -> float:
    """Steps over which reading what a row's drafter lags behind is written off: those it may still have, if each keeps so
    many guesses."""
    return max(1.0, min(CATCH_UP_STEPS, row.depth_limit / (1.0 + kept)))


def _mean_length(rows: Sequence[RowView]) -> float:
    return fmean(row.length for row in rows)


class Offers:
    """Builds offers with the corrected costs. Caches what depends on the table alone."""

    def __init__(self, costs: CostTable, acceptance: Acceptance, corrections: Corrections, shares: LightShares) -> None:
        """shares: of steps in which methods propose what their light parts guess; ``acceptance`` is of the others."""
        self.costs = costs
        self.shares = shares
        self.acceptance = acceptance
        self.corrections = corrections
        self._grids: dict[tuple[str, int], Array] = {}
        self._able: dict[tuple[str, int, int], bool] = {}
        self._columns: dict[str, list[float]] = {}  # of the grids of one row
        self._points: tuple[list[float], list[float]] | None = None  # the pass of one row

    def plain(self, batch: int, length: float = 0.0) -> float:
        """Seconds of a step without guesses; length: of the rows' texts, mean."""
        return self.costs.verify(batch, batch, length) * self.corrections.plain_of(batch) if batch else 1.0

    def plain_of(self, rows: Sequence[RowView]) -> float:
        """The same of these rows."""
        return self.plain(len(rows), _mean_length(rows) if rows else 0.0)

    def of(self, rows: Sequence[RowView], plain: float, option: Option = Option.WHOLE) -> Offer | None:
        """What guesses of these rows would bring; None where no row can gain. plain: seconds of their step without
        guesses. option: by which the rows are seen."""
        offer = self.single(rows[0], plain) if len(rows) == 1 else self.several(rows, plain)
        return None if offer is None else replace(offer, option=option)

    def _is_blind(self, row: RowView, entry: float, plain: float) -> bool:
        """See ``Offer``; entry: seconds a step."""
        return entry * steps_ahead(row, 0.0) > plain and not self.acceptance.knows(row.method)

    def several(self, rows: Sequence[RowView], plain: float) -> Several | None:
        """``of`` in arrays."""
        able = [self._may_guess(row, len(rows)) for row in rows]
        if not any(able):
            return None
        requests, methods, heats = zip(*[(row.request_id, row.method, row.heat) for row in rows], strict=True)
        curves = self.acceptance.curves(requests, methods, heats)
        found = curves.drafted
        curves, own = mixed(curves, [self.shares.of(*row) for row in zip(requests, methods, heats, strict=True)])
        batch, depth = curves.kept.shape
        names = sorted({row.method for row, can in zip(rows, able, strict=True) if can})
        place = {name: index for index, name in enumerate(names)}
        limits = np.array(
            [min(row.max_depth, row.depth_limit, depth) if can else 0 for row, can in zip(rows, able, strict=True)]
        )
        depth = int(limits.max())
        allowed = np.arange(depth)[None] < limits[:, None]
        weighed = np.array([row.method in self.acceptance.weighed for row in rows])
        # One that weighs its guesses stops before the passes of those that it does not make; the first is always made.
        goes_on = np.where(weighed[:, None] & (np.arange(depth) > 0), found[:, :depth], 1.0)
        made = {name: goes_on[np.array(methods) == name].mean(axis=0)[:, None] for name in names}
        factors = self.corrections
        drafts = {  # a method's drafting, as often as its rows make guesses of their own
            name: factors.draft[name] * fmean(share for row, share in zip(rows, own, strict=True) if row.method == name)
            for name in names
        }
        kept = np.where(allowed, curves.kept[:, :depth], 0.0)
        entry = [
            self._entry(row, float(most)) if can and row.num_unread > 1 else 0.0
            for row, can, most in zip(rows, able, kept.sum(axis=1), strict=True)
        ]
        beyond, (xs, ys) = np.array([self.costs.beyond(row.length) for row in rows]), self.costs.verify_curve(batch)
        texts = [self.costs.text(row.method) for row in rows]
        at_depth = np.repeat([[text.each] for text in texts], depth, axis=1)
        at_depth[:, 0] += [text.once for text in texts]
        factor_of = np.array([drafts.get(row.method, 0.0) for row in rows])
        problem = Problem(
            kept=kept,
            drafted=curves.drafted[:, :depth],
            nodes=curves.nodes[:, :depth],
            method=np.array([place.get(row.method, 0) for row in rows]),
            entry=np.array(entry),
            own=at_depth * (beyond * factor_of)[:, None],
            node=beyond * self.costs.text(PASS).each,
            draft=np.stack([self._grid(name, batch)[:depth] * made[name] * drafts[name] for name in names]),
            curve=(xs, ys + self._attention(batch, _mean_length(rows))),
            plain=plain,
            guess_factor=factors.guess,
            weighed=weighed if weighed.any() else None,
        )
        steps = np.array([steps_ahead(row, most) for row, most in zip(rows, kept.sum(axis=1).tolist(), strict=True)])
        return Several(problem, curves, requests, steps, any(map(self._is_blind, rows, entry, [plain] * batch)))

    def single(self, row: RowView, plain: float) -> Single | None:
        """``of`` one row."""
        method = row.method
        if not self._may_guess(row, 1):
            return None
        kept, drafted, optimistic, nodes = self.acceptance.curves_of_one(row.request_id, method, row.heat)
        own, is_weighed = 1.0, method in self.acceptance.weighed
        if method not in self._columns:
            self._columns[method] = self._grid(method, 1)[:, 1].tolist()
        draft = self._columns[method]
        if is_weighed:  # as in ``of``
            draft = [cost * made for cost, made in zip(draft, [1.0, *drafted[1:]], strict=False)]
        light, by_light, more = self.shares.of(row.request_id, method, row.heat)
        if light:  # as in ``mixed``
            own = 1.0 - light
            kept, drafted, optimistic, nodes = (
                [line[0] * own + first, *(value * own for value in line[1:])]
                for line, first in ((kept, by_light), (drafted, light), (optimistic, by_light), (nodes, more))
            )
        depth = min(row.max_depth, row.depth_limit, len(kept))
        if self._points is None:
            xs, ys = self.costs.verify_curve(1)
            self._points = xs.tolist(), ys.tolist()
        beyond, factor = self.costs.beyond(row.length), self.corrections.draft[method] * own
        nodes_at, took = self._points
        first = level = node = 0.0
        if beyond:
            text, added = self.costs.text(method), self._attention(1, row.length)
            took = [seconds + added for seconds in took]
            first, level = beyond * factor * text.once, beyond * factor * text.each
            node = beyond * self.costs.text(PASS).each
        most = sum(kept[:depth])
        entry = self._entry(row, most) if row.num_unread > 1 else 0.0
        return Single(
            row.request_id, kept[:depth], drafted[:depth], optimistic[:depth], nodes[:depth], draft, factor, entry, first,
            level, node, (nodes_at, took), plain, self.corrections.guess, is_weighed, steps_ahead(row, most),
            self._is_blind(row, entry, plain),
        )  # fmt: skip

    def least_chance(self, rows: Sequence[RowView]) -> float:
        """The chance to be kept at which a guess pays what its node adds to the pass of these rows."""
        batch = len(rows)
        xs, ys = self.costs.verify_curve(batch)
        node = float(np.interp(batch, xs, ys) - ys[0]) / batch
        node += self.costs.beyond(_mean_length(rows)) * self.costs.text(PASS).each
        return node * self.corrections.guess * batch / self.plain_of(rows)

    def pass_seconds(self, step: StepObservation) -> float:
        """Seconds of a step without its proposing by the table, uncorrected."""
        nodes = sum(row.num_nodes for row in step.rows if row.cap)
        seconds = self.costs.verify(step.batch, step.batch + nodes) + self._attention(step.batch, step.length)
        own = sum(self.costs.beyond(row.length) * row.num_nodes for row in step.rows if row.cap)
        return seconds + own * self.costs.text(PASS).each

    def _attention(self, batch: int, length: float) -> float:
        """Seconds that texts add to a pass, whether or not there are guesses; length: mean."""
        text = self.costs.text(PASS)
        return batch * self.costs.beyond(length) * (text.once + text.each)

    def draft_seconds(self, method: str, rows: Sequence[RowStep], batch: int) -> float:
        """Seconds of proposing by the table, uncorrected, where rows of one method guess as deep as they may; 0: not
        measured."""
        if method not in self.corrections.draft:
            return 0.0
        grid, text = self._grid(method, batch), self.costs.text(method)
        is_weighed = method in self.acceptance.weighed  # it stops before the pass of a guess that it does not make
        caps = [min(max(row.drafted, 1) if is_weighed else row.cap, len(grid)) for row in rows]
        depth = max(caps)
        own = sum(
            self.costs.beyond(row.length) * (text.once + text.each * cap) for row, cap in zip(rows, caps, strict=True)
        )
        if min(caps) == depth:  # as in most steps
            return self.costs.draft(method, len(caps), depth) + own
        counts = [sum(cap > level for cap in caps) for level in range(depth)]
        return own + float(sum(grid[level, 1 : count + 1].sum() for level, count in enumerate(counts)))

    def _may_guess(self, row: RowView, batch: int) -> bool:
        if row.max_depth < 1 or row.depth_limit < 1 or row.method not in self.corrections.draft:
            return False
        key = (row.method, batch, row.length.bit_length())
        if key not in self._able:  # whether perfect guesses would pay, by the costs alone, for texts about as long
            best = self.costs.best_case(row.method, batch, self.acceptance.max_depth, row.length)
            self._able[key] = best > 1.0 + MIN_BEST_CASE_GAIN
        return self._able[key]

    def _entry(self, row: RowView, kept: float = 0.0) -> float:
        """Seconds a step for the row's drafter to read what it lags behind; kept: guesses of a step."""
        seconds = self.costs.catch_up(row.method, row.num_unread, row.length)
        return seconds * self.corrections.draft[row.method] / steps_ahead(row, kept)

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
