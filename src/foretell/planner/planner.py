"""How deep each row may guess in the next step, so that speculation never costs time.

Before a step the planner compares the expected tokens of guesses with their expected seconds, for the whole batch;
plain decoding is one of the choices. Unknown choices are tried within a budget (``account.py``): every trial is charged
its expected loss.
"""

from collections.abc import Sequence
from dataclasses import replace

from foretell.core.errors import ConfigError
from foretell.planner.acceptance import Acceptance
from foretell.planner.corrections import Corrections
from foretell.planner.costs import CostTable
from foretell.planner.decisions import SETTLING, Decision, Decisions
from foretell.planner.ledger import Ledger, Waiting
from foretell.planner.measure import grid
from foretell.planner.observations import RowStep, RowView, StepObservation
from foretell.planner.offers import Offers
from foretell.planner.outlook import Cell, Factors, lengths_to, outlook
from foretell.planner.plan import StepPlan
from foretell.planner.shares import LightShares

MODES = ("auto", "on", "off")
MAX_ARRIVING_SHARE = 0.25  # of the decoding rows: where more join, guessing is not started
PERIOD = 16  # steps between plans while nothing joins or leaves; every step while much is unknown
PERIOD_WEIGHED = 4  # ... or so many, where only methods are unknown that weigh their guesses
PERIOD_PLAIN = 64  # ... and while nothing guesses; twice as many once that has been decided again
RESTS_TOGETHER = 32  # steps that rest which are learned from together, at most
TOGETHER = 8  # steps that are learned from together, at most, while a plan stands that much is known for
ENOUGH_PROPOSALS = 24.0  # of a method at one heat, after which its rates no longer change by the step
WELL_KNOWN = 0.07  # of the log of a plain step's seconds: where it is known so well ...
PLAIN_SKIPPED = 7  # ... so many of eight plain steps say nothing new
SKIPS = 7  # steps of a settled rest in which nobody asks whether it still stands, at most
HEAVY_DRAFT = 0.15  # of a pass: guesses that take longer read weights of their own


