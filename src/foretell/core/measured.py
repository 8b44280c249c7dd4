"""Measurements that later starts use: JSON files in ``costs`` of the cache directory, each valid for one identity.

``of_passes`` is for choices that change no text, only its time, and are made by timing passes as a model is loaded.
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

from foretell.core.cachedir import cache_directory
from foretell.core.jsontext import parse_json
from foretell.core.platform import num_cores, preemptions, processor
from foretell.core.provenance import package_version

log = logging.getLogger(__name__)
MAX_AGE_S = 7 * 24 * 3600.0
"""What is older is measured again: drivers, clocks and neighbours change."""
FORMAT = 1
"""Of timed passes."""
TOO_SLOW = 1.5
"""What was kept is wrong where it says that many times what a pass takes now: it was measured on a busy machine."""
MAX_SPREAD = 1.15
"""Of each least time in two halves of a measurement, the larger over the smaller: more is not kept."""
MAX_PREEMPTIONS = 60.0
"""A second, in all threads: more is a machine that works for others too, and nothing is kept of it. Of ten processes on
two processors it is hundreds; alone, some."""


def machine() -> dict[str, Any]:
    """This machine, torch and its threads, as far as they decide what a pass takes on the CPU."""
    import torch

    return {
        "processor": processor(),
        "cores": num_cores(),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
    }


def file_of(key: Mapping[str, Any]) -> Path:
    """Where the measurement of an identity (JSON) is kept."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_directory() / "costs" / f"{digest[:24]}.json"


def write(key: Mapping[str, Any], content: Mapping[str, Any], path: Path | None = None) -> None:
    """Write atomically, and remove what is too old to be used. Raises OSError."""
    path, scratch = path or file_of(key), None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
            scratch = file.name
            json.dump({"key": key, "time": time.time(), **content}, file)
        os.replace(scratch, path)
    except OSError:
        if scratch is not None:
            Path(scratch).unlink(missing_ok=True)
        raise
    for old in path.parent.glob("*.json"):  # each version of the code leaves its own
        with contextlib.suppress(OSError):  # another process may have removed it
            if time.time() - old.stat().st_mtime > MAX_AGE_S:
                old.unlink()


def read(key: Mapping[str, Any], path: Path | None = None) -> dict[str, Any]:
    """What ``write`` was given. Raises FileNotFoundError where there is none, and OSError, ValueError, KeyError or
    TypeError where it cannot be used."""
    given = parse_json((path or file_of(key)).read_text(encoding="utf-8"))
    if given["key"] != key:
        raise ValueError("it is of another machine, model or code")
    if not 0 <= time.time() - float(given["time"]) <= MAX_AGE_S:
        raise ValueError(f"it is older than {MAX_AGE_S / 86400:.0f} days")
    return dict(given)


class Keep(Protocol):
    """``of_passes`` of a subject, or ``measured_now``."""

    def __call__(
        self,
        candidates: tuple[int, ...],
        measure: Callable[[], Mapping[int, float]],
        check: Callable[[], Mapping[int, float]],
    ) -> dict[int, float]:
        """Seconds of every candidate."""


def measured_now(
    candidates: tuple[int, ...], measure: Callable[[], Mapping[int, float]], check: object = None
) -> dict[int, float]:
    """Least seconds of a pass by candidate, of two calls of ``measure``; nothing is kept."""
    one, other = measure(), measure()
    return {candidate: min(one[candidate], other[candidate]) for candidate in candidates}


def of_passes(
    subject: Mapping[str, Any],
    candidates: tuple[int, ...],
    measure: Callable[[], Mapping[int, float]],
    check: Callable[[], Mapping[int, float]],
) -> dict[int, float]:
    """Least seconds of a pass by candidate: as an earlier start kept them, where ``check`` does not contradict them; else
    those of two calls of ``measure``, kept where these agree and the machine worked for nobody else.

    subject: what the times hold for besides this machine, torch and foretell's version. measure: seconds of all
    candidates; check: of some of them, by a pass or two. A machine that is busy now makes passes slower: slower ones
    contradict nothing.
    No error of the disk is raised, and none is worth more than a line at level debug.
    """
    known = {"format": FORMAT, "foretell": package_version("foretell"), "machine": machine(), **subject}
    key = json.loads(json.dumps({**known, "candidates": candidates}, sort_keys=True, default=str))
    kept = _kept(key, candidates)
    if kept is not None:
        now = check()
        if all(kept[candidate] <= TOO_SLOW * seconds + 1e-4 for candidate, seconds in now.items()):
            return kept
        log.debug("passes: those of an earlier start took longer than they do now; measuring again")
    began, before = perf_counter(), preemptions()
    one, other = measure(), measure()
    rate = (preemptions() - before) / max(perf_counter() - began, 1e-9)
    least = {candidate: min(one[candidate], other[candidate]) for candidate in candidates}
    spread = max(max(one[candidate], other[candidate]) / max(least[candidate], 1e-9) for candidate in candidates)
    if spread > MAX_SPREAD or rate > MAX_PREEMPTIONS:
        log.debug("passes: not kept, as the machine is busy (spread %.2f, %.0f preemptions a second)", spread, rate)
        return least
    try:
        write(key, {"seconds": [least[candidate] for candidate in candidates]})
    except OSError as error:
        log.debug("passes: cannot be kept (%s)", error)
    return least


def _kept(key: Mapping[str, Any], candidates: tuple[int, ...]) -> dict[int, float] | None:
    try:
        seconds = [float(each) for each in read(key)["seconds"]]
        if not all(math.isfinite(each) and each > 0 for each in seconds):
            raise ValueError("seconds must be positive")
        return dict(zip(candidates, seconds, strict=True))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.debug("passes: %s is not used (%s); measuring again", file_of(key), error)
        return None
