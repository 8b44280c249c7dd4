"""Tables of measured costs of whole steps over batches.

Two figures decide whether a guess pays: ``verify``, the target's pass with distributions, verification and bookkeeping,
over a batch of rows with so many tree nodes in all, and ``draft``, what a method takes to propose so deep for so many rows.
Both are measured on a grid of real steps of short texts, smoothed so that a bigger step is never cheaper, and interpolated
linearly. Attention reads the whole text, which adds to both in proportion to its length (``TextCosts``).
"""

import bisect
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretell.core.errors import ConfigError
from foretell.costs.cost_model import speedup, step_cost

_FAR = 1e6
MAX_SPREAD = 1.5
"""Of the figures of a quiet machine: see ``CostTable.spread`` and ``disorder``."""

Array = NDArray[np.float64]
Cell = tuple[int, int]


class TextCosts(NamedTuple):
    """Seconds that each token of a row's text adds, beyond ``CostTable.length``: attention's part, once + each x size."""

    once: float = 0.0  # to a pass or a proposal, whatever its size
    each: float = 0.0  # for each node of the pass, the root too; for each depth of the proposal
    read: float = 0.0  # for each token that a drafter reads behind it


PASS = "pass"
"""The key of the target's pass among ``CostTable.texts``; the others are methods."""


