"""Mixtures of experts."""

from typing import Any

from foretell.model.gguf.architecture import Architecture
from foretell.model.gguf.decoders import ATTENTION, EXPERTS, FFN_NORM, QK_NORMS, QKV_BIASES, sizes
from foretell.model.gguf.file import GGUFFile
from foretell.model.gguf.values import whole

_SHARED_EXPERT = {
    "ffn_gate_inp_shexp.weight": "mlp.shared_expert_gate.weight",  # a vector
    "ffn_gate_shexp.weight": "mlp.shared_expert.gate_proj.weight",
    "ffn_up_shexp.weight": "mlp.shared_expert.up_proj.weight",
    "ffn_down_shexp.weight": "mlp.shared_expert.down_proj.weight",
}


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


MIXTURES = {
    "qwen2moe": Architecture(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        {**ATTENTION, **FFN_NORM, **EXPERTS, **_SHARED_EXPERT, **QKV_BIASES},
        _qwen,
    ),
    "qwen3moe": Architecture(
        "qwen3_moe", "Qwen3MoeForCausalLM", {**ATTENTION, **FFN_NORM, **EXPERTS, **QK_NORMS}, _qwen
    ),
}
