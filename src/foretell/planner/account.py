"""The time budgets of trials and of learning: shares of the serving time, earned as it passes; together ``PROMISE``."""

import math
import sys
from collections.abc import Sequence

PROMISE = 0.02
"""Share of the serving time that all the work beside decoding may take together (docs/serving.md, "Stepping aside")."""
BUDGET = 0.005  # of it, what trials may lose
LEARN_SHARE = PROMISE - BUDGET  # of it, what a learner may take of the engine's thread
START_CREDIT_PASSES, MAX_CREDIT_PASSES = 1.0, 12.0  # plain passes that a purse starts with, and holds at most
ASKED_AGAIN = 1.25  # of the expected loss of a trial that was refused: the credit at which it is weighed again
WON_SHARE = 0.5  # of what guesses have won over plain decoding, that one trial may lose beyond the credit
MAX_EXTRA_PASSES = 2.0  # plain passes that a trial may be charged afterwards, beyond what was foreseen


class TrialAccount:
    """What all trials of a run may lose together, in equal parts for its planners: from one purse the cheap trials of one
    would take what another saves for a dear one."""

    def __init__(self, num_planners: int = 1) -> None:
        self._purses: list[Purse] = []
        self._share = 1.0 / num_planners

    def open(self) -> "Purse":
        """A planner's part; one for each of ``num_planners``."""
        self._purses.append(Purse(self._share))
        return self._purses[-1]

    @property
    def trials(self) -> int:
        """Trials so far."""
        return sum(purse.trials for purse in self._purses)

    @property
    def seconds(self) -> float:
        """Seconds that trials were charged."""
        return sum(purse.seconds for purse in self._purses)

    def earn(self, seconds: float) -> None:
        """A step took so long, whoever planned it."""
        for purse in self._purses:
            purse.earn(seconds)

    def win(self, seconds: float) -> None:
        """A step with guesses took so much less than plain decoding of its tokens, whoever planned it."""
        for purse in self._purses:
            purse.won += seconds


