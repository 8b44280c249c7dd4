"""Models with Python code of their own, and revisions of hub ids."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell import Engine
from foretell.checkpoints.directories import resolve
from foretell.core.errors import ConfigError, ModelError
from foretell.model.load import load_model
from tests.cli import checkpoint

CODE = """
from transformers import Qwen3Config, Qwen3ForCausalLM


class OwnConfig(Qwen3Config):
    model_type = "own_qwen"


class OwnForCausalLM(Qwen3ForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that only its own code can load."""
    folder = checkpoint.save(tmp_path_factory.mktemp("own") / "ownmodel")
    (folder / "own.py").write_text(CODE)
    file = folder / "config.json"
    config: dict[str, Any] = json.loads(file.read_text())
    config |= {"model_type": "own_qwen", "architectures": ["OwnForCausalLM"]}
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    file.write_text(json.dumps(config))
    return folder


def test_code_of_a_model_runs_only_where_it_is_trusted(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="--trust-remote-code"):
        load_model(own)
    engine = Engine.load(own, trust_remote_code=True, speculative={"model": str(own)})
    assert engine.model.spec.architecture == "OwnForCausalLM"
    assert engine.model.spec.dtype is torch.float32
    plain = checkpoint.save(tmp_path / "plain")
    asked: dict[str, Any] = {"seed": 1, "max_new_tokens": 6}
    found = engine.generate("def f(", **asked)
    assert found.token_ids == Engine.load(plain, implementation="transformers").generate("def f(", **asked).token_ids
    assert found.num_accepted_tokens > 0, "the draft model's code is trusted too"
    with pytest.raises(ConfigError, match="does not run a model's own code"):
        load_model(own, trust_remote_code=True, implementation="lean")


def test_a_known_type_needs_no_trust(tmp_path: Path) -> None:
    folder = checkpoint.save(tmp_path / "known")
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "auto_map": {"AutoModelForCausalLM": "absent.Absent"}}))
    assert load_model(folder).spec.architecture == "Qwen3ForCausalLM"


def test_a_revision_and_code_are_asked_of_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import httpx
    from huggingface_hub.errors import RevisionNotFoundError

    asked: list[tuple[str, str | None, bool]] = []
    (tmp_path / "model.safetensors").write_text("")
    pickles: list[bool] = []

    def download(repo: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((repo, revision, "*.py" in allow_patterns))
        pickles.append("*.bin" in allow_patterns)
        if revision == "gone":
            raise RevisionNotFoundError("404", response=httpx.Response(404, request=httpx.Request("GET", "http://x")))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve("owner/name@v1.2") == tmp_path
    assert resolve("owner/name", code=True) == tmp_path
    assert asked == [("owner/name", "v1.2", False), ("owner/name", None, True)]
    (tmp_path / "model.safetensors").rename(tmp_path / "adapter_model.safetensors")  # which no reader takes for weights
    assert resolve("owner/name") == tmp_path
    assert pickles == [False, False, False, True]
    with pytest.raises(ModelError, match="owner/name has no revision 'gone'"):
        resolve("owner/name@gone")
