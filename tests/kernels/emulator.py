"""Kernels for other machines: compiled by a cross compiler, run by qemu, and the same calls on this machine.

A call is written down as bytes (``emulated.c`` reads them), so that both sides are given the very same.
"""

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from foretell.kernels import build

COMPILER, QEMU, ROOT = "aarch64-linux-gnu-gcc", "qemu-aarch64-static", "/usr/aarch64-linux-gnu"
missing = [name for name in (COMPILER, QEMU) if shutil.which(name) is None]
needs_emulator = pytest.mark.skipif(bool(missing), reason=f"no {' and no '.join(missing)} here")


class At(NamedTuple):
    """The address of a buffer, as an argument."""

    buffer: int


class Call(NamedTuple):
    """A function of ``native.c``; what buffer 0 holds after it is compared. pointers: (buffer, offset there, buffer that is
    pointed at, offset there)."""

    function: str
    buffers: Sequence[bytes]
    arguments: Sequence[int | At]
    pointers: Sequence[tuple[int, int, int, int]] = ()

    def written(self) -> bytes:
        """What ``emulated.c`` reads."""
        parts = [struct.pack("<32sq", self.function.encode(), len(self.buffers))]
        for buffer in self.buffers:
            parts += [struct.pack("<q", len(buffer)), buffer]
        parts.append(struct.pack("<q", len(self.pointers)))
        parts += [struct.pack("<4q", *pointer) for pointer in self.pointers]
        parts.append(struct.pack("<q", len(self.arguments)))
        for argument in self.arguments:
            given = (1, argument.buffer) if isinstance(argument, At) else (0, argument)
            parts.append(struct.pack("<2q", *given))
        return b"".join(parts)

    def run(self, library: ctypes.CDLL) -> tuple[int, bytes]:
        """What it returns on this machine, and buffer 0 behind it."""
        held, places = [], []
        for buffer in self.buffers:
            held.append(ctypes.create_string_buffer(len(buffer) + 64))
            places.append((ctypes.addressof(held[-1]) + 63) // 64 * 64)
            ctypes.memmove(places[-1], buffer, len(buffer))
        for buffer, at, to, offset in self.pointers:
            ctypes.c_int64.from_address(places[buffer] + at).value = places[to] + offset
        values = [places[value.buffer] if isinstance(value, At) else value for value in self.arguments]
        function = getattr(library, self.function)
        function.restype = ctypes.c_int64
        return function(*map(ctypes.c_int64, values)), ctypes.string_at(places[0], len(self.buffers[0]))


def compiled(names: Iterable[str], variant: str) -> dict[str, Path]:
    """Kernels for ARM, by name; CC must name COMPILER."""
    return {name: next(build._libraries(name, variant)) for name in names}


def emulated(
    calls: Sequence[Call], libraries: Mapping[str, Path], cpu: str, directory: Path
) -> list[tuple[int, bytes]]:
    """What the calls give on a CPU that qemu knows: what each returns, and buffer 0 behind it."""
    program, given, made = directory / "emulated", directory / "calls", directory / "results"
    if not program.exists():
        source = Path(__file__).with_name("emulated.c")
        subprocess.run([COMPILER, "-O1", "-Wall", "-Werror", str(source), "-ldl", "-o", str(program)], check=True)
    given.write_bytes(struct.pack("<q", len(calls)) + b"".join(call.written() for call in calls))
    products = [f"{build.PRODUCTS.index(name)}={path}" for name, path in libraries.items() if name in build.PRODUCTS]
    command = [QEMU, "-L", ROOT, "-cpu", cpu, str(program), str(given), str(made), str(libraries["native"]), *products]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert ended.returncode == 0, f"{cpu}: {ended.returncode} {ended.stderr[-300:]}"
    content, results, at = made.read_bytes(), [], 0
    for call in calls:
        (back,) = struct.unpack_from("<q", content, at)
        at += 8 + len(call.buffers[0])
        results.append((back, content[at - len(call.buffers[0]) : at]))
    return results
