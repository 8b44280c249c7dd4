"""Load the optional C kernels: built with the package, else compiled once where a C compiler is found. A failure is
never fatal.

Plain C through ctypes: no headers but the C library's, a few seconds of compilation, no interpreter to match. One source
has several variants, for instruction sets that are named to the compiler; which one is loaded is decided at run time by
the CPU. A wheel may bring all of them (``prebuild``). What is compiled lies in the user's cache directory, or where that
cannot hold it in another one (``core.cachedir``), under a name that hashes source, flags and compiler, and is put there by
one rename, so that processes may build it at the same time.

``FORETELL_ISA`` names the best variant that may be chosen (``avx2`` on a CPU that has more), ``FORETELL_AMX=0`` leaves out
that with AMX, and ``FORETELL_NATIVE=0`` turns all kernels off.
"""

import contextlib
import ctypes
import errno
import hashlib
import logging
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

from foretell.core.cachedir import cache_directory, kept_directories, other_directory
from foretell.core.errors import ConfigError
from foretell.core.platform import end_group, num_cores
from foretell.kernels.cpu import amx_permitted, cpu_flags, known_machine, machine, vendor
from foretell.kernels.variants import KERNELS, PRODUCTS, QUICK, VARIANTS

_FLAGS = ("-O3", "-pipe", "-fPIC", "-std=gnu11")
_TIMEOUT_S = 240
_PREBUILT = Path(__file__).with_name("prebuilt")
logger = logging.getLogger(__name__)
_One = TypeVar("_One")
_Made = TypeVar("_Made")


class BuildError(Exception):
    """Why a kernel is not available. Callers fall back to torch and keep the reason for reports."""


SETTLED = ("disabled by ", "it has no variant ", "the CPU")
"""How reasons begin that are the user's own choice or the machine's nature: nobody is warned of them."""
_PLACE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)  # another directory may do
LETTERS: dict[str, Any] = {"n": ctypes.c_int64, "p": ctypes.c_void_p, "i": ctypes.c_int, "d": ctypes.c_double}
"""Types of C, as the tables of functions name them."""
_warned: list[str] = []
_files: dict[str, str] = {}  # of the libraries that were loaded, by kernel


def load_library(name: str, variant: str | None = None) -> ctypes.CDLL:
    """The library of a kernel, in the best variant for this CPU or the one that is given.

    Raises BuildError with the reason where it is not available, ConfigError for an unknown ``FORETELL_ISA``.
    """
    return load_libraries([name], variant or variant_of(name))[0]


def load_libraries(names: Sequence[str], variant: str) -> list[ctypes.CDLL]:
    """The libraries of several kernels; those that must be compiled are compiled side by side. Raises BuildError."""
    missing = [name for name in names if _is_missing(name, variant)]
    start = perf_counter()
    if missing:
        _say(f"compiling {_shown(missing)} for {variant}, once ...")
    try:
        libraries = _side_by_side(lambda name: _load(name, variant), names)
    except BuildError as error:
        if not any(name in ("native", "pool", *PRODUCTS) for name in names):  # of those the model's loading speaks
            cause = str(error).partition(": ")[2]
            warn_once(f"{_shown(names)} runs by torch, which is slower: {error}", cause)
        raise
    if missing:
        _say(f"compiled {_shown(missing)} in {perf_counter() - start:.1f} s")
    return libraries


def typed(library: ctypes.CDLL, functions: Mapping[str, str]) -> ctypes.CDLL:
    """The library with the types of its functions, by name without ``foretell_``: a letter of ``LETTERS`` for each
    argument, and behind a colon one of what is returned, if anything."""
    for name, types in functions.items():
        arguments, _, answer = types.partition(":")
        function = getattr(library, f"foretell_{name}")
        function.argtypes = [LETTERS[letter] for letter in arguments]
        function.restype = LETTERS[answer] if answer else None
    return library


class Functions:
    """Functions of a library, typed (``typed``): each is an attribute, by its name without ``foretell_``."""

    def __init__(self, library: ctypes.CDLL, functions: Mapping[str, str]) -> None:
        typed(library, functions)
        for name in functions:
            setattr(self, name, getattr(library, f"foretell_{name}"))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., int]: ...


def optional(name: str, functions: Mapping[str, str]) -> ctypes.CDLL | None:
    """A kernel's library with the types of its functions (``typed``); None where it cannot be built."""
    try:
        return typed(load_library(name), functions)
    except BuildError:
        return None


