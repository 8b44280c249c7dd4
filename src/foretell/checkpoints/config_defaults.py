"""What ``configs.py`` knows of transformers' configurations: the types, their classes there, the fields
that are read of each, and their defaults."""

from typing import Any

HYBRIDS = {
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "bamba": "BambaForCausalLM",
}
"""Types of models, some of whose layers have a recurrent mixer in place of attention, or beside it."""
_OTHERS = """
    arcee:Arcee cohere:Cohere cohere2:Cohere2 cwm:Cwm ernie4_5:Ernie4_5 ernie4_5_moe:Ernie4_5_Moe exaone4:Exaone4
    exaone_moe:ExaoneMoe flex_olmo:FlexOlmo glm:Glm granite_swa:GraniteSWA granitemoe_swa:GraniteMoeSWA helium:Helium
    hunyuan_v1_dense:HunYuanDenseV1 hunyuan_v1_moe:HunYuanMoEV1 hy_v3:HYV3 hyperclovax:HyperCLOVAX
    internlm3:InternLM3 iquestcoder:IQuestCoder jais2:Jais2 mellum:Mellum minimax_m2:MiniMaxM2 ministral:Ministral
    nemotron:Nemotron seed_oss:SeedOss stablelm:StableLm starcoder2:Starcoder2 vaultgemma:VaultGemma
"""
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "granitemoeshared": "GraniteMoeSharedForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "solar_open": "SolarOpenForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "bitnet": "BitNetForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "youtu": "YoutuForCausalLM",
    "minicpm3": "MiniCPM3ForCausalLM",
    **{kind: f"{name}ForCausalLM" for kind, name in (pair.split(":") for pair in _OTHERS.split())},
    **HYBRIDS,
}
"""All types of models (``model_type`` of a config.json) that the decoder of the Llama family runs."""

