"""Ctrl-C, wherever it strikes."""

import signal
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest

from foretell.cli.interrupt import Terminated, interruptible
from foretell.cli.output import waiting


class Dropped:
    """Something whose finalizer is interrupted, so that the exception goes nowhere."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_a_finalizer_swallowed_ends_the_loop() -> None:
    before = signal.getsignal(signal.SIGINT)
    turns = []
    with pytest.raises(KeyboardInterrupt), interruptible() as check:  # noqa: PT012
        for turn in count():
            check()
            turns.append(turn)
            if turn == 2:
                Dropped()
            assert turn < 5
    assert turns == [0, 1, 2]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_one_that_is_swallowed_while_a_model_is_loaded_ends_the_command() -> None:
    with pytest.raises(KeyboardInterrupt), waiting("loading", no_color=True):
        Dropped()


def test_other_threads_get_none() -> None:
    with ThreadPoolExecutor(1) as pool, interruptible():
        assert pool.submit(_waited).result() is None


def _waited() -> None:
    with waiting("loading", no_color=True):
        pass


def test_an_interrupt_elsewhere_is_raised_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), interruptible() as check:  # noqa: PT012
        check()
        signal.raise_signal(signal.SIGINT)
        pytest.fail("it goes on")


def test_sigterm_is_met_like_ctrl_c_where_that_is_asked_for() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with interruptible():
        assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(Terminated), interruptible(terminable=True):  # noqa: PT012
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("it goes on")
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(KeyboardInterrupt) as caught, interruptible(terminable=True):
        signal.raise_signal(signal.SIGINT)
    assert not isinstance(caught.value, Terminated)
