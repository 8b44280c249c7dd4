"""Programs of models run apart, and end. Each test starts a Python process: tens of milliseconds."""

import os
import sys
import time
from pathlib import Path

import pytest

from foretell.bench.sandbox import FAILED, PASSED, TIMED_OUT, isolation, run


@pytest.mark.parametrize(
    ("source", "outcome"),
    [
        ("assert 1 + 1 == 2", PASSED),
        ("import math, typing, collections, re, itertools", PASSED),
        ("print('x' * 100000)", PASSED),
        ("assert 1 + 1 == 3", FAILED),
        ("def broken(:", FAILED),
        ("import sys; sys.exit(0)", FAILED),
        ("import os; os._exit(0)", FAILED),
        ("raise KeyboardInterrupt", FAILED),
        ("input()", FAILED),
        ("import os; os.write(1, b'passed'); os._exit(0)", FAILED),
        ("\x00", FAILED),
        ("x = '\ud800'", PASSED),
    ],
)
def test_outcomes(source: str, outcome: str) -> None:
    assert run(source) == outcome


def test_what_never_ends_is_ended() -> None:
    begun = time.monotonic()
    assert run("while True:\n    pass", timeout_s=0.5) == TIMED_OUT
    assert run("import time\ntime.sleep(60)", timeout_s=0.5) == TIMED_OUT
    assert time.monotonic() - begun < 50  # far from what a busy machine takes, and less than the program asks for


def test_its_children_end_with_it(tmp_path: Path) -> None:
    mark = tmp_path / "alive"
    child = f"import time; time.sleep(1.5); open({str(mark)!r}, 'w')"
    source = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {child!r}])"
    assert run(source) == PASSED
    time.sleep(2)
    assert not mark.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's here")
def test_memory_and_files_are_limited() -> None:
    assert isolation().limits
    assert run("x = bytearray(1 << 31)") == FAILED
    assert run("x = bytearray(1 << 20)") == PASSED
    assert run("open('big', 'wb').write(b'x' * (1 << 22))") == FAILED


def test_it_starts_in_an_empty_directory_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETELL_SECRET", "x")
    assert run("import os\nassert os.listdir() == []\nassert 'FORETELL_SECRET' not in os.environ") == PASSED
    assert run("open('left', 'w').write('x')") == PASSED
    assert not (Path(os.getcwd()) / "left").exists()
    assert run("import foretell") == FAILED  # the standard library alone


def test_no_network_where_the_system_can() -> None:
    """With a network of its own even loopback is down, so that a listener here cannot be reached."""
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        source = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), timeout=2)"
        assert run(source) == (PASSED if isolation().network else FAILED)
    assert ("no network" in str(isolation())) != isolation().network
