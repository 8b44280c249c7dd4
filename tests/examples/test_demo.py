"""``make demo``: which model it shows, and that its verdict is about the tokens."""

import importlib.util
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from foretell import Engine
from foretell.checkpoints import catalogue
from tests.cli import checkpoint

FILE = Path(__file__).resolve().parents[2] / "examples" / "demo.py"


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def shown(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was shown, in place of showing it."""
    seen: list[str] = []
    monkeypatch.setattr(demo, "real", lambda: seen.append("real") or 0)
    monkeypatch.setattr(demo, "tiny", lambda: seen.append("tiny") or 0)
    return seen


def test_without_network_the_tiny_pair_and_one_line(
    demo: ModuleType, shown: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main() == 0
    assert shown == ["tiny"]
    line = "the tiny bundled pair instead of smollm2-135m: smollm2-135m is not here, and FORETELL_OFFLINE is set: it "
    assert capsys.readouterr().out == f"{line}cannot be fetched\n\n"


def test_smollm2_where_it_is_here(
    demo: ModuleType, shown: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORETELL_MODELS", str(tmp_path))
    file = catalogue.place(catalogue.CATALOGUE[catalogue.DEFAULT])
    file.parent.mkdir()
    file.write_bytes(b"")
    assert demo.main() == 0
    assert shown == ["real"]


def test_race(demo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Plain against speculative on a tiny model: identical."""
    engine = Engine.load(str(checkpoint.save(tmp_path / "model")), speculative="ngram", implementation="lean")
    assert demo.race(engine, ["def the", "import self"], "tiny", temperature=0.7, rounds=1) == 0
    out = capsys.readouterr().out
    assert out.startswith("tiny (lean, float32, method ngram): plain ")
    assert "tokens identical (median of 1 rounds)" in out


def test_control_other_tokens_are_said(demo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Engines whose tokens differ: DIFFERENT, and exit status 1."""

    def engine(token: int) -> Any:
        done = SimpleNamespace(seconds_decode=1.0, num_tokens=1, token_ids=[token])
        spec = SimpleNamespace(implementation="fake", dtype="torch.float32")
        return SimpleNamespace(
            generate=lambda prompt, **options: done,
            forget=lambda: None,
            model=SimpleNamespace(spec=spec),
            speculative=SimpleNamespace(method="x"),
        )

    guessing = engine(1)
    guessing.with_method = lambda method: engine(2)
    assert demo.race(guessing, ["a"], "fake", temperature=0.0) == 1
    assert "tokens DIFFERENT" in capsys.readouterr().out


@pytest.mark.slow
def test_the_whole_of_it_without_network(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tiny pair's demo, as make runs it, but for how costly its target is made and how often it is raced."""
    sizes = ["--hidden", "288", "--layers", "7", "--intermediate", "800", "--heads", "8", "--kv-heads", "4"]
    monkeypatch.setattr(demo, "tiny", partial(demo.tiny, sizes=sizes, rounds=1))
    assert demo.main() == 0
    out = capsys.readouterr().out
    assert "FORETELL_OFFLINE" in out
    assert "tokens identical (median of 1 rounds)" in out
