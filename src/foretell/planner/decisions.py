"""Chooses the option and the depths that bring most tokens a second, or a trial of others while the budget covers it.

``Option`` orders the choices like a ladder: nobody guesses, light parts do, whole methods do. A rung stands where it brings
more than the one below it, by ``GAIN_TO_START`` or, where it stood before, ``GAIN_TO_CONTINUE``. Rungs that do not stand
are tried where they might.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import exp
from time import thread_time

from foretell.planner.allocation import Allocation
from foretell.planner.budget import Budget, Trial
from foretell.planner.corrections import Corrections
from foretell.planner.plan import Option
from foretell.planner.several import Offer

GAIN_TO_START = 0.05  # expected gain over the rung below needed to start guessing ...
GAIN_TO_CONTINUE = 0.02  # ... and to go on: costs are known no better
MIN_CHARGE_PASSES = 0.05  # least charge of a plain trial step: bounds the trials at near ties
PLAIN_TRIAL_PERIOD = 16  # guessing steps before a plain one is tried, to see what it costs now
MAX_PLAIN_SPREAD = 0.12  # of the log of a plain step's seconds: where it is known no better, the speedup is not known


@dataclass(slots=True)
class Decision:
    """Depths of some rows for the next steps, and why."""

    caps: list[int]
    option: Option = Option.PLAIN  # whose depths they are
    stands: Option = Option.PLAIN  # what is expected to pay, whatever is tried now
    expected: Allocation | None = None  # of what stands
    without: float = 0.0  # tokens a second of the rung below
    trial: bool = False
    charged: float | None = None  # for a trial of guesses where fewer guess, ahead of it
    num_steps: int = 1  # of a trial


class Decisions:
    """Decides from offers, and from what steps have cost."""

    def __init__(self, corrections: Corrections, budget: Budget) -> None:
        self._corrections, self._budget = corrections, budget
        self.since_plain = PLAIN_TRIAL_PERIOD  # guessing steps since the last plain one
        self.num_passes = 1  # of the last call that made plain steps: as many are tried at once
        self._begun = 0.0

    def begin(self) -> None:
        """What follows is for a decision, offers too."""
        self._begun = thread_time()  # not the wall's: what the machine did meanwhile would have to be earned back

    @property
    def knows_plain(self) -> bool:
        """Whether it is known what plain steps take."""
        return self._corrections.plain_spread <= MAX_PLAIN_SPREAD

    def decide(
        self, batch: int, plain: float, offers: Mapping[Option, Offer], before: Decision, *, unsettled: int = 0
    ) -> Decision:
        """What these rows do next. plain: seconds of their step without guesses. offers: of options by which a row can
        gain, the lower first. before: what stood so far. unsettled: steps to come that take longer than others."""
        standing = self.choose(batch, plain, offers, before.stands)
        self._budget.open(plain, offers.keys())  # without offers, too: what was refused to fewer rows is not due now
        if not offers:
            return standing
        # Where nobody guesses, all of it is to find out whether somebody should: it takes longer than many a trial.
        begun = self._begun if standing.stands == Option.PLAIN else thread_time()
        trial = self._try(plain, offers, standing, unsettled)
        self._budget.charge_deciding(thread_time() - begun, offers.keys())
        if trial is None:
            return standing
        self._budget.charge(trial)
        caps, option = trial.allocation.caps, trial.option if any(trial.allocation.caps) else Option.PLAIN
        charged = max(trial.loss, 0.0) if trial.option != standing.stands else None
        num_steps = 1 if any(caps) else 1 + unsettled
        return replace(standing, caps=caps, option=option, trial=True, charged=charged, num_steps=num_steps)

    def choose(self, batch: int, plain: float, offers: Mapping[Option, Offer], stood: Option) -> Decision:
        """The highest rung that is worth its step; stood: the one so far."""
        rate = batch / plain
        made = Decision([0] * batch, without=rate)
        for option, offer in offers.items():
            best = offer.best()
            gain = GAIN_TO_CONTINUE if stood == option else GAIN_TO_START
            if best is not None and best.rate > rate * (1.0 + gain) and not offer.is_blind:
                made, rate = Decision(best.caps, option, option, best, rate), best.rate
        return made

    def _try(self, plain: float, offers: Mapping[Option, Offer], standing: Decision, unsettled: int) -> Trial | None:
        """A trial in place of what stands, if one may pay and is covered: of a plain step and of rows without guesses by
        the budget of what stands, then of the other options, the lower first."""
        expected, stands = standing.expected, standing.stands
        rate, doubt = standing.without, self._corrections.doubt(len(standing.caps))
        if expected is not None:
            rate = expected.rate
            trial = self._plain_trial(standing, plain, expected, doubt, unsettled)
            if trial is not None and self._budget.covers(trial):
                return trial
            trial = offers[stands].idle(expected)
            if trial is not None and self._budget.covers(trial):
                return trial
        for option, offer in offers.items():
            if option == stands:
                continue
            hope = offer.hoped(doubt)
            goes_on = option == Option.WHOLE and offer.goes_on(self._budget.goes_on)
            if hope is None or (hope.rate <= rate * (1.0 + GAIN_TO_START) and not goes_on):
                continue
            covered = [trial for trial in offer.trials(hope, rate, self._budget.goes_on) if self._budget.covers(trial)]
            if covered:
                return max(covered, key=lambda trial: trial.value)
        return None

    def _plain_trial(
        self, standing: Decision, plain: float, expected: Allocation, doubt: float, unsettled: int
    ) -> Trial | None:
        """A plain step in place of guesses, if it may tell something: at once where none with that many rows was seen."""
        batch, is_new = len(standing.caps), not self._corrections.knows_size(len(standing.caps))
        if self.since_plain < PLAIN_TRIAL_PERIOD and not is_new:
            return None
        if batch / plain * exp(doubt) <= expected.rate and self.knows_plain and not is_new:
            return None
        least = MIN_CHARGE_PASSES * plain
        # Of a new number of rows the table alone says that it loses more, and it is one step for each. Where several are
        # made in one call, one by itself would seem dearer than those that it stands for.
        loss = (unsettled + self.num_passes) * (least if is_new else max(plain - batch / expected.rate, least))
        return Trial(standing.stands, Allocation([0] * batch, float(batch), plain), loss)
