"""DeepSeek 2 and 3 and their kin: attention over latent vectors, of which keys and values are made.

llama.cpp keeps one head of keys and values, the latent vector itself, and for it splits the matrix that makes keys and
values of it, the part of the keys on its side (Multi-head Latent Attention, DeepSeek-V2, section 2.1).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from foretell.checkpoints.gguf.families.architecture import Architecture, Change
from foretell.checkpoints.gguf.families.decoders import ATTENTION, FFN_NORM, MLP
from foretell.checkpoints.gguf.families.mixtures import CORRECTION, ROUTED, dense_layers, routed, stacked
from foretell.checkpoints.gguf.file import GGUFFile
from foretell.checkpoints.gguf.rope import read_rope
from foretell.checkpoints.gguf.values import decimal, depth, only, refuse, whole
from foretell.core.errors import ModelError

_LAYER = {
    "attn_norm.weight": ATTENTION["attn_norm.weight"],
    "attn_output.weight": ATTENTION["attn_output.weight"],
    "attn_kv_a_mqa.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attn_kv_a_norm.weight": "self_attn.kv_a_layernorm.weight",
    **FFN_NORM,
}
_QUERY = {"attn_q.weight": "self_attn.q_proj.weight"}
_LATENT_QUERY = {
    "attn_q_a.weight": "self_attn.q_a_proj.weight",
    "attn_q_a_norm.weight": "self_attn.q_a_layernorm.weight",
    "attn_q_b.weight": "self_attn.q_b_proj.weight",
}
_SPLIT = {
    "attn_k_b.weight": "self_attn.kv_b_proj.weight",
    "attn_v_b.weight": "self_attn.kv_b_proj.weight",
}
_APART = {"attn_k_b.weight": "self_attn.k_b_proj.weight", "attn_v_b.weight": "self_attn.v_b_proj.weight"}
_WHOLE = {"attn_kv_b.weight": "self_attn.kv_b_proj.weight"}  # of files of before April 2025
_SOFTMAX, _SIGMOID = 1, 2  # llama.cpp's kinds of gates
_LOG_FACTOR = 0.1  # llama.cpp's converter multiplies mscale_all_dim by it, of this architecture alone


def _config(file: GGUFFile) -> dict[str, Any]:
    heads, context = whole(file, "attention.head_count"), whole(file, "context_length")
    rotated = whole(file, "rope.dimension_count")
    keys = whole(file, "attention.key_length_mla", 0) or whole(file, "attention.key_length")
    rope, rank = read_rope(file, rotated, context), whole(file, "attention.kv_lora_rank")
    if file.get("{arch}.attention.key_length_mla"):  # what llama.cpp keeps: one head, the latent vector
        why = "the latent vector, and what is rotated beside it"
        only(file, "attention.head_count_kv", 1, why)
        only(file, "attention.key_length", rank + rotated, why)
        only(file, "attention.value_length", rank, why)
    else:
        only(file, "attention.head_count_kv", heads, "as many as of q")
    if "mscale_all_dim" in rope:
        both = float(f"{rope['mscale_all_dim'] / _LOG_FACTOR:.6g}")  # all checkpoints have both alike
        rope |= {"mscale": both, "mscale_all_dim": both}
    found = {
        **routed(file),
        "hidden_size": whole(file, "embedding_length"),
        "num_hidden_layers": depth(file)[0],
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": context,
        "rms_norm_eps": decimal(file, "attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope,
        "q_lora_rank": whole(file, "attention.q_lora_rank", 0) or None,
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": keys - rotated,
        "v_head_dim": whole(file, "attention.value_length_mla", 0) or whole(file, "attention.value_length"),
    }
    if file.get("{arch}.attention.temperature_scale"):
        refuse(
            file, "attention.temperature_scale", "expected none: no model of transformers that is read here scales so"
        )
    gate = file.get("{arch}.expert_gating_func", 0) or (_SIGMOID if _is_lite_glm(file) else _SOFTMAX)
    if gate == _SIGMOID:
        return {**found, "rope_interleave": True}
    if gate != _SOFTMAX or _is_third(file):
        refuse(file, "expert_gating_func", f"expected {_SOFTMAX}, softmax without a correction, or {_SIGMOID}, sigmoid")
    grouped = found["n_group"] > 1
    return {
        **found,
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "topk_method": "group_limited_greedy" if grouped else "greedy",
    }


def _is_lite_glm(file: GGUFFile) -> bool:
    """Whether it is GLM-4.7-Flash, of whose first files llama.cpp knows the gate by these two numbers."""
    return depth(file)[0] in (47, 48) and file.tensors["token_embd.weight"].shape[0] == 154880


def _is_third(file: GGUFFile) -> bool:
    """Whether the choice of experts is corrected, as DeepSeek 3 does."""
    return f"blk.{dense_layers(file)}.exp_probs_b.bias" in file.tensors


def _layer(file: GGUFFile, layer: int) -> Mapping[str, str]:
    query = _LATENT_QUERY if file.get("{arch}.attention.q_lora_rank") else _QUERY
    latent = _WHOLE if f"blk.{layer}.attn_kv_b.weight" in file.tensors else _SPLIT
    correction = CORRECTION if _is_third(file) else {}
    return {**query, **latent, **(MLP if layer < dense_layers(file) else {**ROUTED, **correction})}


def _adjust(file: GGUFFile, ours: str, theirs: tuple[str, ...]) -> Change | None:
    if not ours.endswith("kv_b_proj.weight") or len(theirs) == 1:
        return stacked(file, ours, theirs)
    (heads, rank, keys), (more, values, width) = (file.tensors[name].shape for name in theirs)
    if (heads, rank) != (more, width):
        shape, expected = file.tensors[theirs[1]].shape, (heads, values, rank)
        raise ModelError(f"{file.name}: tensor {theirs[1]} has shape {shape}; expected {expected}, as {theirs[0]} has")
    return Change(undo=_joined, shape=(heads * (keys + values), rank))


def _joined(parts: list[Tensor]) -> Tensor:
    """[heads * (keys + values), rank] of keys [heads, rank, keys] and values [heads, values, rank]."""
    keys, values = parts
    return torch.cat((keys.mT, values), 1).flatten(0, 1)


LATENT = {
    "deepseek2": Architecture(
        "deepseek_v3", "DeepseekV3ForCausalLM", _LAYER, _config, some=_layer, may={}, adjust=_adjust, apart=_APART
    )
}
