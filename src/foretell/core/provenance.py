"""The provenance of a figure: command, versions, machine, revision, time."""

import hashlib
import importlib.metadata
import platform
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from foretell.core.platform import load_average, memory_bytes, num_cores, processor

PACKAGES = ("foretell", "torch", "transformers", "tokenizers", "safetensors", "accelerate", "numpy")


def provenance() -> dict[str, Any]:
    """What is needed to repeat a run, as far as this process knows it."""
    import torch

    return {
        "argv": sys.argv,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **{name: package_version(name) for name in PACKAGES}},
        "machine": {
            "system": f"{platform.system()} {platform.release()}",
            "processor": processor(),
            "cores": num_cores(),
            "memory_bytes": memory_bytes(),
            "load_average": load_average(),
            "accelerator": accelerator(),
            "torch_threads": torch.get_num_threads(),
        },
        "git_revision": git_revision(Path(__file__)),
    }


@cache
def source_digest() -> str:
    """Of this package's code, Python and C: what was timed with other code may no longer hold. 16 hexadecimal digits."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(path for kind in ("*.py", "*.c", "*.h") for path in package.rglob(kind)):
        digest.update(f"{path.relative_to(package).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def git_revision(file: Path) -> str | None:
    """The commit that a source file is checked out from, "+changes" where anything differs from it; None outside of one."""
    try:
        run = ["git", "-C", str(file.parent)]
        # A virtual environment may lie inside another repository, whose commit is unrelated to foretell.
        subprocess.run([*run, "ls-files", "--error-unmatch", file.name], capture_output=True, check=True, timeout=10)
        head = subprocess.run([*run, "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10)
        status = subprocess.run([*run, "status", "--porcelain"], capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return head.stdout.strip() + ("+changes" if status.stdout.strip() else "")


def package_version(name: str) -> str | None:
    """Of an installed distribution; None where there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def accelerator() -> str | None:
    """The CUDA device's name, where there is one."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
