"""A system for ARM below one folder, run by an emulator: Debian's Python, torch's wheel and what this package requires.

It is made once, in the folder for temporary files: 1.1 GB, of which 0.25 are fetched.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from filelock import FileLock
from packaging.requirements import Requirement

from tests.kernels.emulator import QEMU

HOME = Path(tempfile.gettempdir()) / "foretell-arm64"
TORCH = "2.10.0"  # later ones on the package index are built for CUDA, which they do not start without
MACHINE = ("--platform", "manylinux_2_28_aarch64", "--platform", "manylinux2014_aarch64", "--platform", "linux_aarch64")
APT = """
APT::Architecture "arm64";
APT::Architectures { "arm64"; };
APT::Install-Recommends "false";
Acquire::Retries "0";
Acquire::http::Timeout "20";
Dir::State "HOME/apt";
Dir::State::status "HOME/apt/status";
Dir::Cache "HOME/apt/cache";
"""


class Unavailable(Exception):
    """Why there is no such system here, in one line."""


@cache
def system() -> Path:
    """The folder with ``root`` (Debian's files) and ``site`` (packages). Raises Unavailable."""
    for program in (QEMU, "apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            raise Unavailable(f"no {program} here")
    with FileLock(f"{HOME}.lock"):
        if not (HOME / "whole").exists():
            shutil.rmtree(HOME, ignore_errors=True)
            _fetch_python()
            install([f"torch=={TORCH}", *(f"{name}=={version(name)}" for name in sorted(required()))], HOME / "site")
            (HOME / "whole").touch()
    return HOME


def _fetch_python() -> None:
    for folder in ("apt/lists/partial", "apt/cache/archives/partial", "root"):
        (HOME / folder).mkdir(parents=True)
    (HOME / "apt" / "status").touch()
    settings = HOME / "apt" / "apt.conf"
    settings.write_text(APT.replace("HOME", str(HOME)))
    environment = {**os.environ, "APT_CONFIG": str(settings), "LC_ALL": "C"}
    _run(["apt-get", "-q", "update", "--error-on=any"], environment)
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    _run(["apt-get", "-qy", "install", "--download-only", python, "libgomp1", "libstdc++6"], environment)
    for package in sorted((HOME / "apt" / "cache" / "archives").glob("*.deb")):
        _run(["dpkg-deb", "-x", str(package), str(HOME / "root")])


def install(names: Sequence[str], site: Path, extra: Sequence[str] = ()) -> None:
    """Packages for ARM, without what they require. pip refuses a wheel whose tag is of another machine. Raises
    Unavailable."""
    pip = [
        sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--timeout", "20", "--retries", "0",
    ]  # fmt: skip
    _run([*pip, "--only-binary", ":all:", *MACHINE, *extra, "--target", str(site), *names])


def required() -> set[str]:
    """What the package needs besides torch, by the packages that are installed here, with what those need."""
    found: set[str] = set()
    left = [*map(Requirement, requires("foretell") or ())]
    while left:
        wanted = left.pop()
        if wanted.name in found or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        try:
            left += map(Requirement, requires(wanted.name) or ())
        except PackageNotFoundError:
            raise Unavailable(f"{wanted.name} is not installed here, so its version is not known") from None
        found.add(wanted.name)
    return found - {"torch", "setuptools"}


def command(cpu: str, site: Path) -> list[str]:
    """Python there, on a CPU that the emulator knows; packages of ``site`` come first. Raises Unavailable."""
    root = system() / "root"
    libraries = f"{root}/usr/lib/aarch64-linux-gnu:{root}/lib/aarch64-linux-gnu"
    settings = (f"LD_LIBRARY_PATH={libraries}", f"PYTHONPATH={site}:{HOME / 'site'}", "PYTHONDONTWRITEBYTECODE=1")
    (python,) = (root / "usr" / "bin").glob("python3.[0-9]*[0-9]")
    return [QEMU, "-L", str(root), "-cpu", cpu, *(part for one in settings for part in ("-E", one)), str(python)]


def _run(parts: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    ended = subprocess.run(parts, env=environment, capture_output=True, text=True, timeout=500, check=False)
    if ended.returncode:
        lines = [line for line in (ended.stderr or ended.stdout).splitlines() if line.strip()]
        raise Unavailable(f"{Path(parts[0]).name}: {(lines or ['it failed'])[0][:200]}")
