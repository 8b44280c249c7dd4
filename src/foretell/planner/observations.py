"""The planner's input: each row before a step, and the measured step."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowView:
    """A row before a step."""

    request_id: str
    method: str
    max_depth: int  # the request's own limit; 0: it never guesses
    depth_limit: int  # greatest depth that it can still use
    num_unread: int = 0  # tokens that its drafter has not read yet
    always: bool = False  # it asked to guess in every step, whether that pays or not
    heat: int = 0  # ``Row.heat``: how its text is drawn, and by which adapter
    length: int = 0  # tokens of its text
    expected: int | None = (
        None  # nearly certain tokens that its method can guess for nothing; None: nobody knows of any
    )


@dataclass(frozen=True, slots=True)
class RowStep:
    """The result of a step for one row."""

    request_id: str
    method: str
    cap: int  # the depth it was allowed
    drafted: int  # the depth of its proposal
    accepted: int
    nodes: int | None = None  # None: a chain, as many as drafted
    # (cap, drafted, accepted) of its light part by itself, where that is known.
    light: tuple[int, int, int] | None = None
    heat: int = 0  # as in ``RowView``
    # Whether the whole method's proposal is, or would be, its light part's; None: not known.
    by_light: bool | None = None
    length: int = 0  # as in ``RowView``

    @property
    def num_nodes(self) -> int:
        """Tree nodes beyond the root."""
        return self.drafted if self.nodes is None else self.nodes


@dataclass(frozen=True, slots=True)
class StepObservation:
    """One step, as measured."""

    batch: int
    rows: Sequence[RowStep]  # may be left out where none may guess
    seconds_draft: float
    seconds_target: float
    seconds_rest: float  # all else between the end of the step before and its own, the loop's time around it included
    length: float = 0.0  # tokens of its rows' texts, mean
    num_passes: int = 1  # steps that one call made, each of which took these seconds

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.seconds_draft + self.seconds_target + self.seconds_rest