def loaded_files() -> list[str]:
    """The names of the libraries that passes run so far: they change with all that these are built from."""
    return sorted(file for name, file in _files.items() if name in ("native", *PRODUCTS))


def warn_once(line: str, cause: str) -> None:
    """A warning of this package's log: that something is slower than it could be. Only the first of each cause is said."""
    if not any(cause in said for said in _warned):
        _warned.append(line)
        logger.warning("%s", line)


def _say(line: str) -> None:
    """Where logs are read, to them; else to a terminal."""
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s", line)
    elif sys.stderr is not None and sys.stderr.isatty():
        print(f"foretell: {line}", file=sys.stderr, flush=True)


def _shown(names: Iterable[str]) -> str:
    return "C kernels " + ", ".join(name.replace("_", " ") for name in names)


def variant_of(name: str) -> str:
    """The variant of a kernel that this CPU runs. Raises BuildError where there is none, or kernels are turned off."""
    return variants_of(name)[0]


def variants_of(name: str) -> list[str]:
    """All variants of a kernel that this CPU runs and the user allows, best first, and at least one.

    Raises BuildError where there is none, or kernels are turned off.
    """
    if os.environ.get("FORETELL_NATIVE", "1") == "0":
        raise BuildError("disabled by FORETELL_NATIVE=0")
    allowed = variants_for(machine())
    best = os.environ.get("FORETELL_ISA") or allowed[0]
    if best not in allowed:
        raise ConfigError(f"FORETELL_ISA is {best!r}; it must be one of {', '.join(allowed)}, or not be set")
    allowed = allowed[allowed.index(best) :]
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


def variants_for(machine: str) -> list[str]:
    """The variants that machines of this kind can have, best first."""
    return [name for name, variant in VARIANTS.items() if variant.machine in (machine, "")]


@cache
def _load(name: str, variant: str) -> ctypes.CDLL:
    try:
        for library in _libraries(name, variant):
            with contextlib.suppress(OSError):  # of a file system from which no code may be run, or for another system
                loaded = ctypes.CDLL(str(library))
                _files[name] = library.name
                return loaded
        raise OSError("what was compiled cannot be loaded; set FORETELL_CACHE to a directory that may hold programs")
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{KERNELS[name].source} could not be built: {_last_line(error)}{_way_out(error)}") from error


def prebuild(directory: Path) -> list[Path]:
    """Compile all variants of all kernels into a directory, for a wheel: those of the machine that the compiler (CC)
    compiles for. Raises OSError or CalledProcessError."""
    directory.mkdir(parents=True, exist_ok=True)
    compiler = _compiler()
    known = variants_for(known_machine(_target(compiler).partition("-")[0]))
    wanted = [(name, variant) for name, kernel in KERNELS.items() for variant in known if variant in kernel.variants]
    built = [directory / _file_name(*one) for one in wanted]
    _side_by_side(lambda one: _compile(compiler, *one[0], one[1]), list(zip(wanted, built, strict=True)))
    return built


def _side_by_side(made: Callable[[_One], _Made], of: Sequence[_One]) -> list[_Made]:
    """``made`` of each, as many at once as this process has cores. Raises the first error, in their order, and then leaves
    out what is not begun."""
    with ThreadPoolExecutor(max(1, min(len(of), num_cores()))) as pool:
        return list(pool.map(made, of))


def _libraries(name: str, variant: str) -> Iterator[Path]:
    """Where the library lies compiled: of the wheel, in the cache directory, in the one besides; then those two again,
    where it is compiled as it is asked for. Raises OSError or SubprocessError."""
    prebuilt = _PREBUILT / _file_name(name, variant)
    if is_whole(prebuilt):
        yield prebuilt
    compiler, file = _compiled_name(name, variant)
    found = [root / file for root in kept_directories() if is_whole(root / file)]
    yield from found
    for root in (cache_directory, other_directory):
        try:
            made = root() / file
            if made in found:  # it could not be loaded
                continue
            _compile_into(made, compiler, name, variant)
            _tell_place(made.parent)
            yield made
        except (OSError, subprocess.CalledProcessError) as error:
            if root == other_directory or not (isinstance(error, OSError) or _lacks_place(error)):
                raise


