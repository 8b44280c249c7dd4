"""``foretell export`` and ``foretell vllm-args``, with heads of the bundled target's sizes."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foretell import bundled
from foretell.heads import formats
from foretell.heads.head import Head
from foretell.heads.layout import TargetInfo
from foretell.heads.rope import RopeScaling
from foretell.methods.eagle.eagle1 import Eagle1Head, Eagle1HeadConfig
from foretell.methods.eagle.eagle3 import Eagle3Head, Eagle3HeadConfig
from foretell.methods.kangaroo.head import KangarooHead, KangarooHeadConfig
from foretell.methods.medusa.head import MedusaHead, MedusaHeadConfig
from foretell.methods.other_engines import serving
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


def said(invoke: Invoke, *args: object) -> tuple[dict[str, Any] | None, list[str] | None, str]:
    """vLLM's configuration and SGLang's flags of what was printed, as a shell would read it, and the notes."""
    result = invoke("vllm-args", *args)
    assert result.exit_code == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if not line.startswith("#")]
    words = {parts[0]: parts for parts in map(shlex.split, lines)}
    vllm, sglang = words.get("vllm"), words.get("python")
    target = str(bundled.path("target"))
    if vllm is not None:
        assert vllm[:4] == ["vllm", "serve", target, "--speculative-config"]
    if sglang is not None:
        assert sglang[:5] == ["python", "-m", "sglang.launch_server", "--model-path", target]
    notes = "\n".join(line for line in result.stdout.splitlines() if line.startswith("#"))
    return json.loads(vllm[4]) if vllm else None, sglang[5:] if sglang else None, notes


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
    assert [line.split()[0] for line in shown.splitlines()] == [*formats.LAYOUTS, "gguf"]
    assert list(json.loads(invoke("export", "anything", "--json").stdout)["layouts"]) == [*formats.LAYOUTS, "gguf"]


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


def test_vllm_args_of_eagle3(invoke: Invoke, tmp_path: Path) -> None:
    head = saved(tmp_path, eagle3())
    vllm, sglang, notes = said(invoke, head, "--target", "bundled", "--num-speculative-tokens", "5")
    assert vllm == {"method": "eagle3", "model": head, "num_speculative_tokens": 5}
    assert sglang == [
        "--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", head, "--speculative-num-steps", "5",
        "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "6",
    ]  # fmt: skip
    assert notes == "# only 50 of 8192 tokens are ever drafted: d2t maps them in both engines"


def test_vllm_args_of_speculators(invoke: Invoke, tmp_path: Path) -> None:
    head = saved(tmp_path, eagle3(norm_output=True, layer_ids=(0, 2)), "speculators", name=None, max_positions=None)
    vllm, sglang, notes = said(invoke, head, "--target", "bundled")
    assert vllm == {"method": "eagle3", "model": head, "num_speculative_tokens": 3}
    assert sglang is None
    for note in (
        "foretell export --to eagle3",
        "no verifier",
        "reads 2 layers",
        "norm_output",
        "max_position_embeddings",
    ):
        assert note in notes


def test_vllm_args_of_eagle1_and_medusa(invoke: Invoke, tmp_path: Path) -> None:
    head = saved(tmp_path / "e", Eagle1Head(Eagle1HeadConfig(H, V, **ATTENTION, tap_layer=5)))
    vllm, sglang, notes = said(invoke, head, "--target", "bundled")
    assert vllm == {"method": "eagle", "model": head, "num_speculative_tokens": 3}
    assert sglang is not None
    assert sglang[:2] == ["--speculative-algorithm", "EAGLE"]
    assert "LlamaForCausalLMEagle" in notes
    assert "fc has a bias" in notes
    medusa = MedusaHead(MedusaHeadConfig(H, V, num_heads=2, num_layers=1, tap_layer=5, draft_vocab_size=V))
    head = saved(tmp_path / "m", medusa, "medusa_vllm")
    vllm, sglang, notes = said(invoke, head, "--target", "bundled")
    assert vllm == {"method": "medusa", "model": head, "num_speculative_tokens": 2}
    assert sglang is None
    assert "0.33 dropped it" in notes
    refused = invoke("vllm-args", saved(tmp_path / "a", medusa), "--target", "bundled")
    assert refused.exit_code == 1
    assert "export --to medusa_vllm" in refused.stderr


def test_medusa_of_a_reduced_vocabulary_is_not_for_vllm(invoke: Invoke, tmp_path: Path) -> None:
    """vLLM 0.32 stops at an assertion: the reason and the way out instead."""
    head = saved(
        tmp_path, MedusaHead(MedusaHeadConfig(H, V, num_heads=2, num_layers=1, tap_layer=5, draft_vocab_size=30))
    )
    for status, args in (
        (2, ("export", head, "--to", "medusa_vllm", "--out", tmp_path / "out")),
        (1, ("vllm-args", head, "--target", "bundled")),
    ):
        result = invoke(*args)
        assert result.exit_code == status
        assert "they guess 30 of 8192 tokens" in result.stderr
        assert "train with 'draft_vocab_size' 8192" in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()
    assert invoke("export", head, "--to", "medusa", "--out", tmp_path / "out").exit_code == 0


@pytest.mark.parametrize(
    ("changes", "vllm", "sglang", "note"),
    [
        ({"qk_norm": True}, True, False, "SGLang's LlamaForCausalLMEagle3, as read, has no norms of queries and keys"),
        ({"num_layers": 2, "windows": (4, 4)}, True, False, "no several layers, no windows"),
        ({"num_layers": 2, "windows": (4, 0)}, False, False, "stops where a head's layers are not all of one kind"),
        ({"norm_before_fc": True}, True, False, "no norm_before_fc"),
        ({"attention_bias": True, "output_bias": True}, True, False, "no attention biases"),
        ({"attention_bias": True}, False, False, "in vLLM's Llama layers with attention_bias it has one"),
        ({"attention_bias": True, "qk_norm": True}, True, False, "no attention biases"),
        (
            {"attention_bias": True, "output_bias": True, "qk_norm": True}, False, False,
            "in vLLM's Qwen3 layers with attention_bias it has none",
        ),
        ({"rope_scaling": RopeScaling("llama3", 8.0, 64)}, True, True, ""),
        ({"rope_scaling": RopeScaling("yarn", 8.0, 64, attention_factor=3.0)}, True, True, "its attention_factor is 3"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("layout", ["eagle3", "speculators"])
def test_what_engines_can_run_of_others_heads(
    tmp_path: Path, changes: dict[str, Any], vllm: bool, sglang: bool, note: str, layout: str
) -> None:
    path = saved(tmp_path, eagle3(**changes), layout)
    known = formats.describe_target(path)
    how = serving(formats.load(path), formats.detect(path), path, known)
    assert (how.vllm is not None) == vllm
    assert (how.sglang is not None) == (sglang and layout == "eagle3")
    assert note in "\n".join(how.notes)


def test_vllm_args_that_cannot_be(invoke: Invoke, tmp_path: Path) -> None:
    adapter = KangarooHead(KangarooHeadConfig(H, V, 2, num_heads=2, num_kv_heads=2, head_dim=4))
    for name, head, length, status, message in (
        ("a", adapter, None, 1, "'kangaroo' runs in foretell alone: neither engine has it"),
        ("f", eagle3(), 0, 2, "must be at least 1"),
        ("g", eagle3(layer_ids=(0, 2, 9)), None, 1, "reads the output of target layer 9"),
    ):
        arguments = [] if length is None else ["--num-speculative-tokens", length]
        result = invoke("vllm-args", saved(tmp_path / name, head), "--target", "bundled", *arguments)
        assert (result.exit_code, result.stdout) == (status, "")
        assert message in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1


def test_vllm_args_as_json_for_a_target_on_the_hub(invoke: Invoke, tmp_path: Path) -> None:
    head = saved(tmp_path, eagle3())
    found = json.loads(invoke("vllm-args", head, "--target", "owner/name", "--json").stdout)
    assert found["target"] == "owner/name"
    assert found["speculative_config"]["method"] == "eagle3"
    assert found["sglang"][1] == "EAGLE3"
    missing = invoke("vllm-args", head)
    assert missing.exit_code == 2
    assert "--target" in missing.stderr


@pytest.mark.parametrize("command", ["export", "vllm-args"])
def test_help(invoke: Invoke, command: str) -> None:
    assert "--target" in invoke(command, "--help").stdout
