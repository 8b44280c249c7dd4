"""CPU seconds of tests: what is measured, what is written down, and which tests are slow by it."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.cputime import COSTS, merged
from tests.tiers import LONG_S, long

ROOT = Path(__file__).parents[1]
TESTS = """
import subprocess, sys, time, pytest
BURN = "import time\\nwhile time.process_time() < {}: pass"

@pytest.fixture(scope="module")
def made():
    end = time.process_time() + 0.3
    while time.process_time() < end: pass

def test_fixture(made): pass

def test_child(made): subprocess.run([sys.executable, "-c", BURN.format(0.5)], check=True)

def test_nothing(made): time.sleep(0.3)
"""


def test_own_time_fixtures_and_processes_count_and_waiting_does_not(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.cputime", "-p", "no:cacheprovider", "--rootdir", tmp_path]
    done = subprocess.run(
        [*map(str, command), "-c", "/dev/null", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if "::test_" in line]
    found = {name.split("::")[1]: float(seconds) for seconds, name in rows}
    assert list(found) == ["test_child", "test_fixture", "test_nothing"], "the dearest first"
    assert 0.5 <= found["test_child"] < 1.5
    assert 0.3 <= found["test_fixture"] < 0.5
    assert found["test_nothing"] < 0.2
    assert "CPU seconds: " in done.stdout


def test_tests_that_did_not_run_keep_their_figures() -> None:
    assert merged({"old": 3.0, "quicker": 9.0, "slower": 1.0}, {"quicker": 0.1, "slower": 2.04, "new": 0.5}) == {
        "new": 0.5, "old": 3.0, "slower": 2.0,
    }  # fmt: skip


def test_what_is_written_down_are_seconds_of_tests() -> None:
    costs = json.loads(COSTS.read_text())
    assert all("::" in name and seconds > 0 for name, seconds in costs.items())


def test_long_tests_begin() -> None:
    assert long("tests/mutants/test_mutants.py::test_x", 0.0) == LONG_S
    assert long("tests/core/test_x.py::test_x", LONG_S + 1) == LONG_S + 1
    assert long("tests/core/test_x.py::test_x", LONG_S - 1) == 0.0
