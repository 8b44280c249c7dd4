"""Timing real steps on a grid of batches and depths: what fills a ``CostTable`` on this machine."""

import logging
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from foretell.costs.table import PASS, Cell, CostTable, TextCosts

log = logging.getLogger(__name__)

PLAIN = "none"
"""The name that ``measure`` passes as method for a plain step."""
MAX_NODES = 96
"""Steps with more tree nodes than this are extrapolated, not measured: they never pay on the machines that need a table."""
_REPEATS, _MOST_REPEATS = 3, 12
_CHEAP_S = 1.2  # a batch's cells are repeated up to _MOST_REPEATS times while they took less than this together
_SHARE = 1 / 3  # of the time that is left, for each batch after the first: deeper guesses than fit are left out
_LONG_S = 0.1
# Of steps of short and long texts, after one warm-up: two rounds at least, then as many as time allows.
_TEXT_ROUNDS, _TEXT_S = 10, 0.6


@dataclass(frozen=True)
class StepSeconds:
    """Where the time of one measured step went, and how many tree nodes it had, roots included (None: a full chain)."""

    draft: float
    target: float
    rest: float
    rows: int | None = None


def grid(highest: int) -> list[int]:
    """1, 2, 4, ... and the highest."""
    return sorted({*(1 << power for power in range(highest.bit_length())), highest}) if highest > 0 else []


