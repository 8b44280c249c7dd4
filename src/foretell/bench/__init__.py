"""Floor 6: measuring. ``run_bench`` decodes prompts plainly and with each method, interleaved, and reports figures.

>>> from foretell.bench import load_suite, run_bench
>>> report = run_bench({"target": "bundled"}, load_suite("bundled")[:10], ["draft_model:5", "ngram"])
>>> print(report.temperatures[0].methods[1].overall.speedup)

``suite.py`` reads questions, ``named.py`` knows the public suites, ``script.py`` makes prompts of them. ``trace.py`` says
what a run is, ``stats.py`` is all arithmetic, ``run.py`` all measuring, ``report.py`` puts them together. ``answers.py``,
``sandbox.py`` and ``quality.py`` say whether answers are right.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretell.bench.named import NAMED, load_suite, read_suite, sample
    from foretell.bench.quality import Quality
    from foretell.bench.report import BenchReport, Figures, Macro, MethodReport, TemperatureReport
    from foretell.bench.run import BenchInterrupted, BenchMethod, PromptDone, parse_method, run_bench
    from foretell.bench.script import encode_item, with_forms
    from foretell.bench.stats import Interval, first_loop
    from foretell.bench.suite import Item, Suite, select

__all__ = [
    "NAMED",
    "BenchInterrupted",
    "BenchMethod",
    "BenchReport",
    "Figures",
    "Interval",
    "Item",
    "Macro",
    "MethodReport",
    "PromptDone",
    "Quality",
    "Suite",
    "TemperatureReport",
    "encode_item",
    "first_loop",
    "load_suite",
    "parse_method",
    "read_suite",
    "run_bench",
    "sample",
    "select",
    "with_forms",
]

_HOMES = {
    "BenchInterrupted": "run",
    "BenchMethod": "run",
    "BenchReport": "report",
    "Figures": "report",
    "Interval": "stats",
    "Item": "suite",
    "Macro": "report",
    "MethodReport": "report",
    "NAMED": "named",
    "PromptDone": "run",
    "Quality": "quality",
    "Suite": "suite",
    "TemperatureReport": "report",
    "encode_item": "script",
    "first_loop": "stats",
    "load_suite": "named",
    "parse_method": "run",
    "read_suite": "named",
    "run_bench": "run",
    "sample": "named",
    "select": "suite",
    "with_forms": "script",
}


def __getattr__(name: str) -> Any:
    """Names are imported when they are first used: questions are read, and refused, without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
