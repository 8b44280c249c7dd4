"""What lies beside a head of its training."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from foretell.core.errors import ForetellError
from foretell.core.jsontext import parse_json
from foretell.heads import formats


@dataclass(frozen=True)
class HeadRecord:
    """What lies beside a head of its training."""

    target: formats.TargetInfo
    target_hash: str | None = None
    conditional: tuple[float, ...] = ()  # held-out acceptance by slot


def read_record(directory: Path) -> HeadRecord:
    """Of a head's directory; empty where nothing is recorded."""
    try:
        about = formats.describe_target(directory)
    except ForetellError:
        about = formats.TargetInfo()
    try:
        found = parse_json((directory / "record.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return HeadRecord(about)
    if not isinstance(found, Mapping):
        return HeadRecord(about)
    result = found.get("result")
    mark = found.get("target_hash")
    curve = _curve(result.get("conditional")) if isinstance(result, Mapping) else ()
    return HeadRecord(about, mark if isinstance(mark, str) else None, curve)


def _curve(given: object) -> tuple[float, ...]:
    """Acceptance by slot; empty where a value is no share: what is left would be of other slots."""
    rates = given if isinstance(given, list) else []
    shares = [float(rate) for rate in rates if type(rate) in (int, float) and 0 <= rate <= 1]
    return tuple(shares) if len(shares) == len(rates) else ()
