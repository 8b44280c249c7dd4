"""How deep rows may guess: the choice of most tokens a second, or a trial of another while there is credit for it.

One row is reckoned in plain Python (``single.py``), several by ``allocation.py``: to the same end.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import thread_time

import numpy as np

from foretell.planner.account import Purse
from foretell.planner.allocation import Allocation, price, search
from foretell.planner.ledger import Ledger
from foretell.planner.observations import RowView
from foretell.planner.offers import Offers, Question, steps_ahead
from foretell.planner.single import Single

GAIN_TO_START = 0.05  # expected gain over plain decoding needed to start guessing ...
GAIN_TO_CONTINUE = 0.02  # ... and to go on: costs are known no better
MIN_CHARGE_PASSES = 0.05  # least charge of a plain trial step: bounds the trials at near ties
SETTLING = 2  # plain steps behind a drafter's pass that take longer than others, where a cache holds the target
PLAIN_TRIAL_PERIOD = 16  # guessing steps before a plain one is tried, to see what it costs now
MAX_PLAIN_SPREAD = 0.12  # of the log of a plain step's seconds: where it is known no better, the speedup is not known


@dataclass(slots=True)
class Decision:
    """Depths of some rows for the next steps, and why."""

    caps: list[int]
    guessing: bool = False  # whether guesses are expected to pay, whatever is tried now
    expected: Allocation | None = None
    plain_rate: float = 0.0
    trial: bool = False
    charged: float | None = None  # for a trial of guesses where nobody does, ahead of it
    num_steps: int = 1  # of a trial


class Decisions:
    """What a planner decides from what it has learned."""

    def __init__(self) -> None:
        self.floor = 0.0  # tokens a second that can be had without any of these guesses, where plain decoding has less
        self.since_plain = PLAIN_TRIAL_PERIOD  # guessing steps since the last plain one

    def use(self, offers: Offers, ledger: Ledger, purse: Purse) -> None:
        """Decide by these from now on."""
        self._offers, self._ledger, self._purse = offers, ledger, purse

    @property
    def knows_plain(self) -> bool:
        """Whether it is known what plain steps take."""
        return self._ledger.corrections.plain_spread <= MAX_PLAIN_SPREAD

    def pays(self, rows: Sequence[RowView]) -> bool:
        """Whether guessing goes on with these rows, where it has begun."""
        plain = self._offers.plain_of(rows)
        best: Allocation | None = None
        if len(rows) == 1:
            single = self._offers.single(rows[0], plain)
            found = None if single is None else single.best(single.kept)
            best = None if found is None else Allocation([found[0]], *found[1:])
        elif question := self._offers.of(rows, plain):
            best = search(question.problem)
        return best is not None and best.rate > max(len(rows) / plain, self.floor) * (1.0 + GAIN_TO_CONTINUE)

    def _is_blind(self, row: RowView, entry: float, plain: float) -> bool:
        """Whether a long text would be read for guesses of which nothing is known: no more than a trial, whatever is
        expected. entry: seconds of it a step."""
        return entry * steps_ahead(row, 0.0) > plain and not self._offers.acceptance.knows(row.method)

    def decide(self, rows: Sequence[RowView], before: Decision) -> Decision:
        """What these rows do next; before: what stood so far."""
        gain = GAIN_TO_CONTINUE if before.guessing else GAIN_TO_START
        return self._decide_one(rows[0], gain) if len(rows) == 1 else self._decide_all(rows, gain)

    def _decide_one(self, row: RowView, gain: float) -> Decision:
        """``_decide_all`` of one row."""
        plain = self._offers.plain(1, row.length)
        off = Decision([0], plain_rate=max(1 / plain, self.floor))
        self._purse.ask_nothing()
        single = self._offers.single(row, plain)
        if single is None:
            return off
        best = single.best(single.kept)
        begun = thread_time()
        if (
            best is None
            or best[1] / best[2] <= off.plain_rate * (1.0 + gain)
            or self._is_blind(row, single.entry, plain)
        ):
            made = self._try_one(row, single, off)
        else:
            depth, tokens, seconds = best
            standing = Decision([depth], True, Allocation([depth], tokens, seconds), off.plain_rate)
            made = self._try_plain(1, plain, standing) or standing
        self._purse.charge_deciding(thread_time() - begun)
        return made

    def _try_one(self, row: RowView, single: Single, off: Decision) -> Decision:
        """``_try_guessing`` of one row."""
        kept = single.kept
        self._purse.credit(single.plain)
        hopes = [max(hope, one) if one > 0.0 else 0.0 for hope, one in zip(single.optimistic, kept, strict=True)]
        hope = single.best(hopes, doubt=math.exp(-self._ledger.corrections.doubt))
        reading = single.entry * steps_ahead(row, sum(kept))  # a failed trial has read the whole text in vain
        prices = single.prices(kept, entry=reading)
        reading = reading if reading > single.plain else 0.0
        request = (row.request_id,)
        goes_on = self._purse.goes_on(request) and not reading
        if hope is None or (hope[1] / hope[2] <= off.plain_rate * (1.0 + GAIN_TO_START) and not goes_on):
            return off
        allowed = sum(one > 0.0 for one in kept)
        best: tuple[float, Allocation, float] | None = None
        for cap in (hope[0],) if single.is_weighed else sorted({1, 2, hope[0]}):
            depth = min(cap, allowed)
            tokens, seconds = prices[depth - 1] if depth else (1.0, single.plain)
            loss = seconds - tokens / off.plain_rate
            value = (1.0 + sum(kept[: depth - 1]) if depth else 0.0) / max(loss, 0.02 * single.plain)
            self._purse.ask(loss, reading, request_ids=request)
            if loss + reading <= self._purse.most and (best is None or value > best[0]):
                best = (value, Allocation([depth], tokens, seconds), loss)
        if best is None:
            return off
        self._purse.charge(best[2], reading, request_ids=request)
        return Decision(best[1].caps, False, best[1], off.plain_rate, trial=True, charged=max(best[2], 0.0))

    def _decide_all(self, rows: Sequence[RowView], gain: float) -> Decision:
        """gain: over plain decoding, that guessing must be expected to bring."""
        batch, plain = len(rows), self._offers.plain_of(rows)
        off = Decision([0] * batch, plain_rate=max(batch / plain, self.floor))
        self._purse.ask_nothing()
        question = self._offers.of(rows, plain)
        if question is None:
            return off
        best = search(question.problem)
        begun = thread_time()  # not the wall's: a machine that stood still in between would have to be earned back
        blind = any(map(self._is_blind, rows, question.problem.entry.tolist(), [plain] * batch))
        if best is None or best.rate <= off.plain_rate * (1.0 + gain) or blind:
            made = self._try_guessing(rows, question, off)
        else:
            made = self._try_other(question, Decision(best.caps, True, best, off.plain_rate))
        # A trial that is weighed often must not cost more than trials.
        self._purse.charge_deciding(thread_time() - begun)
        return made

    # Trials: what the optimistic curve says would win, a few rows at a time, while there is credit.

    def _try_guessing(self, rows: Sequence[RowView], question: Question, off: Decision) -> Decision:
        """No row guesses: let one or a few rows try, if guessing may pay."""
        problem = question.problem
        self._purse.credit(problem.plain)
        depth = problem.kept.shape[1]
        allowed = problem.kept > 0.0
        optimistic = np.where(allowed, np.maximum(question.curves.optimistic[:, :depth], problem.kept), 0.0)
        doubt = float(np.exp(-self._ledger.corrections.doubt))
        hope = search(replace(problem, kept=optimistic, guess_factor=problem.guess_factor * doubt))
        order = np.argsort(-optimistic[:, 0], kind="stable")
        spread = np.array([steps_ahead(row, kept) for row, kept in zip(rows, problem.kept.sum(axis=1), strict=True)])
        problem = replace(problem, entry=problem.entry * spread)  # a failed trial has read the whole text in vain
        ids = [row.request_id for row in rows]
        read = np.array([self._purse.goes_on([request]) for request in ids])
        if goes_on := bool((read & (problem.entry <= problem.plain)).any()):
            order = order[np.argsort(~read[order], kind="stable")]  # those that a trial has read first
        if hope is None or (hope.rate <= off.plain_rate * (1.0 + GAIN_TO_START) and not goes_on):
            return off
        best: tuple[float, Allocation, float, float, list[str]] | None = None
        for count in (1, 4) if problem.batch >= 16 else (1,):
            tried = order[:count]
            for cap in sorted({1, 2, max(hope.caps)}):
                caps = np.zeros(problem.batch, dtype=np.int64)
                caps[tried] = np.minimum(cap, allowed[tried].sum(axis=1))
                caps = np.array(problem.deepened(caps.tolist()))
                choice = price(problem, caps.tolist())
                loss = choice.seconds - choice.tokens / off.plain_rate
                learned = sum(1.0 + problem.kept[row, : caps[row] - 1].sum() for row in tried if caps[row])
                value = learned / max(loss, 0.02 * problem.plain)
                reading = float(problem.entry[caps > 0].sum())
                reading = reading if reading > problem.plain else 0.0
                trying = [ids[row] for row in tried if caps[row]]
                self._purse.ask(loss, reading, request_ids=trying)
                if loss + reading <= self._purse.most and (best is None or value > best[0]):
                    best = (value, choice, loss, reading, trying)
        if best is None:
            return off
        self._purse.charge(best[2], best[3], request_ids=best[4])
        return Decision(best[1].caps, False, best[1], off.plain_rate, trial=True, charged=max(best[2], 0.0))

    def _try_other(self, question: Question, standing: Decision) -> Decision:
        """Some rows guess: try a row that does not, or a plain step, if that may pay."""
        expected, problem = standing.expected, question.problem
        assert expected is not None
        trial = self._try_plain(problem.batch, problem.plain, standing)
        credit = self._purse.credit(problem.plain)
        if trial is not None or credit <= 0.0:
            return trial or standing
        caps = np.array(expected.caps)
        idle = (caps == 0) & (problem.kept[:, 0] > 0.0)
        optimistic = np.where(idle, question.curves.optimistic[:, 0], 0.0)
        row = int(optimistic.argmax())
        if optimistic[row] <= 0.0:
            return standing
        caps[row] = 1
        caps = np.array(problem.deepened(caps.tolist()))
        drafting = problem.draft[problem.method[row], 0, min(int((caps > 0).sum()), len(caps))]
        if optimistic[row] / expected.rate <= drafting:
            return standing  # its drafting alone costs more than the token is worth
        choice = price(problem, caps.tolist())
        gain = choice.tokens - problem.kept[row, 0] + optimistic[row]
        loss = choice.seconds - choice.tokens / expected.rate
        if gain / choice.seconds <= expected.rate or loss > credit:
            return standing
        self._purse.charge(loss)
        return Decision(choice.caps, True, choice, standing.plain_rate, trial=True)

    def _try_plain(self, batch: int, plain: float, standing: Decision) -> Decision | None:
        """A plain step in place of the plan that stands, where that may pay; else None."""
        expected = standing.expected
        assert expected is not None
        credit = self._purse.credit(plain)
        if credit <= 0.0:
            return None
        hope = batch / plain * math.exp(self._ledger.corrections.doubt)
        num_steps = 1 + self._ledger.unsettled
        loss = num_steps * max(plain - batch / expected.rate, MIN_CHARGE_PASSES * plain)
        wanted = hope > expected.rate or not self.knows_plain
        if not wanted or loss > credit or self.since_plain < PLAIN_TRIAL_PERIOD:
            return None
        self._purse.charge(loss)
        return Decision([0] * batch, True, None, standing.plain_rate, trial=True, num_steps=num_steps)
