"""CPU seconds of every test, with its fixtures and the processes that it ended: ``python -m pytest -p tests.cputime``.

Seconds by the clock say little on a machine that does other work too. A fixture of a module or session counts for the test
that first asked for it, a server for the test behind which it was stopped.

``--cpu-save`` writes what was found into ``costs.json``, by which ``conftest.py`` tells slow tests: ``make costs``.
"""

import json
import resource
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

COSTS = Path(__file__).with_name("costs.json")
SHOWN = 30
KEPT_S = 0.3
"""What costs less is not written down."""


def spent() -> float:
    """CPU seconds of this process and of those that it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def known(path: Path = COSTS) -> dict[str, float]:
    """CPU seconds of tests by their names, as they were measured last; a new test has none."""
    found: dict[str, float] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def merged(before: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, float]:
    """What is written down: tests that did not run keep their figures."""
    kept = {name: seconds for name, seconds in before.items() if name not in measured}
    kept |= {name: round(seconds, 1) for name, seconds in measured.items() if seconds >= KEPT_S}
    return dict(sorted(kept.items()))


class CPUTime:
    """Collects the seconds of each phase where reports arrive: in this process, or in the one that others report to."""

    def __init__(self, save: bool) -> None:
        self.save = save
        self.of_test: Counter[str] = Counter()
        self.of_processes = 0.0
        self.start = 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        self.start = spent()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        report: Any = yield
        now = spent()
        report.cpu_s, self.start = now - self.start, now  # one phase after another
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.of_test[report.nodeid] += getattr(report, "cpu_s", 0.0)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["cpu_s"] = spent()
        elif self.save:
            lines = [f"{json.dumps(name)}: {cost}" for name, cost in merged(known(), self.of_test).items()]
            COSTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.of_processes += getattr(node, "workeroutput", {}).get("cpu_s", 0.0)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        # With xdist the processes that ran tests are children of this one, and said themselves what they took.
        total = self.of_processes + time.process_time() if self.of_processes else spent()
        tests = sum(self.of_test.values())
        terminalreporter.section(f"CPU seconds: {total:.0f}, {tests:.0f} in tests, the rest in start and collection")
        for name, seconds in self.of_test.most_common(SHOWN):
            terminalreporter.write_line(f"{seconds:8.2f}  {name}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-save", action="store_true", help="write the CPU seconds of tests into tests/costs.json")


def pytest_configure(config: pytest.Config) -> None:
    """In every process."""
    config.pluginmanager.register(CPUTime(config.getoption("--cpu-save")), "foretell-cpu-time")
