"""An end for a run that must not take longer: ``FORETELL_TESTS_UNTIL``, in seconds of the epoch.

What has not begun by then is skipped, and the run says how much that was. Continuous integration has so many minutes: on a
machine that is too slow for all slow tests it runs what fits, newest planted bugs first, and not nothing.
"""

import math
import os
import time

UNTIL = float(os.environ.get("FORETELL_TESTS_UNTIL", math.inf))
REASON = "no time was left (FORETELL_TESTS_UNTIL)"


def time_is_up() -> bool:
    """Whether nothing more is to be begun."""
    return time.time() > UNTIL
