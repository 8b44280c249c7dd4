"""What a planner would do for requests of a kind, by the length of their texts and how many there are at once."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from foretell.costs.cost_model import speedup
from foretell.costs.table import CostTable

LENGTHS = (256, 1024, 4096, 16_384, 65_536)
"""Of texts, in tokens, as far as the context reaches."""


class Cell(NamedTuple):
    """Requests with texts of one length, all alike."""

    method: str
    context: int  # tokens of each text
    concurrency: int  # requests at once
    guesses: int  # that each of them makes, in depth; 0: plain decoding is faster
    speedup: float  # over plain decoding of the same requests; 1 without guesses


class Factors(NamedTuple):
    """Of the table: see ``Corrections``."""

    plain: float = 1.0
    guess: float = 1.0
    draft: float = 1.0


MEASURED = Factors()


def lengths_to(longest: int) -> list[int]:
    """Lengths of texts that are shown, up to the longest."""
    return [*(length for length in LENGTHS if length < longest), longest]


def outlook(
    costs: CostTable,
    method: str,
    kept: Sequence[float],
    nodes: Sequence[float],
    contexts: Iterable[int],
    batches: Sequence[int],
    factors: Factors = MEASURED,
) -> list[Cell]:
    """The best depth for each length of text and number of requests, where every row guesses as deep. kept, nodes: what a
    proposal's k-th place is expected to keep and to add to the pass (``Curves``). Raises ConfigError for a method that was
    not measured."""
    cells = []
    for context in contexts:
        for batch in batches:
            plain = costs.verify(batch, batch, context) * factors.plain
            best, tokens, width = (0, 1.0), 1.0, 1.0
            for depth, (one, more) in enumerate(zip(kept, nodes, strict=True), 1):
                tokens, width = tokens + one, width + more
                cost = costs.verify(batch, batch * width, context) * factors.guess
                cost += costs.draft(method, batch, depth, context) * factors.draft
                best = max(best, (depth, speedup(tokens, cost, plain)), key=lambda found: found[1])
            cells.append(Cell(method, context, batch, *best))
    return cells
