"""Where rows lie in the KV pool: group by group, then those whose prompts are still being read. Pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Seats:
    """Which row moves where. Rows of a block (a group, or those being read) count from 0, in the order that they had."""

    blocks: list[list[int]]  # of each block: which of its rows lies at its first place, its second, ...
    order: list[
        int
    ]  # [n] the pool's row, before, of what lies at each place afterwards; rows that are not in it are free


def seated(blocks: Sequence[Sequence[int]]) -> Seats:
    """Seats of blocks that lie one after the other. blocks: where the rows of each lie now, in any order. A row that lies
    in its block's range already stays where it is, so few rows are copied."""
    found, order = [], list[int]()
    for old in blocks:
        start = len(order)
        stop = start + len(old)
        staying = {place: row for row, place in enumerate(old) if start <= place < stop}
        moving = iter([row for row, place in enumerate(old) if not start <= place < stop])
        rows = [staying[place] if place in staying else next(moving) for place in range(start, stop)]
        found.append(rows)
        order += [old[row] for row in rows]
    return Seats(found, order)
