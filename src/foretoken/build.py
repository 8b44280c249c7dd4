"""Compiling the optional C kernels, once, where a C compiler is found: never required, never fatal.

Plain C through ctypes: no headers but the C library's, about two seconds of compilation, no interpreter to match. The
library lies in the user's cache directory under a name that hashes source, flags, compiler and processor; it is written
beside and renamed, so that processes starting together never load half a file. ``FORETOKEN_NATIVE=0`` turns it all off.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-shared", "-fPIC")
_TIMEOUT_S = 120


class BuildError(Exception):
    """Why a kernel is not there. Callers fall back to torch and keep the reason for those who ask."""


def cache_directory() -> Path:
    """Where built libraries lie: under XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foretoken"


@lru_cache(maxsize=16)
def load_library(source: Path, flags: tuple[str, ...] = FLAGS, links: tuple[str, ...] = ("-lm",)) -> ctypes.CDLL:
    """The library built from one C file. Raises BuildError with the reason where that cannot be."""
    if os.environ.get("FORETOKEN_NATIVE", "1") == "0":
        raise BuildError("turned off by FORETOKEN_NATIVE=0")
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise BuildError("no C compiler found (cc, gcc or clang)")
    command = [compiler, *flags, str(source), *links]
    path = cache_directory() / f"{source.stem}-{_fingerprint(source, command)}.so"
    try:
        if not path.exists():
            _compile(command, path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{source.name} could not be built or loaded: {error}") from error


def _fingerprint(source: Path, command: list[str]) -> str:
    """-march=native makes the processor part of what was built."""
    digest = hashlib.sha256(source.read_bytes())
    digest.update("\0".join([*command[:1], *command[1:]]).replace(str(source), source.name).encode())
    digest.update(f"{platform.machine()} {_processor()}".encode())
    return digest.hexdigest()[:16]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return "".join(line for line in lines if line.startswith(("model name", "flags")))[:8192]


def _compile(command: list[str], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    try:
        done = subprocess.run([*command, "-o", name], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if done.returncode:
            raise BuildError(f"{command[0]} failed on {path.stem}: {done.stderr.strip()[-400:]}")
        os.chmod(name, 0o755)
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
