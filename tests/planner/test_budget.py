"""The account of trials: a share of the time served, never overdrawn by what was foreseen."""

import pytest
from foretell.planner.account import (
    ASKED_AGAIN,
    BUDGET,
    MAX_CREDIT_PASSES,
    MAX_EXTRA_PASSES,
    PROMISE,
    START_CREDIT_PASSES,
    WON_SHARE,
    Purse,
    TrialAccount,
)


def test_it_opens_with_a_pass_earns_its_share_and_is_bounded() -> None:
    account = Purse()
    account.earn(100.0)  # before it is opened nothing is earned
    assert account.credit(2.0) == START_CREDIT_PASSES * 2.0
    account.earn(100.0)
    assert account.credit(2.0) == pytest.approx(2.0 + BUDGET * 100.0)
    account.earn(1e6)
    assert account.credit(2.0) == MAX_CREDIT_PASSES * 2.0


def test_a_trial_that_cannot_be_paid_is_due_once_it_can() -> None:
    account = Purse()
    assert not account.is_due
    assert account.credit(1.0) == 1.0
    account.ask(1.5)
    account.ask(1.2)  # the cheapest counts
    assert not account.is_due
    account.earn(0.2 / BUDGET)
    assert not account.is_due, "it will be weighed again, and its loss have grown"
    account.earn((ASKED_AGAIN - 1.0) * 1.2 / BUDGET)
    assert account.is_due
    account.ask_nothing()
    assert not account.is_due


def test_deciding_is_charged_and_reckoned_with() -> None:
    account = Purse()
    account.credit(1.0)
    account.charge_deciding(0.25)
    assert (account.trials, account.seconds, account.credit(1.0)) == (0, 0.25, 0.75)
    account.ask(0.5)
    assert not account.is_due, "0.625 and another 0.25"
    account.earn(0.13 / BUDGET)
    assert account.is_due


def test_charges_are_counted_and_extra_ones_limited() -> None:
    account = Purse()
    account.credit(1.0)
    account.charge(0.25)
    account.charge(-0.5)  # a trial that gains is not paid for
    assert (account.trials, account.seconds, account.credit(1.0)) == (2, 0.25, 0.75)
    account.charge_extra(0.5, 0.25, 1.0)
    assert (account.seconds, account.credit(1.0)) == (0.5, 0.5)
    account.charge_extra(0.1, 0.25, 1.0)  # cheaper than foreseen: nothing is given back
    assert account.seconds == 0.5
    account.charge_extra(1000.0, 0.25, 1.0)
    assert account.credit(1.0) == 0.5 - MAX_EXTRA_PASSES
    assert account.trials == 2


def test_planners_share_what_trials_may_lose() -> None:
    """Two purses of half each: what one does not spend does not wait for the other, and both together lose no more."""
    account = TrialAccount(2)
    dear, cheap = account.open(), account.open()
    assert dear.credit(1.0) == cheap.credit(1.0) == START_CREDIT_PASSES
    for _ in range(2100):
        account.earn(1.0)
        for purse, loss in ((cheap, 0.01), (dear, 3.0)):
            if purse.credit(1.0) >= loss:
                purse.charge(loss)
    assert dear.trials == 2, "saved for, whatever the other spends"
    assert cheap.trials > 200
    assert account.trials == dear.trials + cheap.trials
    assert account.seconds == pytest.approx(dear.seconds + cheap.seconds)
    assert account.seconds <= BUDGET * 2100 + 2 * START_CREDIT_PASSES


def test_reading_a_text_may_overdraw_it_by_what_a_run_can_bear() -> None:
    """So much that the run stays within the promise of plain decoding; and once, until that is paid."""
    account = Purse()
    account.credit(1.0)
    account.ask(2.0, 3.0)
    assert not account.is_due
    account.earn(100.0)
    account.won = 4.0 / WON_SHARE
    account.ask_nothing()
    account.ask(2.0)
    assert account.most == pytest.approx(1.0 + 100.0 * BUDGET), (
        "a trial that reads nothing is paid from the credit alone"
    )
    account.ask(4.0, 3.0)
    over = 100.0 * PROMISE + 4.0
    assert account.most == pytest.approx(over)
    account.won = 1e6
    assert account.most == MAX_CREDIT_PASSES, "however much was won"
    account.charge(4.0, 3.0, request_ids=["a", "b"])
    assert account.most == account.credit(1.0) == pytest.approx(1.5 - 4.0), "none that reads, until it is paid"
    account.ask(1.0, request_ids=["b"])
    assert account.goes_on(["b"])
    assert account.most == 3.0, "but as much again, to put to use what was read"
    account.ask(1.0, request_ids=["b", "c"])
    assert account.most == account.credit(1.0), "of c nothing was read"
    account.charge(2.5, request_ids=["b"])
    account.charge(0.25, request_ids=["c"])
    account.forget("b")
    account.ask(1.0, request_ids=["a"])
    assert account.most == 0.5, "another request has ended, and another's trial lost something"
    account.charge(1.0, request_ids=["a"])
    assert not account.goes_on(["a"])
    assert account.most == account.credit(1.0)


def test_what_was_read_is_of_no_use_behind_its_request() -> None:
    account = Purse()
    account.credit(1.0)
    account.charge(4.0, 3.0, request_ids=["a"])
    account.forget("b")
    assert account.goes_on(["a"])
    account.forget("a")
    assert not account.goes_on(["a"])


def test_what_was_overdrawn_is_paid_by_what_the_guesses_win() -> None:
    account = Purse()
    account.credit(1.0)
    account.charge(4.0, 3.0)
    account.repay(-1.0)
    account.repay(2.0)
    assert account.credit(1.0) == -1.0
    account.repay(50.0)
    assert account.credit(1.0) == 0.0, "no more than that"
    account.charge_extra(1.0, 0.0, 1.0)
    account.repay(50.0)
    assert account.credit(1.0) == -1.0, "other losses are earned back"


def test_a_trial_that_did_not_take_place_is_given_back() -> None:
    account = Purse()
    account.credit(1.0)
    account.charge(4.0, 3.0, request_ids=["a"])
    account.refund(4.0)
    assert (account.credit(1.0), account.seconds, account.goes_on(["a"])) == (1.0, 0.0, False)
    account.charge(4.0, 3.0, request_ids=["a"])
    account.charge(0.5, request_ids=["a"])
    account.refund(0.5)
    assert (account.credit(1.0), account.goes_on(["a"])) == (-3.0, True), "the text has been read"
