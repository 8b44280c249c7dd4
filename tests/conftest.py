"""Settings of the whole suite: one thread (two cores are shared), reproducible hypothesis runs, no deadline."""

import functools
import gc
import itertools
import logging
import os
import secrets
import ssl
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, and for every process that a test starts

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton: its kernels run on the CPU

from hypothesis import HealthCheck, Phase, settings

from tests.cputime import known
from tests.stress import MINUTES
from tests.systems import lacking
from tests.tiers import EXHAUSTIVE, SLOW, THINNED, Keep, kept, long, numbered, spared
from tests.until import REASON, time_is_up

torch.set_num_threads(1)
# Every HTTP client reads the certificates of this machine for 20 ms, and none of the tests' needs them.
ssl.create_default_context = functools.cache(ssl.create_default_context)
# No test sees the models that the user has pulled (the default target would be another one), and none fetches any.
os.environ["FORETELL_MODELS"] = str(Path(tempfile.gettempdir()) / "foretell-tests-pull-no-models")
os.environ["FORETELL_OFFLINE"] = "1"

PLANTED = "FORETELL_PLANTED_BUG" in os.environ  # set by mutants/runner.py: that a test fails is all that is asked
settings.register_profile(
    "foretell",
    phases=(Phase.explicit, Phase.generate) if PLANTED else tuple(Phase),
    deadline=None,  # a busy machine is no bug
    derandomize=True,  # the same examples in every run; drop it on purpose to search for more
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("foretell")


def thin(items: list[pytest.Item], keeps: Mapping[str, Keep], mark: str) -> None:
    """Mark the cases of tests that a run does not keep. A case that is named with its parameters is no other entry's."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        node = item.nodeid if item.nodeid in keeps else item.nodeid.split("[")[0]
        if node in keeps:
            cases[node].append(item)
    for node, found in cases.items():
        rows = numbered([item.callspec.params if hasattr(item, "callspec") else {} for item in found])
        default = set(kept(rows, keeps[node]))
        for item, row in zip(found, rows, strict=True):
            if row not in default:
                item.add_marker(mark)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """Nothing that is imported or collected becomes garbage: to look for some there, again and again, took a quarter of the
    collection, and in every later search of a test a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """Triton, at its end, writes a page about its objects that nobody has collected: frozen ones never are."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)  # before -m is looked at
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark slow what ``tiers.py`` leaves out of the default run, and exhaustive what it leaves out of the slow one; skip on
    Windows what uses something of Unix."""
    for item in items if sys.platform == "win32" else ():
        if lack := lacking(getattr(item, "function", None)):
            item.add_marker(pytest.mark.skip(reason=f"Windows has no {lack.splitlines()[0]}"))
    for item in items:
        if item.nodeid.split("[")[0] in SLOW:
            item.add_marker(pytest.mark.slow)
    thin(items, THINNED, "slow")
    costs = known()
    if not config.getoption("--cpu-save", False):  # else they are measured anew, and marked by hand alone
        core = spared({item.nodeid: costs.of(item.nodeid) for item in items if not item.get_closest_marker("slow")})
        for item in items:
            if costs.of(item.nodeid) > costs.limit_s and item.nodeid not in core:
                item.add_marker(pytest.mark.slow)
    thin([item for item in items if item.get_closest_marker("slow")], EXHAUSTIVE, "exhaustive")
    longest: dict[Path, float] = defaultdict(float)
    for item in items:
        longest[item.path] = max(longest[item.path], long(item.nodeid, costs.of(item.nodeid)))
    for item in items:
        if MINUTES or item.path.parent.name == "mutants":  # they are long, and limit what they start themselves
            item.add_marker(pytest.mark.timeout(0))
    items.sort(key=lambda item: -longest[item.path])  # files stay whole, for the sake of their fixtures


@pytest.hookimpl(tryfirst=True)  # before fixtures are made
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail what begins too late."""
    if time_is_up():
        pytest.fail(REASON, pytrace=False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how much was not run for want of time."""
    late = [report for kind in ("skipped", "failed", "error") for report in terminalreporter.stats.get(kind, [])]
    late = [report for report in late if REASON in str(report.longrepr)]
    if late:
        terminalreporter.write_sep("=", f"NO TIME WAS LEFT for {len(late)} tests, or for parts of them")
        for report in late:
            if isinstance(report.longrepr, tuple):  # skipped: planted bugs, of which it says how many were left
                terminalreporter.write_line(str(report.longrepr[-1]))


class SaidAtOnce:
    """A failed test is said when it fails: a run that is ended from outside never comes to its summary."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write_line(f"\nFAILED at {report.when}: {report.nodeid}\n{report.longreprtext[-2000:]}")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the process that others report to
        config.pluginmanager.register(SaidAtOnce(config), "foretell-said-at-once")


@pytest.fixture(autouse=True)
def fresh_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request without a seed gets a fresh one: still another each time, but the same in every run of a test."""
    counter = itertools.count(1)
    monkeypatch.setattr(secrets, "randbits", lambda bits: (next(counter) * 0x9E3779B97F4A7C15) % (1 << bits))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models gain nothing from threads, and lose much where another process has the other core."""
    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """A server in this process sets how much foretell logs: the next test finds it as it was."""
    logger = logging.getLogger("foretell")
    before = logger.level
    yield
    logger.setLevel(before)
