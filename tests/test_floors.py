"""The floors of docs/extend.md: a file imports from its own floor and from lower ones, and no two import each other."""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

import foretell
from tests.structure import arrows, circles, entered, imports, levels, words

ROOT = Path(foretell.__path__[0])
FLOORS = {
    "core": 0,
    "kernels": 0,
    "bundled": 0,
    "checkpoints": 1,
    "verify": 1,
    "costs": 1,
    "planner": 1,
    "theory": 1,
    "model": 2,
    "heads": 2.5,
    "draft": 3,
    "methods": 4,
    "engine": 5,
    "service": 5.5,
    "train": 6,
    "bench": 6,
    "certify": 6,
    "learn": 6.5,
    "analysis": 6,
    "doctor": 7,
    "adapters": 7,
    "server": 7,
    "web": 7,
    "cli": 7,
    "ray": 7,
    "__main__": 7,
}
PUBLIC = 6
"""The floor from which on the package itself (its public names) may be imported: what uses the engine."""
SIBLINGS = {"train", "bench", "certify", "analysis"}
TRANSFORMERS = ("checkpoints", "model")
"""The folders that may import transformers: its configurations and tokenizers, and its models."""


def faults(source: str, path: Path) -> list[str]:
    """What a file (path relative to the package) imports that its floor forbids."""
    part = path.with_suffix("").parts[0]
    if path == Path("__init__.py"):
        return []
    if part not in FLOORS:
        return [f"{path}: {part} stands on no floor: add it to FLOORS and to docs/extend.md"]
    floor, out = FLOORS[part], []
    for name in imports(source, ("foretell", *path.parts[:-1])):
        top, *rest = name.split(".")
        if top == "transformers" and part not in TRANSFORMERS:
            out.append(f"{path}: {name}: only {TRANSFORMERS} import transformers")
        if top != "foretell":
            continue
        other = rest[0] if rest else ""
        if other in FLOORS:
            if FLOORS[other] > floor:
                out.append(f"{path}: {name}: floor {FLOORS[other]} from floor {floor}")
            if {part, other} <= SIBLINGS and part != other:
                out.append(f"{path}: {name}: uses of the engine never import each other")
        elif floor < PUBLIC:
            out.append(f"{path}: {name}: the public names, from floor {floor}")
    return out


FILES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))


def test_imports_go_down() -> None:
    assert [fault for path in FILES for fault in faults((ROOT / path).read_text(encoding="utf-8"), path)] == []


def test_the_planner_knows_nothing_of_models_drafters_and_engines() -> None:
    """Theory, tuning, benchmarks and the engine share its cost model, so it stands below all of them: errors alone."""
    files = [path for path in FILES if path.parts[0] == "planner"]
    assert len(files) > 5
    for path in files:
        for name in imports((ROOT / path).read_text(encoding="utf-8"), ("foretell", "planner")):
            if name.startswith("foretell."):
                assert name.startswith(("foretell.planner.", "foretell.costs.", "foretell.core.")), f"{path}: {name}"


def test_the_page_has_every_folder_on_its_floor() -> None:
    page = (Path(__file__).parents[1] / "docs" / "extend.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([0-9.]+) \| ([^|]+) \|", page, flags=re.MULTILINE)
    told = {folder: float(floor) for floor, folders in rows for folder in re.findall(r"`([^`]+)`", folders)}
    assert told == FLOORS


def test_folders_name_the_floor_that_they_stand_on() -> None:
    found = 0
    for part, floor in FLOORS.items():
        file = ROOT / part / "__init__.py"
        if file.exists() and (named := re.search(r"Floor ([0-9.]+):", file.read_text(encoding="utf-8"))):
            found += 1
            assert float(named[1]) == floor, f"{part} says that it stands on floor {named[1]}"
    assert found > 8


def test_every_floor_has_files() -> None:
    assert {path.parts[0] for path in FILES} >= {"__init__.py", "core", "verify", "model", "draft", "methods", "engine"}


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("core/tree.py", "from foretell.verify import draw"),
        ("verify/x.py", "import foretell.model.target"),
        ("verify/x.py", "from foretell import model"),
        ("verify/x.py", "from ..model import target"),
        ("verify/x.py", "from .. import engine"),
        ("draft/x.py", "def f() -> None:\n    from foretell.engine import step"),
        ("draft/x.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import foretell.cli.main"),
        ("engine/x.py", "from foretell import Engine"),
        ("engine/x.py", "import foretell"),
        ("bench/x.py", "from foretell.train import loop"),
        ("methods/eagle/training.py", "from foretell.train.making import Recipe"),
        ("engine/x.py", "def f() -> None:\n    import transformers.models"),
        ("core/noise.py", "from transformers import AutoTokenizer"),
        ("attic/x.py", "import math"),
    ],
)
def test_control_imports_that_go_up_are_caught(path: str, source: str) -> None:
    assert len(faults(source, Path(path))) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("__init__.py", "from foretell.engine.engine import Engine"),
        ("verify/x.py", "from foretell.core.tree import DrawnBy\nfrom . import base\nfrom ..core.noise import mix"),
        ("model/x.py", "import transformers\nfrom foretell.core.probs import logits_to_probs"),
        ("bench/x.py", "from foretell import Engine\nfrom foretell.engine.step import step"),
        ("cli/x.py", "import foretell\nimport foretell.bench.run"),
        ("draft/x.py", "import foretells"),
    ],
)
def test_imports_that_go_down_pass(path: str, source: str) -> None:
    assert faults(source, Path(path)) == []


