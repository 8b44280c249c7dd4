"""Names of tensors: those of GGUF files beside those that transformers saves a model by."""

from collections.abc import Iterator

_ATTENTION = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
}
_MLP = {
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_LINEAR = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
_QK_NORMS = {"attn_q_norm.weight": "self_attn.q_norm.weight", "attn_k_norm.weight": "self_attn.k_norm.weight"}
_LLAMA = {**_ATTENTION, "ffn_norm.weight": "post_attention_layernorm.weight", **_MLP}
_QKV_BIASES = ("attn_q", "attn_k", "attn_v")
_QKV_BIAS_NAMES = {f"{x}.bias": _LLAMA[f"{x}.weight"][:-6] + "bias" for x in _QKV_BIASES}
_EXPERTS = {  # all of a layer in one tensor; _MLP has no place there
    **_ATTENTION,
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "ffn_gate_exps.weight": "mlp.experts.gate_proj.weight",
    "ffn_up_exps.weight": "mlp.experts.up_proj.weight",
    "ffn_down_exps.weight": "mlp.experts.down_proj.weight",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp.weight": "mlp.shared_expert_gate.weight",  # a vector
    "ffn_gate_shexp.weight": "mlp.shared_expert.gate_proj.weight",
    "ffn_up_shexp.weight": "mlp.shared_expert.up_proj.weight",
    "ffn_down_shexp.weight": "mlp.shared_expert.down_proj.weight",
}
_WHOLE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_HEAD = {"output.weight": "lm_head.weight"}  # absent where the head is the embedding

REQUIRED = {  # architecture -> tensors that every layer has
    "llama": _LLAMA,
    "qwen2": {**_LLAMA, **_QKV_BIAS_NAMES},
    "qwen3": {**_LLAMA, **_QK_NORMS},
    "qwen2moe": {**_EXPERTS, **_SHARED_EXPERT, **_QKV_BIAS_NAMES},
    "qwen3moe": {**_EXPERTS, **_QK_NORMS},
    "gemma3": {
        **_ATTENTION,
        "post_attention_norm.weight": "post_attention_layernorm.weight",
        "ffn_norm.weight": "pre_feedforward_layernorm.weight",
        **_MLP,
        "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
        **_QK_NORMS,
    },
}
OPTIONAL = {f"{x}.bias": {**_ATTENTION, **_MLP}[f"{x}.weight"][:-6] + "bias" for x in _LINEAR}
"""Biases that a layer may have, in any architecture."""
IGNORED = ("rope_freqs.weight",)
"""Tensors that are read as part of the configuration."""


def required(architecture: str, num_layers: int) -> Iterator[tuple[str, str]]:
    """(name in the file, transformers' name) of all that a model must have."""
    yield from _WHOLE.items()
    for layer in range(num_layers):
        for theirs, ours in REQUIRED[architecture].items():
            yield f"blk.{layer}.{theirs}", f"model.layers.{layer}.{ours}"


def optional(num_layers: int) -> Iterator[tuple[str, str]]:
    """The same of what it may have."""
    yield from _HEAD.items()
    for layer in range(num_layers):
        for theirs, ours in OPTIONAL.items():
            yield f"blk.{layer}.{theirs}", f"model.layers.{layer}.{ours}"
