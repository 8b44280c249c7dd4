"""``native/native.c`` as a library, where the CPU has the instructions and torch's OpenMP runtime can be shared."""

import ctypes
import re
from functools import cache
from pathlib import Path

from foretoken.kernels.build import BuildError, cpu_flags, load_library

SOURCE = Path(__file__).with_name("native") / "native.c"
REQUIRED_CPU_FLAGS = ("avx512f", "avx512bw", "avx512dq", "avx512vl")


@cache
def library() -> tuple[ctypes.CDLL | None, str | None]:
    """The compiled library, or None and the reason why there is none. Builds it at the first call (some seconds)."""
    if not cpu_flags():
        return None, "no /proc/cpuinfo to read the CPU's instructions from"
    missing = [flag for flag in REQUIRED_CPU_FLAGS if flag not in cpu_flags()]
    if missing:
        return None, f"the CPU lacks {missing[0]}"
    openmp = openmp_runtime()
    if openmp is None:
        return None, "torch's OpenMP runtime was not found among the loaded libraries"
    try:
        # Linked without -fopenmp: that would name the system's libgomp, and this must be the one torch has loaded.
        return load_library(SOURCE, ("-fopenmp",), (str(openmp), "-lm")), None
    except BuildError as error:
        return None, str(error)


def openmp_runtime() -> Path | None:
    """The OpenMP library that torch has loaded. With two of them in one process, their threads compete."""
    import torch  # noqa: F401  (loads it)

    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    found = re.findall(r"\S+/lib(?:gomp|iomp5|omp)[^/\s]*\.so\S*", maps)
    return Path(found[0]) if found else None
