"""What this CPU is, and which instructions it has."""

import ctypes
import platform
import re
import sys
from functools import cache
from pathlib import Path

_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA = 158, 0x1023, 18  # Linux, x86-64: arch/x86/include/uapi/asm/prctl.h


@cache
def _cpuinfo() -> str | None:
    """What Linux says of this CPU; None elsewhere."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def known_machine(name: str) -> str:
    """A machine's name as variants have it, "x86_64" or "aarch64", of any of the names that systems give it."""
    lower = name.lower()
    return {"amd64": "x86_64", "x64": "x86_64", "arm64": "aarch64"}.get(lower, lower)


def machine() -> str:
    """What this process runs on, as variants name it."""
    return known_machine(platform.machine())


def vendor() -> str:
    """The maker of this CPU, as it names itself ("GenuineIntel", "AuthenticAMD"); empty where that is not known."""
    said = _cpuinfo() or platform.processor()  # on Windows that is its last word
    found = re.search(r"\b(GenuineIntel|AuthenticAMD)\b", said)
    return found.group(1) if found else ""


@cache
def cpu_flags() -> frozenset[str]:
    """Instruction sets of this CPU that variants need, as Linux names them; empty where that is not known."""
    if sys.platform == "linux" and machine() == "aarch64":
        return frozenset(flag for flag, (word, bit) in _HARDWARE.items() if _auxiliary(word) >> bit & 1)
    text = _cpuinfo()
    if text is None:
        if sys.platform != "darwin":
            return _cpu_flags_of_torch()
        # Those up to AVX2: later ones are on few Intel Macs.
        return frozenset(flag for flag, name in _DARWIN.items() if _sysctl(name))
    found = re.search(r"^flags\s*:\s*(.*)$", text, re.MULTILINE)
    return frozenset(found.group(1).split()) if found else frozenset()


@cache
def amx_permitted() -> bool:
    """Whether the system lets this process use AMX: it is asked here, once, for all its threads and forks."""
    if sys.platform != "linux" or machine() != "x86_64":
        return False
    try:
        return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA) == 0)
    except (OSError, AttributeError):  # no such function
        return False


_HARDWARE = {  # what Linux calls a feature of ARM: AT_HWCAP or AT_HWCAP2, and its bit (arch/arm64/include/uapi/asm/hwcap.h)
    "asimd": (16, 1),
    "atomics": (16, 8),
    "asimddp": (16, 20),
    "i8mm": (26, 13),
}


def _auxiliary(word: int) -> int:
    """What the kernel told this process of its CPU: by an emulator of another machine's programs /proc/cpuinfo is that of
    the machine beneath."""
    ask = ctypes.CDLL(None).getauxval
    ask.argtypes, ask.restype = [ctypes.c_ulong], ctypes.c_ulong
    return int(ask(word))


_DARWIN = {  # what Linux calls a feature: what sysctl(3) calls it
    "asimd": "hw.optional.AdvSIMD",
    "atomics": "hw.optional.arm.FEAT_LSE",
    "asimddp": "hw.optional.arm.FEAT_DotProd",
    "i8mm": "hw.optional.arm.FEAT_I8MM",
    "avx2": "hw.optional.avx2_0",
    "fma": "hw.optional.fma",
    "f16c": "hw.optional.f16c",
    "bmi2": "hw.optional.bmi2",
}


def _sysctl(name: str) -> int:
    """A number of the system; 0 where it has none of that name."""
    value, size = ctypes.c_int64(0), ctypes.c_size_t(8)
    found = ctypes.CDLL(None).sysctlbyname(
        name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0)
    )
    return value.value if found == 0 else 0


def _cpu_flags_of_torch() -> frozenset[str]:
    import torch

    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    names = {"fma3": "fma", **{f"avx512_{part}": f"avx512{part}" for part in ("f", "bw", "dq", "vl")}}
    return frozenset(names.get(name, name) for name, has in capabilities.items() if has is True)
