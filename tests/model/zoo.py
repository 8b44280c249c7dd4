"""A tiny random instance of every causal type of transformers, from the defaults of its own configuration.

Every number that only says how large a model is becomes small; every list with one entry a layer keeps one entry of each
kind. So a new type needs no line here unless its dimensions depend on each other, or its default leaves something out.
"""

import copy
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.model.tiny import VOCAB, WINDOW

LAYERS = 4
TYPES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
"""Every type that transformers has a causal language model for."""

_DEPTH = (
    "num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers num_blocks num_layers_per_stack"
)
_SIZES: tuple[tuple[int, str], ...] = (
    (LAYERS, _DEPTH),
    (64, "hidden_size d_model n_embd emb_dim embedding_dim embedding_size lru_width word_embed_proj_dim "
         "input_embedding_size output_embedding_size pronunciation_embed_dim shape_embed_dim"),
    (4, "num_attention_heads n_head n_heads num_heads decoder_attention_heads num_decoder_attention_heads "
        "num_encoder_attention_heads encoder_attention_heads attention_heads swa_num_attention_heads "
        "linear_num_value_heads mamba_n_heads mamba_num_heads linear_num_heads index_n_heads"),
    (4, "num_experts n_routed_experts num_local_experts moe_num_experts"),
    (2, "num_key_value_heads num_kv_heads swa_num_key_value_heads num_experts_per_tok num_experts_per_token moe_topk moe_k "
        "linear_num_key_heads encoder_layers num_encoder_layers"),
    (1, "topk_group n_group num_expert_group first_k_dense_replace num_dense_layers moe_layer_start_index "
        "n_shared_experts"),
    (8, "qk_rope_head_dim qk_nope_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim rotary_dim"),
    (16, "head_dim kv_channels attention_head_size swa_head_dim index_head_dim dim_head d_head attention_head_dim "
         "qk_head_dim q_lora_rank kv_lora_rank o_lora_rank moe_intermediate_size shared_expert_intermediate_size "
         "expert_ffn_hidden_size moe_shared_expert_intermediate_size shared_experts_intermediate_size "
         "mamba_d_state ssm_state_size state_size query_pre_attn_scalar"),
    (12, "v_head_dim"),
    (48, "intermediate_size decoder_ffn_dim encoder_ffn_dim ffn_dim dim_ff dff ffn_hidden_size feed_forward_size d_inner "
         "intermediate_size_mlp dense_intermediate_size"),
    (128, "max_position_embeddings n_positions max_seq_len n_ctx max_target_positions model_max_length seq_length"),
    (WINDOW, "sliding_window window_size local_attention attention_window_size attention_chunk_size sliding_window_size"),
    (VOCAB, "vocab_size decoder_vocab_size vocab_size_per_layer_input"),
)  # fmt: skip
SMALL = {key: size for size, keys in _SIZES for key in keys.split()}

_LATENT = {"num_key_value_heads": 4, "head_dim": 8}
_NATIVE_LATENT = dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 16)
_NATIVE_LATENT |= {"num_key_value_heads": 4}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
OVERRIDES: dict[str, dict[str, Any]] = {
    "axk1": _LATENT,
    "axk2": _LATENT,
    "bailing_hybrid": _LATENT,
    "deepseek_v3": _NATIVE_LATENT,
    "deepseek_v32": _LATENT,
    "glm4_moe_lite": _NATIVE_LATENT,
    "glm_moe_dsa": _LATENT,
    "kimi_linear": _LATENT,
    "longcat_flash": _LATENT,
    "minicpm3": _NATIVE_LATENT,
    "youtu": _NATIVE_LATENT,
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "gemma3n_text": {"num_kv_shared_layers": 2},
    "gemma4_text": {"num_kv_shared_layers": 2},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "zaya": {"num_experts_per_tok": 1},
    "bert-generation": {"is_decoder": True},
    "xmod": {"default_language": "en_XX"},
    "big_bird": {"attention_type": "original_full"},
    "deepseek_v2": _NATIVE_LATENT | {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "nemotron_h": {"n_groups": 2},
    "mamba2": {"head_dim": 32, "n_groups": 2},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [32, 32], "axial_pos_shape": [16, 8]},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
}


