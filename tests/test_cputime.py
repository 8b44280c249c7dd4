"""CPU seconds of tests: what is measured, what is written down, and which tests are slow by it."""

import os
import subprocess
import sys
from pathlib import Path

from tests.cputime import BUDGET_S, LIMITS_S, known, measured
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
    assert 0.45 <= found["test_child"] < 1.5, "a child's time is counted in ticks: .49 was seen of .5"
    assert 0.25 <= found["test_fixture"] < 0.5
    assert found["test_nothing"] < 0.2
    assert "CPU seconds: " in done.stdout


def test_the_limit_keeps_to_the_budget() -> None:
    half = BUDGET_S / 2
    tests = {f"a{n}": 0.4 for n in range(int(half / 0.4))} | {f"b{n}": 1.3 for n in range(int(half / 1.3))}
    assert measured(tests, ()).limit_s == LIMITS_S[0]
    more = {**tests, **{f"c{n}": 1.4 for n in range(10)}}
    assert measured(more, ()).limit_s == 1.2
    assert measured(more, {f"c{n}" for n in range(10)}).limit_s == LIMITS_S[0], "those are slow anyway"
    assert measured({f"a{n}": 0.4 for n in range(10_000)}, ()).limit_s == LIMITS_S[-1]


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    costs = measured({"test_x[a\\b]": 3.04, "test_y": 0.1, 'test_z["]': 0.5}, ())
    assert costs.seconds == {"test_x[a\\b]": 3.0, 'test_z["]': 0.5}
    (tmp_path / "costs.json").write_text(costs.text())
    assert known(tmp_path / "costs.json") == costs
    assert all("::" in name and seconds > 0 for name, seconds in known().seconds.items())


def test_long_tests_begin() -> None:
    assert long("tests/mutants/test_mutants.py::test_x", 0.0) == LONG_S
    assert long("tests/core/test_x.py::test_x", LONG_S + 1) == LONG_S + 1
    assert long("tests/core/test_x.py::test_x", LONG_S - 1) == 0.0
