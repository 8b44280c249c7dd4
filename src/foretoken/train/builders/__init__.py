"""One file per method: how a fresh head for a target is made, and its training objective. Found by
``builtin.METHODS``."""
