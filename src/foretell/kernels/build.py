"""Load the optional C kernels: built with the package, else compiled once where a C compiler is found. A failure is
never fatal.

Plain C through ctypes: no headers but the C library's, a few seconds of compilation, no interpreter to match. One source
has several variants, for instruction sets that are named to the compiler; which one is loaded is decided at run time by
the CPU. A wheel may bring all of them (``prebuild``). What is compiled lies in the user's cache directory under a name
that hashes source, flags and compiler, and is put there by one rename, so that processes may build it at the same time.

``FORETELL_ISA`` names the best variant that may be chosen (``avx2`` on a CPU that has more), ``FORETELL_AMX=0`` leaves out
that with AMX, and ``FORETELL_NATIVE=0`` turns all kernels off.
"""

import contextlib
import ctypes
import hashlib
import os
import platform
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from foretell.core.cachedir import cache_directory, usable_directory
from foretell.core.errors import ConfigError

_FLAGS = ("-O3", "-fPIC", "-std=gnu11")
_TIMEOUT_S = 240
_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA = 158, 0x1023, 18  # Linux, x86-64: arch/x86/include/uapi/asm/prctl.h
_PREBUILT = Path(__file__).with_name("prebuilt")


class Variant(NamedTuple):
    """One instruction set that kernels are compiled for."""

    needs: tuple[str, ...]  # of the CPU, as Linux names them
    flags: tuple[str, ...]  # for the compiler


