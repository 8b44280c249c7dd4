"""Planted bugs: every one in ``bugs.toml`` must be caught by the tests that it names.

A bug is a replacement of source text, found wherever in the package that text stands, so that the list outlives moves of
files. ``needs`` names the variant of the native kernels in which it is, where that is not every one; ``isa`` the one that
its kernels are built for, on CPUs that run it; ``emulated``: its tests run another machine's, under an emulator. ``hangs``
says that its tests never end, and after how many seconds that is certain; without it a bug whose tests are ended from
outside is not caught, for a slow machine would catch it as well. The quick tests keep the list honest; the slow ones plant
each bug in a copy of the package and run its tests.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections import defaultdict
from functools import cache
from importlib.util import cache_from_source
from math import isinf
from pathlib import Path
from typing import Any

import pytest

import foretell
from foretell.kernels.build import BuildError, variants_of
from foretell.kernels.native import variant
from tests.cputime import known
from tests.kernels.emulator import missing
from tests.processes import quick_compiler
from tests.stress import MINUTES
from tests.until import REASON, UNTIL

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PACKAGE = Path(foretell.__file__).parent
BUGS: list[dict[str, Any]] = tomllib.loads((HERE / "bugs.toml").read_text())["bug"]
AREAS = ("verify", "tree", "noise", "sampling", "cache", "commit", "advance", "planner", "draft", "service")
PLAIN_FIXTURES = {"tmp_path", "monkeypatch", "capsys", "caplog"}
NUM_PARTS = 2  # each imports for seconds
TIMEOUT_S = 180.0  # for the tests of one bug
TIME_WAS_UP = 124  # as ``runner.py`` reports it


def sources() -> dict[Path, str]:
    """The package's files by path within it."""
    paths = sorted(path for suffix in ("py", "c", "h") for path in PACKAGE.rglob(f"*.{suffix}"))
    return {path.relative_to(PACKAGE): path.read_text() for path in paths}


def homes(old: str, files: dict[Path, str]) -> list[Path]:
    """The files in which a text stands, one entry for each time."""
    return [path for path, text in files.items() for _ in range(text.count(old))]


def copy_of_package(directory: Path, files: dict[Path, str], bug: dict[str, Any] | None) -> Path:
    """A directory for PYTHONPATH with a copy of the package, one bug in it. All other files are links.

    Compiled files are linked too, but for the bug's: compiling the package costs more than most of the tests. Python puts
    a new one in the place of such a link, and leaves the file alone.
    """
    package = directory / "foretell"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("bundled"), copy_function=os.symlink)
    (package / "bundled").symlink_to(PACKAGE / "bundled", target_is_directory=True)
    if bug is not None:
        (home,) = homes(bug["old"], files)
        Path(cache_from_source(package / home)).unlink(missing_ok=True)
        (package / home).unlink()  # the link: what is written next must not go to the package itself
        (package / home).write_text(files[home].replace(bug["old"], bug["new"]))
    return directory


def escape(bug: dict[str, Any], code: int) -> str:
    """Why pytest's exit code does not show that a bug is caught; "" where it does."""
    if code == 1 or (code == TIME_WAS_UP and "hangs" in bug):
        return ""
    if code == TIME_WAS_UP:
        return f"its tests were ended after {TIMEOUT_S:.0f} s and none had failed: say 'hangs' if that is how it shows"
    return f"exit code {code}"


def until() -> dict[str, float]:
    """When no bug is planted any more, where there is an end: seven eighths of the time are for the other tests."""
    return {} if isinf(UNTIL) else {"until": (7 * time.time() + UNTIL) / 8}


