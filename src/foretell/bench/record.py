"""Reports that were written to a file: read again, as rows of CSV, and two of them compared."""

import csv
import io
import math
import types
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from foretell.bench.report import BenchReport, Figures, MethodReport, TemperatureReport
from foretell.bench.stats import Interval
from foretell.core.errors import ConfigError
from foretell.core.jsontext import parse_json

COLUMNS = (
    "temperature", "method", "exact", "category", "num_prompts", "num_tokens", "num_steps", "seconds_decode",
    "tokens_per_second", "speedup", "speedup_low", "speedup_high", "mean_acceptance_length", "acceptance_rate",
    "num_identical", "share_looped", "draft_cost", "verify_cost", "overhead_cost", "predicted_speedup",
    "predicted_speedup_with_overhead", "share_of_bandwidth", "conditional_acceptance_per_pos",
)  # fmt: skip
"""Of the CSV: one line for each method and category at each temperature, "overall" first."""


def read_report(file: Path | str) -> BenchReport:
    """The report that ``foretell bench --output`` wrote. Raises ConfigError where the file is none."""
    try:
        found = parse_json(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}; expected a report of 'foretell bench --output FILE'") from None
    try:
        report = _build(BenchReport, found)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{file} is no report of 'foretell bench --output FILE' ({type(error).__name__}: {error}): give such a file, "
            "not its .runs.jsonl"
        ) from None
    assert isinstance(report, BenchReport)
    return report


def _build(kind: Any, value: Any) -> Any:
    """A value of JSON as the type that it was written from."""
    if isinstance(kind, type) and is_dataclass(kind):
        if not isinstance(value, dict):
            raise TypeError(f"expected an object for {kind.__name__}")
        hints = get_type_hints(kind)
        known = [field for field in fields(kind) if field.name in value or field.default is MISSING]
        return kind(**{field.name: _build(hints[field.name], value[field.name]) for field in known})
    if get_origin(kind) is list:
        if not isinstance(value, list):
            raise TypeError("expected a list")
        return [_build(get_args(kind)[0], one) for one in value]
    if get_origin(kind) in (Union, types.UnionType):
        return None if value is None else _build(next(arg for arg in get_args(kind) if arg is not type(None)), value)
    if kind is float:  # JSON has no NaN
        return math.nan if value is None else float(value)
    return value


def csv_of(report: BenchReport) -> str:
    """The figures as CSV: a header, then COLUMNS of each method and category at each temperature."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for at in report.temperatures:
        for method in at.methods:
            for figures in (method.overall, *(method.categories if len(method.categories) > 1 else ())):
                writer.writerow([_cell(at, method, figures, name) for name in COLUMNS])
    return out.getvalue()


def _cell(at: TemperatureReport, method: MethodReport, figures: Figures, name: str) -> Any:
    own = {
        "temperature": at.temperature,
        "method": method.label,
        "exact": method.exact,
        "speedup": figures.speedup.value,
        "speedup_low": figures.speedup.low,
        "speedup_high": figures.speedup.high,
        "conditional_acceptance_per_pos": " ".join(f"{rate:.4f}" for rate in figures.conditional_acceptance_per_pos),
    }
    value = own[name] if name in own else getattr(figures, name)
    return "" if value is None else value


@dataclass(frozen=True)
class Change:
    """One method at one temperature, in two reports."""

    temperature: float
    method: str
    speedup: tuple[Interval, Interval]
    tokens_per_second: tuple[float, float]
    mean_acceptance_length: tuple[float, float]

    @property
    def is_clear(self) -> bool:
        """Whether the intervals of the speedup have nothing in common; of one prompt alone there is none."""
        one, other = self.speedup
        if one.is_point or other.is_point:
            return False
        return one.high < other.low or other.high < one.low

    @property
    def ratio(self) -> float:
        """The second speedup over the first."""
        return self.speedup[1].value / self.speedup[0].value if self.speedup[0].value else math.nan


@dataclass(frozen=True)
class Comparison:
    """Two reports side by side."""

    changes: list[Change]
    only: tuple[list[str], list[str]]  # "method at temperature" that only the first, and only the second report has
    differing: dict[str, tuple[Any, Any]]  # settings, versions and machine that are not the same


NOT_COMPARED = {"seconds_measuring", "num_runs", "num_runs_planned", "sandbox", "runs_by_revision"}
"""Settings that say how a run went, not what it measured."""


def compare(one: BenchReport, other: BenchReport) -> Comparison:
    """What changed from one report to another."""
    mine, its = _methods(one), _methods(other)
    changes = [
        Change(
            *key,
            (mine[key].overall.speedup, its[key].overall.speedup),
            (mine[key].overall.tokens_per_second, its[key].overall.tokens_per_second),
            (mine[key].overall.mean_acceptance_length, its[key].overall.mean_acceptance_length),
        )
        for key in mine
        if key in its
    ]
    only = [
        [f"{method} at temperature {temperature:g}" for temperature, method in a if (temperature, method) not in b]
        for a, b in ((mine, its), (its, mine))
    ]
    return Comparison(changes, (only[0], only[1]), dict(_differing(one, other)))


def _methods(report: BenchReport) -> dict[tuple[float, str], MethodReport]:
    return {(at.temperature, method.label): method for at in report.temperatures for method in at.methods}


def _differing(one: BenchReport, other: BenchReport) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Names and both values of what is not the same."""
    for left, right in (
        (one.settings, other.settings),
        (one.provenance.get("versions", {}), other.provenance.get("versions", {})),
        (one.provenance.get("machine", {}), other.provenance.get("machine", {})),
        ({"git_revision": one.provenance.get("git_revision")}, {"git_revision": other.provenance.get("git_revision")}),
    ):
        for name in dict.fromkeys([*left, *right]):
            values = left.get(name), right.get(name)
            if values[0] != values[1] and name not in {*NOT_COMPARED, "load_average", "memory_bytes"}:
                yield name, values


def made_by(report: BenchReport) -> Sequence[str]:
    """The command line that made a report, as words."""
    words = [str(word) for word in report.provenance.get("argv", [])]
    return ["foretell", *words[1:]] if words else []