_ASSISTANT = "a head of Gemma 4 that reads the target's own keys and values; no language model by itself"
_INDEXED = "its layers choose their keys by an index (indexed attention)"
NOT_MADE = {
    "blt": "bytes in patches whose borders a second model draws; no text tokens",
    "gemma4_assistant": _ASSISTANT,
    "gemma4_unified_assistant": _ASSISTANT,
    "dots3_note": _INDEXED,
    "dots3_note_text": _INDEXED,
    "gemma3n": "as gemma3n_text, whose layers pass on four residual streams",
    "musicgen": "audio codes in several streams; no text tokens",
    "musicgen_melody": "audio codes in several streams; no text tokens",
}
"""Types of which no tiny instance is made, and why."""
WHY = {
    "cpmant": "it puts a prompt of its own in front of every pass",
    "gemma3n_text": "its layers pass on four residual streams",
    "hrm_text": "its layers run several times in a pass, in cycles",
    "minimax": "transformers takes a cache of its own for it alone",
    "mllama": "its cross-attention layers are left out of a text without images",
    "openai-gpt": "transformers gives it no cache",
    "prophetnet": "its distances are buckets of two streams, made from the order of slots",
    "reformer": "its cache is of its own kind: buckets of hashes",
    "roformer": "its rotary table is one for all rows of a batch",
    "xlm": "transformers gives it no cache",
    "xlnet": "its memory is of its own kind",
    "xlstm": "its states lie in a cache of its own kind",
    "zaya": "its convolution states cannot be taken up in the middle of a text",
}
"""Why some types are refused, where the error says only where it shows."""


def shrunk(cls: type[PreTrainedConfig], changes: dict[str, Any] | None = None) -> PreTrainedConfig:
    """A small configuration of a class."""
    return cls(**{**_small(cls().to_dict()), **(changes or {})})


def _small(default: dict[str, Any]) -> dict[str, Any]:
    layers = next((default[key] for key in _DEPTH.split() if default.get(key)), LAYERS)
    made: dict[str, Any] = {}
    for key, value in default.items():
        if key.endswith("_config") and isinstance(value, dict) and value:
            made[key] = _small(value)
        elif key in ("bos_token_id", "eos_token_id", "pad_token_id") and value is not None:
            made[key] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}[key]
        elif key in SMALL and value is not None:
            made[key] = SMALL[key]
        elif isinstance(value, list) and len(value) == layers and layers > LAYERS:
            kinds = [copy.deepcopy(x) for i, x in enumerate(value) if x not in value[:i]]
            made[key] = (kinds * LAYERS)[:LAYERS]
        elif key in ("model_type",):
            made[key] = value
    return made


def zoo_config(kind: str) -> PreTrainedConfig:
    """The small configuration of a type, as of a decoder alone."""
    cls = CONFIG_MAPPING[kind]
    changes: dict[str, Any] = {}
    if cls in MODEL_FOR_MASKED_LM_MAPPING or cls().is_encoder_decoder:
        changes = {"is_decoder": True, "is_encoder_decoder": False}
    return shrunk(cls, changes | OVERRIDES.get(kind, {}))


def zoo_module(kind: str, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random model of a type, the same at every call; weights are large enough for attention to matter."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        module: PreTrainedModel = AutoModelForCausalLM.from_config(zoo_config(kind), dtype=dtype)
        with torch.no_grad():
            for weight in module.parameters():
                if weight.dim() < 2:
                    weight.add_(torch.randn_like(weight) * 0.3)
                    continue
                spread = float(weight.float().std())
                weight.copy_(weight * (0.2 / spread) if spread > 1e-6 else torch.randn_like(weight) * 0.2)
    return module.eval()