_AVX2 = Variant(("avx2", "fma", "f16c", "bmi2"), ("-mavx2", "-mfma", "-mf16c", "-mbmi2"))
_AVX512 = Variant(
    (*_AVX2.needs, "avx512f", "avx512bw", "avx512dq", "avx512vl"),
    (*_AVX2.flags, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"),
)
_AVX512_VNNI = Variant((*_AVX512.needs, "avx512_vnni"), (*_AVX512.flags, "-mavx512vnni"))
_AVX512_BF16 = Variant((*_AVX512_VNNI.needs, "avx512_bf16"), (*_AVX512_VNNI.flags, "-mavx512bf16"))
_AMX = Variant(
    (*_AVX512_BF16.needs, "amx_tile", "amx_int8", "amx_bf16"),
    (*_AVX512_BF16.flags, "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
)

VARIANTS = {
    "amx": _AMX,
    "avx512_bf16": _AVX512_BF16,
    "avx512_vnni": _AVX512_VNNI,
    "avx512": _AVX512,
    "avx2": _AVX2,
    "baseline": Variant((), ()),
}
"""Best first. A CPU runs the first whose needs it meets, and of a kernel the first of those that the kernel has."""


class Kernel(NamedTuple):
    """A C file beside this one, and how it is built."""

    source: str
    flags: tuple[str, ...] = ()
    variants: tuple[str, ...] = ("avx512", "avx2", "baseline")


KERNELS = {
    "bounds": Kernel("bounds.c"),
    "cdf": Kernel("cdf.c", ("-ffp-contract=off",)),
    "dequantise": Kernel("dequantise.c", ("-ffp-contract=off",)),
    "race": Kernel("race.c", ("-ffp-contract=off", "-fopenmp-simd")),
    "residual": Kernel("residual.c", ("-fopenmp-simd",)),
    "suffix": Kernel("suffix.c", ("-ffp-contract=off",), ("baseline",)),
    "tree": Kernel("tree.c"),
    # Its OpenMP runtime is the one that torch has loaded: see native.py.
    "native": Kernel("native/native.c", ("-fopenmp",), ("amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2")),
}


class BuildError(Exception):
    """Why a kernel is not available. Callers fall back to torch and keep the reason for reports."""


def load_library(name: str, variant: str | None = None) -> ctypes.CDLL:
    """The library of a kernel, in the best variant for this CPU or the one that is given.

    Raises BuildError with the reason where it is not available, ConfigError for an unknown ``FORETELL_ISA``.
    """
    return _load(name, variant or variant_of(name))


def variant_of(name: str) -> str:
    """The variant of a kernel that this CPU runs. Raises BuildError where there is none, or kernels are turned off."""
    return variants_of(name)[0]


def variants_of(name: str) -> list[str]:
    """All variants of a kernel that this CPU runs and the user allows, best first, and at least one.

    Raises BuildError where there is none, or kernels are turned off.
    """
    if os.environ.get("FORETELL_NATIVE", "1") == "0":
        raise BuildError("disabled by FORETELL_NATIVE=0")
    best = os.environ.get("FORETELL_ISA") or next(iter(VARIANTS))
    if best not in VARIANTS:
        raise ConfigError(f"FORETELL_ISA is {best!r}; it must be one of {', '.join(VARIANTS)}, or not be set")
    allowed = list(VARIANTS)[list(VARIANTS).index(best) :]
    if os.environ.get("FORETELL_AMX", "1") == "0":
        allowed = [variant for variant in allowed if variant != "amx"]
    # By Intel's bf16 instructions without AMX products take twice as long as by those of floats: linear_wide.h.
    if best != "avx512_bf16" and vendor() == "GenuineIntel":
        allowed = [variant for variant in allowed if variant != "avx512_bf16"]
    missing, runs = "", []
    for variant in allowed:
        lacking = [flag for flag in VARIANTS[variant].needs if flag not in cpu_flags()]
        if variant in KERNELS[name].variants:
            missing = lacking[0] if lacking else missing
            if not lacking and (variant != "amx" or amx_permitted()):
                runs.append(variant)
    if runs:
        return runs
    if not missing:
        raise BuildError(f"it has no variant {best}")
    raise BuildError(f"the CPU lacks {missing}" if cpu_flags() else "the CPU's instructions are not known")


@cache
def _cpuinfo() -> str | None:
    """What Linux says of this CPU; None elsewhere."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def vendor() -> str:
    """Who made this CPU, as it says itself ("GenuineIntel", "AuthenticAMD"); empty where that is not known."""
    said = _cpuinfo() or platform.processor()  # on Windows that is its last word
    found = re.search(r"\b(GenuineIntel|AuthenticAMD)\b", said)
    return found.group(1) if found else ""


@cache
def cpu_flags() -> frozenset[str]:
    """Instruction sets of this CPU that variants need, as Linux names them; empty where that is not known."""
    text = _cpuinfo()
    if text is None:
        return _cpu_flags_of_torch()
    found = re.search(r"^flags\s*:\s*(.*)$", text, re.MULTILINE)
    return frozenset(found.group(1).split()) if found else frozenset()


@cache
def amx_permitted() -> bool:
    """Whether the system lets this process use AMX: it is asked here, once, for all its threads and forks."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    try:
        return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA) == 0)
    except (OSError, AttributeError):  # no such function
        return False


def _cpu_flags_of_torch() -> frozenset[str]:
    import torch

    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    names = {"fma3": "fma", **{f"avx512_{part}": f"avx512{part}" for part in ("f", "bw", "dq", "vl")}}
    return frozenset(names.get(name, name) for name, has in capabilities.items() if has is True)


@cache
def _load(name: str, variant: str) -> ctypes.CDLL:
    prebuilt = _PREBUILT / _file_name(name, variant)
    try:
        return ctypes.CDLL(str(prebuilt if is_whole(prebuilt) else _compile_once(name, variant)))
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{KERNELS[name].source} could not be built: {_last_line(error)}") from error


def prebuild(directory: Path) -> list[Path]:
    """Compile all variants of all kernels into a directory, for a wheel. Raises OSError or CalledProcessError."""
    directory.mkdir(parents=True, exist_ok=True)
    built = []
    for name, kernel in KERNELS.items():
        for variant in kernel.variants:
            built.append(directory / _file_name(name, variant))
            _compile(_compiler(), name, variant, built[-1])
    return built


