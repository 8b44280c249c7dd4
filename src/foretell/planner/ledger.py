"""What steps tell of the machine and of the run, whichever planner planned them."""

from collections.abc import Callable, Sequence

from foretell.planner.account import Purse, TrialAccount
from foretell.planner.corrections import Corrections
from foretell.planner.observations import StepObservation
from foretell.planner.plan import StepPlan

SPEED_DECAY = 1.0 / 200.0  # of the live speedup, per step
STALLED = 20.0  # usual steps: one that took longer counts as so many, in the live speedup


class LiveSpeed:
    """Tokens a second over those of plain decoding, of the last steps."""

    def __init__(self) -> None:
        self._plain_seconds = self._seconds = self._known = 0.0
        self.guessed = False  # in the last step

    @property
    def ratio(self) -> float | None:
        """None before any step."""
        return self._plain_seconds / self._seconds if self._seconds else None

    def count(self, worth: float, seconds: float) -> None:
        """A step took so long, for tokens that are worth so many seconds of plain decoding. The machine may have stood
        still in it: its ratio counts, its length only so far."""
        most = STALLED * self._seconds
        if seconds * self._known > most > 0.0:
            worth, seconds = worth * most / (seconds * self._known), most / self._known
        self._known += SPEED_DECAY * (1.0 - self._known)
        self._plain_seconds += SPEED_DECAY * (worth - self._plain_seconds)
        self._seconds += SPEED_DECAY * (seconds - self._seconds)


class Ledger:
    """Kept in common by all planners of the same steps."""

    def __init__(self, methods: Sequence[str], speed: LiveSpeed | None = None, *, num_planners: int = 1) -> None:
        """methods: whose costs are known. speed: what was measured by another table of costs holds on."""
        self.corrections = Corrections(methods)
        self.account = TrialAccount(num_planners)
        self.speed = speed or LiveSpeed()
        self.unsettled = 0  # steps to come that take longer than others: a drafter's weights displaced the target's
        self.tried: Purse | None = None  # of the trial that did so, if it was one


class Waiting:
    """Steps that are learned from a few at a time: after a pass code and data are cold, and the first costs more than
    those after it."""

    def __init__(self, learn: Callable[[StepPlan, StepObservation], None]) -> None:
        self._learn = learn
        self._steps: list[tuple[StepPlan, StepObservation]] = []

    def add(self, plan: StepPlan, step: StepObservation) -> None:
        """Learn from this step, now or with later ones."""
        self._steps.append((plan, step))
        if len(self._steps) >= plan.together:
            self.flush()

    def flush(self) -> None:
        """Learn from all now."""
        if self._steps:
            steps, self._steps = self._steps, []
            for plan, step in steps:
                self._learn(plan, step)
