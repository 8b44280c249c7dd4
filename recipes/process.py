"""Settings of a background process: memory allocator, few threads, low priority, pauses."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

# glibc gives large blocks back to the system at every free, and then pays a page fault for every 4 KiB of the next
# temporary. Keeping them made a training step a quarter faster (3,400 to 4,300 tokens/s on two Zen 4 cores).
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_TOP_PAD_": "268435456"}


def prepare(module: str, *, threads: int, niceness: int = 19) -> None:
    """Restart this command (`python -m module`) with memory settings needed at start; set priority and threads."""
    if any(os.environ.get(k) != v for k, v in KEEP_MEMORY.items()):
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], {**os.environ, **KEEP_MEMORY})
    os.nice(max(0, niceness - os.nice(0)))
    torch.set_num_threads(threads)


def wait_while_paused(run: Path) -> float:
    """Sleep while a file PAUSE lies in the run's folder or the one above; seconds slept."""
    start = time.monotonic()
    while (run / "PAUSE").exists() or (run.parent / "PAUSE").exists():
        time.sleep(1.0)
    return time.monotonic() - start


def budget_minutes(run: Path, minutes: float) -> float:
    """The budget of a run: the number in its file MINUTES, where there is one, else `minutes`."""
    override = run / "MINUTES"
    return float(override.read_text()) if override.exists() else minutes


class Stopwatch:
    """Training time: wall time without pauses. A step of over five times the usual is a stopped one."""

    def __init__(self, elapsed_s: float = 0.0) -> None:
        self.elapsed_s = elapsed_s
        self._usual_s: float | None = None

    def add(self, step_s: float) -> None:
        """Count one step."""
        if self._usual_s is not None and step_s > 5 * self._usual_s:
            step_s = self._usual_s
        self._usual_s = step_s if self._usual_s is None else 0.9 * self._usual_s + 0.1 * step_s
        self.elapsed_s += step_s
