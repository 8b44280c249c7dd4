"""Adapters as peft saves them: what is read, and what is refused with the file and what was expected."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.checkpoints.lora import LoraError, read_lora, read_loras
from foretell.core.errors import ConfigError, ModelError
from tests.model.adapters import write_adapter

WEIGHTS = {
    f"model.layers.{index}.self_attn.{name}_proj.weight": torch.zeros(12, 8) for index in (0, 1) for name in "qv"
}
FIRST = "base_model.model.model.layers.0.self_attn.q_proj"


def written(tmp_path: Path, **options: Any) -> Path:
    return write_adapter(tmp_path / "adapter", WEIGHTS, targets=("q_proj", "v_proj"), **options)


def test_scales_and_ranks_are_those_of_peft(tmp_path: Path) -> None:
    """alpha / r, or alpha / sqrt(r); a pattern's own r and alpha, by the end of a module's name."""
    modules = read_lora(written(tmp_path, rank=4, lora_alpha=6)).modules
    assert sorted(modules) == sorted(name.removesuffix(".weight") for name in WEIGHTS)
    assert {term.scale for term in modules.values()} == {1.5}
    modules = read_lora(written(tmp_path, rank=4, lora_alpha=6, use_rslora=True)).modules
    assert {term.scale for term in modules.values()} == {3.0}
    longer = {f"{FIRST}.lora_A.weight": torch.ones(9, 8), f"{FIRST}.lora_B.weight": torch.ones(12, 9)}
    patterns = {
        "rank_pattern": {r"layers\.0\.self_attn\.q_proj": 9},
        "alpha_pattern": {"layers.0.self_attn.q_proj": 18},
    }
    modules = read_lora(written(tmp_path, lora_alpha=6, tensors=longer, **patterns)).modules
    scales = {name.split("layers.")[1]: term.scale for name, term in modules.items()}
    assert scales == {
        "0.self_attn.q_proj": 2.0,
        "1.self_attn.q_proj": 1.5,
        "0.self_attn.v_proj": 1.5,
        "1.self_attn.v_proj": 1.5,
    }
    term = modules["model.layers.0.self_attn.q_proj"]
    assert torch.equal(term.product, torch.full((12, 8), 18.0))


def test_names_may_have_the_adapters_own_and_no_prefix(tmp_path: Path) -> None:
    old = {f"{FIRST}.lora_{part}.weight": None for part in "AB"}
    new = {f"{FIRST.removeprefix('base_model.model.')}.lora_{part}.default.weight": torch.ones(*size)
           for part, size in (("A", (4, 8)), ("B", (12, 4)))}  # fmt: skip
    term = read_lora(written(tmp_path, tensors={**old, **new})).modules["model.layers.0.self_attn.q_proj"]
    assert torch.equal(term.a, torch.ones(4, 8))


A, B = f"{FIRST}.lora_A.weight", f"{FIRST}.lora_B.weight"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, r"adapter_config.json: DoRA \(use_dora\) is set"),
    "another variant": ({"use_qalora": True}, "use_qalora is set"),
    "module": (
        {"modules_to_save": ["norm"], "tensors": {"base_model.model.model.norm.weight": torch.ones(8)}},
        r"model.norm.weight is a whole tensor beside the adapter \(modules_to_save is \['norm'\]\)",
    ),
    "bias": (
        {"bias": "lora_only", "tensors": {f"{FIRST}.base_layer.bias": torch.ones(8)}},
        r"q_proj.base_layer.bias is a trained bias \(bias is 'lora_only'\)",
    ),
    "bias of B": (
        {"lora_bias": True, "tensors": {f"{FIRST}.lora_B.bias": torch.ones(8)}},
        "lora_B.bias is a trained bias",
    ),
    "kind": ({"peft_type": "IA3"}, "peft_type is 'IA3'; expected 'LORA'"),
    "start": ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which changes the model itself"),
    "layers again": ({"layer_replication": [[0, 2]]}, "layer_replication is set"),
    "no rank": ({"r": None}, "the rank of r is None; expected a number from 1 on"),
    "no alpha": ({"lora_alpha": "much"}, "the alpha of lora_alpha is 'much'"),
    "pattern": ({"rank_pattern": [3]}, r"rank_pattern is \[3\]"),
    "other rank": ({"tensors": {A: torch.ones(3, 8)}}, r"lora_A.weight has shape \(3, 8\); expected \(4, inputs\)"),
    "other rank of B": (
        {"tensors": {B: torch.ones(12, 3)}},
        r"lora_B.weight has shape \(12, 3\); expected \(outputs, 4\)",
    ),
    "half": ({"tensors": {B: None}}, r"lora_B.weight is missing; expected \(outputs, 4\)"),
    "nan": ({"tensors": {A: torch.full((4, 8), torch.nan)}}, r"adapter_model.safetensors: .*lora_A.weight holds NaN"),
    "embedding": (
        {"tensors": {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 8)}},
        "drafters share",
    ),
    "head": ({"tensors": {"base_model.model.lm_head.lora_A.weight": torch.ones(4, 8)}}, "changes embed_tokens/lm_head"),
    "magnitude": ({"tensors": {f"{FIRST}.lora_magnitude_vector": torch.ones(8)}}, "is of DoRA, which is not run"),
    "other": ({"tensors": {f"{FIRST}.lora_C.weight": torch.ones(8, 8)}}, "is no tensor of an adapter"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_run_is_refused_by_name(tmp_path: Path, case: str) -> None:
    options, told = REFUSED[case]
    with pytest.raises(LoraError, match=told):
        read_lora(written(tmp_path, **options))


def test_files_that_are_absent_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no adapter_config.json there; expected the directory of an adapter"):
        read_lora(tmp_path)
    path = written(tmp_path)
    whole = (path / "adapter_model.safetensors").read_bytes()
    (path / "adapter_model.safetensors").write_bytes(whole[:-5])
    with pytest.raises(ModelError, match=r"adapter_model.safetensors has .* bytes"):
        read_lora(path)
    (path / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no weights in .*expected adapter_model.safetensors"):
        read_lora(path)
    (path / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"adapter_config.json is not JSON"):
        read_lora(path)
    (path / "adapter_config.json").write_text(json.dumps([1]))
    with pytest.raises(ModelError, match="expected one JSON object"):
        read_lora(path)


@pytest.mark.parametrize(
    "name",
    ["", " ", "..", "../x", "a/../b", "a//b", "/a", "a/", "a\\..\\b", ".", "a\nb", "a\rb", "a\x00", "a\u2028b", "a\u202eb",
     " a", "a\t", "\ud800", "x" * 257],
)  # fmt: skip
def test_what_is_no_name(tmp_path: Path, name: str) -> None:
    """Said in one line, although the name has two."""
    with pytest.raises(ConfigError, match="is no name of an adapter; expected up to 256") as caught:
        read_loras({name: written(tmp_path)})
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["sql", "org/sql-v1.2", "größe 2", "a..b", "x" * 256, "...", "日本語"])
def test_what_is_a_name(tmp_path: Path, name: str) -> None:
    assert list(read_loras({name: written(tmp_path)})) == [name]


ACCEPTED: dict[str, dict[str, Any]] = {  # what peft 0.21 keeps in the configuration of an adapter of q_proj and v_proj
    "names that the model has not": {"target_modules": ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "c_attn"]},
    "an expression": {"target_modules": r".*\.layers\.\d+\.self_attn\.(q|v|o)_proj"},
    "all linears": {"target_modules": "all-linear"},
    "nothing": {"target_modules": None},
    "a part of the layers": {"layers_to_transform": [0, 1, 7], "layers_pattern": "layers"},
    "others left out": {"target_modules": ["q_proj", "v_proj", "k_proj"], "exclude_modules": r".*\.k_proj"},
    "modules that the model has not": {"modules_to_save": ["classifier", "score"]},
    "biases that the model has not": {"bias": "all"},
    "keys of its releases": {
        "use_bdlora": None, "use_qalora": False, "qalora_group_size": 16, "megatron_core": "megatron.core",
        "kasa_config": None, "loftq_config": {}, "ensure_weight_tying": False, "peft_version": "0.21.2",
    },
}  # fmt: skip


@pytest.mark.parametrize("case", ACCEPTED)
def test_what_the_file_holds_decides(tmp_path: Path, case: str) -> None:
    """Names in the configuration for which peft wrote no tensor are no fault: an adapter for several models has them."""
    modules = read_lora(written(tmp_path, **ACCEPTED[case])).modules
    assert sorted(modules) == sorted(name.removesuffix(".weight") for name in WEIGHTS)
    assert {term.scale for term in modules.values()} == {2.0}
