"""What differs between Linux, macOS and Windows: a test finds names of one system that are used elsewhere.

Linux is what everything was measured on. For the others each function takes the system's own way where it has one, else
says in its docstring what is missing there. It imports nothing of foretell: a script loads it too.
"""

import contextlib
import ctypes
import errno
import io
import mmap
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

_PAGE = mmap.PAGESIZE

_PRIVATE, _FIXED = 0x02, 0x10  # mmap's flags on every Unix
_MEM_RESET, _READ_WRITE = 0x80000, 0x04  # VirtualAlloc's


def can_read_at() -> bool:
    """Whether a file can be read at a place by several threads at once: not on Windows."""
    return hasattr(os, "pread")


def anonymous_memory(num_bytes: int, *, huge: bool) -> mmap.mmap:
    """Zeros whose pages are allocated when they are written; in huge pages or in none of them, where the system lets one
    choose. Raises OSError. On Windows the whole of it counts as used at once, though it takes no memory yet."""
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return mmap.mmap(-1, num_bytes)
    # By default it would be shared memory, which most systems deny huge pages. Small pages are a reserve: most are never
    # written, so Linux need not set memory aside for them.
    reserve = 0 if huge or sys.platform != "linux" else getattr(mmap, "MAP_NORESERVE", 0x4000)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | reserve)
    advice = getattr(mmap, "MADV_HUGEPAGE" if huge else "MADV_NOHUGEPAGE", None)
    if advice is not None:
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages
            memory.madvise(advice)
    return memory


def discard(start: int, size: int) -> None:
    """Return the whole pages in [start, start + size), addresses in bytes of ``anonymous_memory``, to the system. They read
    as zero afterwards; on Windows they may also keep what they held."""
    first, stop = -(-start // _PAGE) * _PAGE, (start + size) // _PAGE * _PAGE
    if stop <= first:
        return
    if sys.platform == "linux":
        _advise()(first, stop - first, mmap.MADV_DONTNEED)
        return
    address, length = ctypes.c_void_p(first), ctypes.c_size_t(stop - first)
    if sys.platform == "win32":
        windows: Any = getattr(ctypes, "windll")  # noqa: B009  # absent elsewhere, also for the type checker
        windows.kernel32.VirtualAlloc(address, length, _MEM_RESET, _READ_WRITE)
    else:  # Darwin's MADV_DONTNEED discards nothing: new pages take the place of these
        flags = _PRIVATE | _FIXED | mmap.MAP_ANONYMOUS
        map_memory = _library().mmap
        map_memory.restype = ctypes.c_void_p
        map_memory(address, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, ctypes.c_int64(0))


def forget_pages(mapping: Any) -> None:
    """Let the system take back the pages of a mapped file that were read (they are read again when needed). mapping: an
    ``mmap``. Windows takes them by itself alone."""
    if hasattr(mapping, "madvise") and hasattr(mmap, "MADV_DONTNEED"):
        mapping.madvise(mmap.MADV_DONTNEED)


def free_memory() -> int:
    """Bytes that this process can still be given, without swapping: the machine's, or less where a container's limit is
    lower, or this process's own (``ulimit -v``)."""
    limits = [_available()]
    limit, used = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current")
    limits += [limit - used] if limit is not None and used is not None else []
    if sys.platform == "linux":
        import resource

        own = resource.getrlimit(resource.RLIMIT_AS)[0]
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limits += [own - pages * _PAGE] if own != resource.RLIM_INFINITY else []
    return max(0, min(limits))


def _available() -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    import psutil

    return int(psutil.virtual_memory().available)


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such limit, or "max"
        return None


def memory_bytes() -> int:
    """Of the machine, all of it."""
    import psutil

    return int(psutil.virtual_memory().total)


def peak_rss_bytes() -> int:
    """Peak memory of this process."""
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def preemptions() -> int:
    """How often another process has taken a processor from a thread of this one, so far; 0 on Windows, which does not
    tell."""
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def num_cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load_average() -> list[float] | None:
    """Of 1, 5 and 15 minutes; None on Windows, which has none."""
    return list(os.getloadavg()) if hasattr(os, "getloadavg") else None


def processor() -> str:
    """Its model's name."""
    found = ""
    with contextlib.suppress(OSError, StopIteration):
        if sys.platform == "darwin":  # platform.processor() is "arm" there
            name = ["sysctl", "-n", "machdep.cpu.brand_string"]
            found = subprocess.run(name, capture_output=True, text=True, check=False).stdout.strip()
        else:
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            found = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return found or platform.processor() or platform.machine()


def thread_times() -> dict[int, tuple[float, float]]:
    """By thread of this process: seconds that it ran, and seconds that it was ready and waited for a core. Empty where the
    kernel does not tell: Linux alone counts them."""
    times = {}
    try:
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/schedstat", "rb") as file:
                ran, waited = file.read().split()[:2]
            times[int(thread)] = (int(ran) * 1e-9, int(waited) * 1e-9)
    except (OSError, ValueError):  # no such list, or a thread has just ended: the next reading tells
        return {}
    return times


def processor_seconds() -> tuple[float, float]:
    """(ran, waited): seconds that this process's threads ran, and were ready and waited for a processor, both counted from
    some moment, so that two readings tell of the time between. Where the kernel does not count what waited (all but Linux),
    those of the calling thread alone: half of the time that it did not run, as it also waits for threads of its own pass.
    """
    times = thread_times()
    if times:
        return sum(ran for ran, _ in times.values()), sum(waited for _, waited in times.values())
    ran = time.thread_time()
    return ran, (time.perf_counter() - ran) / 2


def lower_priority(niceness: int = 19) -> None:
    """Let others have the processors first. At 19 this process runs where nobody else wants the core: as SCHED_IDLE where
    there is one."""
    with contextlib.suppress(OSError):
        if niceness == 19 and hasattr(os, "SCHED_IDLE"):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError):
        if hasattr(os, "nice"):
            os.nice(niceness)
        else:
            import psutil

            wanted = psutil.IDLE_PRIORITY_CLASS if niceness == 19 else psutil.BELOW_NORMAL_PRIORITY_CLASS
            psutil.Process().nice(wanted)


