"""Rows whose prompts begin alike, such as with one system prompt. Pure functions.

They hold the same keys and values there, from the prefix store or computed by themselves, and attention reads one row's for
all of them (``KVCache.shared``).
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from foretell.engine.prefix import Owner
from foretell.model.cache import Shared

PIECE = 256
"""Tokens: what native attention shares is whole segments of as many positions (``SEGMENT`` in ``native/common.h``)."""


def beginnings(ids: Sequence[int], owner: Owner) -> tuple[bytes, ...]:
    """A digest of the first 1, 2, ... whole pieces of an owner's text. Nobody can make two texts that have the same."""
    found, digest = list[bytes](), blake2b(repr(owner).encode(), digest_size=16)
    for start in range(0, len(ids) // PIECE * PIECE, PIECE):
        digest.update(array("q", ids[start : start + PIECE]).tobytes())
        found.append(digest.digest())
    return tuple(found)


def in_common(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """Tokens of whole pieces with which two texts begin, given their ``beginnings``."""
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count * PIECE


def shared(texts: Sequence[Sequence[bytes]]) -> Shared:
    """Groups of rows that share slots: those that spare the most slots, (rows - 1) * slots of each group summed. texts:
    ``beginnings`` of each row's."""
    return tuple((tuple(rows), count * PIECE) for rows, count in _best(texts, range(len(texts)), 0))


def _best(texts: Sequence[Sequence[bytes]], rows: Sequence[int], count: int) -> list[tuple[Sequence[int], int]]:
    """Groups of rows that have at least ``count`` pieces in common, and how many each has."""
    while True:
        parts: dict[bytes, list[int]] = {}
        for row in rows:
            if count < len(texts[row]):
                parts.setdefault(texts[row][count], []).append(row)
        if [len(part) for part in parts.values()] != [len(rows)] or len(rows) < 2:
            break
        count += 1
    apart = [group for part in parts.values() if len(part) > 1 for group in _best(texts, part, count + 1)]
    together = (len(rows) - 1) * count
    return [(rows, count)] if together > sum((len(part) - 1) * each for part, each in apart) else apart
