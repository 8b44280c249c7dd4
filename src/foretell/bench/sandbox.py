"""Runs a program that a model wrote, in a process of its own with limits.

Never in this process. The process starts in an empty directory that is deleted afterwards, with an empty environment,
Python's isolated mode (the standard library alone), and limits of time, memory, file size and open files; where the
system lets a user make namespaces (Linux) it has no network. That stops mistakes, such as an endless loop or a list that
fills the memory. It is no protection against a program that means harm: it may read, and write, what this user may.
``Isolation`` says what was in force.
"""

import os
import secrets
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache

from foretell.core.platform import end_group

TIMEOUT_S = 10.0
MEMORY_BYTES = 1 << 30
PASSED, FAILED, TIMED_OUT = "passed", "failed", "timed out"

# Runs as ``python -I -S -c``. The program is read from stdin, behind one line with a word that only this process and the
# one that started it know: it is written to the first standard output when all has passed, so that neither a program that
# prints nor one that exits counts as right.
_RUNNER = """
import os, sys
seconds, memory = int(sys.argv[1]), int(sys.argv[2])
word, _, source = sys.stdin.buffer.read().decode().partition("\\n")
private = os.dup(1)
null = os.open(os.devnull, os.O_RDWR)
for stream in (0, 1, 2):
    os.dup2(null, stream)
network = "on"
try:
    import ctypes
    if sys.platform == "linux" and ctypes.CDLL(None).unshare(0x10000000 | 0x40000000) == 0:  # NEWUSER, NEWNET
        network = "off"
except (OSError, AttributeError, ImportError):
    pass
limits = "none"
try:
    import resource
    wanted = [("CPU", seconds), ("AS", memory), ("FSIZE", 1 << 20), ("NOFILE", 64), ("CORE", 0)]
    if network == "off":  # in a namespace of its own the system does not count the user's other processes
        wanted.append(("NPROC", 32))
    for name, value in wanted:
        kind = getattr(resource, "RLIMIT_" + name, None)
        if kind is not None:
            try:
                resource.setrlimit(kind, (value, value))
                limits = "set"
            except (OSError, ValueError):
                pass
except ImportError:
    pass
os.write(private, (network + " " + limits + "\\n").encode())
try:
    exec(compile(source, "<answer>", "exec"), {"__name__": "answer"})
except BaseException:
    os._exit(1)
os.write(private, word.encode())
os._exit(0)
"""


@dataclass(frozen=True)
class Isolation:
    """What kept a program in."""

    network: bool  # whether it could reach a network
    limits: bool  # of memory, file size, processor time

    def __str__(self) -> str:
        parts = ["a process of its own in an empty directory"]
        parts.append("limits of time, memory and file size" if self.limits else "a limit of time alone")
        parts.append("with network: this system makes no namespaces for it" if self.network else "no network")
        return ", ".join(parts)


def run(source: str, *, timeout_s: float = TIMEOUT_S, memory_bytes: int = MEMORY_BYTES) -> str:
    """Run a program: PASSED where it ends without an exception, FAILED, or TIMED_OUT."""
    return _run(source, timeout_s, memory_bytes)[0]


@cache
def isolation() -> Isolation:
    """What is in force here, seen on a program that does nothing."""
    _, told = _run("", TIMEOUT_S, MEMORY_BYTES)
    network, _, limits = told.partition(" ")
    return Isolation(network != "off", limits == "set")


def _run(source: str, timeout_s: float, memory_bytes: int) -> tuple[str, str]:
    """The outcome, and what the runner said of its limits."""
    word = secrets.token_hex(16)
    # A program may have left directories that it may not even list; the test process must not fail on them.
    with tempfile.TemporaryDirectory(prefix="foretell-answer-", ignore_cleanup_errors=True) as folder:
        command = [sys.executable, "-I", "-S", "-B", "-c", _RUNNER, str(int(timeout_s) + 1), str(memory_bytes)]
        kept = ("SYSTEMROOT",)  # without it Windows starts nothing
        process = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in kept if name in os.environ}, start_new_session=True,
        )  # fmt: skip
        try:
            out, _ = process.communicate(f"{word}\n{source}".encode(errors="replace"), timeout=timeout_s)
        except subprocess.TimeoutExpired:
            end_group(process)
            process.communicate()
            return TIMED_OUT, ""
        finally:
            end_group(process)  # children that outlive it
    told, _, said = out.decode(errors="replace").partition("\n")
    return (PASSED if said == word and process.returncode == 0 else FAILED), told
