"""A cheap start: the collector rests while modules and models come in, and is awake afterwards."""

import gc
import os
import sys
from types import ModuleType

import pytest

import foretell
from foretell.cli import starting
from foretell.core.errors import ConfigError
from tests.cli.conftest import Invoke


def test_the_collector_rests_and_wakes(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[bool] = []
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(gc.isenabled()))
    with starting.uncollected():
        with starting.uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled(), "the outer one still loads"
    assert gc.isenabled()
    with pytest.raises(ValueError, match="x"), starting.uncollected():
        raise ValueError("x")
    assert gc.isenabled()
    assert frozen == [], "in a program of others all stays searchable"
    with starting.command():
        with starting.uncollected():
            pass
        assert (frozen, gc.isenabled()) == ([False], True)
    assert frozen == [False, True]


def test_triton_has_nothing_left_to_complain_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end it lists its objects that were not collected; frozen ones never are."""
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    with starting.command(), starting.uncollected():
        pass
    assert gc.get_freeze_count() == 0


def test_models_are_loaded_without_the_collector(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def load(*_: object, **__: object) -> None:
        seen.append(gc.isenabled())
        raise ConfigError("enough")

    monkeypatch.setattr(foretell.Engine, "load", load)
    assert "enough" in invoke("generate", "x", "--target", "bundled").stderr
    assert (seen, gc.isenabled()) == ([False], True)


def test_what_the_user_set_of_openblas_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, expected in ((None, "4"), ("20", "20")):
        monkeypatch.delenv("OPENBLAS_THREAD_TIMEOUT", raising=False)
        if given is not None:
            monkeypatch.setenv("OPENBLAS_THREAD_TIMEOUT", given)
        starting.let_idle_threads_sleep()
        assert os.environ["OPENBLAS_THREAD_TIMEOUT"] == expected