def _compiled_name(name: str, variant: str) -> tuple[str, str]:
    """The compiler, and the name of what it makes of a kernel. Raises OSError where there is none."""
    compiler = _compiler()
    version = _version(compiler, os.stat(compiler).st_mtime_ns)
    return compiler, _file_name(name, variant, compiler, version, machine())


def _is_missing(name: str, variant: str) -> bool:
    """Whether a kernel would be compiled now."""
    if is_whole(_PREBUILT / _file_name(name, variant)):
        return False
    try:
        _, file = _compiled_name(name, variant)
        return not any(is_whole(root / file) for root in kept_directories())
    except (OSError, subprocess.SubprocessError):
        return False


def _compile_into(library: Path, compiler: str, name: str, variant: str) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        built = Path(scratch, "code.so")
        _compile(compiler, name, variant, built)
        with built.open("rb") as stream:
            os.fsync(stream.fileno())  # else a power cut may leave the name and not the content
        built.replace(library)


def _tell_place(root: Path) -> None:
    """Say where compiled code lies, if it is not the place that is documented."""
    if root == cache_directory():
        return
    wanted = f"{cache_directory()} cannot hold compiled kernels"
    if root in kept_directories():
        if wanted not in _warned:
            _warned.append(wanted)
            _say(f"{wanted}; they are kept in {root}")
    else:
        warn_once(
            f"{wanted}: they are compiled again at every start; set FORETELL_CACHE to a directory that can be written to",
            wanted,
        )


def _lacks_place(error: subprocess.CalledProcessError) -> bool:
    return any(os.strerror(number) in (error.stderr or "") for number in _PLACE)


def _way_out(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError) and not _lacks_place(error):
        return "; name another compiler by CC, or install a wheel that brings the kernels"
    if isinstance(error, subprocess.CalledProcessError) or getattr(error, "errno", None) is not None:
        return f"; make room in {cache_directory()}, or set FORETELL_CACHE to a directory that can be written to"
    return ""


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
    code, darwin, windows = target.with_suffix(".o"), "darwin" in _target(compiler), "mingw" in _target(compiler)
    if "clang" in _version(compiler, os.stat(compiler).st_mtime_ns):
        flags = tuple(flag for flag in flags if flag not in QUICK)
    link: tuple[str, ...] = ()
    if darwin:  # Apple's clang refuses -fopenmp, and the compiler that it calls does not; the runtime is there later
        link = ("-undefined", "dynamic_lookup")
        flags = tuple(part for flag in flags for part in (("-Xclang", flag) if flag == "-fopenmp" else (flag,)))
    if windows:  # whose stack GCC cannot align as its own moves of AVX need it; and programs there have no pthreads
        flags, link = (*flags, "-Wa,-muse-unaligned-vector-move"), ("-static",)
    # Compiled and linked apart: flags such as -fopenmp must not choose a runtime for the linker.
    _run([compiler, *flags, "-c", str(_source(name)), "-o", str(code)])
    _run([compiler, "-shared", *link, str(code), "-lm", "-o", str(target)])
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
    raise OSError("no C compiler (cc, gcc or clang) on the PATH; install one, or a wheel that brings the kernels")


@cache
def _target(compiler: str) -> str:
    """The machine and system that a compiler compiles for: "aarch64-linux-gnu", "arm64-apple-darwin24.0.0"."""
    return _run([compiler, "-dumpmachine"]).strip()


@cache
def _version(compiler: str, _changed: int) -> str:
    return next(iter(_run([compiler, "--version"]).splitlines()), "")


def _run(command: list[str]) -> str:
    """What a program prints. One that takes too long is ended together with those that it has called: a compiler's driver
    alone would leave the compiler at work."""
    environment = {**os.environ, "LC_ALL": "C"}  # its messages are read
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment
    )
    try:
        out, errors = process.communicate(timeout=_TIMEOUT_S)
    except BaseException:
        end_group(process)
        process.communicate()
        raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, out, errors)
    return out


def _last_line(error: Exception) -> str:
    text = (getattr(error, "stderr", None) or getattr(error, "strerror", None) or str(error)).strip()
    if isinstance(error, subprocess.CalledProcessError):  # a compiler says many words of a full disk
        text = next((os.strerror(number) for number in _PLACE if os.strerror(number) in text), text)
    return str(text.splitlines()[-1]) if text else type(error).__name__
