"""Configurations read without transformers against its own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from foretell import bundled
from foretell.checkpoints.config_defaults import DEFAULTS
from foretell.checkpoints.configs import plain_config, read_plain
from foretell.checkpoints.source import read_config, read_generation, read_plain as read_both
from foretell.model.llama.shape import read_shape
from foretell.model.llama.traits import scaled_frequencies

SMALL: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": [2, 3],
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32, "rope_theta": 500000.0,
}  # fmt: skip
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
KINDS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
GEMMA_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
DELTA, CONV = ["linear_attention"] * 3 + ["full_attention"], ["conv", "full_attention"] * 2
MAMBA = {"mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 8}
PARTIAL = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.25}
NEEDED: dict[str, dict[str, Any]] = {
    "gemma3_text": {"rope_parameters": GEMMA_ROPES},
    "lfm2": {"layer_types": CONV, "num_hidden_layers": 4},
    "lfm2_moe": {"layer_types": CONV, "num_hidden_layers": 4},
    **{
        kind: {"layer_types": DELTA, "num_hidden_layers": 4}
        for kind in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "linear_attention", "mamba"], "num_hidden_layers": 4},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
    "glm4": {"pad_token_id": 0},
    "glm4_moe": {"head_dim": 32},
    "gpt_oss": {"rope_scaling": {**YARN, "truncate": False}},
    "deepseek_v2": {"num_experts_per_tok": 2},
}
"""What a type must state, or its defaults contradict each other."""


def small(kind: str) -> dict[str, Any]:
    """SMALL with what a type must state, of the fields that it has."""
    values = {**SMALL, **NEEDED.get(kind, {}), **(MAMBA if kind == "granitemoehybrid" else {})}
    return {key: value for key, value in values.items() if key != "intermediate_size" or key in DEFAULTS[kind]}


CASES: list[tuple[str, dict[str, Any]]] = [
    *((kind, NEEDED.get(kind, {})) for kind in DEFAULTS),
    *((kind, small(kind)) for kind in DEFAULTS),
    ("qwen3_next", {**SMALL, "layer_types": DELTA, "partial_rotary_factor": 0.5, "rope_theta": 1e7, "head_dim": 16}),
    ("glm4_moe", {**SMALL, "rope_parameters": PARTIAL, "head_dim": 16, "use_qk_norm": True, "n_group": 2, "topk_group": 2}),
    ("qwen3_5_text", {**SMALL, "layer_types": DELTA,
                      "rope_parameters": {**PARTIAL, "mrope_section": [2, 1, 1], "mrope_interleaved": True}}),
    ("gpt_oss", {**SMALL, "head_dim": 8, "experts_per_token": 4, "initial_context_length": 32, "swiglu_limit": 7.0,
                 "rope_scaling": {**YARN, "truncate": False}, "rope_theta": 150000,
                 "quantization_config": {"quant_method": "mxfp4"}}),
    ("bitnet", {**SMALL, "hidden_act": "silu", "quantization_config": {"quant_method": "bitnet"}}),
    ("deepseek_v2", {**SMALL, "num_experts_per_tok": 2, "q_lora_rank": None, "topk_method": "group_limited_greedy",
                     "n_group": 4, "topk_group": 2, "rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.4}}),
    ("deepseek_v3", {**SMALL, "kv_lora_rank": 32, "rope_interleave": False, "attention_bias": True, "n_group": 2,
                     "topk_group": 1}),
    ("granite", {**SMALL, "embedding_multiplier": 12, "logits_scaling": 8, "residual_multiplier": 0.22}),
    ("granitemoehybrid", {**SMALL, **MAMBA, **NEEDED["granitemoehybrid"], "num_local_experts": 0, "num_experts_per_tok": 0,
                          "mamba_d_head": 16, "position_embedding_type": "rope", "rope_theta": 10000}),
    ("nemotron_h", {**SMALL, **NEEDED["nemotron_h"], "n_group": 2, "norm_topk_prob": False, "n_groups": 2}),
    ("mixtral", {**SMALL, "rope_theta": 1e6, "sliding_window": 4, "num_local_experts": 4}),
    ("lfm2_moe", {**SMALL, "layer_types": CONV, "num_dense_layers": 0, "use_expert_bias": False}),
    ("gemma3_text", {**SMALL, "rope_parameters": GEMMA_ROPES, "layer_types": KINDS, "query_pre_attn_scalar": 8}),
    ("llama", {**SMALL, "rope_scaling": LLAMA3, "rope_theta": 10000.0}),
    ("llama", {**SMALL, "rope_parameters": LLAMA3, "head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    ("llama", {**SMALL, "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5000}),
    ("llama", {**SMALL, "rope_scaling": {**YARN, "truncate": False, "beta_fast": 16.0}, "num_key_value_heads": None}),
    ("llama", {**SMALL, "eos_token_id": None, "tie_word_embeddings": True, "rope_scaling": None}),
    ("mistral", {**SMALL, "sliding_window": None, "num_key_value_heads": 4}),
    ("qwen2", {**SMALL, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2, "rope_scaling": YARN}),
    ("qwen2", {**SMALL, "torch_dtype": "bfloat16", "layer_types": KINDS, "use_sliding_window": True}),
    ("qwen3", {**SMALL, "head_dim": 8, "attention_bias": True, "dtype": "float32"}),
    ("qwen3_moe", {**SMALL, "num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [1], "norm_topk_prob": True}),
    ("qwen2_moe", {**SMALL, "decoder_sparse_step": 2, "qkv_bias": False, "use_sliding_window": True, "sliding_window": 4}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "values"), CASES, ids=lambda part: part if isinstance(part, str) else None)
def test_equals_transformers(tmp_path: Path, kind: str, values: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **values}), encoding="utf-8")
    found = read_both(tmp_path, name="x")
    assert found is not None, "left to transformers"
    own = read_config(tmp_path, name="x")
    assert read_shape(*found) == read_shape(own)
    assert found[0].dtype == own.dtype
    for key in DEFAULTS[kind].keys() - {"layer_types", "max_window_layers", "head_dim"}:
        assert getattr(found[0], key) == getattr(own, key, None), key


def test_what_transformers_saves_is_read(tmp_path: Path) -> None:
    for kind in DEFAULTS:
        values = small(kind)
        CONFIG_MAPPING[kind](**values).save_pretrained(tmp_path / kind)
        found = read_plain(tmp_path / kind)
        assert found is not None, kind
        assert read_shape(found) == read_shape(AutoConfig.from_pretrained(tmp_path / kind)), kind


@pytest.mark.parametrize("name", ["target", "draft"])
def test_the_bundled_pair(name: str) -> None:
    path = Path(bundled.path(name))
    found = read_both(path, name=name)
    assert found is not None
    assert read_shape(*found) == read_shape(read_config(path, name=name), read_generation(path, name=name))


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "gpt2"},
        {"model_type": "llama", "quantization_config": {"bits": 4}},
        {"model_type": "llama", "auto_map": {"AutoModelForCausalLM": "x.Y"}},
        {"model_type": "llama", "hidden_size": 31, "num_attention_heads": 4},
        {"model_type": "llama", "hidden_size": "32"},
        {"model_type": "llama", "num_hidden_layers": True},
        {"model_type": "llama", "partial_rotary_factor": 0.5},
        {"model_type": "llama", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"model_type": "llama", "rope_scaling": {"rope_type": "linear"}},
        {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
        {"model_type": "llama", "dtype": "float8"},
        {"model_type": "llama", "eos_token_id": "2"},
        {"model_type": "qwen3", "layer_types": ["full_attention"]},
        {"model_type": "qwen3", "layer_types": ["chunked_attention"] * 32},
        {"model_type": "gemma3_text"},
        {"model_type": "gemma3_text", "rope_parameters": GEMMA_ROPES, "use_bidirectional_attention": True},
        {"model_type": "gemma3_text", "rope_parameters": GEMMA_ROPES, "_sliding_window_pattern": 2},
        {"model_type": "lfm2", "layer_types": ["conv", "sliding_attention"] * 16},
        {"model_type": "qwen3_next"},
        {"model_type": "qwen3_next", "layer_types": DELTA * 12, "partial_rotary_factor": 1.5},
        {"model_type": "nemotron_h", "layers_block_type": ["linear_attention", "hybrid"]},
        {"model_type": "nemotron_h", "layers_block_type": ["linear_attention", "mlp"], "num_hidden_layers": 3},
        {"model_type": "granitemoehybrid", "layer_types": ["mamba"] * 32, "mamba_d_head": 65},
        {"model_type": "granitemoehybrid", "layer_types": ["mamba"] * 32, "time_step_limit": [0.1, 1.0]},
        {"model_type": ["llama"]},
        {},
    ],
)
def test_what_is_not_understood_is_left_to_transformers(values: dict[str, Any]) -> None:
    assert plain_config(values) is None


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"model_type": "llama"'])
def test_damaged_files_are_left_to_transformers(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    assert read_plain(tmp_path) is None


def test_a_generation_configuration_of_another_form_is_left_to_transformers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SMALL}), encoding="utf-8")
    for text, is_read in (('{"eos_token_id": 5}', True), ('{"eos_token_id": "5"}', False), ("{", False)):
        (tmp_path / "generation_config.json").write_text(text, encoding="utf-8")
        found = read_both(tmp_path, name="x")
        assert (found is not None) == is_read
        if found is not None:
            assert read_shape(*found).eos_token_ids == (5, 2, 3)


FACTORS = [1.0 + 0.5 * index for index in range(16)]
ROPES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 3.0},
    LLAMA3,
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0, "beta_fast": 64, "beta_slow": 2},
    {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.25, "truncate": False},
    {"rope_type": "longrope", "factor": 4.0, "short_factor": FACTORS, "long_factor": FACTORS},
    {"rope_type": "longrope", "short_factor": FACTORS, "long_factor": FACTORS, "original_max_position_embeddings": 512},
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: str(rope["rope_type"]))
def test_frequencies_are_those_of_transformers(rope: dict[str, Any]) -> None:
    given = {"hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 4096}
    config = CONFIG_MAPPING["llama"](**given, rope_parameters={"rope_theta": 10000.0, **rope})
    found, scale = scaled_frequencies(config.rope_parameters, 32, 4096, truncate=rope.get("truncate", True))
    expected, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    assert torch.equal(found, expected)
    assert scale == factor