def _compile_once(name: str, variant: str) -> Path:
    compiler = _compiler()
    version = next(iter(_run([compiler, "--version"]).splitlines()), "")
    root = cache_directory()
    target = root / _file_name(name, variant, compiler, version, platform.machine())
    if is_whole(target):
        return target
    root = usable_directory(root)
    target = root / target.name
    shown = KERNELS[name].source if sys.stderr is not None and sys.stderr.isatty() else None
    start = perf_counter()
    if shown:
        print(f"foretell: compiling {shown} for {variant}, once ... ", end="", file=sys.stderr, flush=True)
    try:
        with tempfile.TemporaryDirectory(dir=root) as scratch:
            built = Path(scratch, "code.so")
            _compile(compiler, name, variant, built)
            with built.open("rb") as stream:
                os.fsync(stream.fileno())  # else a power cut may leave the name and not the content
            built.replace(target)
    finally:
        if shown:
            print(f"{perf_counter() - start:.1f} s", file=sys.stderr)
    return target


def is_whole(library: Path) -> bool:
    """Whether a file is there and not cut short, which the loader of the system would not survive. An ELF file ends with
    its table of sections; of other kinds only an empty one is known."""
    try:
        with library.open("rb") as stream:
            head, size = stream.read(64), os.fstat(stream.fileno()).st_size
    except OSError:
        return False
    if head[:4] != b"\x7fELF":
        return sys.platform != "linux" and size > 0
    if head[4:6] != b"\x02\x01" or len(head) < 64:  # 64 bits, the lowest byte first: every machine that has kernels
        return len(head) == 64
    (table,) = struct.unpack_from("<Q", head, 0x28)
    width, count = struct.unpack_from("<HH", head, 0x3A)
    return bool(size >= table + width * count)


def _compile(compiler: str, name: str, variant: str, target: Path) -> None:
    flags = (*_FLAGS, *VARIANTS[variant].flags, *KERNELS[name].flags)
    code = target.with_suffix(".o")
    # Compiled and linked apart: flags such as -fopenmp must not choose a runtime for the linker.
    _run([compiler, *flags, "-c", str(_source(name)), "-o", str(code)])
    _run([compiler, "-shared", str(code), "-lm", "-o", str(target)])
    code.unlink()


def _source(name: str) -> Path:
    return Path(__file__).parent / KERNELS[name].source


def _file_name(name: str, variant: str, *more: str) -> str:
    """The name of a library, which changes with all that it is built from."""
    key = [*_texts(_source(name)), *_FLAGS, *VARIANTS[variant].flags, *KERNELS[name].flags, *more]
    return f"{name}-{variant}-{hashlib.sha256(chr(0).join(key).encode()).hexdigest()[:20]}.so"


def _texts(source: Path) -> list[str]:
    """The texts of a C file and of all that it includes by a relative path, once each, in the order of inclusion."""
    texts: dict[Path, str] = {}

    def visit(path: Path) -> None:
        if path in texts:
            return
        texts[path] = path.read_text(encoding="utf-8")
        for name in re.findall(r'^#\s*include "([^"]+)"', texts[path], re.MULTILINE):
            visit(path.parent / name)

    visit(source)
    return list(texts.values())


def _compiler() -> str:
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and (path := shutil.which(name)):
            return path
    raise OSError("no C compiler (cc, gcc or clang) on the PATH")


def _run(command: list[str]) -> str:
    """What a program prints. One that takes too long is ended together with those that it has called: a compiler's driver
    alone would leave the compiler at work."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, errors = process.communicate(timeout=_TIMEOUT_S)
    except BaseException:
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.communicate()
        raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, out, errors)
    return out


def _last_line(error: Exception) -> str:
    text = (getattr(error, "stderr", None) or str(error)).strip()
    return str(text.splitlines()[-1]) if text else type(error).__name__
