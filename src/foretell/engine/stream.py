"""One completion, piece by piece."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from foretell.engine.result import Completion
from foretell.engine.state import Piece, Row

if TYPE_CHECKING:
    from foretell.engine.engine import Engine


class Stream(Iterator[Piece]):
    """Pieces of one completion as they are made."""

    def __init__(self, engine: "Engine", row: Row) -> None:
        self._engine, self._row = engine, row
        self._steps = engine._decode([row], [engine.choice()], 1)
        self._given = 0

    def __next__(self) -> Piece:
        """The next token. Raises StopIteration after the last."""
        while self._given == len(self._row.pieces):
            next(self._steps)
        self._given += 1
        return self._row.pieces[self._given - 1]

    def close(self) -> None:
        """Stop decoding and free the cache."""
        self._steps.close()  # type: ignore[attr-defined]

    @property
    def completion(self) -> Completion:
        """The completion so far; whole once the iterator is exhausted."""
        return self._engine._completion(self._row, self._engine.choice())
