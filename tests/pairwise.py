"""Covering arrays: of many combinations, the few that hold every value of every axis, or every pair of values of any two.

Defects that need three values at once are rare; those that need one or two are not. See ``tiers.py``.
"""

import itertools
from collections.abc import Sequence
from typing import TypeVar

Combination = TypeVar("Combination", bound=Sequence[object])


def covering(combinations: Sequence[Combination], strength: int) -> list[Combination]:
    """Those combinations, in their order, that hold every value (strength 1) or every pair of values (2) of any of them.

    All have the same number of axes; values are compared by ``==`` and must be hashable. Deterministic and greedy: again
    and again the combination that holds most of what is missing, the first of equals.
    """
    held = [set(itertools.combinations(enumerate(row), min(strength, len(row)))) for row in combinations]
    missing = set().union(*held) if held else set()
    chosen: set[int] = set()
    while missing:
        best = max(range(len(held)), key=lambda at: len(held[at] & missing))
        chosen.add(best)
        missing -= held[best]
    return [row for at, row in enumerate(combinations) if at in chosen]
