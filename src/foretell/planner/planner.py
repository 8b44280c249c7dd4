"""How deep each row may guess in the next step, so that speculation never costs time.

Before a step the planner compares the expected tokens of guesses with their expected seconds, for the whole batch;
plain decoding is one of the choices. Unknown choices are tried within a budget (``account.py``): every trial is charged
its expected loss.
"""

from collections.abc import Sequence

from foretell.core.errors import ConfigError
from foretell.planner.acceptance import Acceptance
from foretell.planner.account import TrialAccount
from foretell.planner.allocation import search
from foretell.planner.corrections import Corrections
from foretell.planner.costs import CostTable
from foretell.planner.decisions import GAIN_TO_CONTINUE, PLAIN_TRIAL_PERIOD, SETTLING, Decisions, Plan
from foretell.planner.observations import RowView, StepObservation
from foretell.planner.problems import Problems
from foretell.planner.shares import LightShares

MODES = ("auto", "on", "off")
MAX_ARRIVING_SHARE = 0.25  # of the decoding rows: where more join, guessing is not started
PERIOD = 16  # steps between plans while nothing joins or leaves; every step while much is unknown
PERIOD_PLAIN = 64  # ... and while nothing guesses; twice as many once that has been decided again
RESTS_TOGETHER = 32  # steps after ``rest`` that are learned from together, at most
TOGETHER = 8  # steps that are learned from together, at most, while a plan stands that much is known for
ENOUGH_PROPOSALS = 24.0  # of a method at one heat, after which its rates no longer change by the step
SPEEDUP_DECAY = 1.0 / 200.0  # of the live speedup, per step
STALLED = 20.0  # usual steps: one that took longer counts as so many, in the live speedup
WELL_KNOWN = 0.07  # of that log: where it is known so well ...
PLAIN_SKIPPED = 7  # ... so many of eight plain steps say nothing new
HEAVY_DRAFT = 0.15  # of a pass: guesses that take longer read weights of their own


