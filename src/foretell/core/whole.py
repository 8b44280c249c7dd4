"""Files that are whole or absent, whatever ends the process or the machine meanwhile."""

import os
from collections.abc import Iterable
from pathlib import Path

from foretell.core.platform import flush_folder

Bytes = bytes | memoryview


def write_bytes(file: Path, content: Bytes) -> None:
    """Write and flush to the disk. Raises OSError."""
    with file.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def write_whole(file: Path, pieces: Iterable[Bytes]) -> None:
    """Write beside the file, readable by its owner alone, flush to the disk, and only then give it its name: whoever looks
    finds the old content or the new. Raises OSError, and leaves the old."""
    part = part_of(file)
    try:
        with open(part, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as stream:
            for piece in pieces:
                stream.write(piece)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(file)
        flush_folder(file.parent)
    finally:
        part.unlink(missing_ok=True)


def part_of(file: Path) -> Path:
    """Where ``write_whole`` writes: what lies there after a kill may be deleted."""
    return file.with_name(f".{file.name}.part")
