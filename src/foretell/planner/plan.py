"""What a planner says of one step."""

from dataclasses import dataclass
from enum import IntEnum


class Option(IntEnum):
    """Nobody guesses, light parts do, or whole methods do. Each pays where it brings more than those before it."""

    PLAIN = 0  # nobody
    LIGHT = 1  # the parts of methods that guess for next to nothing (``Method.light``)
    WHOLE = 2  # methods with all that they have


@dataclass(slots=True)
class StepPlan:
    """How deep each row may guess in one step. It goes out with the step, and comes back with what was observed of it:
    all that the planner must know of the plan then stands here."""

    caps: list[int]  # by row; 0: no guess
    paid: list[int] | None = None  # the same of guesses that cost time, where that is another
    option: Option = Option.WHOLE
    lagging: bool = False  # a drafter has more than two tokens to read: what it takes is not what guesses cost
    least: float = 0.0  # chance to be kept below which a guess that costs nothing to look up does not pay its node
    trial: bool = False
    alone: bool = False  # a plain step that tells of itself: no other is made in the same call
    charged: float | None = None  # for a trial of guesses: seconds, ahead of it
    together: int = 1  # so many steps of its kind may be learned from at once
    expected: tuple[
        int, ...
    ] = ()  # where rows guess what is expected of them: so many of a row's first guesses are that
    members: tuple[str, ...] = ()  # ids of the requests that it was made for, by row: it is of no use to others

    def fits(self, members: tuple[str, ...]) -> bool:
        """Whether it is a plan of these requests, a depth for each."""
        is_theirs = self.members == members and len(self.caps) == len(members)
        return is_theirs and (self.paid is None or len(self.paid) == len(members))
