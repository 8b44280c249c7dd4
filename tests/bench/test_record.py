"""Reports from files: the same values again, CSV, comparisons, and the page."""

import csv
import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from foretell.bench.page import page
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


class Balanced(HTMLParser):
    """Counts elements, and whether every one is closed."""

    VOID = frozenset({"meta", "line", "circle", "rect", "polyline"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_is_whole_and_needs_nothing_else() -> None:
    found = made()
    text = page(found, ["It <is> faster."])
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    assert parser.seen.count("svg") == 3
    assert "It <is> faster." in "".join(parser.text)
    assert not re.search(r"(?:src|href)=", text)
    speedup = found.temperatures[0].methods[1].overall.speedup.value
    assert f"{speedup:.2f}" in "".join(parser.text)
    assert "prefers-color-scheme: dark" in text


def test_no_mark_stands_outside_the_picture() -> None:
    """Every coordinate of every mark is inside its picture."""
    for drawing in re.findall(r"<svg.*?</svg>", page(made(), []), flags=re.DOTALL):
        size = re.search(r'viewBox="0 0 (\d+) (\d+)"', drawing)
        assert size is not None
        width, height = map(float, size.groups())
        for name, most in (("x1", width), ("x2", width), ("cx", width), ("y1", height), ("y2", height), ("cy", height)):
            values = [float(value) for value in re.findall(rf' {name}="([-\d.]+)"', drawing)]
            assert all(0 <= value <= most for value in values)


def test_a_page_of_plain_decoding_alone(tmp_path: Path) -> None:
    found = made()
    alone = json.loads(as_json(found.to_dict()))
    alone["temperatures"][0]["methods"] = alone["temperatures"][0]["methods"][:1]
    file = tmp_path / "plain.json"
    file.write_text(json.dumps(alone))
    assert "<svg" not in page(read_report(file), [])
