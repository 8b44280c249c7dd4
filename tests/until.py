"""An end for a run that must not take longer: ``FORETELL_TESTS_UNTIL``, in seconds of the epoch.

A test that has not begun by then fails: the run is red. Planted bugs alone are chosen by the time that is left, those in
files that changed last first, and the run says how many were not planted (the weekly workflow plants all).
"""

import math
import os
import time

UNTIL = float(os.environ.get("FORETELL_TESTS_UNTIL", math.inf))
REASON = "no time was left (FORETELL_TESTS_UNTIL)"


def time_is_up() -> bool:
    """Whether nothing more is to be begun."""
    return time.time() > UNTIL
