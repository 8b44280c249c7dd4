"""Families of which a table says all that sets them apart from Llama; ``traits.py`` reads it.

Each was written beside transformers' module of its type. What a configuration may ask for and no decoder does is refused
by ``ONLY``, with the field's name.
"""

from collections.abc import Mapping
from typing import Any

_QKV, _ATTENTION, _MLP = ("q", "k", "v"), ("q", "k", "v", "o"), ("gate", "up", "down")
_LLAMA = {"attention_bias": _ATTENTION, "mlp_bias": _MLP}
_LAYER_NORM: dict[str, Any] = {"is_layer_norm": True, "norm_biases": True}
_COHERE: dict[str, Any] = {"is_layer_norm": True, "is_parallel": True, "interleaved": True}
_HEAD_NORMS = ((".query_layernorm.", ".q_norm."), (".key_layernorm.", ".k_norm."))
_HUNYUAN: dict[str, Any] = {"qk_norm": "heads", "norms_last": True, "renames": _HEAD_NORMS}
VAULT = ((".pre_feedforward_layernorm.", ".post_attention_layernorm."),)
_C = ((".c_fc.", ".up_proj."), (".c_proj.", ".down_proj."))

TRAITS: Mapping[str, Mapping[str, Any]] = {
    "arcee": {"has_gate": False},
    "cohere": _COHERE,
    "cohere2": _COHERE,
    "ernie4_5": {"interleaved": True},
    "ernie4_5_moe": {"interleaved": True},
    "exaone4": {"qk_norm": "heads", "norms_before": False, "norms_after": True},
    "exaone_moe": {"qk_norm": "heads"},
    "flex_olmo": {"qk_norm": "all", "norms_before": False, "norms_after": True},
    "glm": {"is_fused": True, "interleaved": True},
    "helium": {"interleaved": True},
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_v1_moe": _HUNYUAN,
    "hy_v3": {"qk_norm": "heads"},
    "jais2": {**_LAYER_NORM, "has_gate": False},
    "mellum": {"qk_norm": "heads"},
    "minimax_m2": {"qk_norm": "all"},
    "nemotron": {**_LAYER_NORM, "has_gate": False, "norm_offset": 1.0},
    "nemotron_h": {"has_gate": False},
    "stablelm": _LAYER_NORM,
    "starcoder2": {**_LAYER_NORM, "has_gate": False, "renames": _C},
}
"""Type -> fields of ``Traits`` that all its models have."""
BIASES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("arcee", "hyperclovax", "granite_swa", "internlm3", "iquestcoder", "jais2", "nemotron"), _LLAMA),
    **{kind: {} for kind in ("cwm", "exaone4", "exaone_moe", "minimax_m2", "ministral", "ernie4_5_moe")},
    "ernie4_5": {"use_bias": (*_ATTENTION, *_MLP)},
    "glm": {"attention_bias": _QKV},
    "helium": {"attention_bias": _QKV, "mlp_bias": _MLP},
    "seed_oss": {"attention_bias": _QKV, "attention_out_bias": ("o",), "mlp_bias": _MLP},
    "stablelm": {"use_qkv_bias": _QKV},
    "starcoder2": {"use_bias": (*_ATTENTION, *_MLP)},
}
"""Type -> field of the configuration -> linears that have a bias where it is true (keys of ``shape.layer_names``)."""
ONLY: Mapping[str, Mapping[str, Any]] = {
    "cohere": {"use_qk_norm": False},
    "ernie4_5_moe": {"use_bias": False},
    "hy_v3": {"mlp_bias": False},
    "stablelm": {"qk_layernorm": False},
}
"""Type -> field of the configuration -> the one value that is implemented."""
BUILT_BY = dict.fromkeys(("internlm3", "iquestcoder"), "LlamaForCausalLM")
"""The class by which transformers runs types that have none of their own."""
_QWENS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
PARTLY_TURNED = (*_QWENS, "phi3", "glm", "glm4", "glm4_moe", "bamba", "minimax_m2", "nemotron", "stablelm")
"""Types of which a part of each head may be rotated."""
SLIDING_TURNED = ("cohere2", "exaone4", "exaone_moe")
"""Types whose layers that see everything do not rotate, where others have a window."""


def refused(config: Any) -> str | None:
    """The field of a configuration that no decoder reads, and why; None where there is none."""
    for field, wanted in ONLY.get(config.model_type, {}).items():
        found = getattr(config, field, wanted)
        if bool(found) != wanted:
            return f"{field} {found!r}; implemented: {wanted!r}"
    return None
