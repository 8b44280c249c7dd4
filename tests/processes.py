"""Processes that tests start, ended with all that they started themselves."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from foretell.core.platform import end_group
from foretell.kernels import build


def torchrun(processes: int) -> list[str]:
    """The command of torch's launcher on this machine alone. It takes a port and keeps it: one that a test had found free
    and let go could be another test's by the time the launcher asks for it."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
        "--nproc-per-node", str(processes),
    ]  # fmt: skip


def quick_compiler(directory: Path, compiler: str = "", level: str = "-O0") -> Path:
    """A C compiler (the usual one if none is named) that takes a fourth of the time, as it does not optimise: of several -O
    the last one counts. The names of AMX tiles must be constants, which they are after a little of it."""
    script = directory / "quick-cc"
    script.write_text(
        f'#!/bin/sh\ncase "$*" in *-mamx*) o=-O1 ;; *) o={level} ;; esac\nexec {compiler or build._compiler()} "$@" $o\n'
    )
    script.chmod(0o755)
    return script


def run_group(
    command: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Like ``subprocess.run`` with captured text, but at ``timeout_s`` the whole group of processes is killed.

    ``subprocess.run`` kills the one process that it started and then waits for the end of its output, which the others
    hold open: a launcher whose ranks hang would never end. What was written until then is returned, with the signal's
    status, and the caller judges.
    """
    with subprocess.Popen(
        command, env=env, cwd=cwd, text=True, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            end_group(process)
            out, err = process.communicate()
        except BaseException:
            end_group(process)
            raise
        return subprocess.CompletedProcess(list(command), process.returncode, out, err)
