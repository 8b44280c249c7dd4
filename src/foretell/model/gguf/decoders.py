"""Architectures of the Llama family, and its mixtures of experts of Qwen."""

from typing import Any

import torch
from torch import Tensor

from foretell.core.errors import ModelError
from foretell.model.gguf.architecture import LINEARS, Architecture, Change
from foretell.model.gguf.file import GGUFFile
from foretell.model.gguf.rope import read_rope
from foretell.model.gguf.values import decimal, depth, whole

_LINEAR_WEIGHTS = {f"{theirs}.weight": f"{ours}.weight" for theirs, ours in LINEARS.items()}
ATTENTION = {
    "attn_norm.weight": "input_layernorm.weight",
    **{theirs: ours for theirs, ours in _LINEAR_WEIGHTS.items() if theirs.startswith("attn")},
}
MLP = {theirs: ours for theirs, ours in _LINEAR_WEIGHTS.items() if theirs.startswith("ffn")}
QK_NORMS = {"attn_q_norm.weight": "self_attn.q_norm.weight", "attn_k_norm.weight": "self_attn.k_norm.weight"}
QKV_BIASES = {f"attn_{x}.bias": f"self_attn.{x}_proj.bias" for x in "qkv"}
FFN_NORM = {"ffn_norm.weight": "post_attention_layernorm.weight"}
LLAMA = {**ATTENTION, **FFN_NORM, **MLP}
SANDWICH = {  # norms before and after both halves of a layer
    **ATTENTION,
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    **MLP,
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
EXPERTS = {  # all of a layer in one tensor
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
_GEMMA_PATTERN = 6  # every sixth layer of Gemma 3 sees the whole text
_GEMMA_27B_LAYERS = 62


def sizes(file: GGUFFile) -> dict[str, Any]:
    """What all of them state: sizes, heads that are rotated as a whole, the epsilon and the rotation. Raises ModelError
    where they contradict each other, or q."""
    arch = file.get("general.architecture")
    hidden, heads = whole(file, "embedding_length"), whole(file, "attention.head_count")
    head_dim = whole(file, "attention.key_length", hidden // heads)
    values = whole(file, "attention.value_length", head_dim)
    turned = whole(file, "rope.dimension_count", head_dim)
    if values != head_dim or turned != head_dim:
        raise ModelError(
            f"{file.name}: heads of {head_dim} values of which {turned} are rotated, beside {values} of v; {arch} "
            "models have the same number of all three"
        )
    found = file.tensors["blk.0.attn_q.weight"].shape
    if found != (heads * head_dim, hidden):
        raise ModelError(
            f"{file.name}: tensor blk.0.attn_q.weight has shape {found}; {file.path.name} states {heads} heads of "
            f"{head_dim} values and a width of {hidden}, so expected {(heads * head_dim, hidden)}"
        )
    context = whole(file, "context_length")
    return {
        "hidden_size": hidden,
        "num_hidden_layers": depth(file)[0],
        "num_attention_heads": heads,
        "num_key_value_heads": whole(file, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": decimal(file, "attention.layer_norm_rms_epsilon"),
        "rope_parameters": read_rope(file, head_dim, context),
    }


def dense(file: GGUFFile) -> dict[str, Any]:
    """The same and the width of MLPs."""
    return {**sizes(file), "intermediate_size": whole(file, "feed_forward_length")}


def _llama(file: GGUFFile) -> dict[str, Any]:
    biases = {"attention_bias": "attn_q", "mlp_bias": "ffn_gate"}
    return {**dense(file), **{key: f"blk.0.{name}.bias" in file.tensors for key, name in biases.items()}}


def _gemma3(file: GGUFFile) -> dict[str, Any]:
    found = dense(file)
    num_layers, context, head_dim = found["num_hidden_layers"], found["max_position_embeddings"], found["head_dim"]
    usual = found["hidden_size"] // found["num_attention_heads"]
    window = whole(file, "attention.sliding_window", 0) or None
    full = [window is None or (layer + 1) % _GEMMA_PATTERN == 0 for layer in range(num_layers)]
    local = {"rope_type": "default", "rope_theta": decimal(file, "rope.freq_base_swa", 10000.0)}
    return {
        **found,
        "layer_types": ["full_attention" if each else "sliding_attention" for each in full],
        "sliding_window": window or context,
        "query_pre_attn_scalar": usual if num_layers == _GEMMA_27B_LAYERS else head_dim,
        "final_logit_softcapping": file.get("{arch}.final_logit_softcapping"),
        "rope_parameters": {"full_attention": found["rope_parameters"], "sliding_attention": local},
    }


def _experts(file: GGUFFile) -> dict[str, Any]:
    """Mixtures of experts of Qwen. Every layer has experts."""
    arch = file.get("general.architecture")
    inner = whole(file, "expert_feed_forward_length", 0) or file.tensors["blk.0.ffn_gate_exps.weight"].shape[-2]
    found = {
        **sizes(file),
        "num_experts": whole(file, "expert_count"),
        "num_experts_per_tok": whole(file, "expert_used_count"),
        "moe_intermediate_size": inner,
        "intermediate_size": whole(file, "feed_forward_length", 0) or inner,  # read by no layer
        # llama.cpp takes these where a file does not say
        "norm_topk_prob": bool(file.get("{arch}.expert_weights_norm", arch == "qwen3moe")),
        "decoder_sparse_step": 1,
    }
    if arch == "qwen2moe":
        found["shared_expert_intermediate_size"] = file.tensors["blk.0.ffn_gate_shexp.weight"].shape[0]
    return found


def turned(file: GGUFFile, ours: str, theirs: tuple[str, ...]) -> Change | None:
    """Rows of q and k in transformers' order, which rotates (i, i + half) of a head; llama.cpp (2i, 2i + 1). Raises
    ModelError where rows cannot be divided among so many heads."""
    part = theirs[0].split(".")[-2]
    if part not in ("attn_q", "attn_k"):
        return None
    num_heads = file.get("{arch}.attention.head_count")
    if part == "attn_k":
        num_heads = file.get("{arch}.attention.head_count_kv", num_heads)
    rows = file.tensors[theirs[0]].shape[0]
    if type(num_heads) is not int or num_heads < 1 or rows % (2 * num_heads):
        raise ModelError(
            f"{file.name}: tensor {theirs[0]} has {rows} rows, which are not {num_heads!r} heads of an even size"
        )
    return Change(order=torch.arange(rows).view(num_heads, -1, 2).transpose(1, 2).reshape(-1))


def offset_norms(file: GGUFFile, ours: str, theirs: tuple[str, ...]) -> Change | None:
    """Norms of Gemma, to which llama.cpp's converter adds the 1 that transformers' code adds."""
    return Change(undo=_less_one) if ours.endswith("norm.weight") else None


def _less_one(parts: list[Tensor]) -> Tensor:
    return parts[0] - 1.0


DECODERS = {
    "llama": Architecture("llama", "LlamaForCausalLM", LLAMA, _llama, adjust=turned),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", {**LLAMA, **QKV_BIASES}, dense),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", {**LLAMA, **QK_NORMS}, dense),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", {**SANDWICH, **QK_NORMS}, _gemma3, adjust=offset_norms),
    "qwen2moe": Architecture(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        {**ATTENTION, **FFN_NORM, **EXPERTS, **_SHARED_EXPERT, **QKV_BIASES},
        _experts,
    ),
    "qwen3moe": Architecture(
        "qwen3_moe", "Qwen3MoeForCausalLM", {**ATTENTION, **FFN_NORM, **EXPERTS, **QK_NORMS}, _experts
    ),
}
