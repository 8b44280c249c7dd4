"""Floor 5: measuring. ``run_bench`` decodes prompts plainly and with each method, interleaved, and reports figures.

>>> from foretoken.bench import load_suite, run_bench
>>> report = run_bench({"target": "bundled"}, load_suite("bundled")[:10], ["draft_model:5", "ngram"])
>>> print(report.temperatures[0].methods[1].overall.speedup)

``trace.py`` says what a run is, ``stats.py`` is all arithmetic, ``run.py`` all measuring, ``report.py`` puts them together.
"""

from foretoken.bench.report import BenchReport, Figures, MethodReport, TemperatureReport
from foretoken.bench.run import BenchInterrupted, BenchMethod, PromptDone, encode_item, parse_method, run_bench
from foretoken.bench.stats import Interval, first_loop
from foretoken.bench.suite import Item, load_suite, select

__all__ = [
    "BenchInterrupted",
    "BenchMethod",
    "BenchReport",
    "Figures",
    "Interval",
    "Item",
    "MethodReport",
    "PromptDone",
    "TemperatureReport",
    "encode_item",
    "first_loop",
    "load_suite",
    "parse_method",
    "run_bench",
    "select",
]
