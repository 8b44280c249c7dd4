"""Cost tables on disk: one for each machine, model and set of methods."""

import contextlib
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from foretell.core.cachedir import cache_directory
from foretell.core.errors import ConfigError
from foretell.core.jsontext import parse_json
from foretell.core.provenance import accelerator, num_cores, processor, source_digest
from foretell.planner.costs import CostTable

log = logging.getLogger(__name__)
FORMAT = 3
MAX_AGE_S = 7 * 24 * 3600.0
"""A table that is older is measured again: drivers, clocks and neighbours change."""


def identity(model: Mapping[str, Any], methods: Mapping[str, Any]) -> dict[str, Any]:
    """What a saved table is valid for: this machine, torch and code, and the model (its name, weight_bytes, dtype,
    implementation) and the resolved methods' settings, as the caller names them."""
    machine = {
        "processor": processor(),
        "cores": num_cores(),
        "threads": torch.get_num_threads(),
        "accelerator": accelerator(),
        "torch": str(torch.__version__),
    }
    known = {
        "format": FORMAT,
        "code": source_digest(),
        "machine": machine,
        "model": model,
        "methods": methods,
    }
    return dict(json.loads(json.dumps(known, sort_keys=True, default=str)))  # as it will compare when read back


def cache_file(key: Mapping[str, Any]) -> Path:
    """Where the table of an identity is kept: ``costs`` in the cache directory."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_directory() / "costs" / f"{digest[:24]}.json"


def save(table: CostTable, key: Mapping[str, Any], path: Path | None = None) -> bool:
    """Write atomically. Where writing fails: False, and one log line."""
    path = path or cache_file(key)
    scratch = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
            scratch = file.name
            json.dump({"key": key, "time": time.time(), **table.to_json()}, file)
        os.replace(scratch, path)
        _clear(path.parent)
    except OSError as error:
        log.warning(
            "costs: cannot be kept in %s (%s), so every start measures them: make it writable, or set FORETELL_CACHE",
            path, error,
        )  # fmt: skip
        if scratch is not None:
            Path(scratch).unlink(missing_ok=True)
        return False
    return True


def _clear(directory: Path) -> None:
    """Remove tables that are too old to be used: each version of the code leaves its own."""
    for path in directory.glob("*.json"):
        with contextlib.suppress(OSError):  # another process may have removed it
            if time.time() - path.stat().st_mtime > MAX_AGE_S:
                path.unlink()


def load(key: Mapping[str, Any], path: Path | None = None) -> CostTable | None:
    """The table kept for this identity; None where there is none or it cannot be used."""
    path = path or cache_file(key)
    try:
        given = parse_json(path.read_text(encoding="utf-8"))
        if given["key"] != key:
            raise ValueError("it is of another machine, model or code")
        if not 0 <= time.time() - float(given["time"]) <= MAX_AGE_S:
            raise ValueError(f"it is older than {MAX_AGE_S / 86400:.0f} days")
        return CostTable.from_json(given)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        log.debug("costs: %s is not used (%s); measuring again", path, error)
        return None


def discard(key: Mapping[str, Any], path: Path | None = None) -> None:
    """Keep no table for this identity: the next start measures again."""
    try:
        (path or cache_file(key)).unlink(missing_ok=True)
    except OSError as error:
        log.warning("costs: %s is outdated and cannot be deleted (%s): delete it", path or cache_file(key), error)
