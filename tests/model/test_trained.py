"""The head that ``foretell train auto`` has trained is what guesses for its target, until either changes."""

import logging
import os
from pathlib import Path

import pytest

from foretell.cli import settings
from foretell.engine.config import default_drafter
from foretell.model import trained


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A directory with weights that nobody reads."""
    monkeypatch.setenv("FORETELL_MODELS", str(tmp_path / "models"))
    trained._said.clear()
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    return str(folder)


def test_it_is_found_by_every_path_of_its_target(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = tmp_path / "head"
    head.mkdir()
    assert settings.default_config(target, None) == {"method": "none"}
    trained.use(target, head, "eagle3", 3)
    monkeypatch.chdir(tmp_path)
    for name in (target, "./target", "target"):
        assert settings.default_config(name, None) == {"method": "eagle3", "num_speculative_tokens": 3}
        assert trained.default_draft(name, "eagle3") == default_drafter("eagle3", name) == str(head)
        assert trained.default_draft(name, "medusa") is None
    assert settings.default_config(str(tmp_path), None) == {"method": "none"}, "it is of another target"
    trained.unuse(target, tmp_path / "other")
    assert trained.trained_head(target) is not None
    trained.unuse(target, head)
    assert settings.default_config(target, None) == {"method": "none"}


def test_it_comes_before_what_is_bundled(tmp_path: Path, target: str) -> None:
    head = tmp_path / "head"
    head.mkdir()
    trained.use("bundled", head, "eagle3", 2)
    assert trained.default_speculation("bundled/target") == {"method": "eagle3", "num_speculative_tokens": 2}
    assert default_drafter("eagle3", "bundled") == str(head)
    assert default_drafter("eagle1", "bundled") == "bundled/eagle1"
    assert trained.bundled_speculation("bundled") == {"method": "draft_model"}


@pytest.mark.parametrize(("change", "said"), [("weights", "has other weights now"), ("head", "it has gone")])
def test_a_head_of_other_weights_is_not_used_and_that_is_said_once(
    target: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, change: str, said: str
) -> None:
    head = tmp_path / "head"
    head.mkdir()
    trained.use(target, head, "eagle3", 3)
    if change == "head":
        head.rmdir()
    else:
        os.utime(Path(target) / "model.safetensors", ns=(1, 1))
    with caplog.at_level(logging.WARNING):
        assert trained.default_speculation(target) == {"method": "none"}
        assert trained.default_draft(target, "eagle3") is None
    assert [said in record.getMessage() for record in caplog.records] == [True]
