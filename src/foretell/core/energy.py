"""Joules as the processor counts them: Linux' RAPL, through the files of its ``powercap`` directory.

Many systems let only root read them, and most virtual machines have none: there is no figure there.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from foretell.core.platform import POWERCAP

_ZONE = re.compile(r"intel-rapl:\d+(:\d+)?")  # intel-rapl-mmio counts the same packages again
_COUNTED = re.compile(r"package-\d+(-die-\d+)?|dram")
"""Names of zones. A package holds its cores and its graphics; of the whole system, "psys", the packages are a part."""


@dataclass
class _Zone:
    counter: Path  # microjoules, which begin again at 0 after the range
    range: int
    last: int


class Energy:
    """Joules of all packages and their memory since this was made, whatever used them. Thread-safe; a reading takes some
    tens of microseconds. A counter that goes round twice between two readings loses a round: 65 kJ or more."""

    def __init__(self, zones: list[_Zone]) -> None:
        self._zones, self._microjoules, self._lock = zones, 0, Lock()

    @classmethod
    def of(cls, directory: Path = POWERCAP) -> "Energy | None":
        """The machine's; None where it does not tell us."""
        zones: list[_Zone] = []
        for zone in sorted(directory.glob("intel-rapl:*")):
            try:
                if not _ZONE.fullmatch(zone.name) or not _COUNTED.fullmatch(_text(zone / "name")):
                    continue
                counter = zone / "energy_uj"
                zones.append(_Zone(counter, int(_text(zone / "max_energy_range_uj")), int(_text(counter))))
            except (OSError, ValueError):
                return None  # a part of the sum would be taken for the whole
        return cls(zones) if zones else None

    def joules(self) -> float | None:
        """So far; None where the counters cannot be read any more."""
        with self._lock:
            try:
                values = [int(_text(zone.counter)) for zone in self._zones]
            except (OSError, ValueError):
                return None
            for zone, value in zip(self._zones, values, strict=True):
                self._microjoules += value - zone.last + (zone.range if value < zone.last else 0)
                zone.last = value
            return self._microjoules / 1e6


def _text(file: Path) -> str:
    return file.read_text(encoding="ascii").strip()
