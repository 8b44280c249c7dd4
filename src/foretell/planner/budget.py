"""What trials may lose: a share of the serving time, earned as it passes."""

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from foretell.planner.plan import Option

if TYPE_CHECKING:  # it imports numpy, for which the command line's options do not wait
    from foretell.planner.allocation import Allocation

PROMISE = 0.02
"""Share of the serving time that all the work beside decoding may take together (docs/serving.md, "Stepping aside")."""
BUDGET = 0.005  # of it, what trials may lose
LEARN_SHARE = PROMISE - BUDGET  # of it, what a learner may take of the engine's thread
START_CREDIT_PASSES, MAX_CREDIT_PASSES = 1.0, 12.0  # plain passes: what it starts with for each option, holds at most
MAX_READING_PASSES = 64.0  # ... and what one trial may overdraw for a long text that a drafter reads
ASKED_AGAIN = 1.25  # of the expected loss of a trial that was refused: the credit at which it is weighed again
WON_SHARE = 0.5  # of what guesses have won over plain decoding, that one trial may lose beyond the credit
MAX_EXTRA_PASSES = 2.0  # plain passes that a trial may be charged afterwards, beyond what was foreseen


@dataclass(frozen=True, slots=True)
class Trial:
    """A step to find out something."""

    option: Option  # by which, and by whose part of the budget
    allocation: "Allocation"
    loss: float  # expected, seconds
    reading: float = 0.0  # of it, seconds of reading a long text, which later trials of these requests put to use
    request_ids: tuple[str, ...] = ()  # that guess
    value: float = 0.0  # proposals that it tells of, over the loss


class Budget:
    """Credit in seconds, in equal parts for the options that are tried: from one part the cheap trials of one option would
    take what another saves for a dear one. Not thread-safe.

    One trial may overdraw its part, where a drafter reads a text that no share of a short run would pay, but not by more
    than keeps the run within ``PROMISE`` of plain decoding. Then nothing like it is tried until that is earned back, or won
    by the guesses that were tried; but what was read may be put to use: steps that lose as much again.
    """

    def __init__(self) -> None:
        self._credit: dict[Option, float] = {}
        self._asked: dict[Option, tuple[float, bool, bool]] = {}  # credit that a refused trial needs; it reads, goes on
        self._option = Option.WHOLE  # of the last trial
        self._deciding = 0.0  # seconds that the last decision took
        self._served = self._plain = self._reserve = self._overdrawn = 0.0
        self._readers: set[str] = set()  # requests whose texts the last trial with reading has read
        self.won = 0.0  # seconds, by guesses, over plain decoding
        self.trials = 0
        self.seconds = 0.0  # charged so far

    def open(self, plain: float, options: Collection[Option]) -> None:
        """Before a decision. plain: seconds of a step without guesses. options: that may be tried."""
        self._plain, most = plain, MAX_CREDIT_PASSES * plain
        for option in options:
            self._credit[option] = min(self._credit.get(option, START_CREDIT_PASSES * plain), most)
        self._asked.clear()

    def _limit(self, option: Option, reads: bool, goes_on: bool) -> float:
        """Seconds that such a trial may lose."""
        credit = self._credit[option]
        if not reads:
            return max(credit, self._reserve) if goes_on else credit
        over = PROMISE * self._served + WON_SHARE * self.won
        return credit if credit < 0.0 else max(credit, min(over, MAX_READING_PASSES * self._plain))

    def goes_on(self, request_ids: Sequence[str]) -> bool:
        """Whether a trial of whole methods for these puts to use what one has read of them, whatever its first guesses were
        worth."""
        return self._reserve > 0.0 and bool(request_ids) and self._readers.issuperset(request_ids)

    def covers(self, trial: Trial) -> bool:
        """Whether a trial may begin now. ``is_due`` says when one that may not is covered, and somewhat more: it is weighed
        again then, which costs time, and what its drafter lags behind grows."""
        option, reads = trial.option, trial.reading > 0.0
        goes_on = option == Option.WHOLE and self.goes_on(trial.request_ids)
        needed = ASKED_AGAIN * max(trial.loss + trial.reading, 0.0) + self._deciding
        if option not in self._asked or needed < self._asked[option][0]:
            self._asked[option] = needed, reads, goes_on
        return trial.loss + trial.reading <= self._limit(option, reads, goes_on)

    @property
    def is_due(self) -> bool:
        """Whether a trial that was refused is covered now."""
        return any(self._limit(option, *how) >= needed for option, (needed, *how) in self._asked.items())

    @property
    def rests(self) -> int:
        """Steps, of four plain ones' time each, after which no refused trial is covered yet; 0: not known."""
        if not self._plain:
            return 0
        most_earned = PROMISE * 4 * self._plain
        missing = [needed - self._limit(option, *how) for option, (needed, *how) in self._asked.items()]
        return max(int(min(missing) / most_earned), 0) if missing else sys.maxsize

    def charge(self, trial: Trial) -> None:
        """A trial begins: its expected loss."""
        loss, self._option = max(trial.loss, 0.0), trial.option
        if trial.reading:
            self._reserve, self._readers = trial.reading, set(trial.request_ids)
        elif trial.option == Option.WHOLE and self.goes_on(trial.request_ids):
            self._reserve = max(self._reserve - loss, 0.0)
        self._spend(loss)
        if trial.reading:
            self._overdrawn = max(-self._credit[trial.option], 0.0)
        self.trials += 1

    def charge_deciding(self, seconds: float, options: Collection[Option]) -> None:
        """What it took to decide whether to try some: weighed often, a trial must not cost more than trials."""
        for option in options:
            self._credit[option] -= seconds / len(options)
        self.seconds += seconds
        self._deciding = seconds

    def charge_extra(self, lost: float, charged: float, plain: float) -> None:
        """A trial that was charged ``charged`` lost ``lost`` seconds: the rest is charged, up to a limit.

        No cost table includes opening a drafter, so the measured loss counts. A step during which the machine stalled
        says nothing about guessing, hence the limit.
        """
        self._spend(min(max(lost - charged, 0.0), MAX_EXTRA_PASSES * plain))

    def _spend(self, seconds: float) -> None:
        self._credit[self._option] -= seconds
        self.seconds += seconds

    def refund(self, charged: float) -> None:
        """The trial that was charged so much did not take place: another guess stood in for the one to be tried."""
        self._spend(-charged)
        if self._overdrawn and self._credit[self._option] >= 0.0:
            self._overdrawn = self._reserve = 0.0

    def repay(self, seconds: float) -> None:
        """Guesses that a plan stands for have won so much over what there is without them: it pays what was overdrawn."""
        if self._overdrawn and seconds > 0.0:
            paid = min(seconds, self._overdrawn)
            self._credit[Option.WHOLE] += paid
            self._overdrawn -= paid

    def earn(self, seconds: float) -> None:
        """A step took so long: credit a share of it."""
        self._served += seconds
        for option in self._credit:
            self._credit[option] += BUDGET * seconds / len(self._credit)

    def forget(self, request_id: str) -> None:
        """A request has ended: what was read of it is of no use any more."""
        self._readers.discard(request_id)
        if not self._readers:
            self._reserve = 0.0
