"""What a run was: arguments, versions, revision, data. Written beside the weights before the first step."""

import importlib.metadata
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("foretoken", "torch", "transformers", "tokenizers", "safetensors", "accelerate", "numpy")


def origin() -> dict[str, Any]:
    """Everything this process knows of itself that a second run would need."""
    return {
        "argv": sys.argv,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "git_revision": git_revision(Path(__file__)),
        "machine": {
            "system": f"{platform.system()} {platform.release()}",
            "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "torch_threads": torch.get_num_threads(),
        },
    }


def git_revision(file: Path) -> str | None:
    """The commit that a source file is checked out from, "+changes" where anything differs; None outside of one."""
    try:
        run = ["git", "-C", str(file.parent)]
        # A virtual environment may lie inside somebody else's repository, which says nothing about foretoken.
        subprocess.run([*run, "ls-files", "--error-unmatch", file.name], capture_output=True, check=True, timeout=10)
        head = subprocess.run([*run, "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10)
        status = subprocess.run([*run, "status", "--porcelain"], capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return head.stdout.strip() + ("+changes" if status.stdout.strip() else "")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
