"""The floors of DESIGN.md section 3: a file imports only from its own floor and from lower ones."""

import ast
from pathlib import Path

import pytest

import foretoken

ROOT = Path(foretoken.__path__[0])
FLOORS = {
    "core": 0,
    "tree": 0,
    "bounds": 0,
    "sampling": 0,
    "noise": 0,
    "errors": 0,
    "registry": 0,
    "builtin": 0,
    "journal": 0,
    "spec": 0,
    "cachedir": 0,
    "provenance": 0,
    "build": 0,
    "verify": 1,
    "planner": 1,
    "theory": 1,
    "model": 2,
    "bundled": 2,
    "heads": 2,
    "draft": 3,
    "engine": 4,
    "train": 5,
    "bench": 5,
    "certify": 5,
    "tune": 5,
    "server": 6,
    "web": 6,
    "cli": 6,
    "ray": 6,
}
PUBLIC = 5
"""The floor from which on the package itself (its public names) may be imported: what uses the engine."""
SIBLINGS = {"train", "bench", "certify", "tune"}
TRANSFORMERS_FLOOR = 2


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
    part = path.parts[0].removesuffix(".py")
    if path == Path("__init__.py"):
        return []
    if part not in FLOORS:
        return [f"{path}: {part} stands on no floor: add it to FLOORS and to DESIGN.md section 3"]
    floor, out = FLOORS[part], []
    for name in imports(source, ("foretoken", *path.parts[:-1])):
        top, *rest = name.split(".")
        if top == "transformers" and floor != TRANSFORMERS_FLOOR:
            out.append(f"{path}: {name}: only floor {TRANSFORMERS_FLOOR} imports transformers")
        if top != "foretoken":
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


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_go_down(path: Path) -> None:
    assert faults((ROOT / path).read_text(encoding="utf-8"), path) == []


def test_the_planner_knows_nothing_of_models_drafters_and_engines() -> None:
    """Theory, tuning, benchmarks and the engine share its cost model, so it stands below all of them: errors alone."""
    files = [path for path in FILES if path.parts[0] == "planner"]
    assert len(files) > 5
    for path in files:
        for name in imports((ROOT / path).read_text(encoding="utf-8"), ("foretoken", "planner")):
            if name.startswith("foretoken."):
                assert name.split(".")[1] in ("planner", "errors", "cachedir", "provenance"), f"{path}: {name}"


def test_every_floor_has_files() -> None:
    assert {path.parts[0] for path in FILES} >= {"__init__.py", "tree.py", "verify", "model", "draft", "engine"}


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("tree.py", "from foretoken.verify import draw"),
        ("verify/x.py", "import foretoken.model.target"),
        ("verify/x.py", "from foretoken import model"),
        ("verify/x.py", "from ..model import target"),
        ("verify/x.py", "from .. import engine"),
        ("draft/x.py", "def f() -> None:\n    from foretoken.engine import step"),
        ("draft/x.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import foretoken.cli.main"),
        ("engine/x.py", "from foretoken import Engine"),
        ("engine/x.py", "import foretoken"),
        ("bench/x.py", "from foretoken.train import loop"),
        ("engine/x.py", "def f() -> None:\n    import transformers.models"),
        ("noise.py", "from transformers import AutoTokenizer"),
        ("attic/x.py", "import math"),
    ],
)
def test_control_imports_that_go_up_are_caught(path: str, source: str) -> None:
    assert len(faults(source, Path(path))) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("__init__.py", "from foretoken.engine.engine import Engine"),
        ("verify/x.py", "from foretoken.tree import Law\nfrom . import law\nfrom ..noise import mix"),
        ("model/x.py", "import transformers\nfrom foretoken.sampling import warp"),
        ("bench/x.py", "from foretoken import Engine\nfrom foretoken.engine.step import step"),
        ("cli/x.py", "import foretoken\nimport foretoken.bench.run"),
        ("draft/x.py", "import foretokens"),
    ],
)
def test_imports_that_go_down_pass(path: str, source: str) -> None:
    assert faults(source, Path(path)) == []
