"""Compile the optional C kernels once, where a C compiler is found. A failure is never fatal.

Plain C through ctypes: no headers but the C library's, a few seconds of compilation, no interpreter to match. A library
lies in the user's cache directory under a name that hashes source, flags, compiler and processor, and is put there by
one rename, so that processes may build it at the same time. ``FORETOKEN_NATIVE=0`` turns all kernels off.
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

from foretoken.core.cachedir import cache_directory, usable_directory

FLAGS = ("-O3", "-march=native", "-fPIC", "-std=gnu11")
_TIMEOUT_S = 120


class BuildError(Exception):
    """Why a kernel is not available. Callers fall back to torch and keep the reason for reports."""


@cache
def load_library(source: Path, flags: tuple[str, ...] = (), links: tuple[str, ...] = ("-lm",)) -> ctypes.CDLL:
    """The library built from one C file; flags are for the compiler, links for the linker.

    Raises BuildError with the reason where it is not available.
    """
    if os.environ.get("FORETOKEN_NATIVE", "1") == "0":
        raise BuildError("disabled by FORETOKEN_NATIVE=0")
    try:
        return ctypes.CDLL(str(_build(source, flags, links)))
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{source.name} could not be built: {_last_line(error)}") from error


@cache
def cpu_flags() -> frozenset[str]:
    """Instruction sets of this CPU as Linux names them; empty where that is not known."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    found = re.search(r"^flags\s*:\s*(.*)$", text, re.MULTILINE)
    return frozenset(found.group(1).split()) if found else frozenset()


def _build(source: Path, flags: tuple[str, ...], links: tuple[str, ...]) -> Path:
    names = (os.environ.get("CC"), "cc", "gcc", "clang")
    compiler = next((path for name in names if name and (path := shutil.which(name))), None)
    if compiler is None:
        raise OSError("no C compiler (cc, gcc or clang) on the PATH")
    version = _run([compiler, "--version"]).splitlines()[0]
    # -march=native makes the processor part of what is built.
    key = [source.read_text(encoding="utf-8"), *FLAGS, *flags, *links, compiler, version, platform.machine()]
    digest = hashlib.sha256("\n".join([*key, *sorted(cpu_flags())]).encode()).hexdigest()[:20]
    root = cache_directory()
    target = root / f"{source.stem}-{digest}.so"
    if target.exists():
        return target
    root = usable_directory(root)
    target = root / target.name
    with tempfile.TemporaryDirectory(dir=root) as scratch:
        code, built = Path(scratch, "code.o"), Path(scratch, "code.so")
        # Compiled and linked apart: flags such as -fopenmp must not choose a runtime for the linker.
        _run([compiler, *FLAGS, *flags, "-c", str(source), "-o", str(code)])
        _run([compiler, "-shared", str(code), *links, "-o", str(built)])
        built.rename(target)
    return target


def _run(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S).stdout


def _last_line(error: Exception) -> str:
    text = (getattr(error, "stderr", None) or str(error)).strip()
    return str(text.splitlines()[-1]) if text else type(error).__name__
