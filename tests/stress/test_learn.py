"""Learning at length: 10,000 random steps whose tokens may not change, and the soak of a service that learns."""

import subprocess
import sys

import pytest

from tests.learn.test_serving import no_token_changes
from tests.stress import MINUTES, minutes, size


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "gamma"), [("chain", 4), ("static/branching=2x1x1", 3)])
def test_ten_thousand_steps_change_no_token(shape: str, gamma: int) -> None:
    no_token_changes(shape, gamma, size(300, 10_000))


@pytest.mark.slow
@pytest.mark.skipif(not MINUTES, reason="a soak of seconds says nothing of memory: FORETELL_STRESS_MINUTES")
def test_soak() -> None:
    command = [sys.executable, "-m", "tests.stress.soak_learn", "--minutes", str(minutes(0.2))]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60 * minutes(0.2) + 300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
