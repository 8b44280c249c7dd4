"""Systems that are not at hand: their names are taken away or put there, and what this system can run of them runs."""

import ctypes
import io
import mmap
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

import foretell
from foretell.core import platform
from foretell.engine.structured import compiling
from foretell.engine.structured.compiling import CompileCheck
from foretell.engine.structured.constraint import json_grammar
from foretell.model.cache import KVCache
from tests.service.test_memory import resident
from tests.systems import CONCERNED, foreign, is_foreign, lacking

ROOT = Path(foretell.__path__[0])
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="compares with what Linux does")
USED = {"name", "kill", "umask", "symlink", "O_NOFOLLOW", "O_DIRECTORY", "waitpid"}
"""Names that Python's own library, or pytest, uses on this system."""
ALLOWED = {"core/provenance.py: platform.system"}  # it is told, and nothing depends on it


def test_what_systems_differ_in_stands_in_one_file() -> None:
    files = {path.relative_to(ROOT).as_posix(): path for path in ROOT.rglob("*.py")}
    swept = [name for name in files if name != "core/platform.py" and not name.startswith("kernels/")]
    assert len(swept) > 400
    texts = {name: files[name].read_text(encoding="utf-8") for name in swept}
    used = {f"{name}: {one}" for name, text in texts.items() if CONCERNED.search(text) for one in foreign(text)}
    assert used == ALLOWED, "core/platform.py is where systems are told apart"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import fcntl", "fcntl"),
        ("def f():\n    from resource import getrusage", "resource"),
        ("import os\nos.nice(3)", "os.nice"),
        ("from os import sched_getaffinity", "os.sched_getaffinity"),
        ("hasattr(os, 'killpg')", "os.killpg"),
        ("mmap.mmap(-1, 3, flags=mmap.MAP_PRIVATE)", "mmap.MAP_PRIVATE"),
        ("ctypes.CDLL(None).madvise", "CDLL(None)"),
        ("open('/proc/self/statm')", "/proc/self/statm"),
        ("open(f'/sys/{x}')", "/sys/"),
        ("signal.signal(signal.SIGHUP, f)", "signal.SIGHUP"),
        ("if sys.platform == 'linux': pass", "sys.platform"),
        ("multiprocessing.get_context('fork')", "fork"),
        ("Popen([], preexec_fn=f)", "preexec_fn"),
        ("socket.socket(socket.AF_UNIX)", "socket.AF_UNIX"),
        ("os.replace(a, b); signal.SIGTERM; mmap.PAGESIZE; ctypes.CDLL('x.so'); getattr(os, name)", None),
    ],
)  # fmt: skip
def test_the_sweep_finds_it(source: str, found: str | None) -> None:
    assert foreign(source) == ([] if found is None else [found])
    module = "" if found is None or "import" in source else f"import {found.partition('.')[0]}\n"
    assert found is None or CONCERNED.search(module + source), "it is looked at"


def uses_a_shell() -> None:
    Path("script").write_text("#!/bin/sh\n")


def test_what_a_test_uses_of_unix_is_found() -> None:
    """On Windows such a test is skipped: conftest.py."""
    assert lacking(uses_a_shell) == "#!/bin/sh\n"
    assert lacking(test_processes_are_known_by_their_numbers) is None


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The one that ``foretell.core.platform`` believes to run on."""
    name: str = request.param
    monkeypatch.setattr(sys, "platform", name)
    if name == "win32":
        for module in ("resource", "fcntl"):
            monkeypatch.setitem(sys.modules, module, None)
        for owner in (os, mmap):
            for one in [one for one in dir(owner) if is_foreign(owner.__name__, one)]:
                if one not in USED:
                    monkeypatch.delattr(owner, one)
    return name


calls: list[tuple[Any, ...]] = []


@pytest.fixture
def kernel32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows' library, which notes what it is told."""
    calls.clear()
    library = SimpleNamespace(VirtualAlloc=lambda *given: calls.append(tuple(getattr(x, "value", x) for x in given)))
    monkeypatch.setattr(ctypes, "windll", SimpleNamespace(kernel32=library), raising=False)


