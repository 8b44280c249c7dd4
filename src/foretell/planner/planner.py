"""How deep each row may guess in the next step, so that speculation never costs time.

Before a step the planner compares the expected tokens of guesses with their expected seconds, for the whole batch, by each
option: nobody guesses, light parts do (``hybrid``: suffix), whole methods do. What is not known is tried within a budget
(``budget.py``): every trial is charged its expected loss. Where steps say whose guess a whole method proposes, its own
guesses and its light part's are known apart (``shares.py``), so that text which repeats itself speaks for both, whichever
guessed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from foretell.core.errors import ConfigError
from foretell.costs.measure import grid
from foretell.costs.outlook import Cell, Factors, lengths_to, outlook
from foretell.costs.table import CostTable
from foretell.planner.acceptance import Acceptance
from foretell.planner.budget import Budget
from foretell.planner.corrections import Corrections
from foretell.planner.decisions import Decision, Decisions
from foretell.planner.expected import Expected
from foretell.planner.live_speed import LiveSpeed
from foretell.planner.observations import RowStep, RowView, StepObservation
from foretell.planner.offers import Offers
from foretell.planner.plan import Option, StepPlan
from foretell.planner.several import Offer
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
SETTLING = 2  # plain steps after a drafter's pass that take longer than others, where a cache holds the target
HEAVY_DRAFT = 0.15  # of a pass: guesses that take longer read weights of their own


class Planner:
    """Plans steps and learns from them. Not thread-safe: used by the engine's thread only."""

    def __init__(
        self, costs: CostTable, acceptance: Acceptance, parts: Mapping[str, str] | None = None, *, mode: str = "auto"
    ) -> None:
        """parts: of each method that has one, the name of its light part; ``costs`` knows both."""
        if mode not in MODES:
            raise ConfigError(f"speculation is one of {', '.join(MODES)}; given {mode!r}")
        self.acceptance, self.mode, self.parts = acceptance, mode, dict(parts or {})
        self._shares = LightShares()
        self._budget, self._speed = Budget(), LiveSpeed()
        self._waiting: list[tuple[StepPlan, StepObservation]] = []  # to learn from, a few at a time ...
        self._num_waiting = 0  # ... and their steps
        self._last = StepPlan([])
        self.members: tuple[str, ...] = ()  # of the last plan
        self._ids: list[tuple[str, str, int]] = []  # of the rows that ``standing`` is for, and what they may guess
        self._widest: list[int] = []  # of these rows: how deep their light parts may guess beside the whole methods
        self._age = 0  # plans for the same rows since the last decision ...
        self._patience = 1  # ... and when the next one is due
        self._known = 0  # steps of these rows before the last decision
        self._rested: tuple[Any, int] | None = None  # the kinds of rows that were let rest, and how often since
        self._skips = 0  # steps of the same rest to come, before anybody asks again whether it stands
        self._plain_skip = self._plain_skipped = 0  # plain steps that corrections are not told of, and those so far
        self._least = 0.0  # of plans while the decision stands
        self.expected = Expected()
        self._begin(costs)

    def _begin(self, costs: CostTable) -> None:
        self.costs, self.corrections = costs, Corrections(costs.methods)
        self._offers = Offers(costs, self.acceptance, self.corrections, self._shares)
        self._decisions = Decisions(self.corrections, self._budget)
        self.standing = Decision([])
        # Steps to come that take longer than others: a drafter's weights displaced the target's ...
        self._unsettled = 0
        self._tried = False  # ... in a trial
        self.replan()

    @property
    def guessing(self) -> bool:
        """Whether guesses are expected to pay, for the rows of the last plan."""
        return self.standing.stands != Option.PLAIN

    @property
    def speedup(self) -> float | None:
        """Tokens a second over those of plain decoding, up to a few steps ago. A plain step counts 1, and no step more than
        its tokens a row. None before any step, where no plain step was seen for long, and in the modes that measure no
        costs."""
        known = self.mode == "auto" and (not self._speed.guessed or self._decisions.knows_plain)
        return self._speed.ratio if known else None

    @property
    def state(self) -> dict[str, float | int | str | bool | None]:
        """For logs and metrics."""
        caps = self._last.caps
        return {
            "mode": self.mode,
            "guessing": self.guessing,
            "mean_depth": sum(caps) / len(caps) if caps else 0.0,
            "speedup": self.speedup,
            "trials": self._budget.trials,
            "trial_seconds": self._budget.seconds,
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

    def use(self, costs: CostTable) -> None:
        """Plan by another table from now on: corrections of the one before are dropped, what is known of guesses and what
        trials have cost is kept."""
        self._flush()
        self._begin(costs)

    def replan(self) -> None:
        """Decide anew at the next plan, however young the decision that stands is."""
        self._ids, self._skips, self._rested = [], 0, None

    def forget(self, request_id: str) -> None:
        """A request has ended; its estimates are not used for another request, even one of the same name."""
        self._flush()
        self._budget.forget(request_id)
        self.acceptance.forget(request_id)
        self._shares.forget(request_id)
        self._ids, self._skips = [], 0
        if request_id in self.members:
            self.members, self._last = (), replace(self._last, members=())

    def will_guess(self, rows: Sequence[RowView]) -> bool:
        """Whether whole methods guess, beyond a trial, and would for these rows too: then preparing drafters is
        worthwhile."""
        if self.mode != "auto":
            return self.mode == "on"
        if all_ask(rows):
            return True
        if self.standing.stands != Option.WHOLE:
            return False
        self._flush()
        plain = self._offers.plain_of(rows)
        offers = self._offers_of(rows, plain)
        return self._decisions.choose(len(rows), plain, offers, Option.WHOLE).stands == Option.WHOLE

    # -- before a step -----------------------------------------------------------------------------------------------

    def plan(self, rows: Sequence[RowView], arriving: int = 0) -> StepPlan:
        """The greatest depth each row may guess in the next step.

        arriving: rows that join soon. Where they are many, guessing is not begun: the plan may not pay with them. Where all
        rows ask to guess always, they do: a loss is theirs alone.
        """
        self._skips, self.members = 0, tuple(row.request_id for row in rows)
        limits = [row.depth_limit for row in rows]
        lagging = any(row.num_unread > 2 for row in rows)
        if self.mode != "auto" or all_ask(rows):
            caps = [max(min(row.max_depth, row.depth_limit), 0) if self.mode != "off" else 0 for row in rows]
            option = Option.WHOLE if any(caps) else Option.PLAIN
            self._ids, self.standing = [], Decision([], option, option)
            self._last = StepPlan(caps, option=option, lagging=lagging, members=self.members)
            return self._last
        if arriving > MAX_ARRIVING_SHARE * len(rows) and not self.guessing:
            self._ids, self._last = [], StepPlan([0] * len(rows), option=Option.PLAIN, members=self.members)
            return self._last
        ids = [(row.request_id, row.method, row.max_depth) for row in rows]
        self._age += 1
        is_due = ids != self._ids or self._age >= self._patience or (not self.guessing and self._budget.is_due)
        if is_due and not self._rests_again(rows, ids):
            self._decide(rows, ids)
        self._last = self._planned(limits, lagging)
        return self._last

    def _rests_again(self, rows: Sequence[RowView], ids: list[tuple[str, str, int]]) -> bool:
        """Let rows rest that are like those which the last decision let rest, where nobody has guessed since: what is
        known of a new request is what is known of its pool. A decision takes as long as half a pass of a small model, and
        where short requests come and go there would be one for each of them."""
        self._flush()
        if self._rested is None or ids == self._ids or self._budget.is_due:
            return False
        kinds, age = self._rested
        is_known = any(self.acceptance.has_seen(row.request_id) for row in rows)
        if age >= PERIOD_PLAIN or is_known or kinds != _kinds(rows):
            return False
        self._rested = kinds, age + 1
        self.standing, self._ids = Decision([0] * len(rows), without=len(rows) / self._offers.plain_of(rows)), ids
        self._age, self._known, self._patience = 0, 0, PERIOD_PLAIN
        self._widest = [0] * len(rows)
        return True

    def _decide(self, rows: Sequence[RowView], ids: list[tuple[str, str, int]]) -> None:
        was_idle = ids == self._ids and not self.guessing and self._patience >= PERIOD_PLAIN
        self._known = self._known + self._age if ids == self._ids else 0
        self._ids, self._age = [], 0  # where deciding fails, nothing stands
        self._decisions.begin()
        plain = self._offers.plain_of(rows)
        offers = self._offers_of(rows, plain)
        self.standing = standing = self._decisions.decide(
            len(rows), plain, offers, self.standing, unsettled=self._unsettled
        )
        if self.acceptance.weighed and any(standing.caps):
            self._least = self._offers.least_chance(rows)
        self._widest = [row.max_depth if row.method in self.parts else 0 for row in rows]
        self._patience = standing.num_steps if standing.trial else self._period(rows, was_idle=was_idle)
        self._ids = ids
        self._rested = None if self.guessing or standing.trial else (_kinds(rows), 0)

    def _offers_of(self, rows: Sequence[RowView], plain: float) -> dict[Option, Offer]:
        """What guesses of these rows would bring, by each option by which they can gain."""
        views = {Option.LIGHT: [self._light_view(row) for row in rows]} if self.parts else {}
        views[Option.WHOLE] = list(rows)
        offers = {option: self._offers.of(seen, plain, option) for option, seen in views.items()}
        return {option: offer for option, offer in offers.items() if offer is not None}

    def _light_view(self, row: RowView) -> RowView:
        part = self.parts.get(row.method)
        if part is None:  # it has no light part
            return replace(row, max_depth=0, num_unread=0)
        return replace(row, method=part, num_unread=0)

    def _planned(self, limits: Sequence[int], lagging: bool) -> StepPlan:
        """The standing decision's plan for rows with so much room. Where whole methods guess as deep as planned (``paid``),
        their light parts, which are asked in the same step and preferred only where they promise more, guess as deep as
        there is room."""
        standing = self.standing
        caps = [cap if cap <= most else max(most, 0) for cap, most in zip(standing.caps, limits, strict=True)]
        paid: list[int] | None = None
        if standing.option == Option.LIGHT:
            paid = [0] * len(caps)
        elif standing.option == Option.WHOLE and any(self._widest):
            rows, paid = zip(caps, self._widest, limits, strict=True), caps
            caps = [max(cap, min(most, limit)) if cap else 0 for cap, most, limit in rows]
        return StepPlan(
            caps,
            paid,
            standing.option,
            lagging=lagging,
            least=self._least,
            trial=standing.trial,
            alone=standing.trial and self._unsettled > 0,
            charged=standing.charged,
            together=self._together,
            members=self.members,
        )

    def again(self, depth_limit: int, *, lagging: bool) -> StepPlan | None:
        """What ``plan`` would say now for the rows that it was asked for last, where none arrives: for any rows while none
        guesses, for one row while that guesses by a standing decision. None where ``plan`` must be asked. After a pass, a
        view of a row takes some 35 microseconds.

        depth_limit: of the one row. lagging: whether its drafter has more than two tokens to read.
        """
        if self._skips:
            self._skips -= 1
            self._age += 1
            return self._last
        if self.mode == "off":
            return self._last if self.members else None
        if not self._stands:
            return None
        if self.guessing:
            if len(self.standing.caps) != 1:
                return None
            self._last = self._planned([depth_limit], lagging)
        else:
            self._last = self._planned([0] * len(self.standing.caps), lagging=False)
            if self._last.together > 1:  # so many that neither the next decision nor a trial is late
                self._skips = max(min(SKIPS, self._patience - self._age - 3, self._budget.rests - 1), 0)
        self._age += 1
        return self._last

    def asks_expected(self, batch: int, length: float) -> bool:
        """Whether ``with_expected`` may plan guesses for so many rows; length: of their texts, mean."""
        return self.mode == "auto" and self.expected.can_pay(batch, length, self._offers)

    def with_expected(self, plan: StepPlan, rows: Sequence[RowView]) -> StepPlan:
        """A plan of this planner; where nobody guesses by it, one by which rows guess what is expected of them, as far as
        that pays."""
        if self.mode != "auto" or any(plan.caps) or plan.charged is not None:
            return plan
        return self.expected.plan(plan, rows, self._offers)

    @property
    def _stands(self) -> bool:
        """Whether the next plan for the same rows is that of the decision that stands."""
        if not self._ids or self.standing.trial or self._age + 1 >= self._patience:
            return False
        return self.guessing or not self._budget.is_due

    @property
    def _together(self) -> int:
        """Steps to learn from at once while the decision stands."""
        if self.standing.trial:
            return 1
        if not self.guessing:
            return 1 if self._unsettled else RESTS_TOGETHER
        return min(TOGETHER, self._patience) if PERIOD_WEIGHED <= self._patience <= PERIOD else 1

    def _period(self, rows: Sequence[RowView], *, was_idle: bool) -> int:
        if not self.guessing:
            return 2 * PERIOD_PLAIN if was_idle else PERIOD_PLAIN
        light = self.standing.stands == Option.LIGHT
        pools = {(self.parts.get(row.method, row.method) if light else row.method, row.heat) for row in rows}
        unknown = {method for method, heat in pools if self.acceptance.seen(method, heat) < ENOUGH_PROPOSALS}
        # Such a method risks little in a step: less than planning takes, after a pass.
        if unknown:
            return PERIOD_WEIGHED if self.acceptance.weighed.issuperset(unknown) else 1
        # What lookups find differs from text to text, which its first steps show.
        return min(PERIOD, max(PERIOD_WEIGHED, self._known)) if self.acceptance.weighed else PERIOD

    # -- after a step ------------------------------------------------------------------------------------------------

    def observe(self, plan: StepPlan, step: StepObservation) -> None:
        """To be called after every step, with its plan and its measurements; where no row may guess, rows are left out.
        While a decision stands that much is known for, a few steps are learned from together: after a pass code and data
        are cold, and the first costs more than those after it."""
        further = step.num_passes - 1  # of the same call: the plan stood for them, too
        self._age, self._skips = self._age + further, max(self._skips - further, 0)
        if step.batch > 0 and step.seconds > 0.0 and self.mode != "off":
            self._budget.earn(step.seconds * step.num_passes)
            self._waiting.append((plan, step))
            self._num_waiting += step.num_passes
            if self._num_waiting >= plan.together:
                self._flush()

    def observe_reading(self, seconds: float) -> None:
        """Drafters took so long to read prompts: plain decoding would not have."""
        self._speed.before += seconds

    def _flush(self) -> None:
        """Learn from all steps that wait."""
        steps, self._waiting, self._num_waiting = self._waiting, [], 0
        for plan, step in steps:
            self._learn(plan, step)

    def _learn(self, plan: StepPlan, step: StepObservation) -> None:
        self.acceptance.tick(step.num_passes)
        self.corrections.tick(step.num_passes)
        # Rest, in which most steps pass where guessing does not pay.
        if not step.rows and plan.charged is None and not self._unsettled:
            self._decisions.since_plain, self._decisions.num_passes, self._speed.guessed = 0, step.num_passes, False
            self._learn_plain(step)
            self._speed.count(step.seconds, step.seconds, step.num_passes)
            return
        if plan.expected:
            self._speed.guessed = True
            plain, kept = self._offers.plain(step.batch, step.length), self.expected.learn(plan.expected, step.rows)
            self._speed.count((step.batch + kept) / step.batch * plain, step.seconds)
            return
        if step.rows:
            self._rested = None
            step = replace(step, rows=self._own_rows(plan, step.rows)) if self.parts else step
        drafted = any(row.drafted for row in step.rows)
        self._decisions.since_plain = self._decisions.since_plain + 1 if drafted else 0
        self._speed.guessed = drafted
        heavy = drafted and step.seconds_draft > HEAVY_DRAFT * step.seconds_target
        settled = heavy or not self._unsettled
        if not settled:
            self._unsettled = max(self._unsettled - step.num_passes, 0)
            if not drafted and self._tried:  # the first steps after a trial that displaced weights are its cost
                plain = self._offers.plain(step.batch, step.length)
                self._budget.charge_extra(step.seconds, plain, plain)
        accepted = self._learn_rows(plan, step, settled=settled, heavy=heavy)
        if heavy:
            self._unsettled, self._tried = SETTLING, plan.trial
        self._learn_gain(plan, step, drafted, accepted)

    def _learn_gain(self, plan: StepPlan, step: StepObservation, drafted: bool, accepted: int) -> None:
        """What the step has won or lost."""
        plain, seconds = self._offers.plain(step.batch, step.length), step.seconds
        if not drafted:
            self._speed.count(seconds, seconds, step.num_passes)
            if plan.charged is not None:
                self._budget.charge_extra(seconds - plain, plan.charged, plain)
            return
        tokens = step.batch + accepted
        served = tokens / step.batch * plain  # what plain decoding would have taken for these tokens
        self._budget.won += served - seconds
        if plan.charged is not None and all(row.by_light for row in step.rows if row.cap):
            self._budget.refund(plan.charged)
        elif plan.charged is not None:
            self._budget.charge_extra(seconds - served, plan.charged, plain)
        elif self.standing.stands == Option.WHOLE:  # whose trial it was that overdrew the budget
            self._budget.repay(min(served, tokens / max(self.standing.without, 1e-300)) - seconds)
        if self._decisions.knows_plain:
            # Guessing adds nodes to a pass: a plain step never takes longer, whatever its estimate says.
            self._speed.count(min(served, seconds * tokens / step.batch), seconds)

    def _own_rows(self, plan: StepPlan, rows: Sequence[RowStep]) -> list[RowStep]:
        """The rows of a step by those who guessed: light parts as methods of their own. Where whole methods did, and rows
        say what their light parts would have done, those are counted too: so a light part is known though the whole method
        guesses, and is not tried in its place to find out."""
        found: list[RowStep] = []
        for index, row in enumerate(rows):
            if row.by_light is not None and row.cap:
                nodes, accepted = (row.num_nodes, row.accepted) if row.by_light else (0, 0)
                self._shares.observe(row.request_id, row.method, row.heat, nodes, accepted)
            part = self.parts.get(row.method)
            if plan.option == Option.LIGHT:
                found.append(replace(row, method=part or row.method, by_light=None))
                continue
            if part is not None and row.light is not None:
                self.acceptance.observe(row.request_id, part, *row.light, heat=row.heat)
            if plan.paid is not None:  # deeper ones are the light part's, and its own
                row = replace(row, cap=max(plan.paid[index], row.drafted) if row.cap else 0)
            found.append(row)
        return found

    def _learn_plain(self, step: StepObservation) -> None:
        self._plain_skipped += step.num_passes
        # Where they are known well, one of a few plain steps says enough.
        if self._plain_skipped > self._plain_skip or not self.corrections.knows_size(step.batch):
            plain = self.costs.verify(step.batch, step.batch, step.length)
            self.corrections.observe_plain(step.seconds, plain, step.batch)
            known = self.corrections.plain_spread <= WELL_KNOWN
            self._plain_skipped, self._plain_skip = 0, PLAIN_SKIPPED if known else 0

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
        self._plain_skip = 0
        measured = step.seconds_target + step.seconds_rest
        predicted, drafting = self._offers.pass_seconds(step), step.seconds_draft
        if heavy and self.parts and plan.option == Option.WHOLE:
            # What a pass takes longer here than after a light part's guesses is a part of what drafting costs.
            drafting = max(step.seconds - predicted * self.corrections.guess, drafting)
        elif settled:
            if nodes:
                self.corrections.observe_guess(measured, predicted)
            else:
                self.corrections.observe_plain(measured, predicted, step.batch)
        if len(asked) == 1 and not by_light and not plan.lagging:  # the table does not include catching up
            ((method, rows),) = asked.items()
            expected = self._offers.draft_seconds(method, rows, step.batch)
            self.corrections.observe_draft(method, drafting, expected)
        return accepted


def _kinds(rows: Sequence[RowView]) -> list[Any]:
    """What a decision reads of rows of which nothing is known, numbers of tokens by their power of two."""
    tokens = [[count.bit_length() for count in (row.length, row.depth_limit, row.num_unread)] for row in rows]
    return sorted([row.method, row.heat, row.max_depth, *counts] for row, counts in zip(rows, tokens, strict=True))


def all_ask(rows: Sequence[RowView]) -> bool:
    """Whether all rows ask to guess in every step."""
    return bool(rows) and all(row.always for row in rows)