def depths(highest: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ... and the highest: passes bend where kernels do, so twice as dense as ``grid``."""
    return sorted({*grid(highest), *(size * 3 // 2 for size in grid(highest) if 1 < size <= highest * 2 // 3)})


def measure(
    step: Callable[[str, int, int], StepSeconds],
    methods: Mapping[str, int],
    max_batch: int,
    time_limit_s: float = 20.0,
    *,
    lag_seconds: Mapping[str, float] | None = None,
    weightless: Collection[str] = (),
    max_nodes: int = MAX_NODES,
    clock: Callable[[], float] = time.perf_counter,
) -> CostTable:
    """Time real steps on a grid of batches and depths, smallest batch first, until the time is used.

    step(method, batch, depth) runs one step; depth 0 of the method ``PLAIN`` is a plain one. methods: the deepest guess
    of each. Plain and guessing cells of a batch take turns, so that a drift of the machine hits both alike; a cell's
    figure is the least after one warm-up. Batch 1 is always measured once, even beyond the time limit; of larger ones only
    as deep as ``_SHARE`` of the rest allows, which is known better than a small batch says of a larger. weightless: methods
    that look their guesses up. How many they make hardly matters to their time: one depth is measured, and holds for all.
    """
    begun = clock()
    verify: dict[Cell, list[float]] = {}
    draft: dict[str, dict[Cell, float]] = {method: {} for method in methods}
    spreads: list[float] = []
    for batch in grid(max_batch):
        cells = [(PLAIN, 0)]
        for method, deepest in methods.items():
            if method in weightless:
                depth = min(deepest, max_nodes // batch - 1)
                cells += [(method, depth)] if depth > 0 else []
                continue
            cells += [(method, depth) for depth in depths(deepest) if batch * (1 + depth) <= max_nodes]
        if batch > 1:
            cells = _fitting(cells, batch, verify, (time_limit_s - clock() + begun) * _SHARE)
        seen: dict[tuple[str, int], list[StepSeconds]] = {cell: [] for cell in cells}
        started = clock()
        for round_ in range(1 + _MOST_REPEATS):  # the first is the warm-up
            if round_ > _REPEATS and clock() - started > _CHEAP_S:
                break
            for method, depth in cells:
                if (batch > 1 or round_ > 1) and clock() - begun > time_limit_s:
                    break
                first = step(method, batch, depth)
                if not round_:
                    continue
                # A step after one of another kind finds other weights in the CPU caches: the second of two is what
                # serving sees, where steps of one kind follow each other. Long steps stream their weights anyway.
                seen[method, depth].append(first if _total(first) > _LONG_S else step(method, batch, depth))
        for (method, depth), found in seen.items():
            if len(found) < (2 if batch > 1 else 1):  # the time ran out: a single figure is too noisy
                continue
            rows = statistics.median_low([_nodes(one, batch, depth) for one in found])
            # The least: on a shared machine a step takes longer than it must, never shorter.
            rest = min(one.target + one.rest + (0.0 if depth else one.draft) for one in found)
            verify.setdefault((batch, rows), []).append(rest)
            if depth:
                draft[method][batch, depth] = min(one.draft for one in found)
                if method in weightless:
                    draft[method][batch, 1] = draft[method][batch, depth]
            if len(found) >= _REPEATS:
                times = sorted(map(_total, found))
                spreads.append(times[len(times) // 2] / times[0])
        if clock() - begun > time_limit_s:
            log.info("costs: timing stopped after %.0f s; batches larger than %d are estimated", time_limit_s, batch)
            break
    cells_verify = {cell: statistics.fmean(costs) for cell, costs in verify.items()}
    return CostTable(cells_verify, draft, dict(lag_seconds or {}), spread=_median(spreads))


def _fitting(
    cells: Sequence[tuple[str, int]], batch: int, verify: Mapping[Cell, Sequence[float]], seconds: float
) -> list[tuple[str, int]]:
    """Those whose steps take so long together, the shallower first, by what passes with as many rows took; at least a plain
    one and the shallowest guesses."""
    known = {rows: min(costs) for (_, rows), costs in sorted(verify.items(), reverse=True)}  # of the smallest batch
    most, left, kept = max(known), seconds / (1 + 2 * _REPEATS), list[tuple[str, int]]()
    for method, depth in sorted(cells, key=lambda cell: cell[1]):  # stable: methods in their order
        rows = batch * (1 + depth)
        above = min((size for size in known if size >= rows), default=most)
        left -= known[above] * max(rows / above, 1.0)
        if left >= 0.0 or depth <= 1:
            kept.append((method, depth))
    return [cell for cell in cells if cell in kept]


def measure_texts(
    step: Callable[[str, int, bool], StepSeconds],
    methods: Mapping[str, int],
    lengths: tuple[float, float],
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, TextCosts]:
    """What longer texts add to passes and proposals, from steps of one row with a short and with a long text.

    step(method, depth, is_long) runs one step; a depth of 0 is a plain one. methods: the deepest guess of each. lengths: of
    both texts. Steps with both texts take turns. Passes, and proposals by depth, are put on a line, which is what attention
    takes in the processors and kernels that were looked at (docs/LOG.md); no part of it is below 0. Without ``read``.
    """
    short, long = lengths
    points: dict[str, list[tuple[float, float]]] = {PASS: []}
    for method, deepest in methods.items():
        cells = [(depth, is_long) for depth in sorted({0, 1, deepest}) for is_long in (False, True)]
        seen: dict[tuple[int, bool], list[StepSeconds]] = {cell: [] for cell in cells}
        begun = clock()
        for round_ in range(1 + _TEXT_ROUNDS):
            if round_ > 2 and clock() - begun > _TEXT_S:
                break
            for depth, is_long in cells:
                step(method, depth, is_long)  # as in ``measure``: steps of one kind follow each other
                seen[depth, is_long].append(step(method, depth, is_long))
        for depth in sorted({depth for depth, _ in cells}):
            rows = statistics.median_low([_nodes(one, 1, depth) for one in seen[depth, True][1:]])
            pair = [
                [one for one in seen[depth, is_long][1:] if _nodes(one, 1, depth) == rows] for is_long in (False, True)
            ]
            if not pair[0]:  # of another size
                continue
            passed = [min(one.target + one.rest + (0.0 if depth else one.draft) for one in found) for found in pair]
            points[PASS].append((rows, (passed[1] - passed[0]) / (long - short)))
            if depth:
                drafted = [min(one.draft for one in found) for found in pair]
                points.setdefault(method, []).append((depth, (drafted[1] - drafted[0]) / (long - short)))
    return {name: TextCosts(*_line(found)) for name, found in points.items() if found}


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(a, b) of a + b x, neither below 0, nearest in least squares."""
    count, x, y = len(points), sum(at for at, _ in points), sum(value for _, value in points)
    xx, xy = sum(at * at for at, _ in points), sum(at * value for at, value in points)
    spread = count * xx - x * x
    slope = (count * xy - x * y) / spread if spread else 0.0
    if slope <= 0.0:
        return max(y / count, 0.0), 0.0
    if y < slope * x:
        return 0.0, max(xy / xx, 0.0)
    return (y - slope * x) / count, slope


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 1.0


def _total(measured: StepSeconds) -> float:
    return measured.draft + measured.target + measured.rest


def _nodes(measured: StepSeconds, batch: int, depth: int) -> int:
    return batch * (1 + depth) if measured.rows is None else max(measured.rows, batch)
