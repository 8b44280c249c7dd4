"""Floor 6: measuring. ``run_bench`` decodes prompts plainly and with each method, interleaved, and reports figures.

>>> from foretell.bench import load_suite, run_bench
>>> report = run_bench({"target": "bundled"}, load_suite("bundled")[:10], ["draft_model:5", "ngram"])
>>> print(report.temperatures[0].methods[1].overall.speedup)

``suite.py`` reads questions, ``named.py`` knows the public suites, ``script.py`` makes prompts of them. ``stats.py`` is
all arithmetic, ``run.py`` all measuring, ``report.py`` puts them together. ``answers.py``,
``sandbox.py`` and ``quality.py`` say whether answers are right.
"""

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    name: home
    for home, names in {
        "named": ("NAMED", "load_suite", "read_suite", "sample"),
        "quality": ("Quality",),
        "report": ("BenchReport", "Figures", "Macro", "MethodReport", "TemperatureReport"),
        "run": ("BenchInterrupted", "BenchMethod", "PromptDone", "parse_method", "run_bench"),
        "script": ("encode_item", "with_forms"),
        "stats": ("Interval", "first_loop"),
        "suite": ("Item", "Suite", "select"),
    }.items()
    for name in names
}
__all__ = sorted(_HOMES)

if TYPE_CHECKING:
    from foretell.bench.named import (
        NAMED as NAMED,
        load_suite as load_suite,
        read_suite as read_suite,
        sample as sample,
    )
    from foretell.bench.quality import Quality as Quality
    from foretell.bench.report import (
        BenchReport as BenchReport,
        Figures as Figures,
        Macro as Macro,
        MethodReport as MethodReport,
        TemperatureReport as TemperatureReport,
    )
    from foretell.bench.run import (
        BenchInterrupted as BenchInterrupted,
        BenchMethod as BenchMethod,
        PromptDone as PromptDone,
        parse_method as parse_method,
        run_bench as run_bench,
    )
    from foretell.bench.script import encode_item as encode_item, with_forms as with_forms
    from foretell.bench.stats import Interval as Interval, first_loop as first_loop
    from foretell.bench.suite import Item as Item, Suite as Suite, select as select


def __getattr__(name: str) -> Any:
    """Names are imported when they are first used: questions are read, and refused, without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
