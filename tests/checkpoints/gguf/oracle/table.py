"""The tiny random checkpoints of the oracle: one for each architecture of GGUF files, with every kind of layer it has.

A weight is one of four multiples of a power of two, so that a file of float32 packs to little more than two bits a weight,
float16 and bfloat16 hold it exactly, and a row or head out of place still moves every logit.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

VOCAB = 320
WINDOW = 8
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_HEADS: dict[str, Any] = {"head_dim": 16}
_WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 32}  # where a head's size is hidden_size / heads
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED: dict[str, Any] = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
}  # fmt: skip
_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
_SECTIONS = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 16,
}  # fmt: skip
_SSM: dict[str, Any] = {
    "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "chunk_size": 16, "expand": 2,
    "moe_latent_size": None, "moe_shared_expert_intermediate_size": 32,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}  # fmt: skip
_YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
_SCALES: dict[str, Any] = {
    "embedding_multiplier": 2.0, "logits_scaling": 4.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2,
}  # fmt: skip
_SLIDING = ["sliding_attention", "sliding_attention", "full_attention"]


def _blocks(other: str) -> list[str]:
    """Nemotron-H's layers, each a mixer alone."""
    return ["linear_attention", other, "full_attention", "linear_attention"]


@dataclass(frozen=True)
class Tiny:
    """A checkpoint: its configuration's class and what differs from COMMON; ``pre``, how its tokenizer splits text;
    ``kinds``, the quantised files beside the one of float32, by the quantiser's names; ``published``, what the
    ``config.json`` of published checkpoints says otherwise than transformers saves it (None: says nothing of); ``flags``
    of the converter."""

    config: str
    options: Mapping[str, Any] = field(default_factory=dict)
    pre: str = "llama-bpe"
    kinds: tuple[str, ...] = ()
    published: Mapping[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()


ARCHITECTURES: dict[str, Tiny] = {
    "qwen3next": Tiny(
        "Qwen3NextConfig", {**_HEADS, **_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 32}, "qwen2",
        flags=("--no-mtp",),
    ),
    "qwen35": Tiny(
        "Qwen3_5TextConfig",
        {**_HEADS, **_DELTA, "rope_parameters": {**_DELTA["rope_parameters"], **_SECTIONS}, "tie_word_embeddings": True},
        "qwen35", ("BF16", "Q8_0", "Q4_K_M"), flags=("--no-mtp",),
    ),
    "qwen35moe": Tiny(
        "Qwen3_5MoeTextConfig",
        {**_HEADS, **_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 32,
         "rope_parameters": {**_DELTA["rope_parameters"], **_SECTIONS}},
        "qwen35", flags=("--no-mtp",),
    ),
    "lfm2": Tiny(
        "Lfm2Config",
        {**_WIDE, "layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
        "lfm2", ("F16", "IQ4_NL"),
    ),
    "lfm2moe": Tiny(
        "Lfm2MoeConfig",
        {**_WIDE, **_EXPERTS, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1}, "lfm2",
    ),
    "nemotron_h": Tiny(
        "NemotronHConfig",
        {**_HEADS, **_SSM, **_ROUTED, "layers_block_type": _blocks("mlp")},
        "pixtral", (),
        {"hybrid_override_pattern": "M-*M", "num_hidden_layers": 4, "layers_block_type": None, "layer_types": None,
         **dict.fromkeys((*_ROUTED, "moe_shared_expert_intermediate_size"))},
        ("--as-written",),
    ),
    "nemotron_h_moe": Tiny(
        "NemotronHConfig",
        {**_HEADS, **_SSM, **_ROUTED, "layers_block_type": _blocks("moe")},
        "pixtral",
    ),
    "granitehybrid": Tiny(
        "GraniteMoeHybridConfig",
        {**_MAMBA, **_SCALES, "layer_types": ["mamba", "attention", "mamba"], "num_attention_heads": 2,
         "num_key_value_heads": 1, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2,
         "shared_intermediate_size": 32, "mamba_n_groups": 1},
        "dbrx", (), {"layer_types": ["mamba", "attention", "mamba"]}, ("--as-written",),
    ),
    "falcon-h1": Tiny(
        "FalconH1Config",
        {**_MAMBA, "head_dim": 16, "mamba_d_ssm": 64, "num_hidden_layers": 2, "embedding_multiplier": 2.0,
         "lm_head_multiplier": 0.5, "mlp_multipliers": [0.75, 0.5], "key_multiplier": 0.5,
         "attention_out_multiplier": 0.75, "attention_in_multiplier": 1.25, "ssm_in_multiplier": 1.5,
         "ssm_out_multiplier": 0.5, "ssm_multipliers": [0.75, 0.5, 1.25, 1.5, 0.875]},
        "falcon-h1",
    ),
    "gemma2": Tiny(
        "Gemma2Config", {**_HEADS, "sliding_window": WINDOW, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0,
                         "final_logit_softcapping": 4.0}, "gemma",
    ),
    "gemma4": Tiny(
        "Gemma4TextConfig",
        {**_HEADS, "num_hidden_layers": 6, "global_head_dim": 32, "sliding_window": WINDOW, "layer_types": _SLIDING * 2,
         "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 3,
         "intermediate_size": 32, "final_logit_softcapping": 4.0, "use_double_wide_mlp": True},
        "gemma4",
    ),
    "gemma4moe": Tiny(
        "Gemma4TextConfig",
        {**_HEADS, "global_head_dim": 32, "sliding_window": WINDOW, "layer_types": _SLIDING,
         "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
         "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
         "intermediate_size": 32, "final_logit_softcapping": 4.0},
        "gemma4",
    ),
    "phi3": Tiny("Phi3Config", {**_WIDE, "original_max_position_embeddings": 256}, "dbrx"),
    "glm4": Tiny(
        "Glm4Config", {**_HEADS, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                                                     "partial_rotary_factor": 0.5}}, "glm4",
    ),
    "glm4moe": Tiny(
        "Glm4MoeConfig",
        {**_HEADS, **_ROUTED, "use_qk_norm": True, "attention_bias": True, "num_mtp_layers": 0,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
        "glm4",
    ),
    "smollm3": Tiny("SmolLM3Config", {**_WIDE, "num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}, "smaug-bpe"),
    "olmo2": Tiny("Olmo2Config", _WIDE, "dbrx"),
    "granite": Tiny("GraniteConfig", {**_WIDE, **_SCALES}, "refact"),
    "mistral3": Tiny("Ministral3Config", {**_HEADS, "rope_parameters": _YARN}, "tekken"),
    "gpt-oss": Tiny(
        "GptOssConfig",
        {**_HEADS, "sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
         "rope_parameters": {key: value for key, value in _YARN.items() if not key.startswith(("mscale", "llama"))}},
        "gpt-4o", ("MXFP4_MOE",),
    ),
    "deepseek2": Tiny(
        "DeepseekV3Config", {**_LATENT, **_ROUTED, "num_mtp_layers": 0}, "deepseek-v3", (),
        {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    ),
    "deepseek2-v2": Tiny(
        "DeepseekV2Config", {**_LATENT, **_ROUTED, "n_shared_experts": 2}, "deepseek-llm", (),
        {"scoring_func": "softmax"},
    ),
    "seed_oss": Tiny("SeedOssConfig", _HEADS, "seed-coder"),
    "arcee": Tiny("ArceeConfig", _WIDE),
    "ernie4_5": Tiny("Ernie4_5Config", _HEADS, "gemma"),
    "ernie4_5-moe": Tiny(
        "Ernie4_5_MoeConfig",
        {**_WIDE, "intermediate_size": 64, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32,
         "moe_num_shared_experts": 1},
        "gemma",
    ),
    "hunyuan-dense": Tiny("HunYuanDenseV1Config", _HEADS, "hunyuan-dense"),
    "exaone4": Tiny("Exaone4Config", {**_WIDE, "sliding_window": None, "layer_types": ["full_attention"] * 3}, "exaone4"),
    "command-r": Tiny("CohereConfig", {**_WIDE, "logit_scale": 0.5}, "refact"),
    "cohere2": Tiny(
        "Cohere2Config", {**_WIDE, "num_hidden_layers": 4, "logit_scale": 0.5, "sliding_window": WINDOW}, "refact", (),
        {"rotary_pct": 1.0},
    ),
    "starcoder2": Tiny("Starcoder2Config", _WIDE, "refact"),
    "minimax-m2": Tiny(
        "MiniMaxM2Config",
        {**_HEADS, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
        "minimax-m2", (), {"rotary_dim": 8, "scoring_func": "sigmoid"},
    ),
}  # fmt: skip


def tiny(name: str) -> PreTrainedModel:
    """The float32 checkpoint of one of ARCHITECTURES, the same at every call and in every process."""
    entry = ARCHITECTURES[name]
    config = getattr(transformers, entry.config)(**{**COMMON, **entry.options})
    module: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    seen: set[int] = set()
    with torch.no_grad():
        for key, tensor in sorted(module.state_dict().items()):
            if tensor.data_ptr() not in seen and tensor.is_floating_point():
                tensor.copy_(_drawn(key, tensor))
            seen.add(tensor.data_ptr())
    return module.eval()


def _drawn(key: str, tensor: Tensor) -> Tensor:
    """New values of a tensor, by its name: what a tensor draws does not hang on which others there are."""
    generator = torch.Generator().manual_seed(crc32(key.encode()))
    levels = torch.randint(0, 4, tensor.shape, generator=generator) - 1.5
    if key.endswith("A_log"):
        return levels - 2  # decays between 0.6 and 0.98 a token: short and long memories
    if tensor.dim() < 2:
        start = tensor.flatten()[0].item()
        centre = 1.0 if start == 1 else 0.0  # a norm's weight stays about what it multiplies by
        return centre + 0.25 * levels
    return levels * 2.0 ** -round((tensor.shape[-1].bit_length() - 1) / 2)