def folders_with_circles(root: Path) -> set[str]:
    """The first folder of the files of each circle; several, where files of several are in one."""
    return {" and ".join(sorted({file.partition("/")[0] for file in circle})) for circle in circles(arrows(root))}


def test_no_two_files_import_each_other() -> None:
    assert folders_with_circles(ROOT) == set()


def test_no_two_folders_import_each_other() -> None:
    """A folder is a floor: among whole folders there is no circle either, but for trees and noise and their C code."""
    graph = arrows(ROOT)
    folders = {
        folder: frozenset(
            other.partition("/")[0] for file in graph if file.startswith(f"{folder}/") for other in graph[file]
        )
        for folder in FLOORS
    }
    folders = {folder: (others & FLOORS.keys()) - {folder} for folder, others in folders.items()}
    assert circles(folders) == [["core", "kernels"]]


MOST_LINES = {"src": 82_561, "tests": 94_691}
"""Of Python. A change that raises a number says in its commit what that buys; the aims are 72,000 and 78,000."""
MOST_TWICE, MOST_UNFORMATTED = 21, 376
"""Names of classes that two files of the package have, and places that the formatter leaves as they are."""


def lines(folder: Path) -> int:
    """Of all Python files under a folder."""
    return sum(file.read_text(encoding="utf-8").count("\n") for file in folder.rglob("*.py"))


def twice(texts: Mapping[Path, str]) -> set[str]:
    """Names of classes that stand at the top of several files."""
    count = Counter(name for text in texts.values() for name in re.findall(r"^class (\w+)", text, flags=re.MULTILINE))
    return {name for name, times in count.items() if times > 1}


def test_the_tree_has_a_size() -> None:
    root = Path(__file__).parents[1]
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file in FILES}
    assert {folder: lines(root / folder) for folder in MOST_LINES if lines(root / folder) > MOST_LINES[folder]} == {}
    assert len(found := twice(texts)) <= MOST_TWICE, sorted(found)
    assert sum(text.count("# fmt: skip") for text in texts.values()) <= MOST_UNFORMATTED


def test_control_lines_and_names_are_counted(package: Path) -> None:
    (package / "a.py").write_text("class One:\n    pass\n")
    (package / "b.py").write_text("class One:\n    pass\n\n\nclass Two: ...\n")
    assert lines(package) == 2 + 5 + 1
    assert twice({file: file.read_text() for file in package.glob("*.py")}) == {"One"}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package without circles: c imports b, which imports a, and the folder ``low`` its own file."""
    root = tmp_path / "foretell"
    (root / "low").mkdir(parents=True)
    files = {
        "a": "import math",
        "b": "from foretell import a",
        "c": "from foretell.b import value\nfrom foretell.low import floor",
        "low/__init__": "from .floor import floor",
        "low/floor": "floor = 0",
    }
    for name, text in files.items():
        (root / f"{name}.py").write_text(text)
    return root


def test_a_package_whose_imports_go_one_way_has_no_circles(package: Path) -> None:
    graph = arrows(package)
    assert graph["c"] == {"b", "low/floor"}
    assert folders_with_circles(package) == set()
    assert levels(graph) == {"a": 0, "b": 1, "c": 2, "low/__init__": 1, "low/floor": 0}


@pytest.mark.parametrize(
    ("file", "text", "found"),
    [
        ("a", "from foretell.b import value", [["a", "b"]]),
        ("a", "def f() -> None:\n    import foretell.c", [["a", "b", "c"]]),
        ("a", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import c", [["a", "b", "c"]]),
        ("low/floor", "from foretell.low import other", [["low/__init__", "low/floor"]]),
    ],
)
def test_control_circles_are_found(package: Path, file: str, text: str, found: list[list[str]]) -> None:
    (package / f"{file}.py").write_text(text)
    graph = arrows(package)
    assert circles(graph) == found
    assert folders_with_circles(package) != set()
    assert len({levels(graph)[name] for name in found[0]}) == 1


def test_files_that_a_call_enters_are_counted() -> None:
    from foretell.core.spec import parse_spec
    from foretell.verify import VERIFIERS

    assert entered(lambda: None) == set()
    found = entered(lambda: parse_spec("typical/epsilon=0.2", VERIFIERS, "verifier"))
    assert {"core/spec", "core/registry"} <= found <= {path.with_suffix("").as_posix() for path in FILES}


def test_words_of_the_documents_are_counted() -> None:
    told = words(Path(__file__).parents[1])
    assert min(told["README.md"], told["docs/README.md"], told["docs/LOG.md"]) > 100