def limit_memory(num_bytes: int) -> None:
    """Of this process's address space, on Linux: macOS knows the limit and does not keep it, Windows has none."""
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


@contextlib.contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """End this process where the block takes more: CPU seconds, not those of a clock, since what else runs on the machine
    does not count. Windows has no such timer: there they are a clock's."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)  # the signal ends the process
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
    else:
        import faulthandler  # its thread needs no interpreter, which a compiler may hold

        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)
            try:
                yield
            finally:
                faulthandler.cancel_dump_traceback_later()


def own_function(name: str) -> Callable[..., Any] | None:
    """A C function that this process has loaded; None where it has none of that name, and on Windows."""
    try:
        found: Callable[..., Any] | None = getattr(_library(), name, None)
    except (OSError, TypeError):
        return None
    return found


def process_runs(number: int) -> bool:
    """Whether there is a process of that number, anybody's."""
    import psutil

    try:
        return bool(psutil.pid_exists(number))
    except OverflowError:
        return False


def end_group(process: "subprocess.Popen[Any]") -> None:
    """End a process that was started as a session of its own, and what it has started; on Windows those that it still is
    the parent of."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        import psutil

        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
    if process.poll() is None:
        process.kill()


def lock_file(file: int) -> bool:
    """Whether nobody else has locked this file, a descriptor that may be written to; it is locked now, until it is closed
    or the process ends, however that happens. True on a disk that has no locks."""
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(file, 0x7FFFFFFE, os.SEEK_SET)  # a lock there hides what it covers: a byte that nobody reads
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # of Windows the second one
        return False
    except OSError:
        return True
    return True


def flush_folder(folder: Path) -> None:
    """Write a folder's names to the disk. Raises OSError. On Windows a folder cannot be opened, and need not be."""
    if sys.platform != "win32":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def user_id() -> int | None:
    """Whose process this is; None on Windows, whose temporary folder is a user's own."""
    return os.getuid() if hasattr(os, "getuid") else None


def own_port(made: socket.socket) -> None:
    """Let a socket take a port that a server has just left, and none that one holds."""
    # On Windows SO_REUSEADDR would let two servers share one port.
    option = getattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_REUSEADDR)
    made.setsockopt(socket.SOL_SOCKET, option, 1)


def forgiving(stream: Any, errors: str) -> None:
    """What a standard stream cannot encode or decode is handled as ``errors`` says. A pipe or a file on Windows holds
    UTF-8, as everywhere else, not the code page of the machine, unless PYTHONIOENCODING asks for another."""
    if isinstance(stream, io.TextIOWrapper):
        own = sys.platform == "win32" and not stream.isatty() and not os.environ.get("PYTHONIOENCODING")
        stream.reconfigure(encoding="utf-8" if own else None, errors=errors)


@contextlib.contextmanager
def unechoed() -> Iterator[None]:
    """Within the block the terminal of standard input shows nothing of what is typed, keeps it for who reads next, and
    marks what is pasted; Ctrl-C goes on as ever. Nothing on Windows, where there is no terminal, and where it is another
    job's: changing it would stop this process."""
    mine = sys.stdin.fileno() if sys.stdin.isatty() and sys.platform != "win32" else -1
    if mine < 0 or os.tcgetpgrp(mine) != os.getpgrp():
        yield
        return
    import termios

    before, marks = termios.tcgetattr(mine), "\x1b[?2004{}" if sys.stdout.isatty() else ""
    try:
        entered, local = before[0] & ~termios.ICRNL, before[3] & ~(termios.ECHO | termios.ICANON)
        termios.tcsetattr(mine, termios.TCSANOW, [entered, *before[1:3], local, *before[4:]])
        print(end=marks.format("h"), flush=True)
        yield
    finally:
        with contextlib.suppress(OSError, termios.error):  # the terminal has been closed
            print(end=marks.format("l"), flush=True)
            termios.tcsetattr(mine, termios.TCSANOW, before)


def is_closed_pipe(error: BaseException) -> bool:
    """Whether what was written has no reader any more; on Windows that is EINVAL."""
    known = (errno.EPIPE, errno.EINVAL) if sys.platform == "win32" else (errno.EPIPE,)
    return isinstance(error, OSError) and error.errno in known


@cache
def _library() -> Any:
    """All that this process has loaded."""
    return ctypes.CDLL(None)


@cache
def _advise() -> Any:
    function = _library().madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
