"""What stands around the target's passes may fail, and decoding goes on without it: how often each part has, and which
parts rest because they failed several times in a row.

A drafter that fails costs its requests their guesses (``guarded``). Were its method tried again for every request, each
would pay for opening a drafter, reading its prompt and failing; so after ``MOST_IN_A_ROW`` failures nobody opens one for
``FIRST_REST_S``, and for twice as long after each further failure that no request without one has interrupted. So it is
with the planner, of which each step would pay. Other parts (``run``) are tried each time.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import monotonic
from typing import TypeVar

from foretell.core.errors import DrafterError, ForetellError, ModelError
from foretell.engine.config import METHODS

logger = logging.getLogger(__name__)
MOST_IN_A_ROW = 3
FIRST_REST_S = 10.0
LONGEST_REST_S = 640.0
PLANNER = "the planner"
"""Named as a method is; no method's name has a space."""
PASSES = ("step", "prompt", "score", "admission", "leaving")
"""What is done with rows of the pool: where one of these fails the pool is made anew."""
PLACES = (
    "planner", *PASSES, "recorder", "observer", "sink", "output", "learner", "prefixes", "keeper", "rest", "figures",
)  # fmt: skip
"""Where errors are counted, beside drafters."""
_T = TypeVar("_T")


@dataclass
class _Part:
    """The failures of one method's drafters, or of the planner."""

    total: int = 0
    in_a_row: int = 0  # since a request of it ended well; those of drafters that fail during a rest do not count
    rest_s: float = 0.0  # the last rest's length
    until: float = -float("inf")  # its end, by the clock
    error: str = ""  # the name of the last one


class Failures:
    """See the module's docstring. The engine's thread tells; any thread may ask."""

    def __init__(self, methods: Iterable[str] = (), *, clock: Callable[[], float] = monotonic) -> None:
        """methods: those that are reported before any failure, too."""
        self._parts = {name: _Part() for name in (*methods, PLANNER)}
        self._places = Counter(dict.fromkeys(PLACES, 0))
        self._told: set[tuple[str, type[Exception]]] = set()  # of the other places: what the log has
        self._clock = clock

    def failed(self, name: str, error: Exception) -> None:
        """A drafter of a method has failed, or ``PLANNER``. To be called where the error is handled: it goes to the log."""
        mine = self._parts.setdefault(name, _Part())
        mine.total += 1
        mine.error = type(error).__name__
        if self._left(mine):  # opened before the rest
            return
        mine.in_a_row += 1
        if name != PLANNER or (name, type(error)) not in self._told:  # which may fail at any step
            logger.warning(
                "%s failed (%s); its requests go on without guesses", _part(name), mine.error,
                exc_info=error if mine.in_a_row == 1 or name == PLANNER else None,
            )  # fmt: skip
        self._told.add((name, type(error)))
        if mine.in_a_row >= MOST_IN_A_ROW:
            mine.rest_s = min(2 * mine.rest_s, LONGEST_REST_S) if mine.rest_s else FIRST_REST_S
            mine.until = self._clock() + mine.rest_s
            logger.error(
                "%s rests for %.0f s after %d failures in a row, the last of them %s",
                _part(name), mine.rest_s, mine.in_a_row, mine.error,
            )  # fmt: skip

    def worked(self, name: str) -> None:
        """A request that was guessed for has ended, and its drafter has not failed; or the planner has learned from a step
        that it planned."""
        mine = self._parts.get(name)
        if mine is None or not mine.in_a_row or self._left(mine):
            return
        if mine.rest_s:
            logger.info("%s works again after %d failures in a row", _part(name), mine.in_a_row)
        mine.in_a_row, mine.rest_s = 0, 0.0

    def why_rests(self, name: str) -> str:
        """Why no drafter of a method is opened now, or nothing is planned; "" where it does not rest."""
        mine = self._parts.get(name)
        if mine is None or not self._left(mine):
            return ""
        return f"{name} rests after {mine.in_a_row} failures in a row ({mine.error})"

    def run(self, place: str, instead: _T, call: Callable[..., _T], *args: object) -> _T:
        """The result of a call that decoding does not depend on; ``instead`` where it fails."""
        try:
            return call(*args)
        except Exception as error:
            self.fault(place, error)
            return instead

    def fault(self, place: str, error: Exception, about: str = "decoding goes on") -> None:
        """An error at one of ``PLACES``. The log has the first of each kind with its traceback, and of passes all."""
        self._places[place] += 1
        kind = place, type(error)
        if kind not in self._told or place in PASSES:
            logger.error("internal error (%s): %s; %s", place, type(error).__name__, about, exc_info=error)
        self._told.add(kind)

    def by_place(self) -> dict[str, int]:
        """Errors so far, by place; those of drafters are ``totals``."""
        return {**self._places, PLACES[0]: self._parts[PLANNER].total}

    def totals(self) -> dict[str, int]:
        """Failures so far, by method."""
        return {name: mine.total for name, mine in list(self._parts.items()) if name != PLANNER}

    def rests(self) -> dict[str, float]:
        """Seconds for which each method still rests; 0 where it does not."""
        return {name: self._left(mine) for name, mine in list(self._parts.items()) if name != PLANNER}

    def _left(self, mine: _Part) -> float:
        return max(0.0, mine.until - self._clock())


def _part(name: str) -> str:
    return name if name == PLANNER else f"the drafter of method {name}"


class RaisedFailures(Failures):
    """For those who measure or check: a failure ends the call. Plain decoding must not pass for what they ask for."""

    def failed(self, name: str, error: Exception) -> None:
        """Raise DrafterError; an error that the caller can mend as it is."""
        if name == PLANNER or (isinstance(error, ForetellError) and not isinstance(error, ModelError)):
            raise error
        raise DrafterError(
            f"the drafter of {METHODS.called(name)} failed ({type(error).__name__}: {error}): choose another method, or "
            "drafter_errors = 'plain' to go on without guesses"
        ) from error

    def fault(self, place: str, error: Exception, about: str = "") -> None:
        """Raise it."""
        raise error
