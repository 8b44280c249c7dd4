"""``python -m tests.stress.clients``."""

import sys

from tests.stress.clients import main

sys.exit(main())
