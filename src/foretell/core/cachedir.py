"""The one directory that foretell writes to by itself: built kernels, measured costs, pulled models, heads of ``train
auto``, the history of ``chat``. Deleting it is always safe; heads and history alone do not come back by themselves."""

import atexit
import contextlib
import os
import shutil
import stat
import tempfile
from functools import cache
from pathlib import Path

from foretell.core.platform import user_id


def cache_directory() -> Path:
    """``$FORETELL_CACHE``, else ``foretell`` in ``$XDG_CACHE_HOME``, else ``~/.cache/foretell``. It may be absent."""
    own = os.environ.get("FORETELL_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or _home() / ".cache") / "foretell"


def kept_directories() -> list[Path]:
    """Where compiled code may lie that an earlier process has made: the cache directory, and the user's own below the
    system's temporary one, where it is there and safe. What is run as code is never read from a place that others may write
    to."""
    path = _temporary()
    return [cache_directory(), *([path] if path is not None and _is_private(path) else [])]


def other_directory() -> Path:
    """Where compiled code goes that the cache directory cannot hold (a read-only home, a full disk): the user's own below
    the system's temporary one, else one that is this process's alone and goes with it. Raises OSError where there is
    none."""
    path = _temporary()
    if path is not None:
        with contextlib.suppress(OSError):
            if not os.path.lexists(path):
                path.mkdir(mode=0o700)
            if _is_private(path):
                return path
    return _own()


def _temporary() -> Path | None:
    owner = user_id()
    return Path(tempfile.gettempdir(), f"foretell-{owner}") if owner is not None else None


def _is_private(path: Path) -> bool:
    """Whether a directory, and no link to one, is this user's, nobody else may look into it, and nobody else may put
    another in its place."""
    try:
        found, above = path.lstat(), path.parent.stat()
    except OSError:
        return False
    own = stat.S_ISDIR(found.st_mode) and found.st_uid == user_id() and not found.st_mode & 0o077
    shared = above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX
    return own and not shared and above.st_uid in (0, user_id())


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
