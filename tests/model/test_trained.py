"""What guesses where nothing is said: the head that ``foretell train auto`` has trained, until it or its target changes;
else what comes with the model, whatever form its weights have."""

import copy
import logging
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from foretell.checkpoints.catalogue import CATALOGUE, NamedModel
from foretell.cli import settings
from foretell.engine.config import default_drafter
from foretell.model import trained
from foretell.model.identity import weights_hash
from tests.checkpoints.gguf.make import random_model, write
from tests.model.tiny import tiny_module


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
    assert settings.default_config(target, None) == {"method": "suffix"}
    trained.use(target, head, "eagle3", 3)
    monkeypatch.chdir(tmp_path)
    for name in (target, "./target", "target"):
        assert settings.default_config(name, None) == {"method": "eagle3", "num_speculative_tokens": 3}
        assert trained.default_draft(name, "eagle3") == default_drafter("eagle3", name) == str(head)
        assert trained.default_draft(name, "medusa") is None
    assert settings.default_config(str(tmp_path), None) == {"method": "suffix"}, "it is of another target"
    trained.unuse(target, tmp_path / "other")
    assert trained.trained_head(target) is not None
    trained.unuse(target, head)
    assert settings.default_config(target, None) == {"method": "suffix"}


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
        assert trained.default_speculation(target) == {"method": "suffix"}
        assert trained.default_draft(target, "eagle3") is None
    assert [said in record.getMessage() for record in caplog.records] == [True]


HEAD = {"eagle3": "bundled/x"}


@pytest.fixture(scope="module")
def module() -> PreTrainedModel:
    """A model whose last norm has numbers of bfloat16, as that of every checkpoint that is published in it."""
    made = random_model(tiny_module("llama", hidden_size=64, intermediate_size=64))
    with torch.no_grad():
        made.model.norm.weight.copy_(made.model.norm.weight.bfloat16())
    return made


@pytest.fixture
def entry(module: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NamedModel:
    """The model in the catalogue."""
    monkeypatch.setenv("FORETELL_MODELS", str(tmp_path / "models"))
    found = weights_hash(str(write(tmp_path / "own.gguf", module)))
    made = NamedModel("tiny", "", "", "own.gguf", 1, "0" * 64, (), found, ("us/tiny-it",), {"method": "eagle3"}, HEAD)
    monkeypatch.setitem(CATALOGUE, "tiny", made)
    trained._entry_of_files.cache_clear()
    return made


FORMS: dict[str, Callable[[PreTrainedModel, Path], object]] = {
    "gguf": lambda module, path: write(path, module, kind="Q8_0"),
    "float32": lambda module, path: module.save_pretrained(path),
    "bfloat16": lambda module, path: copy.deepcopy(module).bfloat16().save_pretrained(path),
    "float16": lambda module, path: copy.deepcopy(module).half().save_pretrained(path),
    "shards": lambda module, path: module.save_pretrained(path, max_shard_size="20KB"),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_comes_with_a_model_guesses_for_every_form_of_its_weights(
    module: PreTrainedModel, entry: NamedModel, tmp_path: Path, form: str
) -> None:
    """It did for the name of the catalogue alone: the same file by its path decoded plainly."""
    FORMS[form](module, tmp_path / "mine")
    for target in ("tiny", "us/tiny-it", "us/tiny-it@main", str(tmp_path / "mine")):
        assert settings.default_config(target, None) == {"method": "eagle3"}
        assert default_drafter("eagle3", target) == HEAD["eagle3"]
        assert default_drafter("medusa", target) is None


def _further(module: PreTrainedModel, path: Path) -> None:
    with torch.no_grad():
        module.model.norm.weight[3] *= 1.01
    module.save_pretrained(path)


def _shallow(module: PreTrainedModel, path: Path) -> None:
    del module.model.layers[1:]
    module.config.num_hidden_layers = 1
    module.save_pretrained(path)


def _wide(module: PreTrainedModel, path: Path) -> None:
    module.resize_token_embeddings(module.config.vocab_size + 3)
    module.save_pretrained(path)


def _pickled(module: PreTrainedModel, path: Path) -> None:
    module.save_pretrained(path)
    torch.save(module.state_dict(), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()


def _damaged(module: PreTrainedModel, path: Path) -> None:
    module.save_pretrained(path)
    (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-50])


def _other_names(module: PreTrainedModel, path: Path) -> None:
    path.mkdir()
    save_file({"transformer.wte.weight": torch.zeros(2, 2)}, path / "model.safetensors")


@pytest.mark.parametrize("change", [_further, _shallow, _wide, _pickled, _damaged, _other_names])
@pytest.mark.filterwarnings("ignore")
def test_other_weights_are_no_form_of_a_model(
    module: PreTrainedModel, entry: NamedModel, tmp_path: Path, change: Callable[[PreTrainedModel, Path], None]
) -> None:
    """Trained further, cut to fewer layers, with more tokens: a head would not fit, or guess badly. Who loads what
    cannot be read says so."""
    CATALOGUE["unknown"] = replace(entry, name="unknown", weights_hash=None, hub_ids=())
    try:
        change(copy.deepcopy(module), tmp_path / "mine")
        assert trained.entry_of(str(tmp_path / "mine")) is None
        assert settings.default_config(str(tmp_path / "mine"), None) == {"method": "suffix"}
        assert trained.entry_of("us/other") is None
        assert trained.entry_of(str(tmp_path / "absent")) is None
    finally:
        del CATALOGUE["unknown"]


def test_weights_that_change_are_looked_at_again(module: PreTrainedModel, entry: NamedModel, tmp_path: Path) -> None:
    module.save_pretrained(tmp_path / "mine")
    assert trained.entry_of(str(tmp_path / "mine")) is entry
    _further(copy.deepcopy(module), tmp_path / "mine")
    os.utime(tmp_path / "mine" / "model.safetensors", ns=(1, 1))
    assert trained.entry_of(str(tmp_path / "mine")) is None


def test_every_model_with_a_head_is_known_by_its_weights() -> None:
    found = [entry for entry in CATALOGUE.values() if entry.drafts]
    for entry in found:
        assert entry.hub_ids
        assert re.fullmatch("[0-9a-f]{16}", entry.weights_hash or "")
    assert len({entry.weights_hash for entry in found}) == len(found) == 3
