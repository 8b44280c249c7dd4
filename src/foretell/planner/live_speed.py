"""Tokens a second over those of plain decoding, of the last steps."""

SPEED_DECAY = 1.0 / 200.0  # of the live speedup, per step
STALLED = 20.0  # usual steps: one that took longer counts as so many


class LiveSpeed:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._plain_seconds = self._seconds = self._known = 0.0
        self.guessed = False  # in the last step
        self.before = 0.0  # seconds that only guessing took since then: drafters read prompts

    @property
    def ratio(self) -> float | None:
        """None before any step."""
        return self._plain_seconds / self._seconds if self._seconds else None

    def count(self, worth: float, seconds: float, times: int = 1) -> None:
        """A step took so long, for tokens that are worth so many seconds of plain decoding, and others as long. The machine
        may have stood still in it: its ratio counts, its length only so far."""
        for _ in range(times):
            gained, took, self.before = worth, seconds + self.before, 0.0
            most = STALLED * self._seconds
            if took * self._known > most > 0.0:
                gained, took = worth * most / (took * self._known), most / self._known
            self._known += SPEED_DECAY * (1.0 - self._known)
            self._plain_seconds += SPEED_DECAY * (gained - self._plain_seconds)
            self._seconds += SPEED_DECAY * (took - self._seconds)
