"""The floors of docs/extend.md: a file imports only from its own floor and from lower ones."""

import ast
import re
from pathlib import Path

import pytest

import foretell

ROOT = Path(foretell.__path__[0])
FLOORS = {
    "core": 0,
    "kernels": 0,
    "verify": 1,
    "planner": 1,
    "analysis/theory": 1,
    "model": 2,
    "methods/common": 2,
    "bundled": 2,
    "draft": 3,
    "methods": 4,
    "engine": 5,
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
TRANSFORMERS_FLOOR = 2


def part_of(names: tuple[str, ...]) -> str:
    """The entry of FLOORS that a path or a dotted name belongs to: the longest."""
    two = "/".join(names[:2])
    return two if two in FLOORS else names[0] if names else ""


def imports(source: str, package: tuple[str, ...]) -> list[str]:
    """Absolute dotted names of all that a file imports, anywhere in it: names of ``from a import b`` as a.b."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            found += [f"{prefix}.{name.name}" for name in node.names]
    return found


def faults(source: str, path: Path) -> list[str]:
    """What a file (path relative to the package) imports that its floor forbids."""
    part = part_of(path.with_suffix("").parts)
    if path == Path("__init__.py"):
        return []
    if part not in FLOORS:
        return [f"{path}: {part} stands on no floor: add it to FLOORS and to docs/extend.md"]
    floor, out = FLOORS[part], []
    for name in imports(source, ("foretell", *path.parts[:-1])):
        top, *rest = name.split(".")
        if top == "transformers" and floor != TRANSFORMERS_FLOOR:
            out.append(f"{path}: {name}: only floor {TRANSFORMERS_FLOOR} imports transformers")
        if top != "foretell":
            continue
        other = part_of(tuple(rest))
        if other in FLOORS:
            if FLOORS[other] > floor:
                out.append(f"{path}: {name}: floor {FLOORS[other]} from floor {floor}")
            if {part, other} <= SIBLINGS and part != other:
                out.append(f"{path}: {name}: uses of the engine never import each other")
        elif floor < PUBLIC:
            out.append(f"{path}: {name}: the public names, from floor {floor}")
    return out


FILES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_go_down(path: Path) -> None:
    assert faults((ROOT / path).read_text(encoding="utf-8"), path) == []


def test_the_planner_knows_nothing_of_models_drafters_and_engines() -> None:
    """Theory, tuning, benchmarks and the engine share its cost model, so it stands below all of them: errors alone."""
    files = [path for path in FILES if path.parts[0] == "planner"]
    assert len(files) > 5
    for path in files:
        for name in imports((ROOT / path).read_text(encoding="utf-8"), ("foretell", "planner")):
            if name.startswith("foretell."):
                assert name.startswith(("foretell.planner.", "foretell.core.")), f"{path}: {name}"


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
