"""``foretell cache``: what is kept on the disk is told, and deleted where that was said, and nothing else."""

import json
from pathlib import Path

import pytest

from foretell.checkpoints.catalogue import CATALOGUE
from foretell.cli.commands import cache
from tests.cli.conftest import Invoke

MODEL = next(iter(CATALOGUE))


@pytest.fixture
def kept(tmp_path: Path) -> dict[str, str]:
    """The environment of a cache with something of each kind, and with what is not foretell's."""
    root, models = tmp_path / "cache", tmp_path / "models"
    for name, size in (
        ("native-avx2-1.so", 5000), ("race-avx2-2.so", 1000), ("tmpabc/code.so", 300), ("costs/1.json", 20),
        ("costs/2.json", 30), ("suites/mt.jsonl", 400), ("history/chat", 7),
        ("notes.txt", 7), ("mine/photo.jpg", 8), ("learned/a.safetensors", 9),
    ):  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x" * size)
    (models / "heads").mkdir(parents=True)
    (models / "heads" / "target.json").write_bytes(b"x" * 600)
    for name in (f"{MODEL}/model.gguf", f".{MODEL}.part/half.incomplete", "own/model.gguf"):
        (models / name).parent.mkdir(parents=True, exist_ok=True)
        (models / name).write_bytes(b"x" * 10_000)
    return {"FORETELL_CACHE": str(root), "FORETELL_MODELS": str(models)}


def files(kept: dict[str, str]) -> set[str]:
    return {
        str(path.relative_to(root)) for root in map(Path, kept.values()) for path in root.rglob("*") if path.is_file()
    }


OWN = {"history/chat", "notes.txt", "mine/photo.jpg", "learned/a.safetensors", "own/model.gguf"}
MODELS = {f"{MODEL}/model.gguf", f".{MODEL}.part/half.incomplete"}
HEADS = {"heads/target.json"}


def test_it_is_listed_with_its_size(invoke: Invoke, kept: dict[str, str]) -> None:
    before = files(kept)
    found = json.loads(invoke("cache", "--json", env=kept).stdout)
    assert {row["kind"]: (row["count"], row["size"]) for row in found["kinds"]} == {
        "kernels": (3, 6300), "costs": (2, 50), "suites": (1, 400), "models": (2, 20_000),
        "heads": (1, 600), "history": (1, 7),
    }  # fmt: skip
    assert found["size"] == 27_357
    shown = invoke("cache", "list", "costs", env=kept).stdout
    assert shown.splitlines()[0].split() == ["costs", "0.0", "MB", "2", *cache.KINDS["costs"].about.split()]
    assert shown.splitlines()[1].endswith(f"in all, in {kept['FORETELL_CACHE']}")
    assert files(kept) == before


def test_clear_takes_all_but_models_and_what_is_not_foretells(invoke: Invoke, kept: dict[str, str]) -> None:
    result = invoke("cache", "clear", "--yes", env=kept)
    assert (result.exit_code, result.stdout) == (0, "deleted: 0.0 MB\n")
    assert files(kept) == OWN | MODELS | HEADS
    again = invoke("cache", "clear", env=kept)
    assert (again.exit_code, again.stdout) == (0, "nothing is kept of kernels, costs, suites\n")


def test_what_is_named_is_deleted_alone(invoke: Invoke, kept: dict[str, str]) -> None:
    before = files(kept)
    assert json.loads(invoke("cache", "clear", "costs", "--yes", "--json", env=kept).stdout) == {"freed": 50}
    assert before - files(kept) == {"costs/1.json", "costs/2.json"}
    assert json.loads(invoke("cache", "clear", "models", "--yes", "--json", env=kept).stdout) == {"freed": 20_000}
    assert before - files(kept) == {"costs/1.json", "costs/2.json"} | MODELS
    assert json.loads(invoke("cache", "clear", "heads", "--yes", "--json", env=kept).stdout) == {"freed": 600}
    assert before - files(kept) == {"costs/1.json", "costs/2.json"} | MODELS | HEADS


def test_nothing_is_deleted_without_an_answer(
    invoke: Invoke, kept: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files(kept)
    refused = invoke("cache", "clear", env=kept)
    assert refused.exit_code == 2
    assert "nothing is deleted without a question or --yes: it would be kernels (0.0 MB), costs" in refused.stderr
    monkeypatch.setattr("typer.testing._NamedTextIOWrapper.isatty", lambda self: True, raising=False)
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda self: True, raising=False)
    for answer in ("n\n", "\n", ""):
        assert invoke("cache", "clear", env=kept, input=answer).exit_code != 0
    assert files(kept) == before
    assert invoke("cache", "clear", env=kept, input="y\n").exit_code == 0
    assert files(kept) == OWN | MODELS | HEADS


def test_a_link_is_not_followed(invoke: Invoke, kept: dict[str, str], tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "dear.txt").write_text("dear")
    root = Path(kept["FORETELL_CACHE"])
    (root / "costs" / "link").symlink_to(elsewhere, target_is_directory=True)
    (root / "tmplink").symlink_to(elsewhere, target_is_directory=True)
    assert invoke("cache", "clear", "--yes", env=kept).exit_code == 0
    assert (elsewhere / "dear.txt").read_text() == "dear"
    assert not (root / "costs" / "link").is_symlink()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("claer",), "action 'claer' must be list or clear; did you mean 'clear'?"),
        (("clear", "kernel"), "'kernel' is no kind of thing that is kept; did you mean 'kernels'?"),
        (("list", "--yes"), "list deletes nothing"),
    ],
)
def test_what_is_refused(invoke: Invoke, kept: dict[str, str], options: tuple[str, ...], says: str) -> None:
    before = files(kept)
    result = invoke("cache", *options, env=kept)
    assert result.exit_code == 2
    assert says in result.stderr
    assert files(kept) == before


def test_a_cache_that_is_absent_is_empty(invoke: Invoke, tmp_path: Path) -> None:
    env = {"FORETELL_CACHE": str(tmp_path / "none"), "FORETELL_MODELS": str(tmp_path / "nothing")}
    assert json.loads(invoke("cache", "--json", env=env).stdout)["size"] == 0
    assert not (tmp_path / "none").exists()
