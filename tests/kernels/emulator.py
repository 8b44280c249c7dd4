"""Kernels for other machines: compiled by a cross compiler, run by qemu, and the same calls on this machine.

A call is written down as bytes (``emulated.c`` reads them), so that both sides are given the very same.
"""

import ctypes
import gc
import os
import shutil
import struct
import subprocess
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from foretell.kernels import build

COMPILER, QEMU, ROOT = "aarch64-linux-gnu-gcc", "qemu-aarch64-static", "/usr/aarch64-linux-gnu"
WINDOWS = "x86_64-w64-mingw32-gcc"
missing = [name for name in (COMPILER, QEMU) if shutil.which(name) is None]
needs_emulator = pytest.mark.skipif(bool(missing), reason=f"no {' and no '.join(missing)} here")


class At(NamedTuple):
    """An address in a buffer, as an argument."""

    buffer: int
    offset: int = 0


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
            given = (1, *argument) if isinstance(argument, At) else (0, argument, 0)
            parts.append(struct.pack("<3q", *given))
        return b"".join(parts)

    def run(self, library: ctypes.CDLL) -> tuple[int, bytes]:
        """What it returns on this machine, and buffer 0 behind it."""
        held, places = [], []
        for buffer in self.buffers:
            held.append(ctypes.create_string_buffer(len(buffer) + 64))
            places.append((ctypes.addressof(held[-1]) + 63) // 64 * 64)
            ctypes.memmove(places[-1], buffer, len(buffer))
        for holder, at, to, offset in self.pointers:
            ctypes.c_int64.from_address(places[holder] + at).value = places[to] + offset
        values = [places[value.buffer] + value.offset if isinstance(value, At) else value for value in self.arguments]
        function = library[self.function]  # an object of its own, without the types of others
        function.restype = ctypes.c_int64
        return function(*map(ctypes.c_int64, values)), ctypes.string_at(places[0], len(self.buffers[0]))


def recorded(function: str, arguments: Sequence[object], out: int) -> Call:
    """A call with addresses as it is about to be made: all memory of tensors and structures that it reaches. ``out`` is the
    address of what is compared."""
    memory = dict(_memory())
    starts = sorted(memory)
    found: list[int] = []  # where buffers begin, in the order in which they are found
    pointers: list[tuple[int, int, int, int]] = []

    def place(address: int) -> tuple[int, int] | None:
        at = bisect_right(starts, address) - 1
        if at < 0 or address >= starts[at] + memory[starts[at]][0]:
            return None
        if starts[at] not in found:
            found.append(starts[at])
        return found.index(starts[at]), address - starts[at]

    assert place(out) == (0, 0)
    given: list[int | At] = []
    for argument in arguments:
        value = argument if isinstance(argument, int) else ctypes.cast(argument, ctypes.c_void_p).value or 0  # type: ignore[arg-type]
        spot = place(value)
        given.append(value if spot is None else At(*spot))
    at = 0
    while at < len(found):
        size, is_structure = memory[found[at]]
        for offset in range(0, size - 7, 8) if is_structure else ():
            spot = place(ctypes.c_int64.from_address(found[at] + offset).value)
            pointers += [] if spot is None else [(at, offset, *spot)]
        at += 1
    return Call(function, [ctypes.string_at(start, memory[start][0]) for start in found], given, pointers)


def _memory() -> Iterable[tuple[int, tuple[int, bool]]]:
    """Where tensors and structures begin, their bytes, and whether they may hold addresses."""
    gc.unfreeze()  # what was made while tests were collected
    things = gc.get_objects()
    gc.freeze()
    for thing in things:
        if (
            type(thing) in (torch.Tensor, torch.nn.Parameter)
            and thing.device.type == "cpu"
            and thing.layout == torch.strided  # others, of tests that ran before, have no storage
        ):
            storage = thing.untyped_storage()
            yield storage.data_ptr(), (storage.nbytes(), False)
        elif issubclass(type(thing), ctypes.Structure | ctypes.Array) and thing._b_base_ is None:
            yield ctypes.addressof(thing), (ctypes.sizeof(thing), True)


def compiled(names: Iterable[str], variant: str) -> dict[str, Path]:
    """Kernels for ARM, by name; CC must name COMPILER."""
    return {name: next(build._libraries(name, variant)) for name in names}


def emulated(
    calls: Sequence[Call],
    libraries: Mapping[str, Path],
    cpu: str,
    directory: Path,
    threads: Path | None = None,
    compiler: str = COMPILER,
) -> list[tuple[int, bytes]]:
    """What the calls give on a CPU that qemu knows ("": on this one): what each returns, and buffer 0 behind it. threads:
    the library that runs their regions; None: GCC's. compiler: of the program that calls them."""
    program, given, made = directory / "emulated.exe", directory / "calls", directory / "results"
    if not program.exists():
        source = Path(__file__).with_name("emulated.c")
        more = [] if compiler == WINDOWS else ["-Wall", "-Werror", "-ldl"]
        subprocess.run([compiler, "-O1", str(source), *more, "-o", str(program)], check=True)
    given.write_bytes(struct.pack("<q", len(calls)) + b"".join(call.written() for call in calls))
    products = [f"{build.PRODUCTS.index(name)}={path}" for name, path in libraries.items() if name in build.PRODUCTS]
    (kernel,) = (str(path) for name, path in libraries.items() if name not in build.PRODUCTS)
    environment = {**os.environ, **({"THREADS": str(threads)} if threads else {})}
    by = [QEMU, "-L", ROOT, "-cpu", cpu] if cpu else []
    if compiler == WINDOWS:
        by = ["wine"]
        environment |= {"WINEPREFIX": str(directory / "wine"), "WINEDEBUG": "-all", "DISPLAY": ""}
    command = [*by, str(program), given.name, made.name, kernel, *products]
    ended = subprocess.run(
        command, env=environment, cwd=directory, capture_output=True, text=True, check=False, timeout=280
    )
    assert ended.returncode == 0, f"{cpu}: {ended.returncode} {ended.stderr[-300:]}"
    content, results, at = made.read_bytes(), [], 0
    for call in calls:
        (back,) = struct.unpack_from("<q", content, at)
        at += 8 + len(call.buffers[0])
        results.append((back, content[at - len(call.buffers[0]) : at]))
    return results