@LINUX
@pytest.mark.parametrize("system", ["linux", "darwin"], indirect=True)
def test_discarded_pages_leave_memory_and_read_as_zero(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if system == "darwin":  # whose MADV_DONTNEED leaves everything as it was
        mac = SimpleNamespace(mmap=ctypes.CDLL(None).mmap, madvise=lambda *_: 0)
        monkeypatch.setattr(platform, "_library", lambda: mac)
        monkeypatch.setattr(platform, "_advise", lambda: mac.madvise)
    memory = platform.anonymous_memory(16 << 20, huge=False)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    whole.fill_(7)
    page, before = mmap.PAGESIZE, resident()
    platform.discard(whole.data_ptr() + 1, (16 << 20) - 2)
    assert before - resident() > 14 << 20
    assert not whole[page:-page].any()
    assert bool((whole[:page] == 7).all()), "a page that is not wholly in it stays"
    assert bool((whole[-page:] == 7).all())
    whole.fill_(3)
    assert int(whole[page]) == 3


@pytest.mark.parametrize("system", ["win32"], indirect=True)
def test_a_cache_of_windows_grows_and_gives_its_pages_back(system: str, kernel32: None) -> None:
    """No mapping has flags there, and no C library is loaded under no name."""
    cache = KVCache(2, 1024, [(2, 64)], torch.float32, [torch.device("cpu")], reserve=4)
    assert not cache.keys[0].any()
    cache.keys[0][1] = 1.0
    cache.keep(torch.tensor([0]))
    row, page = cache._all_keys[0][1], mmap.PAGESIZE
    size = row.numel() * 4
    start = -(-row.data_ptr() // page) * page
    told = (start, (row.data_ptr() + size) // page * page - start, 0x80000, 0x04)
    assert told in calls, "the pages of the row that left, MEM_RESET, PAGE_READWRITE"
    assert len(calls) == 2, "keys and values"


@pytest.fixture(scope="module")
def text() -> str:
    """What this system generates."""
    return _generated()


def _generated() -> str:
    engine = foretell.Engine.load("bundled", speculative="draft_model")
    return str(engine.generate("def add(a, b):", max_new_tokens=12, temperature=0.7, seed=1).text)


@pytest.mark.parametrize("system", ["win32"], indirect=True)
def test_windows_generates_the_same_text(text: str, system: str, kernel32: None) -> None:
    assert _generated() == text


def test_grammars_are_compiled_where_a_process_has_no_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child as Windows has it: no niceness, no timer of CPU seconds, no resource module."""
    lost = (
        "import os, signal, sys, psutil; del os.nice, os.SCHED_IDLE, signal.setitimer; sys.modules['resource'] = None; "
    )
    lost += "psutil.BELOW_NORMAL_PRIORITY_CLASS = 1; from foretell.core import platform; sys.platform = 'win32'; "
    start, seen = subprocess.Popen, []

    def popen(command: list[str], **given: Any) -> Any:
        seen.append(command)
        run = lost + f"import runpy; runpy.run_path({command[-1]!r}, run_name='__main__')"
        return start([sys.executable, "-c", run], **given)

    monkeypatch.setattr(compiling.subprocess, "Popen", popen)
    monkeypatch.setattr(compiling, "CPU_S", 0.5)
    check = CompileCheck(compiling.as_text(foretell.Engine.load("bundled").tokenizer), 8192, [0])
    try:
        assert check.check('{"grammars": [{"json_schema": {"type": "boolean"}}]}', "schema") == ""
        slow = json_grammar({"type": "integer", "multipleOf": 765432})
        with pytest.raises(foretell.ConfigError, match="to compile"):
            check.check(slow, "schema")
    finally:
        check.close()
    assert len(seen) == 1


@pytest.mark.parametrize("system", ["win32", "darwin"], indirect=True)
def test_memory_is_told_where_there_is_no_proc(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: (_ for _ in ()).throw(FileNotFoundError()))
    wanted = SimpleNamespace(available=3 << 30, total=5 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: wanted)
    assert (platform.free_memory(), platform.memory_bytes()) == (3 << 30, 5 << 30)


@LINUX
def test_memory_is_what_the_library_says_too() -> None:
    assert platform.free_memory() == pytest.approx(psutil.virtual_memory().available, rel=0.2)
    assert platform.memory_bytes() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert platform.peak_rss_bytes() >= resident() > 1 << 20


@LINUX
def test_free_memory_knows_the_limit_of_the_process() -> None:
    code = "from foretell.core import platform; platform.limit_memory(2 << 30); print(platform.free_memory())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0 < int(done.stdout) < 2 << 30


@pytest.mark.parametrize("system", ["win32"], indirect=True)
def test_figures_of_windows(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil.Process, "memory_info", lambda _: SimpleNamespace(peak_wset=123))
    assert platform.peak_rss_bytes() == 123
    assert platform.preemptions() == 0
    assert platform.num_cores() == os.cpu_count()
    assert platform.load_average() is None
    assert platform.user_id() is None
    monkeypatch.setattr(os, "listdir", lambda _: (_ for _ in ()).throw(FileNotFoundError()))
    assert platform.thread_times() == {}


def test_figures_of_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    said = ["Apple M4 Pro\n", ""]
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=said.pop(0)))
    monkeypatch.setattr(platform.platform, "processor", lambda: "arm")
    assert [platform.processor(), platform.processor()] == ["Apple M4 Pro", "arm"]
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=5))
    assert platform.peak_rss_bytes() == 5, "in bytes there, in KiB elsewhere"


@pytest.mark.parametrize("system", ["win32"], indirect=True)
@pytest.mark.parametrize(("niceness", "wanted"), [(19, 64), (10, 16384)])
def test_priority_on_windows(system: str, niceness: int, wanted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    monkeypatch.setattr(psutil, "IDLE_PRIORITY_CLASS", 64, raising=False)
    monkeypatch.setattr(psutil, "BELOW_NORMAL_PRIORITY_CLASS", 16384, raising=False)
    monkeypatch.setattr(psutil.Process, "nice", lambda _, value: told.append(value))
    platform.lower_priority(niceness)
    assert told == [wanted]


SPIN = "import re; re.match(r'(a+)+$', 'a' * 40 + 'b')"  # years, and the interpreter is never let go of


@pytest.mark.parametrize("lost", ["", "del signal.setitimer; "], ids=["timer", "no timer"])
@pytest.mark.parametrize(("within", "ends"), [(SPIN, True), ("pass", False)], ids=["long", "short"])
def test_what_takes_too_long_ends_the_process(lost: str, within: str, ends: bool) -> None:
    source = f"import signal; {lost}from foretell.core.platform import cpu_limit\nwith cpu_limit(0.2):\n    {within}\n"
    source += "import time; time.sleep(0.4)"
    assert (subprocess.run([sys.executable, "-c", source], capture_output=True, timeout=60).returncode != 0) == ends


@LINUX
@pytest.mark.parametrize(("name", "limited"), [("linux", True), ("darwin", False), ("win32", False)])
def test_memory_is_limited_where_that_holds(name: str, limited: bool) -> None:
    source = f"import sys; from foretell.core.platform import limit_memory; sys.platform = {name!r}\n"
    source += "limit_memory(1 << 30); import mmap; mmap.mmap(-1, 2 << 30)"
    run = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60)
    assert ("Cannot allocate memory" in run.stderr) == limited, run.stderr
    assert (run.returncode != 0) == limited


def test_a_file_is_locked_once(tmp_path: Path) -> None:
    files = [os.open(tmp_path / "log", os.O_RDWR | os.O_CREAT | os.O_APPEND) for _ in range(3)]
    assert [platform.lock_file(file) for file in files[:2]] == [True, False]
    os.close(files[0])
    assert platform.lock_file(files[2]), "it was left"
    for file in files[1:]:
        os.close(file)


@pytest.mark.parametrize(("error", "held"), [(None, True), (PermissionError(13, ""), False), (OSError(22, ""), True)])
def test_a_file_is_locked_on_windows(
    error: OSError | None, held: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []

    def locking(file: int, mode: int, count: int) -> None:
        told.append((os.lseek(file, 0, os.SEEK_CUR), mode, count))
        if error is not None:
            raise error

    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(LK_NBLCK=2, locking=locking))  # type: ignore[arg-type]
    with (tmp_path / "log").open("wb") as stream:
        assert platform.lock_file(stream.fileno()) is held
    assert told == [(0x7FFFFFFE, 2, 1)], "behind all that is ever written: others may go on reading"


def test_processes_are_known_by_their_numbers() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert platform.process_runs(os.getpid())
    assert platform.process_runs(child.pid)
    child.communicate()
    assert not platform.process_runs(child.pid)
    assert not platform.process_runs(1 << 70)


@pytest.mark.parametrize("grouped", [True, False])
def test_children_end_with_their_process(grouped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not grouped:
        monkeypatch.delattr(os, "killpg", raising=False)
    sleep = [sys.executable, "-IS", "-c", "import time; time.sleep(60)"]
    source = f"import subprocess, time; print(subprocess.Popen({sleep!r}).pid, flush=True); time.sleep(60)"
    made = subprocess.Popen(
        [sys.executable, "-IS", "-c", source], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    with made:
        assert made.stdout is not None
        child = psutil.Process(int(made.stdout.readline()))
        platform.end_group(made)
        made.wait(10)
    _, alive = psutil.wait_procs([child], timeout=10)
    for each in alive:
        each.kill()
    assert not alive
    platform.end_group(made)  # it has ended: nothing happens


@pytest.mark.parametrize(
    ("name", "variable", "written"),
    [("linux", "", b"a?"), ("win32", "", "a\N{SNOWMAN}".encode()), ("win32", "cp1252", b"a?")],
    ids=["linux", "windows", "windows-asked"],
)
def test_a_code_page_loses_no_text(name: str, variable: str, written: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", name)
    monkeypatch.setenv("PYTHONIOENCODING", variable)
    stream = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    platform.forgiving(stream, "replace")
    stream.write("a\N{SNOWMAN}")
    stream.flush()
    assert stream.buffer.getvalue() == written  # type: ignore[attr-defined]
    platform.forgiving(io.StringIO(), "replace")  # no such thing: left as it is


def test_a_port_is_one_server_s(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    made: Any = SimpleNamespace(setsockopt=lambda *given: told.append(given))
    platform.own_port(made)
    monkeypatch.setattr(socket, "SO_EXCLUSIVEADDRUSE", -5, raising=False)
    platform.own_port(made)
    assert told == [(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1), (socket.SOL_SOCKET, -5, 1)]


@pytest.mark.parametrize(("name", "code", "closed"), [("linux", 32, True), ("linux", 22, False), ("win32", 22, True)])
def test_a_closed_pipe(name: str, code: int, closed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", name)
    assert platform.is_closed_pipe(OSError(code, "")) is closed
    assert not platform.is_closed_pipe(ValueError())


def test_a_folder_is_flushed_where_it_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    platform.flush_folder(tmp_path)
    with pytest.raises(OSError):
        platform.flush_folder(tmp_path / "none")
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("Windows opens no folder"))
    monkeypatch.setattr(sys, "platform", "win32")
    platform.flush_folder(tmp_path)


def test_a_function_that_nobody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert platform.own_function("no_such_function_at_all") is None

    def no_name(_: object) -> None:
        raise TypeError("LoadLibrary() argument 1 must be str, not None")

    platform._library.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", no_name)
    assert platform.own_function("malloc_trim") is None
    platform._library.cache_clear()
