"""Results that are kept as they are made: a file of JSON lines, appended to, and read again after a kill.

The first line identifies the run (``identity``), so that two runs never mix. Each further line is one
result, written at once: a killed process loses none. The file is flushed to the disk every few seconds: a power failure
loses only those. A line that was cut short, or damaged, is left out; its result is made again.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, TextIO

from foretell.core.errors import ConfigError
from foretell.core.jsontext import parse_json

VERSION = 1
BEGIN = b'{"journal":'
FLUSH_SECONDS = 5.0
"""Between two flushes to the disk."""


class Journal:
    """One file. As a context manager it is always flushed and closed at the end."""

    def __init__(self, file: Path | str, identity: Mapping[str, Any]) -> None:
        """Open or create a file. identity: JSON values. ``records`` then holds what the file holds, in its order.

        Raises ConfigError where the file belongs to another identity, naming the first difference, or is no journal;
        OSError.
        """
        self.file = Path(file)
        mine = json.loads(json.dumps(identity, default=str))
        found = read_journal(self.file)
        self.records: list[dict[str, Any]] = []
        if found is not None:
            was, self.records = found
            difference = first_difference(was, mine)
            if difference is not None:
                key, old, new = difference
                raise ConfigError(
                    f"{self.file} holds {len(self.records)} results that were made with {key} = {old!r}, and now {key} is "
                    f"{new!r}: give the arguments of that run to go on with it, or another file, or delete this one"
                )
        self._stream: TextIO = self.file.open("a" if found is not None else "w", encoding="utf-8")
        self._flushed = monotonic()
        if found is None:
            self.append({"journal": VERSION, "identity": mine})
        elif not _ends_with_newline(self.file):
            self._stream.write("\n")  # the last line was cut short: start a new line

    def close(self) -> None:
        """Flush to the disk and close. Idempotent."""
        if not self._stream.closed:
            try:
                self._sync()
            finally:
                self._stream.close()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def append(self, record: Mapping[str, Any]) -> None:
        """Keep one result. Raises OSError that names the file."""
        try:
            self._stream.write(json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n")
            self._stream.flush()
            if monotonic() - self._flushed >= FLUSH_SECONDS:
                self._sync()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.file)) from None

    def _sync(self) -> None:
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._flushed = monotonic()


def read_journal(file: Path) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
    """(identity, results) of a file; None where there is none, or its first line was cut short before any result.

    Raises ConfigError where the file is something else.
    """
    try:
        lines = file.read_bytes().splitlines()
    except FileNotFoundError:
        return None
    head = _object(lines[0]) if lines else None
    begun = lines[0] if lines else b""
    if head is None and len(lines) <= 1 and begun[: len(BEGIN)] == BEGIN[: len(begun)]:
        return None
    if head is None or head.get("journal") != VERSION or not isinstance(head.get("identity"), dict):
        raise ConfigError(f"{file} was not written by this version of foretell: give another file, or delete this one")
    return head["identity"], [record for line in lines[1:] if (record := _object(line)) is not None]


def first_difference(was: Mapping[str, Any], now: Mapping[str, Any], at: str = "") -> tuple[str, Any, Any] | None:
    """(dotted key, old value, new value) of the first difference of two nested objects of JSON values; None: equal."""
    for key in sorted({*was, *now}):
        old, new = was.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            inner = first_difference(old, new, f"{at}{key}.")
            if inner is not None:
                return inner
        elif old != new:
            return f"{at}{key}", old, new
    return None


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = parse_json(line)
    except ValueError:  # of JSON, or of UTF-8
        return None
    return value if isinstance(value, dict) else None


def _ends_with_newline(file: Path) -> bool:
    with file.open("rb") as stream:
        stream.seek(-1, os.SEEK_END)
        return stream.read(1) == b"\n"