class Purse:
    """Credit in seconds, initialised by the first call of ``credit``. Not thread-safe.

    One trial may overdraw it, where a drafter reads a text that no share of a short run would pay, but not by more than
    keeps the run within ``PROMISE`` of plain decoding. Then nothing is tried until that is earned back, or won by the
    guesses that were tried; but what was read may be put to use: steps that lose as much again.
    """

    def __init__(self, share: float = 1.0) -> None:
        """share: of what trials may lose."""
        self._share = share
        self._credit: float | None = None
        self._needed = math.inf  # credit at which the cheapest trial that was refused can be paid
        self._deciding = 0.0  # seconds that the last decision took
        self._served = self._most = self._reserve = self._overdrawn = 0.0
        self._reads = self._goes_on = False  # of the trial that was asked for
        self._readers: set[str] = set()  # requests whose texts the last trial with reading has read
        self.won = 0.0  # seconds, by guesses, over plain decoding
        self.trials = 0
        self.seconds = 0.0  # charged so far

    def credit(self, plain: float) -> float:
        """Seconds that a trial may lose now; plain: seconds of a step without guesses."""
        if self._credit is None:
            self._credit = START_CREDIT_PASSES * plain
        self._most = MAX_CREDIT_PASSES * plain
        self._credit = min(self._credit, self._most)
        return self._credit

    @property
    def most(self) -> float:
        """Seconds that a trial of guesses like the one that was asked for may lose now. Call ``credit`` before."""
        assert self._credit is not None
        if not self._reads:
            return max(self._credit, (self._goes_on and self._reserve) or self._credit)
        over = PROMISE * self._served + WON_SHARE * self.won
        return self._credit if self._credit < 0.0 else max(self._credit, min(over, self._most))

    def goes_on(self, request_ids: Sequence[str]) -> bool:
        """Whether a trial of these puts to use what one has read of them, whatever its first guesses were worth."""
        return self._reserve > 0.0 and bool(request_ids) and self._readers.issuperset(request_ids)

    def forget(self, request_id: str) -> None:
        """A request has ended: what was read of it is of no use any more."""
        self._readers.discard(request_id)
        if not self._readers:
            self._reserve = 0.0

    def ask(self, loss: float, reading: float = 0.0, *, request_ids: Sequence[str] = ()) -> None:
        """Register a trial of this expected loss: ``is_due`` says when it is covered, and somewhat more, as it is weighed
        again then: that costs time, and what its drafter lags behind grows. reading, request_ids: as for ``charge``."""
        self._reads, self._goes_on = reading > 0.0, self.goes_on(request_ids)
        self._needed = min(self._needed, ASKED_AGAIN * max(loss + reading, 0.0) + self._deciding)

    def ask_nothing(self) -> None:
        """Cancel the registered trial."""
        self._needed = math.inf

    @property
    def is_due(self) -> bool:
        """Whether the credit covers the registered trial."""
        return self._credit is not None and self.most >= self._needed

    @property
    def rests(self) -> int:
        """Steps, of four plain ones' time each, after which the registered trial is still not covered; 0: not known."""
        if not self._most:
            return 0
        missing, most_earned = self._needed - self.most, PROMISE * 4 * self._most / MAX_CREDIT_PASSES
        return sys.maxsize if missing == math.inf else max(int(missing / most_earned), 0)

    def charge(self, loss: float, reading: float = 0.0, *, request_ids: Sequence[str] = ()) -> None:
        """Charge a trial that starts now with its expected loss in seconds. reading: a long text's part of it, which later
        trials of these requests put to use; they may lose as much. Call ``credit`` before."""
        assert self._credit is not None
        if reading:
            self._reserve, self._readers = reading, set(request_ids)
        elif self.goes_on(request_ids):
            self._reserve = max(self._reserve - max(loss, 0.0), 0.0)
        self._credit -= max(loss, 0.0)
        if reading:
            self._overdrawn = max(-self._credit, 0.0)
        self.trials += 1
        self.seconds += max(loss, 0.0)

    def charge_deciding(self, seconds: float) -> None:
        """Charge what it took to decide whether to try something. Call ``credit`` before."""
        assert self._credit is not None
        self._credit -= seconds
        self.seconds += seconds
        self._deciding = seconds

    def charge_extra(self, lost: float, charged: float, plain: float) -> None:
        """A trial that was charged ``charged`` lost ``lost`` seconds: the rest is charged, up to a limit.

        No cost table includes opening a drafter, so the measured loss counts. A step during which the machine stalled
        says nothing about guessing, hence the limit.
        """
        assert self._credit is not None
        extra = min(max(lost - charged, 0.0), MAX_EXTRA_PASSES * plain)
        self._credit -= extra
        self.seconds += extra

    def refund(self, charged: float) -> None:
        """The trial that was charged so much did not take place: another guess stood in for the one to be tried."""
        assert self._credit is not None
        self._credit += charged
        self.seconds -= charged
        if self._overdrawn and self._credit >= 0.0:
            self._overdrawn = self._reserve = 0.0

    def repay(self, seconds: float) -> None:
        """Guesses that a plan stands for have won so much over what there is without them: it pays what was overdrawn."""
        if self._credit is not None and seconds > 0.0:
            paid = min(seconds, self._overdrawn)
            self._credit += paid
            self._overdrawn -= paid

    def earn(self, seconds: float) -> None:
        """Credit a share of a step's seconds."""
        if self._credit is not None:
            self._served += seconds
            self._credit += BUDGET * self._share * seconds


class Allowance:
    """A share of the serving time for work that is not decoding: earned as steps end, charged with what was measured.

    It may be overdrawn by one charge, after which nothing is covered until it is earned back. Not thread-safe.
    """

    def __init__(self, share: float, *, most: float = 0.25) -> None:
        """share: of the seconds of steps; most: seconds that it holds at most."""
        self.share, self.most = share, most
        self.credit = most / 10
        self.seconds = 0.0  # charged so far

    def earn(self, seconds: float) -> None:
        """A step took so long."""
        self.credit = min(self.most, self.credit + self.share * seconds)

    def covers(self, seconds: float) -> bool:
        """Whether work that takes this many seconds may begin; where ``most`` is less than that, whether it is full."""
        return self.credit >= min(seconds, self.most)

    def charge(self, seconds: float) -> None:
        """Work has taken so long."""
        self.credit -= seconds
        self.seconds += seconds
