"""A thread that has computed gives its workers back."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread

import pytest
import torch

from foretell import Engine, SamplingParams, Service, ServiceOptions, Submission, Update
from foretell.core import platform
from foretell.engine import threads as workers
from foretell.engine.threads import release_workers

TASKS = Path("/proc/self/task")


def num_threads() -> int:
    return len(list(TASKS.iterdir()))


def settled() -> int:
    """The number of threads once it stands still: one that has been told to end does so a little later."""
    count, since = num_threads(), time.monotonic()
    while time.monotonic() < since + 0.3:
        time.sleep(0.01)
        if num_threads() != count:
            count, since = num_threads(), time.monotonic()
    return count


def compute() -> float:
    return float(torch.ones(2_000_000).exp().sum())  # long enough to be divided


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
    release_workers()


@pytest.mark.skipif(sys.platform != "linux", reason="counts the threads of a process as Linux tells them")
@pytest.mark.usefixtures("two_threads")
def test_workers_end_and_come_back() -> None:
    counts: dict[str, int] = {}
    results: list[float] = []

    def run() -> None:
        release_workers()
        counts["before"] = settled()
        results.append(compute())
        counts["with"] = num_threads()
        release_workers()
        counts["after"] = settled()
        results.append(compute())
        counts["again"] = num_threads()
        release_workers()

    compute()  # this thread has workers too: they are none of the other's
    thread = Thread(target=run)
    thread.start()
    thread.join()
    assert counts["with"] == counts["again"] == counts["before"] + 1
    assert counts["after"] == counts["before"]
    assert results[0] == results[1]


@pytest.mark.skipif(sys.platform != "linux", reason="counts the threads of a process as Linux tells them")
@pytest.mark.usefixtures("two_threads")
def test_an_idle_service_holds_no_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after it has measured at its start, which is short here and not kept, nor after a request."""
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path))
    monkeypatch.setenv("FORETELL_NATIVE", "0")  # else kernels are built there
    release_workers()
    before = settled()
    engine = Engine.load("bundled", speculative="draft_model", implementation="lean")
    service = Service(engine, ServiceOptions(max_num_seqs=2, max_model_len=64, cost_time_limit_s=0.5))
    service.start()
    assert settled() == before + 1  # its own
    seen: list[int] = []
    ended = Event()

    def sink(update: Update) -> None:
        seen.append(num_threads())
        if update.is_last:
            ended.set()

    service.submit(Submission("a", list(range(5, 40)), SamplingParams(max_new_tokens=8)), sink)
    assert ended.wait(60)
    assert max(seen) == before + 2  # and a worker
    assert settled() == before + 1
    service.close()
    assert settled() == before


def test_without_libgomp_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[object] = []

    class Other:
        def __getattr__(self, name: str) -> object:
            called.append(name)
            return lambda *_: called.append("call")

    for library in (Other(), object()):
        workers._pause.cache_clear()
        platform._library.cache_clear()
        monkeypatch.setattr(platform.ctypes, "CDLL", lambda _, library=library: library)
        release_workers()
    workers._pause.cache_clear()
    platform._library.cache_clear()
    assert called == ["__kmpc_fork_call"]