class Planner(Decisions):
    """Plans steps and learns from them. Not thread-safe: used by the engine's thread only."""

    _has_light = False  # whether methods have light parts, whose steps have passes of their own

    paid: list[int] | None = None
    """Of the last plan: the depth that each row may guess with guesses that cost time, where that is another."""

    def __init__(
        self,
        costs: CostTable,
        acceptance: Acceptance,
        *,
        mode: str = "auto",
        corrections: Corrections | None = None,
        shares: LightShares | None = None,
    ) -> None:
        """corrections: shared with another planner of the same steps. shares: see ``Problems``."""
        if mode not in MODES:
            raise ConfigError(f"speculation is one of {', '.join(MODES)}; given {mode!r}")
        self.costs = costs
        self.acceptance = acceptance
        self.mode = mode
        self.corrections = corrections or Corrections(costs.methods)
        self._problems = Problems(costs, acceptance, self.corrections, shares)
        self._floor = 0.0  # tokens a second that can be had without any of these guesses, where plain decoding has less
        self.last = (0.0, 0.0)  # of the last step: seconds that plain decoding would have taken, and seconds
        self._account = TrialAccount()
        self._ids: list[
            tuple[str, str, int]
        ] = []  # of the rows that ``standing`` was made for, and what they may guess
        self.standing = Plan([])
        self._caps: list[int] = []
        self._age, self._patience = 0, 1
        self._lagging = False
        self._guessing = False
        self._skip = self._skipped = 0  # plain steps that the corrections are not told of, and those of them so far
        self._plain_seconds = self._seconds = self._known = 0.0
        self._since_plain = PLAIN_TRIAL_PERIOD
        self._unsettled, self._tried = 0, False  # see ``_settles``; whether the guesses before were a trial
        self.guessed_last = False
        # Steps that are still to be learned from, and what was planned for them: ``paid``, depths, whether drafters lagged.
        self._waiting: list[tuple[StepObservation, list[int] | None, list[int], bool]] = []
        # Steps after ``rest`` to be learned from: rows, seconds, and whether they are like others.
        self._rests: list[tuple[int, float, bool]] = []

    @property
    def speedup(self) -> float | None:
        """Tokens a second over those of plain decoding, up to a few steps ago. A plain step counts 1, and no step more than
        its tokens a row. None before any step, where no plain step was seen for long, and in the modes that measure no
        costs."""
        known = self._seconds and self.mode == "auto" and (not self.guessed_last or self._knows_plain)
        return self._plain_seconds / self._seconds if known else None

    @property
    def trials(self) -> int:
        """Trials so far."""
        return self._account.trials

    @property
    def trial_seconds(self) -> float:
        """Seconds that trials were charged."""
        return self._account.seconds

    @property
    def state(self) -> dict[str, float | int | str | bool | None]:
        """For logs and metrics."""
        return {
            "mode": self.mode,
            "guessing": self._guessing,
            "mean_depth": sum(self._caps) / len(self._caps) if self._caps else 0.0,
            "speedup": self.speedup,
            "trials": self.trials,
            "trial_seconds": self.trial_seconds,
            "correction_plain": self.corrections.plain,
            "correction_guess": self.corrections.guess,
            **{f"correction_draft_{method}": factor for method, factor in self.corrections.draft.items()},
        }

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

    def use(self, costs: CostTable, corrections: Corrections | None = None) -> None:
        """Plan by another table from now on: corrections of the one before are dropped, acceptance is kept."""
        self._learn_waiting()
        self.costs, self.corrections = costs, corrections or Corrections(costs.methods)
        self._problems = Problems(costs, self.acceptance, self.corrections, self._problems.shares)
        self._account, self._unsettled = TrialAccount(), 0
        self._ids, self.standing, self._guessing = [], Plan([]), False

    def replan(self) -> None:
        """Decide anew at the next plan, however young the one that stands is."""
        self._ids = []

    def forget(self, request_id: str) -> None:
        """A request has ended; its estimates are not used for another request, even one of the same name."""
        if self._waiting:
            self._learn_waiting()
        self.acceptance.forget(request_id)
        self._ids = []

    def will_guess(self, rows: Sequence[RowView]) -> bool:
        """Whether guessing is on, beyond a trial, and would be for these rows too: then preparing drafters is
        worthwhile."""
        if self.mode != "auto":
            return self.mode == "on"
        if all_ask(rows):
            return True
        if not self._guessing:
            return False
        self._learn_waiting()
        plain = self._problems.plain(len(rows))
        if len(rows) == 1:
            single = self._problems.single(rows[0], plain)
            found = None if single is None else single.best(single.kept)
            return found is not None and found[1] / found[2] > max(1 / plain, self._floor) * (1.0 + GAIN_TO_CONTINUE)
        question = self._problems.of(rows, plain)
        best = None if question is None else search(question.problem)
        return best is not None and best.rate > max(len(rows) / plain, self._floor) * (1.0 + GAIN_TO_CONTINUE)

    def plan(self, rows: Sequence[RowView], arriving: int = 0) -> list[int]:
        """The greatest depth each row may guess in the next step, 0 for none.

        arriving: rows that join soon. Where they are many, guessing is not begun: the plan may not pay with them. Where all
        rows ask to guess always, they do: a loss is theirs alone.
        """
        asked = self.mode == "auto" and all_ask(rows)
        if self.mode != "auto" or asked:
            on = self.mode == "on" or asked
            self._ids, self.standing = [], Plan([])
            self._lagging = any(row.num_unread > 2 for row in rows)
            self._caps = [max(min(row.max_depth, row.depth_limit), 0) if on else 0 for row in rows]
            self._guessing = any(self._caps)
            return list(self._caps)
        if arriving > MAX_ARRIVING_SHARE * len(rows) and not self._guessing:
            self._ids, self._caps = [], [0] * len(rows)
            return list(self._caps)
        ids = [(row.request_id, row.method, row.max_depth) for row in rows]
        self._age += 1
        due = self._age >= self._patience or (not self._guessing and self._account.is_due)
        if ids != self._ids or due:
            self._learn_waiting()
            was_idle = ids == self._ids and not self._guessing and self._patience >= PERIOD_PLAIN
            self._ids, self._age = ids, 0
            self.standing = self._decide(rows)
            self._patience = self.standing.num_steps if self.standing.trial else self._period(rows, was_idle=was_idle)
        caps = self.standing.caps
        self._lagging = any(row.num_unread > 2 for row in rows)
        self._caps = [
            cap if cap <= row.depth_limit else max(row.depth_limit, 0) for cap, row in zip(caps, rows, strict=True)
        ]
        return list(self._caps)

    def again(self, depth_limit: int, *, lagging: bool) -> list[int] | None:
        """What ``plan`` would say now, for the one row that it was asked for last, while that guesses by a standing plan;
        None where ``plan`` must be asked. After a pass, a view of the row takes some 35 microseconds.

        depth_limit: of the row. lagging: whether its drafter has more than two tokens to read.
        """
        standing = self._guessing and not self.standing.trial and len(self._ids) == 1 and self.mode == "auto"
        if not standing or self._age + 1 >= self._patience:
            return None
        self._age += 1
        self._lagging = lagging
        self._caps = [max(min(self.standing.caps[0], depth_limit), 0)]
        return list(self._caps)

    def rest(self) -> bool:
        """Whether the next step is a plain one and there is nothing to decide: for the same rows as the last ``plan``, and
        where none arrives, what ``plan`` would have said. ``observe_rest`` follows such a step."""
        if not self._is_resting:
            return False
        self._age += 1
        return True

    @property
    def _is_resting(self) -> bool:
        standing = bool(self._ids) and self.mode == "auto" and not self._guessing and not self.standing.trial
        return standing and self._age + 1 < self._patience and not self._account.is_due

    def _period(self, rows: Sequence[RowView], *, was_idle: bool) -> int:
        if not self._guessing:
            # Where another planner's guesses are the choice, these are weighed as often as before.
            return 2 * PERIOD_PLAIN if was_idle and not self._floor else PERIOD_PLAIN
        pools = {(row.method, row.heat) for row in rows}
        return PERIOD if all(self.acceptance.seen(*pool) >= ENOUGH_PROPOSALS for pool in pools) else 1

    def earn(self, seconds: float) -> None:
        """Time that passed in steps which another planner planned."""
        self._account.earn(seconds)

    def observe(self, step: StepObservation) -> None:
        """To be called after every step, with its measurements. While a plan stands that much is known for, a few steps are
        learned from together: after a pass code and data are cold, and the first costs more than those after it."""
        if self._can_wait:
            if self._rests:
                self._learn_waiting()
            self._waiting.append((step, self.paid, self._caps, self._lagging))
            self.guessed_last = any(row.drafted for row in step.rows)
            return
        self._learn_waiting()
        self._observe(step)

    @property
    def _can_wait(self) -> bool:
        standing = self._guessing and not self.standing.trial and not self.standing.charged
        return standing and self._patience == PERIOD and len(self._waiting) < TOGETHER - 1

    def _learn_waiting(self) -> None:
        """Learn from the steps that wait for it."""
        if self._rests:
            rests, self._rests = self._rests, []
            for rest in rests:
                self._learn_rest(*rest)
            return
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        now = self.paid, self._caps, self._lagging
        for step, paid, caps, lagging in waiting:
            self.paid, self._caps, self._lagging = paid, caps, lagging
            self._observe(step)
        self.paid, self._caps, self._lagging = now

    def _observe(self, step: StepObservation) -> None:
        seconds = step.seconds
        if step.batch < 1 or seconds <= 0.0:
            return
        self.acceptance.tick()
        self.corrections.tick()
        drafted = any(row.drafted for row in step.rows)
        self._since_plain = self._since_plain + 1 if drafted else 0
        heavy = drafted and step.seconds_draft > HEAVY_DRAFT * step.seconds_target
        if not drafted:
            settled = self._settles(step.batch, seconds)
        else:
            settled = heavy or not self._unsettled
            self._unsettled = max(0, self._unsettled - 1)
        accepted = self._learn(step, settled=settled, heavy=heavy)
        plain = self._problems.plain(step.batch)
        if heavy:
            self._unsettled, self._tried = SETTLING, self.standing.trial
        self._account.earn(seconds)
        served = (step.batch + accepted) / step.batch * plain  # what plain decoding would have taken for these tokens
        if self.standing.charged and any(row.drafted for row in step.rows if row.cap > 0):
            self._account.charge_extra(seconds - served, self.standing.charged, plain)
            self.standing.charged = 0.0
        self.guessed_last = drafted
        self.last = (0.0, 0.0)
        if drafted and not self._knows_plain:
            return
        # Guessing adds nodes to a pass: a plain step never takes longer, whatever its estimate says.
        worth = min(served, seconds * (step.batch + accepted) / step.batch) if drafted else seconds
        self._count(worth, seconds)

    def observe_rest(self, batch: int, seconds: float) -> None:
        """``observe`` of a step after ``rest``. A few are learned from together, but for what they earn, which says when
        the next trial is due."""
        if self._waiting:
            self._learn_waiting()
        self.guessed_last = False
        if batch < 1 or seconds <= 0.0:
            return
        self._account.earn(seconds)
        self._rests.append((batch, seconds, self._settles(batch, seconds)))
        if len(self._rests) >= RESTS_TOGETHER:
            self._learn_waiting()

    def _settles(self, batch: int, seconds: float) -> bool:
        """A plain step has taken so long: whether it is like plain steps among others. A drafter's weights have taken the
        place of the target's in the processor's cache, so that the first ones behind its guesses take longer: they tell
        nothing of plain decoding, and after a trial are a part of what it costs."""
        if not self._unsettled:
            return True
        self._unsettled -= 1
        if self._tried:
            plain = self._problems.plain(batch)
            self._account.charge_extra(seconds, plain, plain)
        return False

    def _learn_rest(self, batch: int, seconds: float, settled: bool) -> None:
        self.acceptance.tick()
        self.corrections.tick()
        self._since_plain = 0
        if settled:
            self._learn_plain(batch, seconds)
        self._count(seconds, seconds)

    def _learn_plain(self, batch: int, seconds: float) -> None:
        self._skipped += 1
        if self._skipped > self._skip:  # where they are known well, one of a few plain steps says enough
            self.corrections.observe("plain", seconds, self.costs.verify(batch, batch))
            self._skipped, self._skip = 0, PLAIN_SKIPPED if self.corrections.plain_spread <= WELL_KNOWN else 0

    def _count(self, worth: float, seconds: float) -> None:
        """A step for the live speedup. The machine may have stood still in it: its ratio counts, its length only so far."""
        self.last = (worth, seconds)
        most = STALLED * self._seconds
        if seconds * self._known > most > 0.0:
            worth, seconds = worth * most / (seconds * self._known), most / self._known
        self._known += SPEEDUP_DECAY * (1.0 - self._known)
        self._plain_seconds += SPEEDUP_DECAY * (worth - self._plain_seconds)
        self._seconds += SPEEDUP_DECAY * (seconds - self._seconds)

    def _learn(self, step: StepObservation, *, settled: bool, heavy: bool) -> int:
        """Count accepted guesses and correct the costs. Returns the number of accepted guesses. settled: see
        ``_settles``. heavy: the drafter's weights have taken the place of the target's."""
        asked: dict[str, list[int]] = {}
        accepted = nodes = by_light = 0
        if any(self._caps) or any(row.cap for row in step.rows):
            for row in step.rows:
                accepted += row.accepted
                if row.cap < 1:
                    continue
                nodes += row.num_nodes
                if row.by_light:  # it says nothing of the method's own guesses, nor of their cost
                    by_light += 1
                    continue
                asked.setdefault(row.method, []).append(row.cap)
                self.acceptance.observe(
                    row.request_id, row.method, row.cap, row.drafted, row.accepted, row.nodes, row.heat
                )
        if not asked and not by_light:
            if settled:
                self._learn_plain(step.batch, step.seconds)
            return accepted
        self._skip = 0
        kind = "guess" if nodes else "plain"
        measured = step.seconds_target + step.seconds_rest
        predicted, drafting = self.costs.verify(step.batch, step.batch + nodes), step.seconds_draft
        if heavy and self._has_light:
            # What a pass takes longer here than behind a light part's guesses is a part of what drafting costs.
            drafting = max(step.seconds - predicted * self.corrections.guess, drafting)
        elif settled:
            self.corrections.observe(kind, measured, predicted)
        if len(asked) == 1 and not by_light and not self._lagging:  # the table does not include catching up
            ((method, caps),) = asked.items()
            expected = self._problems.draft_seconds(method, caps, step.batch)
            self.corrections.observe_draft(method, drafting, expected)
        return accepted


def all_ask(rows: Sequence[RowView]) -> bool:
    """Whether all rows ask to guess in every step."""
    return bool(rows) and all(row.always for row in rows)