def changed_lately(days: int = 1) -> set[Path]:
    """The package's files that commits of the last days touched, by path within it; none where git says nothing."""
    command = ["git", "log", f"--since={days}.days", "--name-only", "--format=", "--", str(PACKAGE)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    inside = PACKAGE.relative_to(ROOT)
    return {
        Path(name).relative_to(inside) for name in done.stdout.split("\n") if name.startswith(f"{inside.as_posix()}/")
    }


def results(jobs: list[dict[str, Any]]) -> list[dict[str, Any] | None]:
    """What ``runner.py`` found; None of jobs that no time was left for."""
    done = subprocess.run(
        [sys.executable, str(HERE / "runner.py")],
        input=json.dumps(jobs),
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60 + TIMEOUT_S * len(jobs),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


# -- the list --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found() -> dict[str, list[Path]]:
    """Where the text of each bug is found."""
    files = sources()
    return {bug["id"]: homes(bug["old"], files) for bug in BUGS}


def test_the_text_of_every_bug_is_there_once(found: dict[str, list[Path]]) -> None:
    lost = {name: len(places) for name, places in found.items() if len(places) != 1}
    assert not lost, f"times that the text to be replaced was found: {lost}; give the text as it stands now"


def definitions(text: str) -> list[tuple[int, int]]:
    """The first and last line of every function and class, and of the whole text: the shortest first, lines from 0."""
    found = [
        (node.lineno - 1, node.end_lineno or 0)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    return sorted([*found, (0, text.count("\n") + 1)], key=lambda span: span[1] - span[0])


def dump(lines: list[str]) -> str:
    """The code of lines that are a whole text, or a function or class in one."""
    return ast.dump(ast.parse("\n".join(["if True:", *lines] if lines[0].startswith(" ") else lines)))


def test_every_bug_changes_the_code_and_no_two_are_the_same(found: dict[str, list[Path]]) -> None:
    """Of Python files the function or class around a bug is compared: reading the whole of each file takes seconds."""
    files, changed = sources(), {}
    spans = cache(lambda home: definitions(files[home]))
    for bug in BUGS:
        (home,) = found[bug["id"]]
        before, text = files[home], files[home].replace(bug["old"], bug["new"])
        if home.suffix == ".py":  # what is C is compiled by the tests that catch it
            at = before[: before.index(bug["old"])].count("\n")
            end = at + bug["old"].count("\n") + 1
            first, last = next(span for span in spans(home) if span[0] <= at and end <= span[1])
            longer = text.count("\n") - before.count("\n")
            assert dump(text.split("\n")[first : last + longer]) != dump(before.split("\n")[first:last]), bug["id"]
        assert text != before, bug["id"]
        changed[home, text] = bug["id"]
    assert len(changed) == len(BUGS) == len({bug["id"] for bug in BUGS}) >= 42
    for area in AREAS:
        assert sum(bug["id"].startswith(area + "-") for bug in BUGS) >= 1, area


def test_the_tests_that_catch_them_exist() -> None:
    """Names are read from the text: a tree of every test file takes a second and a half, too much for the quick run."""

    @cache
    def names(path: str) -> dict[str, bool]:
        """The functions of a file, and whether something may give one cases: a decorator, or a fixture of its own."""
        text = (ROOT / path).read_text()
        parts, for_all = re.split(r"^def (\w+)\(([^)]*)\)", text, flags=re.MULTILINE), "autouse=True" in text
        found = zip(parts[::3], parts[1::3], parts[2::3], strict=False)
        return {
            name: for_all
            or bool(above.rpartition("\n\n\n")[2].strip() or set(re.findall(r"(\w+):", given)) - PLAIN_FIXTURES)
            for above, name, given in found
        }

    nodes = [(bug["id"], *node.split("::")) for bug in BUGS for node in bug["tests"]]
    lost = [
        f"{bug}: {path}::{node}"
        for bug, path, node in nodes
        if (has_cases := names(path).get(node.split("[")[0])) is None or ("[" in node and not has_cases)
    ]
    assert nodes
    assert not lost


def test_a_timeout_is_no_failure_unless_the_bug_says_so() -> None:
    assert escape({}, 1) == escape({"hangs": 5}, 1) == escape({"hangs": 5}, TIME_WAS_UP) == ""
    assert "ended after 180 s and none had failed" in escape({}, TIME_WAS_UP)
    for code in (0, 2, 5, 98, 99):  # passed, interrupted, nothing collected, another package, the runner failed
        assert escape({"hangs": 5}, code) == escape({}, code) == f"exit code {code}"


# -- planted ---------------------------------------------------------------------------------------------------------


def job(directory: Path, files: dict[Path, str], bug: dict[str, Any] | None, tests: list[str]) -> dict[str, Any]:
    """For ``runner.py``. directory: of all jobs; where C is changed, kernels are built there, without optimising."""
    source = directory / (bug["id"] if bug else "none")
    made = {"src": str(copy_of_package(source, files, bug)), "tests": tests, "timeout_s": TIMEOUT_S}
    return {**made, "environment": unoptimised(directory, bug)} if bug and is_c(bug, files) else made


def is_c(bug: dict[str, Any], files: dict[Path, str]) -> bool:
    return homes(bug["old"], files)[0].suffix != ".py"


def unoptimised(directory: Path, bug: dict[str, Any]) -> dict[str, str]:
    """Settings by which kernels are built quickly, and none is left in the user's cache."""
    # The quickest to build, where the CPU has it, but for bugs in what only a later one runs.
    isa = {} if "needs" in bug else {"FORETELL_ISA": bug.get("isa", "avx512")}
    return {"CC": str(quick_compiler(directory)), "FORETELL_CACHE": str(directory / "kernels"), **isa}


def can_be_planted(bug: dict[str, Any]) -> bool:
    """Whether this CPU runs what the bug is in."""
    try:
        runs = variants_of("native")
    except BuildError:
        runs = []
    if "emulated" in bug and missing:
        return False
    return bug.get("needs") in (None, variant()) and ("isa" not in bug or bug["isa"] in runs)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_every_planted_bug_is_caught(part: int, tmp_path: Path) -> None:
    files = sources()
    mine = [bug for bug in BUGS[part::NUM_PARTS] if can_be_planted(bug)]
    touched = changed_lately()
    mine.reverse()
    mine.sort(key=lambda bug: homes(bug["old"], files)[0] not in touched)  # changed files first, the newest of each
    end = until()
    jobs = [
        {**job(tmp_path, files, bug, bug["tests"]), "timeout_s": bug.get("hangs", TIMEOUT_S), **end} for bug in mine
    ]
    escaped, left = [], 0
    for bug, found in zip(mine, results(jobs), strict=True):
        if found is None:
            left += 1
        elif why := escape(bug, found["code"]):
            escaped.append(f"{bug['id']} ({bug['what']}): {why}\n{found['output']}")
    assert not escaped, "\n".join(escaped)
    if left:
        pytest.skip(f"{REASON}: {left} of {len(mine)} bugs were not planted, all others were caught")


def cheapest(tests: set[str]) -> list[str]:
    """Of each file the test that costs least, with all its cases."""
    seconds = known().seconds

    def cost(node: str) -> float:
        return sum(one for name, one in seconds.items() if name == node or name.startswith(f"{node}["))

    by_file: dict[str, list[str]] = defaultdict(list)
    for node in sorted(tests):
        by_file[node.split("::")[0]].append(node)
    return [min(nodes, key=cost) for nodes in by_file.values()]


@pytest.fixture(scope="module")
def controls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the runner says where no bug is planted. One run for all: it imports for seconds."""
    directory, files = tmp_path_factory.mktemp("controls"), sources()
    endless = directory / "test_endless.py"
    endless.write_text("import time\n\n\ndef test_endless():\n    time.sleep(600)\n")
    lists = directory / "test_long_lists.py"
    lists.write_text(
        "def test_lists():\n    assert [[i % 5] for i in range(900)] == [[i * i % 5] for i in range(900)]\n"
    )
    tests = {node for bug in BUGS for node in bug["tests"]}
    in_c = [bug for bug in BUGS if is_c(bug, files) and can_be_planted(bug)]
    in_c = in_c if isinf(UNTIL) else in_c[::4]
    whole = next(bug for bug in BUGS if any(f"{bug['old']}\n" in text for text in files.values()))  # to a line's end
    harmless = {**whole, "new": f"{whole['old']}  # the same"}
    none = job(directory, files, None, sorted(tests) if MINUTES else cheapest(tests))
    jobs = {
        "none": {**none, "timeout_s": 4 * TIMEOUT_S},
        **{
            f"{bug['id']} is not there": {**none, "tests": bug["tests"], "environment": unoptimised(directory, bug)}
            for bug in in_c
        },
        "endless": {**none, "tests": [str(endless)], "timeout_s": 3.0},
        "long lists": {**none, "tests": [str(lists)], "timeout_s": 20.0, "environment": {"CI": "true"}},
        "harmless": job(directory, files, harmless, harmless["tests"]),
    }
    found = results([{**one, **({} if isinf(UNTIL) else {"until": UNTIL})} for one in jobs.values()])
    if None in found:
        pytest.fail(f"{REASON}: controls of planted bugs")
    return {name: one for name, one in zip(jobs, found, strict=True) if one is not None}


@pytest.mark.slow
def test_control_without_a_bug_the_same_tests_pass(controls: dict[str, dict[str, Any]]) -> None:
    """The copy, not a bug, could be what makes tests fail. One test of each file, or all where minutes are given."""
    assert controls["none"]["code"] == 0, controls["none"]["output"]


@pytest.mark.slow
def test_control_kernels_that_are_not_optimised_pass_too(controls: dict[str, dict[str, Any]]) -> None:
    found = {name: one["output"] for name, one in controls.items() if "is not there" in name and one["code"]}
    assert not found, "\n".join(found.values())


@pytest.mark.slow
def test_control_tests_that_do_not_end_are_told_apart(controls: dict[str, dict[str, Any]]) -> None:
    """A bug that hangs, with a test that would else pass: the runner says that the time was up, not that a test failed."""
    assert controls["endless"]["code"] == TIME_WAS_UP
    assert "say 'hangs'" in escape(BUGS[0], controls["endless"]["code"])


@pytest.mark.slow
def test_control_a_long_difference_is_not_worked_out(controls: dict[str, dict[str, Any]]) -> None:
    """Where ``CI`` is set pytest would take minutes to say how two long lists differ, and the bug would seem to hang."""
    assert controls["long lists"]["code"] == 1, controls["long lists"]["output"]


@pytest.mark.slow
def test_control_a_change_that_is_no_bug_escapes(controls: dict[str, dict[str, Any]]) -> None:
    """Negative control of the runner: a comment, planted like a bug, must not count as caught."""
    assert controls["harmless"]["code"] == 0, controls["harmless"]["output"]
