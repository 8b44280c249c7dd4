"""Checkpoints whose tensors are not those of their configuration: what is missing, of another size or surplus is named."""

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretell.core.errors import ModelError
from foretell.core.tree import layout
from foretell.model.llama.run.lean import LeanModel
from foretell.model.llama.run.native import NativeModel, supports
from foretell.model.load import load_model
from tests.model.llama.family import CAPACITY, chain, make_model

Change = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
CPU = torch.device("cpu")
FAST = ["lean", "native"] if supports(make_model("llama").config, torch.float32, CPU) is None else ["lean"]


def saved(path: Path, kind: str, change: Change | None = None, **config: Any) -> str:
    """A checkpoint whose weights or configuration were changed afterwards."""
    make_model(kind).save_pretrained(path)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    if change is not None:
        weights = path / "model.safetensors"
        kept = {name: tensor.contiguous() for name, tensor in change(load_file(weights)).items()}
        save_file(kept, weights, metadata={"format": "pt"})
    return str(path)


def without(*parts: str) -> Change:
    return lambda weights: {name: tensor for name, tensor in weights.items() if not any(part in name for part in parts)}


def with_(name: str, tensor: Tensor) -> Change:
    return lambda weights: {**weights, name: tensor}


def logits_of(path: str, implementation: str) -> Tensor:
    model = load_model(path, implementation=implementation)
    assert model.spec.implementation == implementation
    plan = layout(chain(1, 8), torch.zeros(1, dtype=torch.int64), CAPACITY)
    logits = model.forward(torch.arange(8)[None], plan, model.new_cache(1, CAPACITY)).logits
    assert logits is not None
    return logits


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize(
    ("kind", "config", "said"),
    [
        ("llama", {"intermediate_size": 80}, r"9 tensors .*layers\.0.*gate_proj\.weight has shape \(72, 48\), e.*80"),
        ("llama", {"intermediate_size": 64}, r"gate_proj\.weight has shape \(72, 48\), expected \(64, 48\)"),
        ("llama", {"hidden_size": 64}, r"embed_tokens\.weight has shape \(61, 48\), expected \(61, 64\)"),
        ("llama", {"vocab_size": 64}, r"embed_tokens\.weight has shape \(61, 48\), expected \(64, 48\)"),
        ("llama", {"num_key_value_heads": 4}, r"k_proj\.weight has shape \(32, 48\), expected \(64, 48\)"),
        ("llama", {"num_attention_heads": 8}, r"q_proj\.weight has shape \(64, 48\), expected \(128, 48\)"),
        ("qwen3moe", {"moe_intermediate_size": 64}, r"experts\.0\.gate_proj\.weight has shape \(40, 48\), expected"),
        ("qwen2moe", {"shared_expert_intermediate_size": 80}, r"shared_expert\.gate_proj\.weight has shape \(56, 64\)"),
        ("granitemoe", {"num_local_experts": 3}, r"input_linear\.weight has shape \(4, 144, 64\).*\(3, 144, any\)"),
        ("phi3-window", {"intermediate_size": 64}, r"gate_up_proj\.weight has shape \(144, 64\).*\(128, 64\)"),
    ],
)  # fmt: skip
def test_a_configuration_of_another_size(
    tmp_path: Path, kind: str, config: dict[str, Any], said: str, implementation: str
) -> None:
    """Every decoder takes sizes from the one and memory from the other."""
    path = saved(tmp_path, kind, **config)
    with pytest.raises(ModelError, match=said) as raised:
        load_model(path, implementation=implementation)
    assert "\n" not in str(raised.value)
    with pytest.raises(ModelError, match=r"has shape .*, expected "):  # transformers', which is tried last
        load_model(path)


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("qwen2", without(".bias"), r"9 tensors .*q_proj\.bias is missing, expected \(64,\)"),
        ("qwen2", without("layers.1.self_attn.k_proj.bias"), r"1 tensors .*layers\.1\.self_attn\.k_proj\.bias is missing"),
        ("qwen2", with_("model.layers.1.self_attn.k_proj.bias", torch.ones(4)), r"k_proj\.bias has shape \(4,\), exp"),
        ("llama-mha-bias", without(".bias"), r"21 tensors are missing.*and 17 more"),
        ("llama", without("lm_head"), r"lm_head\.weight is missing, expected \(61, 48\)"),
        ("llama", with_("model.norm.weight", torch.ones(40)), r"model\.norm\.weight has shape \(40,\), expected \(48,\)"),
        ("llama", with_("model.layers.1.self_attn.q_proj.weight", torch.ones(64 * 48)), r"has shape \(3072,\), exp"),
        ("qwen3", without("q_norm"), r"layers\.0\.self_attn\.q_norm\.weight is missing"),
        ("qwen3", with_("model.layers.2.self_attn.k_norm.weight", torch.ones(4)), r"k_norm\.weight has shape \(4,\)"),
    ],
)  # fmt: skip
def test_tensors_that_are_missing_or_of_another_shape(
    tmp_path: Path, kind: str, change: Change, said: str, implementation: str
) -> None:
    path = saved(tmp_path, kind, change)
    with pytest.raises(ModelError, match=said):
        load_model(path, implementation=implementation)
    with pytest.raises(ModelError, match="the weights do not match"):
        load_model(path)


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize(
    ("kind", "change", "config"),
    [
        ("llama-mha-bias", None, {"attention_bias": False, "mlp_bias": False}),
        ("llama", with_("model.layers.0.self_attn.q_norm.weight", torch.ones(16)), {}),
        ("llama", None, {"tie_word_embeddings": True}),  # and yet it has a head of its own
    ],
    ids=["bias", "norm", "head"],
)
def test_surplus_tensors_are_named_and_make_no_other_model_than_transformers(
    tmp_path: Path, kind: str, change: Change | None, config: dict[str, Any], implementation: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    path = saved(tmp_path, kind, change, **config)
    with caplog.at_level(logging.WARNING, logger="foretell"):
        logits = logits_of(path, implementation)
    assert any(word in caplog.text for word in ("are not read", "which is read"))
    torch.testing.assert_close(logits, logits_of(path, "transformers"), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("implementation", FAST)
def test_old_buffers_and_a_head_that_is_the_embedding_are_no_surplus(
    tmp_path: Path, implementation: str, caplog: pytest.LogCaptureFixture
) -> None:
    def change(weights: dict[str, Tensor]) -> Mapping[str, Tensor]:
        head, inv_freq = weights["model.embed_tokens.weight"].clone(), torch.ones(8)
        return {**weights, "lm_head.weight": head, "model.layers.0.self_attn.rotary_emb.inv_freq": inv_freq}

    with caplog.at_level(logging.WARNING, logger="foretell"):
        model = load_model(saved(tmp_path, "llama-tied", change), implementation=implementation)
    assert not caplog.text
    if isinstance(model, NativeModel):
        assert "lm_head.weight" not in model.matrices.held


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize("projection", ["eh_proj", "other"])
def test_a_layer_for_further_tokens_is_no_surplus(
    tmp_path: Path, implementation: str, projection: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As GLM-4.5's checkpoints have it, behind the model's own layers; a layer without what marks it is one too many."""

    def change(weights: dict[str, Tensor]) -> Mapping[str, Tensor]:
        last = {name.replace("layers.2.", "layers.3."): x.clone() for name, x in weights.items() if "layers.2." in name}
        return {**weights, **last, f"model.layers.3.{projection}.weight": torch.ones(48, 96)}

    path = saved(tmp_path, "glm4moe", change, num_nextn_predict_layers=1)
    with caplog.at_level(logging.WARNING, logger="foretell"):
        load_model(path, implementation=implementation)
    assert ("are not read" in caplog.text) == (projection == "other")


def test_a_module_s_own_weights_are_its_configuration_s() -> None:
    for kind in ("llama-mha-bias", "qwen2moe", "phi3-partial"):
        module = make_model(kind)
        assert LeanModel.from_hf(module).spec.num_layers == module.config.num_hidden_layers
