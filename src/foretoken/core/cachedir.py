"""The one directory that foretoken writes to by itself: built kernels, measured costs, pulled models. Deleting it is always
safe."""

import os
from pathlib import Path


def cache_directory() -> Path:
    """``$FORETOKEN_CACHE``, else ``foretoken`` in ``$XDG_CACHE_HOME``, else ``~/.cache/foretoken``. It may be absent."""
    own = os.environ.get("FORETOKEN_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foretoken"


def models_directory() -> Path:
    """Where ``foretoken pull`` puts models: ``$FORETOKEN_MODELS``, else ``models`` in the cache directory."""
    own = os.environ.get("FORETOKEN_MODELS")
    return Path(own) if own else cache_directory() / "models"
