"""What some system lacks, or has in another way: found in sources by their syntax trees."""

import ast
import inspect
import re
import textwrap
from typing import Any

MODULES = {
    "fcntl",
    "grp",
    "msvcrt",
    "posix",
    "pty",
    "pwd",
    "resource",
    "select",
    "selectors",
    "termios",
    "tty",
    "winreg",
}
_NAMES = """
os: name fork forkpty getloadavg getuid geteuid getgid getegid getpgid getpgrp setsid setpgid kill killpg nice pipe2 uname
os: umask chown fchown lchown fchmod mkfifo mknod openpty pread pwrite sysconf statvfs sendfile sync symlink wait waitpid
os: wait3 wait4 memfd_create fdatasync eventfd posix_spawn posix_fallocate register_at_fork O_NOFOLLOW O_DIRECTORY
signal: SIGHUP SIGUSR1 SIGUSR2 SIGKILL SIGQUIT SIGALRM SIGCHLD SIGPIPE SIGSTOP SIGCONT SIGBREAK setitimer alarm pause
signal: sigwait pthread_kill pthread_sigmask ITIMER_PROF ITIMER_REAL CTRL_BREAK_EVENT
socket: AF_UNIX socketpair SO_REUSEADDR SO_REUSEPORT
sys: platform getwindowsversion
platform: system
ctypes: windll WinDLL
time: clock_gettime tzset
"""
NAMES: dict[str, set[str]] = {}
for _line in _NAMES.strip().splitlines():
    _module, _, _names = _line.partition(":")
    NAMES.setdefault(_module, set()).update(_names.split())
PREFIXES = {
    "os": ("sched_", "SCHED_"),
    "mmap": ("MAP_", "MADV_", "PROT_"),
    "signal": (),
    "platform": ("mac_", "win32_"),
}

_CONCERNED = "|".join(sorted({*MODULES, *NAMES, "mmap"}))
CONCERNED = re.compile(rf"(import|from) ({_CONCERNED})|CDLL|get_context|preexec_fn|pass_fds|/(proc|sys|dev|tmp)")
"""Files that have none of it need no closer look."""


def foreign(source: str) -> list[str]:
    """What a file uses that some system lacks, or has in another way."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [name for name in names if name.split(".")[0] in MODULES]
            if isinstance(node, ast.ImportFrom) and node.module in {*NAMES, "mmap"}:
                found += [f"{node.module}.{alias.name}" for alias in node.names if is_foreign(node.module, alias.name)]
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and is_foreign(node.value.id, node.attr)
        ):
            found.append(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            given = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            if name in ("hasattr", "getattr") and node.args and isinstance(node.args[0], ast.Name):
                found += [f"{node.args[0].id}.{text}" for text in given if is_foreign(node.args[0].id, str(text))]
            if name == "CDLL" and None in given:
                found.append("CDLL(None)")
            if name == "get_context" and {"fork", "forkserver"} & {*map(str, given)}:
                found.append("fork")
            found += [each.arg for each in node.keywords if each.arg in ("preexec_fn", "pass_fds")]
        elif str(getattr(node, "value", "")).startswith(("/proc/", "/sys/", "/dev/", "/tmp", "#!/bin/")):
            found.append(str(node.value))
    return found


def is_foreign(module: str, name: str) -> bool:
    return name in NAMES.get(module, ()) or name.startswith(PREFIXES.get(module, ()))


def lacking(function: Any) -> str | None:
    """The first thing in a test's own source that Windows lacks; None where there is none, or no source."""
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        return None
    return next(iter(foreign(source)), None)
