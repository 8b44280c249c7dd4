"""Settings of the whole suite: one thread (two cores are shared), reproducible hypothesis runs, no deadline."""

import itertools
import os
import secrets
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, and for every process that a test starts

import torch
from hypothesis import HealthCheck, settings

from tests.cputime import known
from tests.stress import MINUTES
from tests.tiers import EXHAUSTIVE, SLOW, THINNED, kept, long, numbered

torch.set_num_threads(1)
# No test sees the models that the user has pulled (the default target would be another one), and none fetches any.
os.environ["FORETELL_MODELS"] = str(Path(tempfile.gettempdir()) / "foretell-tests-pull-no-models")
os.environ["FORETELL_OFFLINE"] = "1"

settings.register_profile(
    "foretell",
    deadline=None,  # a busy machine is no bug
    derandomize=True,  # the same examples in every run; drop it on purpose to search for more
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("foretell")


@pytest.hookimpl(tryfirst=True)  # before -m is looked at
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark slow what ``tiers.py`` leaves out of the default run, and exhaustive what it leaves out of the slow one."""
    thinned: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        node = item.nodeid.split("[")[0]
        if node in SLOW:
            item.add_marker(pytest.mark.slow)
        elif node in THINNED and isinstance(item, pytest.Function):
            thinned[node].append(item)
    for node, cases in thinned.items():
        rows = numbered([case.callspec.params for case in cases])
        default = set(kept(rows, THINNED[node]))
        for case, row in zip(cases, rows, strict=True):
            if row not in default:
                case.add_marker(pytest.mark.slow)
    costs = known()
    if not config.getoption("--cpu-save", False):  # else they are measured anew, and marked by hand alone
        for item in items:
            if costs.of(item.nodeid) > costs.limit_s:
                item.add_marker(pytest.mark.slow)
    left: dict[str, int] = defaultdict(int)
    for item in items:
        node = item.nodeid.split("[")[0]
        if node in EXHAUSTIVE and item.get_closest_marker("slow"):
            if left[node] % EXHAUSTIVE[node]:
                item.add_marker(pytest.mark.exhaustive)
            left[node] += 1
    longest: dict[Path, float] = defaultdict(float)
    for item in items:
        longest[item.path] = max(longest[item.path], long(item.nodeid, costs.of(item.nodeid)))
    for item in items:
        if MINUTES or item.path.parent.name == "mutants":  # they are long, and limit what they start themselves
            item.add_marker(pytest.mark.timeout(0))
    items.sort(key=lambda item: -longest[item.path])  # files stay whole, for the sake of their fixtures


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
