"""Compiling ``native.c`` once per machine, with whatever C compiler there is; never required.

The library lies in the user's cache directory under a name that hashes source, flags, compiler, CPU and OpenMP runtime,
and is put there by one rename, so that processes may build it at the same time. ``FORETOKEN_NATIVE=0`` disables it.
"""

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("native.c")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-std=gnu11")
REQUIRED_CPU_FLAGS = ("avx512f", "avx512bw", "avx512dq", "avx512vl")


@cache
def library() -> tuple[ctypes.CDLL | None, str | None]:
    """The compiled library, or None and the reason why there is none. Builds it at the first call (some seconds)."""
    if os.environ.get("FORETOKEN_NATIVE", "1") == "0":
        return None, "disabled by FORETOKEN_NATIVE=0"
    missing = [flag for flag in REQUIRED_CPU_FLAGS if flag not in cpu_flags()]
    if missing:
        return None, f"the CPU lacks {missing[0]}" if cpu_flags() else "the CPU's instructions are unknown (no /proc/cpuinfo)"
    openmp = openmp_runtime()
    if openmp is None:
        return None, "torch's OpenMP runtime was not found among the loaded libraries"
    try:
        return ctypes.CDLL(str(_build(openmp))), None
    except (OSError, subprocess.SubprocessError) as error:
        return None, f"native.c could not be built: {_last_line(error)}"


@cache
def cpu_flags() -> frozenset[str]:
    """Instruction sets of this CPU as Linux names them; empty where that is not known."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    found = re.search(r"^flags\s*:\s*(.*)$", text, re.MULTILINE)
    return frozenset(found.group(1).split()) if found else frozenset()


def openmp_runtime() -> Path | None:
    """The OpenMP library that torch has loaded. Two of them in one process would spin against each other."""
    import torch  # noqa: F401  (loads it)

    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    found = re.findall(r"\S+/lib(?:gomp|iomp5|omp)[^/\s]*\.so\S*", maps)
    return Path(found[0]) if found else None


def _build(openmp: Path) -> Path:
    compiler = next((path for name in (os.environ.get("CC"), "cc", "gcc") if name and (path := shutil.which(name))), None)
    if compiler is None:
        raise OSError("no C compiler (cc or gcc) on the PATH")
    version = _run([compiler, "--version"]).splitlines()[0]
    key = [SOURCE.read_text(), *FLAGS, compiler, version, str(openmp), platform.machine(), *sorted(cpu_flags())]
    digest = hashlib.sha256("\n".join(key).encode()).hexdigest()[:20]
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foretoken"
    target = root / f"native-{digest}.so"
    if target.exists():
        return target
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as scratch:
        code, built = Path(scratch, "native.o"), Path(scratch, "native.so")
        _run([compiler, *FLAGS, "-c", str(SOURCE), "-o", str(code)])
        # Linked without -fopenmp: that would name the system's libgomp, and this must be the one torch has loaded.
        _run([compiler, "-shared", str(code), str(openmp), "-lm", "-o", str(built)])
        built.rename(target)
    return target


def _run(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def _last_line(error: Exception) -> str:
    text = (getattr(error, "stderr", None) or str(error)).strip()
    return str(text.splitlines()[-1]) if text else type(error).__name__
