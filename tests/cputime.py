"""CPU seconds of every test, with its fixtures and the processes that it ended: ``python -m pytest -p tests.cputime``.

Seconds by the clock say little on a machine that does other work too. A fixture of a module or session counts for the test
that first asked for it, a server for the test behind which it was stopped.

``--cpu-save``, with a run of all tests, writes what was found to ``costs.json``, by which ``conftest.py`` tells slow ones:
``make costs``. What a test of the default run may take is chosen so that all of them together keep to BUDGET_S.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.tiers import spared

COSTS = Path(__file__).with_name("costs.json")
SHOWN = 30
KEPT_S = 0.2
"""What costs less is not written down."""
LIMITS_S = (2.0, 1.5, 1.2, 1.0, 0.8, 0.6, 0.5, 0.4, 0.3)
"""What a test of the default run may take: the first that keeps to the budget."""
BUDGET_S = 430.0
"""For the tests of the default run; start and collection of two processes take about 40 more, and twice that where no byte
code is there yet."""


@dataclass(frozen=True)
class Costs:
    """CPU seconds of tests by their names, as they were measured last (a new test has none), and the limit."""

    limit_s: float = LIMITS_S[0]
    seconds: dict[str, float] = field(default_factory=dict)

    def of(self, test: str) -> float:
        return self.seconds.get(test, 0.0)

    def text(self) -> str:
        """As JSON, one test a line."""
        lines = [f"    {json.dumps(name)}: {seconds:.1f}" for name, seconds in sorted(self.seconds.items())]
        return f'{{\n  "limit_s": {self.limit_s},\n  "seconds": {{\n' + ",\n".join(lines) + "\n  }\n}\n"


def known(path: Path = COSTS) -> Costs:
    """What was measured last."""
    return Costs(**json.loads(path.read_text(encoding="utf-8")))


def measured(seconds: dict[str, float], slow: Collection[str]) -> Costs:
    """What is written down of a run of all tests, some of which are slow whatever they take."""
    quick = {name: cost for name, cost in seconds.items() if name not in slow}
    core = spared(quick)

    def taken(limit: float) -> float:
        return sum(cost for name, cost in quick.items() if cost <= limit or name in core)

    fitting = (limit for limit in LIMITS_S if taken(limit) <= BUDGET_S)
    kept = {name: round(cost, 1) for name, cost in seconds.items() if cost >= KEPT_S}
    return Costs(next(fitting, LIMITS_S[-1]), kept)


def spent() -> float:
    """CPU seconds of this process and of those that it has waited for."""
    times = os.times()  # Windows does not count children: 0
    return time.process_time() + times.children_user + times.children_system


class CPUTime:
    """Collects the seconds of each phase where reports arrive: in this process, or in the one that others report to."""

    def __init__(self, save: bool) -> None:
        self.save = save
        self.of_test: Counter[str] = Counter()
        self.slow: set[str] = set()
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
        if "slow" in report.keywords:
            self.slow.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["cpu_s"] = spent()
        elif self.save:
            COSTS.write_text(measured(dict(self.of_test), self.slow).text(), encoding="utf-8")

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
