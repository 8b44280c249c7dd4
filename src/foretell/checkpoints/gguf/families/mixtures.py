"""Mixtures of experts: Qwen's, GLM-4.5, gpt-oss. DeepSeek's: ``latent.py``."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from foretell.checkpoints.gguf.families.architecture import BIASES, Architecture, Change
from foretell.checkpoints.gguf.families.decoders import (
    ATTENTION,
    EXPERTS,
    FFN_NORM,
    MLP,
    QK_NORMS,
    QKV_BIASES,
    layer_types,
    of_text_alone,
    sizes,
)
from foretell.checkpoints.gguf.file import GGUFFile
from foretell.checkpoints.gguf.values import decimal, only, refuse, whole
from foretell.core.errors import ModelError

SHARED_EXPERT = {
    "ffn_gate_inp_shexp.weight": "mlp.shared_expert_gate.weight",  # a vector
    "ffn_gate_shexp.weight": "mlp.shared_expert.gate_proj.weight",
    "ffn_up_shexp.weight": "mlp.shared_expert.up_proj.weight",
    "ffn_down_shexp.weight": "mlp.shared_expert.down_proj.weight",
}
ROUTED = {  # experts as transformers stacks them, and those that every token reads
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "ffn_gate_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
    "ffn_gate_shexp.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn_up_shexp.weight": "mlp.shared_experts.up_proj.weight",
    "ffn_down_shexp.weight": "mlp.shared_experts.down_proj.weight",
}
CORRECTION = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}  # of the choice of experts, not of their weights
_SIGMOID = 2  # of llama.cpp's kinds of gates
_GPT_OSS_PATTERN = 2  # every second layer sees the whole text
_ROUNDS_BOUNDS = False  # of gpt-oss's YaRN, as OpenAI's checkpoints say it; no file does, and llama.cpp rounds them
_GPT_OSS = {
    **ATTENTION,
    **{theirs: ours for theirs, ours in BIASES.items() if theirs.startswith("attn")},
    "attn_sinks.weight": "self_attn.sinks",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate_inp.weight": "mlp.router.weight",
    "ffn_gate_inp.bias": "mlp.router.bias",
    "ffn_gate_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_gate_exps.bias": "mlp.experts.gate_up_proj_bias",
    "ffn_up_exps.bias": "mlp.experts.gate_up_proj_bias",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}
_PLAIN = {**ATTENTION, **FFN_NORM}
_ROUTED_ALONE = {theirs: ours for theirs, ours in ROUTED.items() if "shexp" not in theirs}
_MINIMAX = {**_ROUTED_ALONE, "exp_probs_b.bias": "mlp.e_score_correction_bias"}
_ERNIE_BIAS = {"exp_probs_b.bias": "mlp.gate.moe_statics.e_score_correction_bias"}
_APART = {
    f"ffn_{key}_exps.weight": f"mlp.experts.{key}_proj.weight" for key in ("gate", "up", "down")
}  # of gpt-oss: matrices as they are, which may be packed


def _qwen(file: GGUFFile) -> dict[str, Any]:
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


def routed(file: GGUFFile) -> dict[str, Any]:
    """What GLM-4.5 and DeepSeek state of their experts, of which the first layers have none."""
    return {
        "intermediate_size": whole(file, "feed_forward_length"),
        "moe_intermediate_size": whole(file, "expert_feed_forward_length"),
        "n_routed_experts": whole(file, "expert_count"),
        "n_shared_experts": whole(file, "expert_shared_count"),
        "num_experts_per_tok": whole(file, "expert_used_count"),
        "n_group": whole(file, "expert_group_count", 1),
        "topk_group": whole(file, "expert_group_used_count", 1),
        "first_k_dense_replace": dense_layers(file),
        "norm_topk_prob": bool(file.get("{arch}.expert_weights_norm", False)),
        "routed_scaling_factor": decimal(file, "expert_weights_scale", 1.0, zero=True),
    }


def dense_layers(file: GGUFFile) -> int:
    """How many of the first layers have no experts."""
    return whole(file, "leading_dense_block_count", 0)


def _glm4moe(file: GGUFFile) -> dict[str, Any]:
    gate = file.get("{arch}.expert_gating_func", _SIGMOID)
    if gate not in (0, _SIGMOID):
        refuse(file, "expert_gating_func", f"expected {_SIGMOID}, GLM-4.5's sigmoid")
    of_text_alone(file)
    return {
        **sizes(file, partial=True),
        **routed(file),
        "norm_topk_prob": bool(file.get("{arch}.expert_weights_norm", True)),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
    }


def _glm4moe_layer(file: GGUFFile, layer: int) -> Mapping[str, str]:
    return MLP if layer < dense_layers(file) else {**ROUTED, **CORRECTION}


def _gpt_oss(file: GGUFFile) -> dict[str, Any]:
    found = sizes(file)
    only(file, "rope.freq_base_swa", file.get("{arch}.rope.freq_base", 10000.0), "layers of gpt-oss are rotated alike")
    rope = found["rope_parameters"]
    if rope["rope_type"] == "yarn":
        rope["truncate"] = _ROUNDS_BOUNDS
    return {
        **found,
        "intermediate_size": whole(file, "expert_feed_forward_length"),
        "num_local_experts": whole(file, "expert_count"),
        "num_experts_per_tok": whole(file, "expert_used_count"),
        "sliding_window": whole(file, "attention.sliding_window"),
        "layer_types": layer_types(file, found["num_hidden_layers"], _GPT_OSS_PATTERN),
        "attention_bias": True,
    }


def _ernie_moe(file: GGUFFile) -> dict[str, Any]:
    return {
        **sizes(file),
        "intermediate_size": whole(file, "feed_forward_length"),
        "moe_intermediate_size": whole(file, "expert_feed_forward_length"),
        "moe_num_experts": whole(file, "expert_count"),
        "moe_k": whole(file, "expert_used_count"),
        "moe_num_shared_experts": whole(file, "expert_shared_count", 0),
        "moe_layer_start_index": dense_layers(file),
        "moe_layer_interval": whole(file, "interleave_moe_layer_step"),
    }


def _ernie_layer(file: GGUFFile, layer: int) -> Mapping[str, str]:
    if layer < dense_layers(file) or (layer + 1) % whole(file, "interleave_moe_layer_step"):
        return MLP
    return {**(ROUTED if whole(file, "expert_shared_count", 0) else _ROUTED_ALONE), **_ERNIE_BIAS}


def _minimax(file: GGUFFile) -> dict[str, Any]:
    only(file, "expert_gating_func", _SIGMOID, "MiniMax-M2's router takes the sigmoid")
    return {
        **sizes(file, partial=True),
        "intermediate_size": whole(file, "expert_feed_forward_length"),
        "num_local_experts": whole(file, "expert_count"),
        "num_experts_per_tok": whole(file, "expert_used_count"),
    }


def _ernie_adjust(file: GGUFFile, ours: str, theirs: tuple[str, ...]) -> Change | None:
    if ours.endswith("e_score_correction_bias"):  # of one group of experts
        return Change(shape=(1, file.tensors[theirs[0]].shape[-1]))
    return stacked(file, ours, theirs)


def stacked(file: GGUFFile, ours: str, theirs: tuple[str, ...]) -> Change | None:
    """Gate and up of each expert in one matrix, as transformers keeps them: [experts, 2 inner, hidden]."""
    if not ours.endswith("experts.gate_up_proj") or len(theirs) == 1:
        return None
    return halves(file, theirs)


def halves(file: GGUFFile, theirs: tuple[str, ...]) -> Change:
    """Gate and up below each other, or of a stack those of each expert. Raises ModelError where their shapes differ."""
    *experts, rows, columns = _alike(file, theirs)
    if not experts:
        return Change(shape=(2 * rows, columns))
    order = torch.arange(2 * experts[0] * rows).view(2, experts[0], rows).transpose(0, 1).reshape(-1)
    return Change(order=order, shape=(experts[0], 2 * rows, columns))


def _interleaved(file: GGUFFile, ours: str, theirs: tuple[str, ...]) -> Change | None:
    """Experts of gpt-oss: gate and up interleaved, and matrices transposed: [experts, hidden, 2 inner]."""
    if ours.endswith("gate_up_proj_bias"):
        experts, inner = _alike(file, theirs)
        return Change(undo=_by_turns, shape=(experts, 2 * inner))
    if ours.endswith("gate_up_proj"):
        experts, inner, hidden = _alike(file, theirs)
        return Change(undo=lambda parts: _by_turns([part.mT for part in parts]), shape=(experts, hidden, 2 * inner))
    if ours.endswith("experts.down_proj"):
        experts, hidden, inner = file.tensors[theirs[0]].shape
        return Change(undo=lambda parts: parts[0].mT, shape=(experts, inner, hidden))
    return None


def _by_turns(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts, -1).flatten(-2)


def _alike(file: GGUFFile, names: tuple[str, ...]) -> tuple[int, ...]:
    """The shape that all these tensors have. Raises ModelError where they differ."""
    first, *rest = names
    shape = file.tensors[first].shape
    for name in rest:
        if file.tensors[name].shape != shape:
            raise ModelError(
                f"{file.name}: tensor {name} has shape {file.tensors[name].shape}; expected {shape}, that of {first}"
            )
    return shape


MIXTURES = {
    "qwen2moe": Architecture(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        {**ATTENTION, **FFN_NORM, **EXPERTS, **SHARED_EXPERT, **QKV_BIASES},
        _qwen,
    ),
    "qwen3moe": Architecture(
        "qwen3_moe", "Qwen3MoeForCausalLM", {**ATTENTION, **FFN_NORM, **EXPERTS, **QK_NORMS}, _qwen
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        {**ATTENTION, "post_attention_norm.weight": "post_attention_layernorm.weight"},
        _glm4moe,
        some=_glm4moe_layer,
        may={**QKV_BIASES, **QK_NORMS},
        adjust=stacked,
    ),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe", "Ernie4_5_MoeForCausalLM", _PLAIN, _ernie_moe, some=_ernie_layer, may={}, adjust=_ernie_adjust
    ),
    "minimax-m2": Architecture(
        "minimax_m2", "MiniMaxM2ForCausalLM", {**_PLAIN, **QK_NORMS, **_MINIMAX}, _minimax, may={}, adjust=stacked
    ),
    "gpt-oss": Architecture(
        "gpt_oss", "GptOssForCausalLM", _GPT_OSS, _gpt_oss, may={}, adjust=_interleaved, apart=_APART
    ),
}
