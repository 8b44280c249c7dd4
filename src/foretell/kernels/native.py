"""``native/native.c`` as a library, where the CPU has the instructions and torch's OpenMP runtime can be shared."""

import ctypes
import re
from functools import cache
from pathlib import Path

from foretell.kernels.build import BuildError, load_library, variants_of


def library() -> tuple[ctypes.CDLL | None, str | None]:
    """The library, or None and the reason why there is none. It may be compiled at the first call (some seconds)."""
    return _best()[:2]


def variant() -> str | None:
    """The instructions that the library was compiled for, a name of ``build.VARIANTS``; None where there is none."""
    return _best()[2]


def _best() -> tuple[ctypes.CDLL | None, str | None, str | None]:
    """The first variant that can be loaded: an old compiler knows AVX2 and no AMX."""
    try:
        names = variants_of("native")
    except BuildError as error:
        return None, str(error), None
    reasons = []
    for name in names:
        lib, reason = _library(name)
        if lib is not None:
            return lib, None, name
        reasons.append(reason)
    return None, reasons[0], None


@cache
def _library(variant: str) -> tuple[ctypes.CDLL | None, str | None]:
    openmp = openmp_runtime()
    if openmp is None:
        return None, "torch's OpenMP runtime was not found among the loaded libraries"
    try:
        # Built without naming a runtime: this must be the one torch has loaded, by whatever name it was packed.
        ctypes.CDLL(str(openmp), mode=ctypes.RTLD_GLOBAL)
        return load_library("native", variant), None
    except (BuildError, OSError) as error:
        return None, str(error)


def openmp_runtime() -> Path | None:
    """The OpenMP library that torch has loaded. With two of them in one process, their threads compete."""
    import torch

    name = r"lib(?:gomp|iomp5|omp)\b[^/\s]*"
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:  # not Linux: the library that torch was packed with
        lib = Path(torch.__file__).parent / "lib"
        found = sorted(str(path) for path in lib.glob("*omp*") if re.fullmatch(name, path.name))
    else:
        found = re.findall(rf"\S+/{name}\.so\S*", maps)
    return Path(found[0]) if found else None
