"""An end for a run that must not take longer: ``FORETELL_TESTS_UNTIL``, in seconds of the epoch.

A test that has not begun by then fails: a slow test that continuous integration passes over rots, and the run must not be
green. Planted bugs are the exception: of those as many are planted as an eighth of the time allows, bugs of changed files
first, and the run says how many were not; all of them are planted once a week.
"""

import math
import os
import time

UNTIL = float(os.environ.get("FORETELL_TESTS_UNTIL", math.inf))
REASON = "no time was left (FORETELL_TESTS_UNTIL)"


def time_is_up() -> bool:
    """Whether nothing more is to be begun."""
    return time.time() > UNTIL
