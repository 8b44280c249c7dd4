"""Public suites: counts, the fixed sample, the cache directory, fetching. Files are made up; nothing is fetched."""

import io
import itertools
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from foretell.bench import named
from foretell.bench.answers import AnswerCheck
from foretell.bench.named import MT_BENCH, NAMED, SPEC_BENCH_TASKS, described, read_suite, sample, suite_file
from foretell.bench.suite import Item, Suite
from foretell.core.errors import ConfigError


def spec_bench(leave_out: set[int] | None = None) -> list[dict[str, Any]]:
    """Lines with Spec-Bench's ids and categories, and texts of our own."""
    lines = []
    for task, ids in SPEC_BENCH_TASKS.items():
        for at in ids:
            category = MT_BENCH[(at - 81) // 10] if task == "mt_bench" else task
            turns = [f"{task} {at}", "Say it again."] if task == "mt_bench" else [f"{task} {at}"]
            if at not in (leave_out or ()):
                lines.append({"question_id": at, "category": category, "turns": turns})
    return lines


def put(file: Path, lines: list[dict[str, Any]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of its own, and no network."""
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(urllib.request, "urlopen", no_network)
    return tmp_path / "cache"


def no_network(url: str, timeout: float) -> io.BytesIO:
    raise urllib.error.URLError("Name or service not known")


def test_the_stated_sizes() -> None:
    assert sum(named.SPEC_BENCH_COUNTS.values()) == NAMED["spec-bench"].num_questions == 480
    assert sum(map(len, SPEC_BENCH_TASKS.values())) == 480
    assert [name for name in NAMED if name.startswith("eagle/") and NAMED[name].num_questions == 80] == [
        "eagle/mt_bench", "eagle/humaneval", "eagle/gsm8k", "eagle/alpaca", "eagle/sum", "eagle/qa"
    ]  # fmt: skip


def test_spec_bench_whole(cache: Path) -> None:
    put(suite_file("spec-bench"), spec_bench())
    suite = read_suite("spec-bench")
    assert suite_file("spec-bench") == cache / "suites" / "spec-bench.jsonl"
    assert (suite.name, len(suite.items), suite.notes) == ("spec-bench", 480, [])
    assert {item.group for item in suite.items} == set(SPEC_BENCH_TASKS)
    assert sum(len(item.later) for item in suite.items) == 80


def test_other_counts_are_said(tmp_path: Path) -> None:
    short = read_suite(put(tmp_path / "mine.jsonl", spec_bench({90, 170})))
    assert len(short.items) == 478
    assert short.notes == [
        f"suite {tmp_path / 'mine.jsonl'} (Spec-Bench's questions) has 478 questions; 480 are stated for it"
    ]
    lines = spec_bench()
    lines[100]["question_id"] = lines[101]["question_id"]
    assert read_suite(put(tmp_path / "twice.jsonl", lines)).notes == [
        f"suite {tmp_path / 'twice.jsonl'} (Spec-Bench's questions) has 1 questions whose id another one has"
    ]
    lines = [{"question_id": at, "category": "writing", "turns": ["x", "y"]} for at in range(80)]
    put(suite_file("eagle/mt_bench"), lines)
    (note,) = read_suite("eagle/mt_bench").notes
    assert note.startswith(
        "suite eagle/mt_bench has other counts than stated for it: writing 80 for 10, roleplay 0 for 10"
    )


def test_eagle_sets_are_one_task_each() -> None:
    """Word problems are of category math there, as MT-bench's are: the mark before the number tells them apart."""
    line = {"category": "math", "turns": ["1 + 1?"], "reference": ["1+1=<<1+1=2>>2\n#### 2"]}
    put(suite_file("eagle/gsm8k"), [{"question_id": at, **line} for at in range(80)])
    suite = read_suite("eagle/gsm8k")
    assert {item.group for item in suite.items} == {"gsm8k"}
    assert {item.check for item in suite.items} == {AnswerCheck("number", "2.0")}
    assert suite.notes == []


def test_other_files_are_left_as_they_are() -> None:
    other = Suite("x", [Item(1, "qa", "x"), Item(2, "rag", "y")])
    assert described(other) is other


def test_the_sample_is_fixed() -> None:
    """The rule never changes: these ids were written down when it was made."""
    put(suite_file("spec-bench"), spec_bench())
    found = sample(read_suite("spec-bench"), 60)
    by_task: dict[str, list[int]] = {}
    for item in found.items:
        assert isinstance(item.question_id, int)
        by_task.setdefault(item.group, []).append(item.question_id)
    assert by_task == SAMPLE_60
    assert found.name == "spec-bench/sample-1/60"
    assert found.notes == []
    writing = [item.category for item in found.items if item.group == "mt_bench"]
    assert set(writing) == set(MT_BENCH)  # each of the eight before any of them has a second


def test_a_sample_is_a_part_of_every_larger_one() -> None:
    put(suite_file("spec-bench"), spec_bench())
    suite = read_suite("spec-bench")
    sizes = [{item.question_id for item in sample(suite, size).items} for size in (6, 20, 60, 480)]
    assert [len(ids) for ids in sizes] == [6, 20, 60, 480]
    assert all(small < large for small, large in itertools.pairwise(sizes))


def test_the_sample_does_not_depend_on_the_file(tmp_path: Path) -> None:
    """What a file lacks is said, and not replaced by other questions."""
    lacking = {SAMPLE_60["rag"][0], SAMPLE_60["qa"][3]}
    found = sample(read_suite(put(tmp_path / "part.jsonl", spec_bench(lacking)[::-1])), 60)
    everything = {at for ids in SAMPLE_60.values() for at in ids}
    assert {item.question_id for item in found.items} == everything - lacking
    assert found.notes[-1].endswith(
        f"lacks 2 of the 60 questions of the sample: {', '.join(map(str, sorted(lacking)))}"
    )


def test_a_sample_of_another_suite() -> None:
    suite = Suite("mine", [Item(at, "abc"[at % 3], "x") for at in range(30)])
    found = sample(suite, 7)
    assert [sum(item.category == name for item in found.items) for name in "abc"] == [3, 2, 2]
    with pytest.raises(
        ConfigError, match="--sample 2 must be at least 3, one of each task of suite 'mine', and at most 30"
    ):
        sample(suite, 2)
    uneven = Suite("mine", [Item(0, "a", "x"), *(Item(at, "b", "x") for at in range(1, 9))])
    with pytest.raises(ConfigError, match="asks for 2 questions of a, which has 1"):
        sample(uneven, 4)


def test_without_network_it_says_where_to_get_the_file() -> None:
    with pytest.raises(ConfigError) as caught:
        read_suite("eagle/qa")
    said = str(caught.value)
    assert "\n" not in said
    assert all(part in said for part in (
        "suite 'eagle/qa' is not in", "Name or service not known", NAMED["eagle/qa"].url, str(suite_file("eagle/qa")),
        "--suite FILE",
    ))  # fmt: skip
    assert not suite_file("eagle/qa").exists()


def test_it_is_fetched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    data = "".join(json.dumps(line) + "\n" for line in spec_bench()).encode()

    def network(url: str, timeout: float) -> io.BytesIO:
        asked.append(url)
        return io.BytesIO(data)

    monkeypatch.setattr(urllib.request, "urlopen", network)
    assert [len(read_suite("spec-bench").items) for _ in range(2)] == [480, 480]
    assert asked == [NAMED["spec-bench"].url]


def test_a_page_that_is_no_suite_is_not_kept(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: io.BytesIO(b"<html>Not found</html>"))
    with pytest.raises(ConfigError, match=r"could not be fetched \(suite .*line 1: not JSON"):
        read_suite("gsm8k")
    assert list((cache / "suites").iterdir()) == []


def test_a_name_that_is_nearly_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'spec-bench'"):
        read_suite("specbench")


SAMPLE_60: dict[str, list[int]] = {
    "mt_bench": [83, 93, 104, 117, 122, 136, 140, 144, 149, 155],
    "translation": [173, 177, 180, 196, 199, 210, 212, 213, 236, 240],
    "summarization": [242, 253, 261, 263, 270, 272, 277, 297, 310, 314],
    "qa": [327, 330, 336, 346, 355, 362, 373, 380, 384, 387],
    "math_reasoning": [403, 407, 413, 414, 424, 431, 437, 440, 456, 457],
    "rag": [487, 490, 500, 504, 507, 513, 522, 524, 551, 555],
}