class Planner:
    """Plans steps and learns from them. Not thread-safe: used by the engine's thread only."""

    def __init__(
        self,
        costs: CostTable,
        acceptance: Acceptance,
        *,
        mode: str = "auto",
        ledger: Ledger | None = None,
        shares: LightShares | None = None,
    ) -> None:
        """ledger: shared with another planner of the same steps. shares: see ``Offers``; of methods with light parts,
        whose steps have passes of their own."""
        if mode not in MODES:
            raise ConfigError(f"speculation is one of {', '.join(MODES)}; given {mode!r}")
        self.acceptance, self.mode = acceptance, mode
        self._shares, self._has_light = shares, shares is not None
        self._waiting = Waiting(self.learn)
        self._last = StepPlan([])
        self.members: tuple[str, ...] = ()  # of the last plan
        self._ids: list[tuple[str, str, int]] = []  # of the rows that ``standing`` is for, and what they may guess
        self.standing = Decision([])
        self.age, self._patience = 0, 1  # plans for the same rows since the last decision, and when the next one is due
        self._known = 0  # steps of these rows before the last decision
        self.skips = 0  # steps of the same rest to come, before anybody asks again whether it stands
        self._skip = self._skipped = 0  # plain steps that the corrections are not told of, and those of them so far
        self._least = 0.0  # of plans while the decision stands
        self._decisions = Decisions()
        self._begin(costs, ledger or Ledger(costs.methods))

    def _begin(self, costs: CostTable, ledger: Ledger) -> None:
        self.costs, self._ledger, self._purse = costs, ledger, ledger.account.open()
        self._offers = Offers(costs, self.acceptance, ledger.corrections, self._shares)
        self._decisions.use(self._offers, ledger, self._purse)

    @property
    def acceptances(self) -> dict[str, Acceptance]:
        """What is known of guesses that were kept, by part of the planner."""
        return {"whole": self.acceptance}

    @property
    def corrections(self) -> Corrections:
        """Of the cost table."""
        return self._ledger.corrections

    @property
    def guessing(self) -> bool:
        """Whether guesses are expected to pay, for the rows of the last plan."""
        return self.standing.guessing

    @property
    def floor(self) -> float:
        """Tokens a second that can be had without these guesses, where plain decoding has less; 0: plain decoding it is."""
        return self._decisions.floor

    @floor.setter
    def floor(self, rate: float) -> None:
        self._decisions.floor = rate

    @property
    def speedup(self) -> float | None:
        """Tokens a second over those of plain decoding, up to a few steps ago. A plain step counts 1, and no step more than
        its tokens a row. None before any step, where no plain step was seen for long, and in the modes that measure no
        costs."""
        speed = self._ledger.speed
        known = self.mode == "auto" and (not speed.guessed or self._decisions.knows_plain)
        return speed.ratio if known else None

    @property
    def trials(self) -> int:
        """Trials so far."""
        return self._ledger.account.trials

    @property
    def trial_seconds(self) -> float:
        """Seconds that trials were charged."""
        return self._ledger.account.seconds

    @property
    def state(self) -> dict[str, float | int | str | bool | None]:
        """For logs and metrics."""
        caps = self._last.caps
        return {
            "mode": self.mode,
            "guessing": self.guessing,
            "mean_depth": sum(caps) / len(caps) if caps else 0.0,
            "speedup": self.speedup,
            "trials": self.trials,
            "trial_seconds": self.trial_seconds,
            "correction_plain": self.corrections.plain,
            "correction_guess": self.corrections.guess,
            **{f"correction_draft_{method}": factor for method, factor in self.corrections.draft.items()},
        }

    def outlook(self, longest: int, max_rows: int) -> list[Cell]:
        """What it would do for requests with texts of up to ``longest`` tokens, up to ``max_rows`` at once, as far as is
        known: by each method that has guessed. Any thread may ask. Empty in the modes that measure no costs."""
        cells: list[Cell] = []
        for method, draft in self.corrections.draft.items() if self.mode == "auto" else ():
            expected = self.acceptance.expected(method)
            if expected is not None:
                factors = Factors(self.corrections.plain, self.corrections.guess, draft)
                cells += outlook(self.costs, method, *expected, lengths_to(longest), grid(max_rows), factors)
        return cells

    def why_not(self, method: str) -> str:
        """Why rows of a method made no guess: one sentence for the client."""
        if self.mode == "off":
            return "speculation is off in this service"
        if self.mode == "on":
            return f"{method} found nothing to guess"
        if method not in self.costs.methods:
            return f"the costs of {method} were not measured in this service, so it does not guess with it"
        return f"guessing was not expected to pay here: {self.costs.verdict(method)}"

    @property
    def contradiction(self) -> str | None:
        """What live steps say against the cost table; None where they agree with it."""
        return self.corrections.contradiction() if self.mode == "auto" else None

    def use(self, costs: CostTable, ledger: Ledger | None = None) -> None:
        """Plan by another table from now on: corrections of the one before are dropped, acceptance is kept."""
        self._waiting.flush()
        self._begin(costs, ledger or Ledger(costs.methods, self._ledger.speed))
        self.replan()
        self.standing = Decision([])

    def replan(self) -> None:
        """Decide anew at the next plan, however young the decision that stands is."""
        self._ids, self.skips = [], 0

    def forget(self, request_id: str) -> None:
        """A request has ended; its estimates are not used for another request, even one of the same name."""
        self._waiting.flush()
        self._purse.forget(request_id)
        self.acceptance.forget(request_id)
        self.replan()
        if request_id in self.members:
            self.members, self._last = (), replace(self._last, members=())

    def will_guess(self, rows: Sequence[RowView]) -> bool:
        """Whether guessing is on, beyond a trial, and would be for these rows too: then preparing drafters is
        worthwhile."""
        if self.mode != "auto":
            return self.mode == "on"
        if all_ask(rows):
            return True
        if not self.guessing:
            return False
        self._waiting.flush()
        return self._decisions.pays(rows)

    # -- before a step -----------------------------------------------------------------------------------------------

    def plan(self, rows: Sequence[RowView], arriving: int = 0) -> StepPlan:
        """The greatest depth each row may guess in the next step.

        arriving: rows that join soon. Where they are many, guessing is not begun: the plan may not pay with them. Where all
        rows ask to guess always, they do: a loss is theirs alone.
        """
        self.skips, self.members = 0, tuple(row.request_id for row in rows)
        lagging = any(row.num_unread > 2 for row in rows)
        if self.mode != "auto" or all_ask(rows):
            caps = [max(min(row.max_depth, row.depth_limit), 0) if self.mode != "off" else 0 for row in rows]
            self._ids, self.standing = [], Decision([], any(caps))
            self._last = StepPlan(caps, lagging=lagging, members=self.members)
            return self._last
        if arriving > MAX_ARRIVING_SHARE * len(rows) and not self.guessing:
            self._ids, self._last = [], StepPlan([0] * len(rows), members=self.members)
            return self._last
        ids = [(row.request_id, row.method, row.max_depth) for row in rows]
        self.age += 1
        if ids != self._ids or self.age >= self._patience or (not self.guessing and self._purse.is_due):
            self._waiting.flush()
            was_idle = ids == self._ids and not self.guessing and self._patience >= PERIOD_PLAIN
            self._known = self._known + self.age if ids == self._ids else 0
            self._ids, self.age = [], 0  # where deciding fails, nothing stands
            self.standing = standing = self._decisions.decide(rows, self.standing)
            if self.acceptance.weighed and any(standing.caps):
                self._least = self._offers.least_chance(rows)
            self._patience = standing.num_steps if standing.trial else self._period(rows, was_idle=was_idle)
            self._ids = ids
        standing, limits = self.standing, [row.depth_limit for row in rows]
        caps = [cap if cap <= most else max(most, 0) for cap, most in zip(standing.caps, limits, strict=True)]
        together = self._together if standing.guessing and not standing.trial else 1
        self._last = StepPlan(
            caps,
            least=self._least,
            lagging=lagging,
            trial=standing.trial,
            charged=standing.charged,
            together=together,
            members=self.members,
        )
        return self._last

    def again(self, depth_limit: int, *, lagging: bool) -> StepPlan | None:
        """What ``plan`` would say now for the rows that it was asked for last, where none arrives: for any rows while none
        guesses, for one row while that guesses by a standing decision. None where ``plan`` must be asked. After a pass, a
        view of a row takes some 35 microseconds.

        depth_limit: of the one row. lagging: whether its drafter has more than two tokens to read.
        """
        if self.skips:
            self.skips -= 1
            self.age += 1
            return self._last
        if not self.stands:
            return None
        caps, together = self.standing.caps, 1 if self._ledger.unsettled else RESTS_TOGETHER
        if self.standing.guessing:
            if len(caps) != 1:
                return None
            caps, together = [max(min(caps[0], depth_limit), 0)], self._together
        elif together > 1:
            self.skips = self.most_skips
        self.age += 1
        self._last = StepPlan(caps, least=self._least, lagging=lagging, together=together, members=self.members)
        return self._last

    @property
    def stands(self) -> bool:
        """Whether the next plan for the same rows is that of the decision that stands."""
        if not self._ids or self.standing.trial or self.age + 1 >= self._patience:
            return False
        return self.standing.guessing or not self._purse.is_due

    @property
    def most_skips(self) -> int:
        """What ``skips`` may be now, so that neither the next decision nor a trial is late."""
        return max(min(SKIPS, self._patience - self.age - 3, self._purse.rests - 1), 0)

    def stands_for(self, rows: Sequence[RowView]) -> bool:
        """Whether the next plan for these rows is."""
        return self.stands and self._ids == [(row.request_id, row.method, row.max_depth) for row in rows]

    @property
    def _together(self) -> int:
        """Steps to learn from at once while a decision to guess stands."""
        return min(TOGETHER, self._patience) if PERIOD_WEIGHED <= self._patience <= PERIOD else 1

    def _period(self, rows: Sequence[RowView], *, was_idle: bool) -> int:
        if not self.guessing:
            # Where another planner's guesses are the choice, these are weighed as often as before.
            return 2 * PERIOD_PLAIN if was_idle and not self._decisions.floor else PERIOD_PLAIN
        pools = {(row.method, row.heat) for row in rows}
        unknown = {method for method, heat in pools if self.acceptance.seen(method, heat) < ENOUGH_PROPOSALS}
        # Such a method risks little in a step: less than planning takes, after a pass.
        if unknown:
            return PERIOD_WEIGHED if self.acceptance.weighed.issuperset(unknown) else 1
        # What lookups find differs from text to text, which its first steps show.
        return min(PERIOD, max(PERIOD_WEIGHED, self._known)) if self.acceptance.weighed else PERIOD

    # -- after a step ------------------------------------------------------------------------------------------------

    def observe(self, plan: StepPlan, step: StepObservation) -> None:
        """To be called after every step, with its plan and its measurements; where no row may guess, rows are left out.
        While a decision stands that much is known for, a few steps are learned from together."""
        if step.batch > 0 and step.seconds > 0.0:
            self._ledger.account.earn(step.seconds)
            self._waiting.add(plan, step)

    def learn(self, plan: StepPlan, step: StepObservation) -> None:
        """Learn from a step now."""
        ledger, seconds = self._ledger, step.seconds
        self.acceptance.tick()
        ledger.corrections.tick()
        # Rest, in which most steps pass where guessing does not pay.
        if not step.rows and plan.charged is None and not ledger.unsettled:
            self._decisions.since_plain, ledger.speed.guessed = 0, False
            self._learn_plain(step)
            ledger.speed.count(seconds, seconds)
            return
        drafted = any(row.drafted for row in step.rows)
        self._decisions.since_plain = self._decisions.since_plain + 1 if drafted else 0
        ledger.speed.guessed = drafted
        heavy = drafted and step.seconds_draft > HEAVY_DRAFT * step.seconds_target
        settled = heavy or not ledger.unsettled
        if not settled:
            ledger.unsettled -= 1
            if not drafted and ledger.tried:  # the first steps after a trial that displaced weights are its cost
                plain = self._offers.plain(step.batch, step.length)
                ledger.tried.charge_extra(seconds, plain, plain)
        accepted = self._learn_rows(plan, step, settled=settled, heavy=heavy)
        plain = self._offers.plain(step.batch, step.length)
        if not drafted:
            ledger.speed.count(seconds, seconds)
            if plan.charged is not None:
                self._purse.charge_extra(seconds - plain, plan.charged, plain)
            return
        if heavy:
            ledger.unsettled, ledger.tried = SETTLING, self._purse if plan.trial else None
        served = (step.batch + accepted) / step.batch * plain  # what plain decoding would have taken for these tokens
        ledger.account.win(served - seconds)
        if plan.charged is not None and all(row.by_light for row in step.rows if row.cap):
            self._purse.refund(plan.charged)
        elif plan.charged is not None:
            self._purse.charge_extra(seconds - served, plan.charged, plain)
        elif self.guessing:
            self._purse.repay(min(served, (step.batch + accepted) / max(self.floor, 1e-300)) - seconds)
        if self._decisions.knows_plain:
            # Guessing adds nodes to a pass: a plain step never takes longer, whatever its estimate says.
            ledger.speed.count(min(served, seconds * (step.batch + accepted) / step.batch), seconds)

    def _learn_plain(self, step: StepObservation) -> None:
        self._skipped += 1
        if self._skipped > self._skip:  # where they are known well, one of a few plain steps says enough
            self.corrections.observe("plain", step.seconds, self.costs.verify(step.batch, step.batch, step.length))
            self._skipped, self._skip = 0, PLAIN_SKIPPED if self.corrections.plain_spread <= WELL_KNOWN else 0

    def _learn_rows(self, plan: StepPlan, step: StepObservation, *, settled: bool, heavy: bool) -> int:
        """Count accepted guesses and correct the costs. Returns the number of accepted guesses. settled: whether the step
        is like others of its kind. heavy: the drafter's weights have taken the place of the target's in the processor's
        cache: its pass and the first ones after it take longer, and say nothing of plain decoding."""
        asked: dict[str, list[RowStep]] = {}
        accepted = nodes = by_light = 0
        for row in step.rows:
            if row.cap < 1:
                continue
            accepted += row.accepted
            nodes += row.num_nodes
            if row.by_light:  # it says nothing of the method's own guesses, nor of their cost
                by_light += 1
                continue
            asked.setdefault(row.method, []).append(row)
            self.acceptance.observe(row.request_id, row.method, row.cap, row.drafted, row.accepted, row.nodes, row.heat)
        if not asked and not by_light:
            if settled:
                self._learn_plain(step)
            return accepted
        self._skip = 0
        kind = "guess" if nodes else "plain"
        measured = step.seconds_target + step.seconds_rest
        predicted, drafting = self._offers.pass_seconds(step), step.seconds_draft
        if heavy and self._has_light:
            # What a pass takes longer here than after a light part's guesses is a part of what drafting costs.
            drafting = max(step.seconds - predicted * self.corrections.guess, drafting)
        elif settled:
            self.corrections.observe(kind, measured, predicted)
        if len(asked) == 1 and not by_light and not plan.lagging:  # the table does not include catching up
            ((method, rows),) = asked.items()
            expected = self._offers.draft_seconds(method, rows, step.batch)
            self.corrections.observe_draft(method, drafting, expected)
        return accepted


def all_ask(rows: Sequence[RowView]) -> bool:
    """Whether all rows ask to guess in every step."""
    return bool(rows) and all(row.always for row in rows)
