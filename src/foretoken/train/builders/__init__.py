"""A file a method: how a fresh head for a target is made, and what it is trained by. Found by ``builtin.METHODS``."""
