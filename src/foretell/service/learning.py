"""The interface by which a service lets something learn from its traffic: ``foretell.learn`` implements it."""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from foretell.engine.event import StepEvent
from foretell.engine.request.row import Row, Submission
from foretell.engine.speculation import Speculation

ACTIONS = ("pause", "resume", "revert", "save")
"""What ``Learning.act`` takes."""


@dataclass(frozen=True)
class LearnFigures:
    """Learning so far. Counters only grow; gauges are as they stood after the last step."""

    # Gauges.
    is_learning: bool = False  # not paused for all, and not failed
    version: int = 0  # of the drafter that serves, the highest of all adapters; 0 is the one that was loaded
    acceptance: float | None = None  # of first guesses, over the last steps; None before any
    held_bytes: int = 0  # texts that are kept to learn from
    num_adapters: int = 0
    # Counters.
    num_texts: int = 0  # learned from or held out
    num_skipped: int = 0  # not captured: no time, no memory, too long, or the client asked for it
    num_updates: int = 0
    num_swaps: int = 0
    num_refused: int = 0  # updates that the gate refused
    num_reverts: int = 0
    num_drifts: int = 0  # falls of acceptance that were told
    num_failures: int = 0  # of the learner; each ends learning until the service starts again
    seconds_learning: float = 0.0  # of the learner's own work
    seconds_serving: float = 0.0  # of the engine's thread: capturing and swapping


class Learning(Protocol):
    """Called on the engine's thread unless it says otherwise."""

    def assign(self, choice: Speculation, submission: Submission) -> tuple[Speculation, object | None]:
        """The choice with the drafter that learns, for this request; and what its row carries as ``Row.capture``, None
        where nothing is learned from it. From any thread."""
        ...

    def prompt(self, row: Row, start: int, taps: Tensor) -> None:
        """Hidden states [n, T * H] of known text, which the row's drafter has just received."""
        ...

    def observe(self, event: StepEvent) -> None:
        """A step has ended."""
        ...

    def swap(self) -> None:
        """Between two steps: take over new weights where there are some, within a quantum."""
        ...

    def train_idle(self) -> bool | None:
        """While no request runs: learn for at most a quantum. False where there is nothing to do."""
        ...

    def figures(self) -> LearnFigures:
        """The figures of now. From any thread."""
        ...

    def state(self, tenant: str | None = None) -> dict[str, Any]:
        """For people: figures, versions, the last events, and acceptance over requests. From any thread."""
        ...

    def act(self, action: str, tenant: str | None = None) -> dict[str, Any]:
        """One of ACTIONS. Raises ConfigError for anything else, and where it cannot be done."""
        ...

    def close(self) -> None:
        """The service stops."""
        ...


class LearnOptions(Protocol):
    """How to learn: values, ``foretell.learn.LearnOptions``. ``builtin.LEARNER`` makes the learner of them."""

    @property
    def learn_dir(self) -> str | None:
        """The folder of what was learned."""
        ...
