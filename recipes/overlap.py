"""Find which parts of some texts occur in a large body of text: all windows of 50 bytes, by hash, then exactly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

WINDOW = 50  # bytes
BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that powers stay invertible modulo 2**64


def window_hashes(data: bytes) -> NDArray[np.uint64]:
    """Hash of every window of WINDOW bytes: [len(data) - WINDOW + 1] (empty for shorter data)."""
    raw = np.frombuffer(data, dtype=np.uint8)
    count = len(raw) - WINDOW + 1
    if count <= 0:
        return np.empty(0, np.uint64)
    total = np.zeros(count, np.uint64)
    with np.errstate(over="ignore"):
        for offset in range(WINDOW):
            total = total * BASE + raw[offset : offset + count]
        return total * BASE


def pieces(texts: Iterable[str], size: int = 4_000_000) -> Iterator[bytes]:
    """Texts joined to pieces of about `size` bytes, so that arrays stay small; a zero byte parts two texts."""
    held: list[bytes] = []
    length = 0
    for text in texts:
        held.append(text.encode())
        length += len(held[-1])
        if length >= size:
            yield b"\x00".join(held)
            held, length = [], 0
    if held:
        yield b"\x00".join(held)


def windows_found(queries: list[str], texts: Iterable[str]) -> list[set[bytes]]:
    """For each query, its windows that occur in `texts`."""
    wanted: dict[int, list[tuple[int, bytes]]] = {}
    for number, query in enumerate(queries):
        raw = query.encode()
        for start, value in enumerate(window_hashes(raw).tolist()):
            wanted.setdefault(value, []).append((number, raw[start : start + WINDOW]))
    keys = np.sort(np.fromiter(wanted, np.uint64, len(wanted)))
    found: list[set[bytes]] = [set() for _ in queries]
    for piece in pieces(texts) if wanted else ():
        hashes = window_hashes(piece)
        at = np.minimum(np.searchsorted(keys, hashes), len(keys) - 1)
        for start in np.flatnonzero(keys[at] == hashes).tolist():
            window = piece[start : start + WINDOW]
            for number, original in wanted[int(hashes[start])]:
                if original == window:
                    found[number].add(window)
    return found
