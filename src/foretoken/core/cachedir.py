"""The one directory that foretoken writes to by itself: built kernels and measured costs. Deleting it is always safe."""

import os
from pathlib import Path


def cache_directory() -> Path:
    """``$FORETOKEN_CACHE``, else ``foretoken`` in ``$XDG_CACHE_HOME``, else ``~/.cache/foretoken``. It may be absent."""
    own = os.environ.get("FORETOKEN_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foretoken"
