"""Rows of the pool, over any sequence of leaving and coming: each keeps its content, groups lie together, few rows move."""

from hypothesis import given, strategies as st

from foretell.engine.batch import Seats, seated

EVENTS = st.lists(
    st.tuples(st.sampled_from(["comes", "joins", "leaves"]), st.integers(0, 11)), min_size=12, max_size=60
)
"""What happens, and to which: the number modulo how many there are."""


class Pool:
    """A pool whose rows hold names, and the blocks that lie in it."""

    def __init__(self) -> None:
        self.rows: list[str] = []
        self.blocks: list[list[str]] = [[], [], [], []]  # three groups, and rows that are being read
        self.copies = 0

    def settle(self) -> Seats:
        old = [[self.rows.index(name) for name in block] for block in self.blocks]
        seats = seated(old)
        assert [sorted(rows) for rows in seats.blocks] == [list(range(len(block))) for block in self.blocks]
        self.blocks = [[block[row] for row in rows] for block, rows in zip(self.blocks, seats.blocks, strict=True)]
        before, self.rows = self.rows, [self.rows[place] for place in seats.order]
        self.copies += sum(place >= len(before) or before[place] != name for place, name in enumerate(self.rows))
        return seats


@given(EVENTS)
def test_every_row_keeps_its_content_and_blocks_lie_one_after_the_other(events: list[tuple[str, int]]) -> None:
    pool, number = Pool(), 0
    for event, which in events:
        names = [name for block in pool.blocks for name in block]
        if event == "comes":
            pool.rows.append(f"row {number}")
            pool.blocks[3].append(f"row {number}")
            number += 1
        elif event == "joins" and pool.blocks[3]:
            pool.blocks[which % 3].append(pool.blocks[3].pop(which % len(pool.blocks[3])))
        elif event == "leaves" and names:
            gone = names[which % len(names)]
            pool.blocks = [[name for name in block if name != gone] for block in pool.blocks]
        before = {name: place for place, name in enumerate(pool.rows)}
        seats = pool.settle()
        assert pool.rows == [name for block in pool.blocks for name in block]
        assert len(set(pool.rows)) == len(pool.rows)
        start = 0
        for block in pool.blocks:
            stop = start + len(block)
            for name in block:
                if start <= before[name] < stop:
                    assert pool.rows.index(name) == before[name], "it lay in its range, and need not move"
            start = stop
        assert len(seats.order) == len(pool.rows)


def test_nobody_moves_where_nobody_must() -> None:
    assert seated([[0, 1], [2], [3, 4]]) == Seats([[0, 1], [0], [0, 1]], [0, 1, 2, 3, 4])
    assert seated([[1, 0], [2]]) == Seats([[1, 0], [0]], [0, 1, 2]), "each at its own place, whatever the order"
    assert seated([[1, 4], [2]]).order == [4, 1, 2], "the last one fills the gap of who left"
    assert seated([]) == Seats([], [])
