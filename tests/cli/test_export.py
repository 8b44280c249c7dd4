"""``foretell export``, with heads of the bundled target's sizes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foretell.heads import formats
from foretell.heads.head import Head
from foretell.heads.layout import TargetInfo
from foretell.methods.eagle.eagle1 import Eagle1Head, Eagle1HeadConfig
from foretell.methods.eagle.eagle3 import Eagle3Head, Eagle3HeadConfig
from foretell.methods.medusa.head import MedusaHead, MedusaHeadConfig
from tests.cli.conftest import Invoke

H, V, LAYERS = 256, 8192, 6
ATTENTION = {"intermediate_size": 8, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4}


def eagle3(**changes: Any) -> Head:
    values = {**ATTENTION, "draft_vocab_size": 50, "layer_ids": (0, 2, 4), **changes}
    return Eagle3Head(Eagle3HeadConfig(H, V, **values))


def saved(path: Path, head: Head, layout: str | None = None, **target: Any) -> str:
    about = {
        "name": "bundled",
        "architecture": "Qwen3ForCausalLM",
        "num_layers": LAYERS,
        "max_positions": 4096,
        **target,
    }
    formats.save(head, path / "head", layout, target=TargetInfo(**about))
    return str(path / "head")


def test_export_converts_and_carries_what_is_known(invoke: Invoke, tmp_path: Path) -> None:
    head = eagle3(norm_before_residual=True)
    formats.save(head, tmp_path / "head", target=TargetInfo("a/b", "LlamaForCausalLM", LAYERS, 99), extra={"loss": 2})
    result = invoke("export", tmp_path / "head", "--to", "speculators", "--out", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout) == {
        "out": str(tmp_path / "out"), "layout": "speculators", "head": "eagle3", "parameters": head.num_parameters,
    }  # fmt: skip
    assert formats.detect(tmp_path / "out").name == "speculators"
    assert formats.describe_target(tmp_path / "out") == TargetInfo("a/b", "LlamaForCausalLM", LAYERS, 99)
    assert formats.describe_extra(tmp_path / "out") == {"loss": 2}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["speculators_config"]["verifier"] == {"name_or_path": "a/b", "architectures": ["LlamaForCausalLM"]}
    assert config["transformer_layer_config"]["max_position_embeddings"] == 99
    first, second = head.state_dict(), formats.load(tmp_path / "out").state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_export_with_a_target_fills_in_what_it_says(invoke: Invoke, tmp_path: Path) -> None:
    formats.save(Eagle1Head(Eagle1HeadConfig(H, V, **ATTENTION, tap_layer=5)), tmp_path / "head")
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    del config["foretell"]
    (tmp_path / "head" / "config.json").write_text(json.dumps(config))  # as of the authors
    without = invoke("export", tmp_path / "head", "--to", "eagle1", "--out", tmp_path / "out")
    assert without.exit_code == 1
    assert "name the target" in without.stderr
    result = invoke("export", tmp_path / "head", "--to", "eagle1", "--out", tmp_path / "out", "--target", "bundled")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith(f"{tmp_path / 'out'}: eagle1, ")
    assert formats.load(tmp_path / "out").taps == (5,)
    assert formats.describe_target(tmp_path / "out") == TargetInfo("bundled", "Qwen3ForCausalLM", LAYERS, 4096)


def test_export_lists_its_layouts(invoke: Invoke) -> None:
    shown = invoke("export", "anything").stdout
    assert [line.split()[0] for line in shown.splitlines()] == [*formats.HEADS, "gguf"]
    assert list(json.loads(invoke("export", "anything", "--json").stdout)["layouts"]) == [*formats.HEADS, "gguf"]


def test_export_mistakes(invoke: Invoke, tmp_path: Path) -> None:
    head = saved(tmp_path, eagle3())
    small = saved(
        tmp_path / "small", Eagle3Head(Eagle3HeadConfig(16, 40, **ATTENTION, draft_vocab_size=4, layer_ids=(1,)))
    )
    (tmp_path / "model").mkdir()
    save_file({"x": torch.zeros(1)}, tmp_path / "model" / "model.safetensors")
    for args, status, message in (
        ((head, "--to", "eagle3"), 2, "--out is missing"),
        ((head, "--out", tmp_path / "out"), 2, "no layout to write: add --to, one of"),
        ((head, "--to", "speculatros", "--out", tmp_path / "out"), 2, "did you mean 'speculators'"),
        ((head, "--to", "medusa", "--out", tmp_path / "out"), 2, "it holds medusa heads, and this is an eagle3 head"),
        ((tmp_path / "absent", "--to", "eagle3", "--out", tmp_path / "out"), 1, "does not exist"),
        ((small, "--to", "eagle3", "--out", tmp_path / "out", "--target", "bundled"), 1, "hidden size 16"),
        ((head, "--to", "eagle3", "--out", tmp_path / "model"), 2, "foretell did not write"),
        ((head, "--to", "eagle3", "--out", tmp_path / "out", "--target", "./absent"), 1, "does not exist"),
    ):
        result = invoke("export", *args)
        assert (result.exit_code, message in result.stderr) == (status, True), result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()
    assert list(load_file(tmp_path / "model" / "model.safetensors")) == ["x"]


def test_medusa_of_a_reduced_vocabulary_is_not_for_vllm(invoke: Invoke, tmp_path: Path) -> None:
    """vLLM 0.32 stops at an assertion: the reason and the way out instead."""
    head = saved(
        tmp_path, MedusaHead(MedusaHeadConfig(H, V, num_heads=2, num_layers=1, tap_layer=5, draft_vocab_size=30))
    )
    result = invoke("export", head, "--to", "medusa_vllm", "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "they guess 30 of 8192 tokens" in result.stderr
    assert "train with 'draft_vocab_size' 8192" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()
    assert invoke("export", head, "--to", "medusa", "--out", tmp_path / "out").exit_code == 0


def test_help(invoke: Invoke) -> None:
    assert "--target" in invoke("export", "--help").stdout


def test_a_full_disk_is_named(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of a write says neither the file nor the folder."""
    head = saved(tmp_path, eagle3())
    monkeypatch.setattr(formats, "save", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    result = invoke("export", head, "--to", "speculators", "--out", "there")
    assert (result.exit_code, result.stderr) == (1, "foretell: cannot read or write 'there': No space left on device\n")