_COMMON: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_LLAMA = {
    **_COMMON, "vocab_size": 32000, "intermediate_size": 11008, "num_key_value_heads": None, "head_dim": None,
    "max_position_embeddings": 2048, "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_MISTRAL = {
    **_COMMON, "vocab_size": 32000, "intermediate_size": 14336, "num_key_value_heads": 8, "head_dim": None,
    "max_position_embeddings": 131072, "sliding_window": 4096, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_WINDOW = {"use_sliding_window": False, "sliding_window": 4096}
_QWEN = {**_COMMON, **_WINDOW, "head_dim": None, "max_window_layers": 28, "layer_types": None}
_EXPERTS = {
    "hidden_size": 2048, "num_hidden_layers": 24, "decoder_sparse_step": 1, "norm_topk_prob": False,
    "mlp_only_layers": None,
}  # fmt: skip
_GEMMA = {
    **_COMMON, "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072, "tie_word_embeddings": True, "attention_bias": False, "query_pre_attn_scalar": 256,
    "sliding_window": 4096, "layer_types": None, "final_logit_softcapping": None, "attn_logit_softcapping": None,
    "use_bidirectional_attention": False, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip
del _GEMMA["hidden_act"]
_SCALES = {
    "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0,
}  # fmt: skip
_ROUTER = {"routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "norm_topk_prob": True}
_LFM2 = {
    **_COMMON, "vocab_size": 65536, "num_key_value_heads": 8, "max_position_embeddings": 128000, "norm_eps": 1e-5,
    "tie_word_embeddings": True, "conv_bias": False, "conv_L_cache": 3, "layer_types": None, "head_dim": None,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
del _LFM2["hidden_act"], _LFM2["rms_norm_eps"]
_DELTA = {
    **_COMMON, "num_attention_heads": 16, "head_dim": 256, "attention_bias": False, "layer_types": None,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}  # fmt: skip
_LATENT = {**_COMMON, "kv_lora_rank": 512, "q_lora_rank": 1536, "v_head_dim": 128, "attention_bias": False}
_LATENT |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "num_experts_per_tok": None, "head_dim": None}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {**_LLAMA, "mlp_bias": False},
    "mistral": _MISTRAL,
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128, "attention_bias": False},
    "qwen3_moe": {
        **_COMMON, **_WINDOW, **_EXPERTS, "intermediate_size": 6144, "num_key_value_heads": 4, "attention_bias": False,
        "head_dim": None, "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128,
    },
    "qwen2_moe": {
        **_QWEN, **_EXPERTS, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16,
        "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4,
        "num_experts": 60, "qkv_bias": True,
    },
    "gemma3_text": _GEMMA,
    "gemma2": {
        **_GEMMA, "vocab_size": 256000, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0, "use_bidirectional_attention": None,
    },
    "olmo2": {**_LLAMA, "vocab_size": 50304, "rms_norm_eps": 1e-5, "bos_token_id": None, "eos_token_id": 50279},
    "granite": {**_LLAMA, **_SCALES, "mlp_bias": False},
    "granitemoe": {**_LLAMA, **_SCALES, "num_local_experts": 8, "num_experts_per_tok": 2},
    "granitemoeshared": {
        **_LLAMA, **_SCALES, "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 0,
    },
    "mixtral": {**_MISTRAL, "rms_norm_eps": 1e-5, "sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {
        **_LLAMA, "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16,
        "num_attention_heads": 16, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "num_experts": 64,
        "num_experts_per_tok": 8, "norm_topk_prob": False, "clip_qkv": None, "bos_token_id": None, "eos_token_id": 50279,
    },
    "glm4": {
        **_COMMON, "vocab_size": 151552, "intermediate_size": 13696, "num_hidden_layers": 40, "num_key_value_heads": 2,
        "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-7, "head_dim": 128, "attention_bias": True,
        "eos_token_id": [151329, 151336, 151338],
    },
    "glm4_moe": {
        **_COMMON, "vocab_size": 151552, "intermediate_size": 10944, "num_hidden_layers": 46, "num_attention_heads": 96,
        "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "head_dim": None,
        "attention_bias": False, "moe_intermediate_size": 1408, "num_experts_per_tok": 8, "n_shared_experts": 1,
        "n_routed_experts": 128, "first_k_dense_replace": 1, "use_qk_norm": False, **_ROUTER,
        "num_nextn_predict_layers": 1,
    },
    "gpt_oss": {
        **_COMMON, "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "attention_bias": True, "sliding_window": 128, "layer_types": None, "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0, "num_local_experts": 128, "num_experts_per_tok": 4, "quantization_config": None,
    },
    "bitnet": {
        **_COMMON, "vocab_size": 128256, "hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 30,
        "num_attention_heads": 20, "num_key_value_heads": 5, "hidden_act": "relu2", "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5, "attention_bias": False, "quantization_config": None, "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    "deepseek_v2": {
        **_LATENT, "vocab_size": 102400, "intermediate_size": 11008, "num_key_value_heads": None,
        "max_position_embeddings": 2048, "mlp_bias": False, "first_k_dense_replace": 0, "n_group": None, "topk_group": None,
        "n_routed_experts": 64, "n_shared_experts": 2, "routed_scaling_factor": 1.0, "topk_method": "greedy",
        "norm_topk_prob": False, "moe_intermediate_size": 1407, "bos_token_id": 1, "eos_token_id": 2,
    },
    "deepseek_v3": {
        **_LATENT, "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
        "num_attention_heads": 128, "num_key_value_heads": 128, "max_position_embeddings": 4096, "rope_interleave": True,
        "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "n_routed_experts": 256,
        "n_shared_experts": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "moe_intermediate_size": 2048,
        "num_nextn_predict_layers": 1, "bos_token_id": 0, "eos_token_id": 1,
    },
    "lfm2": {
        **_LFM2, "hidden_size": 2560, "intermediate_size": 12288, "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256,
    },
    "lfm2_moe": {
        **_LFM2, "hidden_size": 2048, "intermediate_size": 7168, "moe_intermediate_size": 1792, "num_dense_layers": 2,
        "num_experts": 32, "num_experts_per_tok": 4, "use_expert_bias": True, "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
    "qwen3_next": {
        **_DELTA, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 48, "num_key_value_heads": 2,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts": 512,
        "num_experts_per_tok": 10, "decoder_sparse_step": 1, "norm_topk_prob": True, "mlp_only_layers": None,
    },
    "qwen3_5_text": {**_DELTA, "vocab_size": 248320, "intermediate_size": 12288, "num_key_value_heads": 4},
    "qwen3_5_moe_text": {
        **{key: value for key, value in _DELTA.items() if key != "intermediate_size"}, "vocab_size": 248320,
        "hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8,
    },
    "granitemoehybrid": {
        **_LLAMA, **_SCALES, "layer_types": None, "num_local_experts": 8, "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024, "position_embedding_type": None, "mamba_n_heads": 128, "mamba_n_groups": 1,
        "mamba_d_state": 256, "mamba_d_head": None, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True,
        "mamba_proj_bias": False, "time_step_limit": (0.0, float("inf")),
    },
    "nemotron_h": {
        "vocab_size": 131072, "hidden_size": 4096, "layers_block_type": None, "num_hidden_layers": None,
        "tie_word_embeddings": False, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 4096, "attention_bias": False, "sliding_window": None, "intermediate_size": 21504,
        "mlp_hidden_act": "relu2", "mlp_bias": False, "ssm_state_size": 128, "mamba_num_heads": 128,
        "mamba_head_dim": 64, "mamba_hidden_act": "silu", "n_groups": 8, "conv_kernel": 4, "time_step_min": 0.001,
        "use_conv_bias": True, "n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688, "moe_latent_size": None, "num_experts_per_tok": 2, **_ROUTER,
        "use_bias": False, "num_nextn_predict_layers": 0, "layer_norm_epsilon": 1e-5, "bos_token_id": 1, "eos_token_id": 2,
    },
}  # fmt: skip
"""Type -> the fields that are read, and transformers' defaults of them."""
THETAS = {"gpt_oss": 150000.0, "bitnet": 500000.0, "mixtral": 1e6, "lfm2": 1e6, "lfm2_moe": 1e6}
"""The base of RoPE of types of which it is not 10,000."""
PARTIAL = {"glm4": 0.5, "glm4_moe": 0.5, "qwen3_next": 0.25, "qwen3_5_text": 0.25, "qwen3_5_moe_text": 0.25}
"""The part of a head that is rotated, of types that have such a number."""