def isotonic(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest in least squares (pool adjacent violators)."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        total, count = float(value), 1
        while blocks and blocks[-1][0] * count > total * blocks[-1][1]:  # by mean, without dividing
            before, width = blocks.pop()
            total, count = total + before, count + width
        blocks.append((total, count))
    return [total / count for total, count in blocks for _ in range(count)]


class Surface:
    """Seconds over (batch, x): a curve over x at each measured batch, linear between batches and beyond (but ``by_sum``).

    Never falls in x nor in batch. Beyond its last point a curve goes on with its last slope or its mean slope,
    whichever is steeper, so that steps beyond the measured ones are never free.
    """

    def __init__(self, cells: Mapping[Cell, float], *, by_sum: bool = False) -> None:
        """by_sum: beyond the largest batch a point is as dear as that batch's with the same batch + x."""
        self._by_sum = by_sum
        self._batches = sorted({batch for batch, _ in cells})
        first = isotonic([min((x, y) for (b, x), y in cells.items() if b == batch)[1] for batch in self._batches])
        self._curves: dict[int, tuple[Array, Array]] = {}
        self._points: dict[int, tuple[list[float], list[float]]] = {}
        slope = 0.0
        before: tuple[Array, Array] | None = None  # the batch below, as far as it was measured
        for batch, lowest in zip(self._batches, first, strict=True):
            measured = sorted(x for b, x in cells if b == batch)
            xs, ys = np.array(measured, float), np.array(isotonic([lowest, *(cells[batch, x] for x in measured[1:])]))
            if before is not None:
                knots = np.union1d(xs, before[0][(before[0] > xs[0]) & (before[0] < xs[-1])])
                xs, ys = knots, np.maximum(np.interp(knots, xs, ys), np.interp(knots, *before))
            before = xs, ys
            if len(xs) > 1:
                slope = float(max((ys[-1] - ys[-2]) / (xs[-1] - xs[-2]), (ys[-1] - ys[0]) / (xs[-1] - xs[0])))
            self._curves[batch] = (np.append(xs, _FAR), np.append(ys, ys[-1] + slope * (_FAR - xs[-1])))

    def curve(self, batch: int) -> tuple[Array, Array]:
        """(xs, seconds) of a batch, for ``numpy.interp``; kept once made."""
        if batch not in self._curves:
            self._curves[batch] = self._between(batch)
        return self._curves[batch]

    def _between(self, batch: int) -> tuple[Array, Array]:
        last = self._batches[-1]
        if self._by_sum and batch > last and len(self._curves[last][0]) > 2:
            xs, ys = self._curves[last]
            more = batch - last
            return np.append(0.0, xs[xs > more] - more), np.append(np.interp(more, xs, ys), ys[xs > more])
        if len(self._batches) == 1:  # in proportion: a larger batch is not underestimated
            xs, ys = self._curves[self._batches[0]]
            return xs, ys * (batch / self._batches[0])
        after = min(max(bisect.bisect_left(self._batches, batch), 1), len(self._batches) - 1)
        low, high = self._batches[after - 1], self._batches[after]
        share = (batch - low) / (high - low)  # above 1 beyond the largest batch
        xs = np.union1d(self._curves[low][0], self._curves[high][0])
        below, above = np.interp(xs, *self._curves[low]), np.interp(xs, *self._curves[high])
        return xs, np.maximum(below + share * (above - below), 0.0)

    def __call__(self, batch: int, x: float) -> float:
        """Seconds at one point."""
        points = self._points.get(batch)
        if points is None:
            xs, ys = self.curve(batch)
            points = self._points[batch] = (xs.tolist(), ys.tolist())
        places, costs = points  # lists: numpy takes longer for one point than for a hundred
        after = bisect.bisect_left(places, x)
        if after == 0 or after == len(places):
            return costs[min(after, len(costs) - 1)]
        low, high = places[after - 1], places[after]
        return costs[after - 1] + (x - low) / (high - low) * (costs[after] - costs[after - 1])


@dataclass(frozen=True)
class CostTable:
    """Seconds of the parts of a step; ``measure`` makes one. Queries are exact at measured cells that were in order, and
    linear between them. Raises ConfigError for costs that are not positive, or without a plain step."""

    verify_cells: Mapping[Cell, float]  # (batch, tree nodes in all) -> seconds; nodes == batch is plain decoding
    draft_cells: Mapping[str, Mapping[Cell, float]]  # method -> (drafting rows, depth) -> seconds
    lag_seconds: Mapping[str, float] = field(default_factory=dict)  # method -> seconds a token it lags behind
    texts: Mapping[str, TextCosts] = field(default_factory=dict)  # of ``PASS`` and methods; others do not depend on it
    length: float = 0.0  # tokens of the texts that the cells were measured with
    spread: float = 1.0  # median time of a cell's steps over their least, median of the cells: 1 on a quiet machine
    _verify: Surface = field(init=False, repr=False, compare=False)
    _draft: dict[str, Surface] = field(init=False, repr=False, compare=False)
    _verdicts: dict[str, str] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        if not any(batch == rows for batch, rows in self.verify_cells):
            raise ConfigError("a cost table has at least one plain step; given none")
        for name, cells in {"verify": self.verify_cells, **self.draft_cells}.items():
            least = 0.0 if name != "verify" else 1e-12
            bad = {cell: cost for cell, cost in cells.items() if not (math.isfinite(cost) and cost >= least)}
            if bad or any(batch < 1 or x < 0 for batch, x in cells):
                raise ConfigError(f"costs of {name} are positive seconds of cells (batch >= 1, size >= 0); given {bad}")
        # A pass's rows cost the same however they are divided among texts, and larger batches are not always measured. On a
        # line through smaller batches guesses would be free as far as these wait for memory.
        cells = {(batch, rows - batch): cost for (batch, rows), cost in self.verify_cells.items()}
        surface = Surface(cells, by_sum=True)
        draft = {
            method: Surface({**{(batch, 0): 0.0 for batch, _ in cells}, **cells})
            for method, cells in self.draft_cells.items()
            if cells
        }
        object.__setattr__(self, "_verify", surface)
        object.__setattr__(self, "_draft", draft)

    @property
    def methods(self) -> list[str]:
        """Methods with measured costs."""
        return list(self._draft)

    @property
    def disorder(self) -> float:
        """Largest ratio of a pass's seconds to those of one with more nodes, of the same batch: 1 where none is cheaper."""
        cells = sorted(self.verify_cells.items())
        worst = 1.0
        for place, ((batch, rows), cost) in enumerate(cells):
            bigger = [other for (same, more), other in cells[place + 1 :] if same == batch and more > rows]
            worst = max([worst, *(cost / other for other in bigger)])
        return worst

    @property
    def is_steady(self) -> bool:
        """Whether the figures look like those of a machine that did nothing else."""
        return max(self.spread, self.disorder) <= MAX_SPREAD

    def of_methods(self, names: Collection[str]) -> "CostTable":
        """Without the costs of other methods."""
        draft = {name: cells for name, cells in self.draft_cells.items() if name in names}
        lag = {name: seconds for name, seconds in self.lag_seconds.items() if name in names}
        texts = {name: text for name, text in self.texts.items() if name == PASS or name in names}
        return replace(self, draft_cells=draft, lag_seconds=lag, texts=texts)

    def least(self, other: "CostTable") -> "CostTable":
        """Of two measurements the lesser figure of every cell: a step on a busy machine takes longer than it must, never
        shorter."""

        def lesser(mine: Mapping[Cell, float], others: Mapping[Cell, float]) -> dict[Cell, float]:
            return {cell: min(mine.get(cell, math.inf), others.get(cell, math.inf)) for cell in {**mine, **others}}

        return CostTable(
            lesser(self.verify_cells, other.verify_cells),
            {
                name: lesser(self.draft_cells.get(name, {}), other.draft_cells.get(name, {}))
                for name in {**self.draft_cells, **other.draft_cells}
            },
            {
                name: min(self.lag_seconds.get(name, math.inf), other.lag_seconds.get(name, math.inf))
                for name in {**self.lag_seconds, **other.lag_seconds}
            },
            {
                name: TextCosts(*map(min, self.text(name), other.text(name)))
                for name in {**self.texts, **other.texts}
                if name in self.texts and name in other.texts
            },
            min(self.length, other.length),
            spread=min(self.spread, other.spread),
        )

    def text(self, name: str) -> TextCosts:
        """Of ``PASS`` or a method."""
        return self.texts.get(name, TextCosts())

    def beyond(self, length: float) -> float:
        """Tokens of a text by which it is longer than those that cells were measured with."""
        return max(0.0, length - self.length)

    def verify(self, batch: int, rows: float, length: float = 0.0) -> float:
        """Seconds of a step without its proposing: batch rows with ``rows`` tree nodes in all, roots included; length: of
        each row's text."""
        text = self.text(PASS)
        return self._verify(batch, rows - batch) + self.beyond(length) * (batch * text.once + rows * text.each)

    def verify_curve(self, batch: int) -> tuple[Array, Array]:
        """(nodes beyond the roots, seconds) of one batch, for ``numpy.interp``."""
        return self._verify.curve(batch)

    def draft(self, method: str, batch: int, depth: int, length: float = 0.0) -> float:
        """Seconds to propose ``depth`` deep for ``batch`` rows; length: of each row's text. Raises ConfigError for a method
        that was not measured."""
        if batch < 1 or depth < 1:
            return 0.0
        if method not in self._draft:
            raise ConfigError(f"the costs of {method!r} were not measured; known: {', '.join(self._draft) or 'none'}")
        text = self.text(method)
        return self._draft[method](batch, depth) + self.beyond(length) * batch * (text.once + depth * text.each)

    def catch_up(self, method: str, tokens: int, length: int = 0) -> float:
        """Seconds for a drafter to read the last ``tokens`` tokens of a text of ``length`` (at least as many)."""
        given = self.lag_seconds.get(method)
        if given is None:  # a token more in a pass costs at most what a row more costs
            given = (self.draft(method, 2, 1) - self.draft(method, 1, 1)) if method in self._draft else 0.0
        tokens = max(tokens, 0)
        return tokens * (max(given, 0.0) + (max(length, tokens) - tokens / 2) * self.text(method).read)

    def best_case(self, method: str, batch: int, max_depth: int | None = None, length: float = 0.0) -> float:
        """Speed over plain if every guess were accepted, at the best depth and number of guessing rows; 1 at least.
        length: of each row's text."""
        if method not in self._draft:
            return 1.0
        deepest = max_depth or max(depth for _, depth in self.draft_cells[method])
        plain, best = self.verify(batch, batch, length), 1.0
        for rows in {*(1 << power for power in range(batch.bit_length())), batch}:
            for depth in range(1, deepest + 1):
                verify, draft = (
                    self.verify(batch, batch + rows * depth, length),
                    self.draft(method, rows, depth, length),
                )
                cost = step_cost(verify, 1, draft)
                best = max(best, speedup((batch + rows * depth) / batch, cost, plain))
        return best

    def verdict(self, method: str) -> str:
        """One sentence for the log and for answers that were not guessed: where guessing can win at all."""
        if method not in self._verdicts:  # hundreds of queries, and each request that ends may ask
            self._verdicts[method] = self._judge(method)
        return self._verdicts[method]

    def _judge(self, method: str) -> str:
        if method not in self._draft:
            return f"{method}: not measured; --speculation auto will not guess with it"
        passes = self.draft(method, 1, 1) / self.verify(1, 1)
        batches = sorted({batch for batch, _ in self.verify_cells})
        wins = [batch for batch in batches if self.best_case(method, batch) > 1.0]
        said = f"{method}: a guess costs {passes:.2f} passes"
        if not wins:
            return f"{said}; it cannot win at any acceptance: --speculation auto will not guess"
        gain = f"at best {self.best_case(method, wins[0]):.1f}x at batch {wins[0]}"
        if wins == batches:
            return f"{said}; it can win at every batch up to {batches[-1]}, {gain}"
        if wins == batches[: len(wins)]:
            return f"{said}; even if all were accepted it wins only up to batch {wins[-1]}, {gain}"
        return f"{said}; even if all were accepted it wins only at batch {', '.join(map(str, wins))}, {gain}"

    def to_json(self) -> dict[str, Any]:
        """As lists that JSON can hold."""
        return {
            "verify": [[*cell, cost] for cell, cost in self.verify_cells.items()],
            "draft": {
                name: [[*cell, cost] for cell, cost in cells.items()] for name, cells in self.draft_cells.items()
            },
            "lag": dict(self.lag_seconds),
            "texts": {name: list(text) for name, text in self.texts.items()},
            "length": self.length,
            "spread": self.spread,
        }

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> "CostTable":
        """What ``to_json`` made. Raises ConfigError, KeyError, TypeError or ValueError where it is something else."""

        def cells(rows: Iterable[Sequence[float]]) -> dict[Cell, float]:
            return {(int(batch), int(size)): float(cost) for batch, size, cost in rows}

        draft = {str(name): cells(rows) for name, rows in given["draft"].items()}
        lag = {str(name): float(cost) for name, cost in given["lag"].items()}
        texts = {str(name): TextCosts(*map(float, text)) for name, text in given["texts"].items()}
        length, spread = float(given["length"]), float(given["spread"])
        return cls(cells(given["verify"]), draft, lag, texts, length, spread)
