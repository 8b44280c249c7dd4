"""Reports from files: the same values again, CSV, comparisons."""

import csv
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretell.bench.record import COLUMNS, compare, csv_of, read_report
from foretell.bench.report import BenchReport
from foretell.bench.trace import DecodedRun
from foretell.cli.output import as_json
from foretell.core.errors import ConfigError
from tests.bench.test_report import fast_run, plain_run, report


def made(fast_steps: int = 2) -> BenchReport:
    return report([plain_run(8), plain_run(16)], [fast_run(fast_steps), fast_run(4)])


def slower(run: DecodedRun) -> DecodedRun:
    """By a tenth."""
    return replace(run, steps=[replace(one, ended=1.1 * one.ended, seconds_rest=0.2) for one in run.steps])


def saved(found: BenchReport, file: Path) -> Path:
    return saved_text(found.to_dict(), file)


def saved_text(found: dict[str, Any], file: Path) -> Path:
    file.write_text(as_json(found))
    return file


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = made()
    assert read_report(saved(found, tmp_path / "a.json")) == found


def test_reports_of_before_are_read(tmp_path: Path) -> None:
    """They don't tell of how many questions their messages are."""
    found = made().to_dict()
    for at in found["temperatures"]:
        for method in at["methods"]:
            for figures in (method["overall"], *method["categories"]):
                del figures["num_questions"]
    overall = read_report(saved_text(found, tmp_path / "a.json")).temperatures[0].methods[1].overall
    assert (overall.num_questions, overall.num_independent) == (0, overall.num_prompts)


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "is not JSON"), ("{}", "is no report"), ("[1]", "is no report"), ('{"settings": {}}', "is no report")],
)
def test_other_files_are_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "a.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_report(file)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_report(tmp_path / "none.json")


def test_csv_has_the_reports_figures() -> None:
    found = report([plain_run(8), plain_run(16)], [fast_run(2), plain_run(16)])  # the second prompt gains nothing
    rows = list(csv.DictReader(io.StringIO(csv_of(found))))
    assert tuple(rows[0]) == COLUMNS
    whole = next(row for row in rows if (row["method"], row["category"]) == ("fast", "overall"))
    overall = found.temperatures[0].methods[1].overall
    assert float(whole["speedup"]) == overall.speedup.value
    assert float(whole["speedup_low"]) == overall.speedup.low < overall.speedup.high
    assert [float(rate) for rate in whole["conditional_acceptance_per_pos"].split()] == pytest.approx(
        overall.conditional_acceptance_per_pos, abs=1e-4
    )
    assert {row["category"] for row in rows} == {"overall", "a", "b"}


def test_a_report_against_itself_has_not_changed() -> None:
    found = compare(made(), made())
    assert [one.method for one in found.changes] == ["none", "fast"]
    assert all(one.ratio == 1.0 and not one.is_clear for one in found.changes)
    assert found.only == ([], [])
    assert found.differing == {}


def test_what_changed_and_what_differs() -> None:
    plain = [plain_run(8), plain_run(16)] * 3
    quick = report(plain, [fast_run(2), slower(fast_run(4))] * 3)
    slow = report(plain, [plain_run(8), slower(plain_run(16))] * 3)
    object.__setattr__(slow, "settings", {"seed": 1})
    found = compare(quick, slow)
    fast = next(one for one in found.changes if one.method == "fast")
    assert fast.is_clear
    assert fast.ratio == pytest.approx(fast.speedup[1].value / quick.temperatures[0].methods[1].overall.speedup.value)
    assert found.differing == {"seed": (None, 1)}


def test_one_prompt_shows_no_change() -> None:
    """Its figure has no interval: two runs of it differ by chance alone."""
    one, other = report([plain_run(8)], [fast_run(2)]), report([plain_run(8)], [slower(fast_run(2))])
    change = next(one for one in compare(one, other).changes if one.method == "fast")
    assert change.speedup[0].value != change.speedup[1].value
    assert not change.is_clear
