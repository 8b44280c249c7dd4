"""Long loads on servers and engines, in small: each file is a program, and a test runs it for seconds.

``FORETELL_STRESS_MINUTES=20 python -m pytest -m "" tests/stress`` runs the same tests at length, that many minutes each
where time is what they take, and otherwise at full size. The programs have more options, told by ``--help``:
``python -m tests.stress.soak``, ``hostile``, ``differ``, ``clients``, ``fuzz``, ``equality``, ``schemas``.
"""

import os

MINUTES = float(os.environ.get("FORETELL_STRESS_MINUTES", "0"))
"""How long each test may take; 0: seconds."""


def minutes(short: float) -> float:
    """The minutes that were asked for, or a short time."""
    return MINUTES or short


def size(short: int, full: int) -> int:
    """A count: the full one where minutes were asked for."""
    return full if MINUTES else short
