"""``native/native.c`` and what belongs to it as libraries, where the CPU has the instructions. They share torch's OpenMP
runtime; where torch has none, threads are those of ``native/pool.c``. Products (``native/product.c``) and heads
(``native/heads.c``) are loaded when something needs them."""

import contextlib
import ctypes
import os
import re
import threading
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from foretell.core.errors import ModelError
from foretell.kernels.build import BuildError, load_libraries, load_library, variants_of, warn_once
from foretell.kernels.variants import PRODUCTS

_OPENMP = r"lib(?:gomp|iomp5|omp)\b[^/]*\.(?:so|dylib|dll)\S*"
_lock = threading.Lock()
_loaded: dict[str, set[int]] = {}  # formats of products, by variant


def library() -> tuple[ctypes.CDLL | None, str | None]:
    """The library, or None and the reason why there is none. It may be compiled at the first call (some seconds)."""
    return _best()[:2]


def variant() -> str | None:
    """The instructions that the library was compiled for, a name of ``variants.VARIANTS``; None where there is none."""
    return _best()[2]


def _best() -> tuple[ctypes.CDLL | None, str | None, str | None]:
    """The first variant that can be loaded: an old compiler knows AVX2 and no AMX."""
    try:
        names = variants_of("native")
    except BuildError as error:
        return None, str(error), None
    reasons: list[str] = []
    for name in names:
        lib, reason = _library(name)
        if lib is not None:
            if reasons:
                warn_once(f"C kernels run as {name}, which is slower than {names[0]}: {reasons[0]}", reasons[0])
            return lib, None, name
        reasons.append(reason or "")
    return None, reasons[0], None


def need(formats: Iterable[int]) -> None:
    """Load products with matrices of these formats, the numbers of ``native/common.h``, before one is multiplied. They may
    be compiled now (a second each). Raises ModelError with the reason where they are not available here."""
    lib, reason, name = _best()
    if lib is None or name is None:
        raise ModelError(f"the native decoder is not available: {reason}")
    with _lock:
        loaded = _loaded.setdefault(name, set())
        missing = sorted({*formats} - loaded)
        try:
            libraries = load_libraries([PRODUCTS[number] for number in missing], name) if missing else []
        except BuildError as error:
            raise ModelError(f"the native decoder is not available: {error}") from error
        for number, made in zip(missing, libraries, strict=True):
            lib.foretell_use(ctypes.c_int64(number), address_in(made, "foretell_products"))
            loaded.add(number)


def address_in(lib: ctypes.CDLL, name: str) -> ctypes.c_void_p:
    """Where a structure lies that a library exports."""
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(lib, name)))


@cache
def _library(variant: str) -> tuple[ctypes.CDLL | None, str | None]:
    try:
        # Built without naming a runtime: this must be the one torch has loaded, by whatever name it was packed.
        openmp = openmp_runtime() or load_library("pool")._name
        ctypes.CDLL(str(openmp), mode=ctypes.RTLD_GLOBAL)
        return load_libraries(["native"], variant)[0], None
    except (BuildError, OSError) as error:
        return None, str(error)


def openmp_runtime() -> Path | None:
    """The OpenMP library that torch has loaded. With two of them in one process, their threads compete: of several that
    other packages have brought it is the one in which torch's own code finds its functions."""
    import torch

    lib = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        with contextlib.suppress(OSError, AttributeError):  # no such file, or no such function
            found = home_of(ctypes.CDLL(str(lib / name)).omp_get_max_threads)
            if found is not None and re.fullmatch(_OPENMP, found.name) and found.exists():
                return found
    return loaded_openmp() or next(
        (path for path in sorted(lib.glob("*omp*")) if re.fullmatch(_OPENMP, path.name)), None
    )


def loaded_openmp(maps: Path = Path("/proc/self/maps")) -> Path | None:
    """The first OpenMP library among the files of a process's memory; None where there is none, or the system has no such
    list."""
    try:
        lines = os.fsdecode(maps.read_bytes()).splitlines()
    except OSError:
        return None
    paths = [Path(line.split(maxsplit=5)[5]) for line in lines if line.count("/")]  # a path may have blanks
    return next((path for path in paths if re.fullmatch(_OPENMP, path.name)), None)


class _Symbol(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("at", ctypes.c_void_p),
    )


def home_of(function: Any) -> Path | None:
    """The library in which a C function lies, by dladdr(3); None where that is not known. Raises AttributeError where the
    system has no such call."""
    found = _Symbol()
    if not ctypes.CDLL(None).dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(found)) or not found.file:
        return None
    return Path(os.fsdecode(found.file))
