"""How often the drafters of each method have failed, and which methods rest because theirs failed several times in a row.

A drafter that fails costs its requests their guesses (``guarded``). Were its method tried again for every request, each
would pay for opening a drafter, reading its prompt and failing; so after ``MOST_IN_A_ROW`` failures nobody opens one for
``FIRST_REST_S``, and for twice as long after each further failure that no request without one has interrupted.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import monotonic

from foretell.core.errors import DrafterError, ForetellError, ModelError
from foretell.engine.config import METHODS

logger = logging.getLogger(__name__)
MOST_IN_A_ROW = 3
FIRST_REST_S = 10.0
LONGEST_REST_S = 640.0


@dataclass
class _Method:
    """One method's failures."""

    total: int = 0
    in_a_row: int = 0  # since a request of it ended well; those of drafters that fail during a rest do not count
    rest_s: float = 0.0  # the last rest's length
    until: float = -float("inf")  # its end, by the clock
    error: str = ""  # the name of the last one


class DrafterFailures:
    """See the module's docstring. The engine's thread tells; any thread may ask."""

    def __init__(self, methods: Iterable[str] = (), *, clock: Callable[[], float] = monotonic) -> None:
        """methods: those that are reported before any failure, too."""
        self._methods = {name: _Method() for name in methods}
        self._clock = clock

    def failed(self, name: str, error: Exception) -> None:
        """A drafter of a method has failed. To be called where the error is handled: it goes to the log."""
        mine = self._methods.setdefault(name, _Method())
        mine.total += 1
        mine.error = type(error).__name__
        if self._left(mine):  # opened before the rest
            return
        mine.in_a_row += 1
        logger.warning(
            "the drafter of method %s failed (%s); its requests go on without guesses", name, mine.error,
            exc_info=error if mine.in_a_row == 1 else None,
        )  # fmt: skip
        if mine.in_a_row >= MOST_IN_A_ROW:
            mine.rest_s = min(2 * mine.rest_s, LONGEST_REST_S) if mine.rest_s else FIRST_REST_S
            mine.until = self._clock() + mine.rest_s
            logger.error(
                "method %s rests for %.0f s: its drafters failed %d times in a row, last with %s",
                name, mine.rest_s, mine.in_a_row, mine.error,
            )  # fmt: skip

    def worked(self, name: str) -> None:
        """A request that was guessed for has ended, and its drafter has not failed."""
        mine = self._methods.get(name)
        if mine is None or not mine.in_a_row or self._left(mine):
            return
        if mine.rest_s:
            logger.info("method %s works again after %d failures in a row", name, mine.in_a_row)
        mine.in_a_row, mine.rest_s = 0, 0.0

    def why_rests(self, name: str) -> str:
        """Why no drafter of a method is opened now; "" where it does not rest."""
        mine = self._methods.get(name)
        if mine is None or not self._left(mine):
            return ""
        return f"{name} rests after {mine.in_a_row} failures in a row ({mine.error})"

    def totals(self) -> dict[str, int]:
        """Failures so far, by method."""
        return {name: mine.total for name, mine in list(self._methods.items())}

    def rests(self) -> dict[str, float]:
        """Seconds for which each method still rests; 0 where it does not."""
        return {name: self._left(mine) for name, mine in list(self._methods.items())}

    def _left(self, mine: _Method) -> float:
        return max(0.0, mine.until - self._clock())


class RaisedFailures(DrafterFailures):
    """For those who measure or check a method: its failure ends the call. Plain decoding must not pass for it."""

    def failed(self, name: str, error: Exception) -> None:
        """Raise DrafterError; an error that the caller can mend as it is."""
        if isinstance(error, ForetellError) and not isinstance(error, ModelError):
            raise error
        raise DrafterError(
            f"the drafter of {METHODS.called(name)} failed ({type(error).__name__}: {error}): choose another method, or "
            "drafter_errors = 'plain' to go on without guesses"
        ) from error
