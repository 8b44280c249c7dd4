"""The one directory that foretell writes to by itself: built kernels, measured costs, pulled models. Deleting it is always
safe."""

import atexit
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path


def cache_directory() -> Path:
    """``$FORETELL_CACHE``, else ``foretell`` in ``$XDG_CACHE_HOME``, else ``~/.cache/foretell``. It may be absent."""
    own = os.environ.get("FORETELL_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or _home() / ".cache") / "foretell"


def usable_directory(wanted: Path) -> Path:
    """The directory, made where it is absent; where nothing can be written there (a read-only home), another one that is
    this process's alone and goes with it. What is run as code is never read from a place that others may write to."""
    try:
        wanted.mkdir(parents=True, exist_ok=True)
    except OSError:
        return _own()
    return wanted if os.access(wanted, os.W_OK | os.X_OK) else _own()


@cache
def _own() -> Path:
    made = tempfile.mkdtemp(prefix="foretell-")
    owner = os.getpid()
    atexit.register(lambda: shutil.rmtree(made, ignore_errors=True) if os.getpid() == owner else None)  # not a fork's
    return Path(made)


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # a user without a home directory
        return Path("/nonexistent")


def models_directory() -> Path:
    """Where ``foretell pull`` puts models: ``$FORETELL_MODELS``, else ``models`` in the cache directory."""
    own = os.environ.get("FORETELL_MODELS")
    return Path(own) if own else cache_directory() / "models"
