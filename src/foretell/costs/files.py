"""Cost tables on disk: one for each machine, model and set of methods. One of more methods, or larger batches, serves too:
``generate``, ``chat`` and ``doctor`` plan by what ``serve`` has measured."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from foretell.core.errors import ConfigError
from foretell.core.jsontext import parse_json
from foretell.core.measured import file_of, machine, read, write
from foretell.core.provenance import accelerator, source_digest
from foretell.costs.measure import StepSeconds
from foretell.costs.table import CostTable

log = logging.getLogger(__name__)
FORMAT = 5
Timed = tuple[object, float, float, float]
"""A result of what was timed, and the seconds that it took, that all threads ran and that they waited."""
_MORE = ("max_batch", "longest")
"""Of a model: a table that was measured to more of them says what it says to less."""


def identity(model: Mapping[str, Any], methods: Mapping[str, Any]) -> dict[str, Any]:
    """What a saved table is valid for: this machine, torch and code, and the model (its name, weight_bytes, dtype,
    implementation) and the resolved methods' settings, as the caller names them."""
    known = {
        "format": FORMAT,
        "code": source_digest(),
        "machine": {**machine(), "accelerator": accelerator()},
        "model": model,
        "methods": methods,
    }
    return dict(json.loads(json.dumps(known, sort_keys=True, default=str)))  # as it will compare when read back


def save(table: CostTable, key: Mapping[str, Any], path: Path | None = None) -> bool:
    """Write atomically. Where writing fails: False, and one log line."""
    return _write(key, table.to_json(), path or file_of(key))


def keep_begun(timed: Sequence[Timed], key: Mapping[str, Any]) -> bool:
    """The same with what was timed of a table that is not whole yet. key: what that is valid for, another one than the
    table's; ``discard`` removes it."""
    rows = [[astuple(result) if isinstance(result, StepSeconds) else result, *rest] for result, *rest in timed]
    return _write(key, {"timed": rows}, file_of(key))


def load_begun(key: Mapping[str, Any]) -> list[Timed]:
    """What ``keep_begun`` has kept for this key; empty where there is nothing, or it cannot be used."""
    try:
        return [
            (
                StepSeconds(*result) if isinstance(result, list) else float(result),
                float(seconds),
                float(ran),
                float(waited),
            )
            for result, seconds, ran, waited in read(key)["timed"]
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _write(key: Mapping[str, Any], content: Mapping[str, Any], path: Path) -> bool:
    try:
        write(key, content, path)
    except OSError as error:
        log.warning(
            "costs: cannot be kept in %s (%s), so every start measures them: make it writable, or set FORETELL_CACHE",
            path, error,
        )  # fmt: skip
        return False
    return True


def load(key: Mapping[str, Any], path: Path | None = None) -> CostTable | None:
    """The table kept for this identity, or the part for it of one of more; None where there is none or it cannot be
    used."""
    path = path or file_of(key)
    try:
        return CostTable.from_json(read(key, path))
    except FileNotFoundError:
        return next((found for other in sorted(path.parent.glob("*.json")) if (found := _part(key, other))), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        log.debug("costs: %s is not used (%s); measuring again", path, error)
        return None


def _part(key: Mapping[str, Any], path: Path) -> CostTable | None:
    """What a file says of an identity, where that is a part of its own."""
    try:
        own = parse_json(path.read_text(encoding="utf-8"))["key"]
        model, methods = own["model"], own["methods"]
        enough = all(model[name] >= key["model"][name] for name in _MORE)
        mine = {**own, "model": {**model, **{name: key["model"][name] for name in _MORE}}, "methods": key["methods"]}
        if not enough or mine != key or any(methods[name] != each for name, each in key["methods"].items()):
            return None
        return CostTable.from_json(read(own, path)).of_methods(key["methods"])
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        ConfigError,
    ):  # other measurements are kept there too
        return None


def discard(key: Mapping[str, Any], path: Path | None = None) -> None:
    """Keep no table for this identity: the next start measures again."""
    try:
        (path or file_of(key)).unlink(missing_ok=True)
    except OSError as error:
        log.warning("costs: %s is outdated and cannot be deleted (%s): delete it", path or file_of(key), error)
