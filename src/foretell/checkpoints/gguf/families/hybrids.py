"""Hybrids of attention and short convolutions (LFM2) or Mamba-2 (Nemotron-H, Granite 4, Falcon-H1), beside those of
``delta.py``."""

from dataclasses import replace
from typing import Any

from foretell.checkpoints.gguf.families.architecture import Architecture, Change
from foretell.checkpoints.gguf.families.decoders import ATTENTION, FFN_NORM, turned_rows
from foretell.checkpoints.gguf.families.delta import DELTA_NETS, recurrent
from foretell.checkpoints.gguf.families.mixtures import halves
from foretell.checkpoints.gguf.file import GGUFFile
from foretell.checkpoints.gguf.rope import read_rope
from foretell.checkpoints.gguf.values import decimal, depth, each, only, refuse, whole
from foretell.core.errors import ModelError

_EMBEDDING = {"token_embd.weight": "model.embed_tokens.weight"}
_QKV = ("q", "k", "v")
_MAMBA = {
    "ssm_in.weight": "in_proj.weight",
    "ssm_conv1d.weight": "conv1d.weight",
    "ssm_dt.bias": "dt_bias",
    "ssm_a": "A_log",
    "ssm_d": "D",
    "ssm_out.weight": "out_proj.weight",
}
_MAMBA_NORM = {"ssm_norm.weight": "norm.weight"}
_MAMBA_BIAS = {"ssm_conv1d.bias": "conv1d.bias"}
_SIGMOID = 2  # llama.cpp, ``llama_expert_gating_func_type``

_LFM2_ATTENTION = {
    **{f"attn_{x}.weight": f"self_attn.{x}_proj.weight" for x in _QKV},
    "attn_output.weight": "self_attn.out_proj.weight",
    "attn_q_norm.weight": "self_attn.q_layernorm.weight",
    "attn_k_norm.weight": "self_attn.k_layernorm.weight",
}
_LFM2_CONVOLUTION = {f"shortconv.{x}.weight": f"conv.{x}.weight" for x in ("conv", "in_proj", "out_proj")}
_LFM2_PARTS = {"gate": "w1", "down": "w2", "up": "w3"}
_LFM2_MLP = {f"ffn_{theirs}.weight": f"feed_forward.{ours}.weight" for theirs, ours in _LFM2_PARTS.items()}
_LFM2_EXPERTS = {
    "ffn_gate_inp.weight": "feed_forward.gate.weight",
    **{f"ffn_{theirs}_exps.weight": f"feed_forward.experts.{ours}.weight" for theirs, ours in _LFM2_PARTS.items()},
}
_LFM2_BIAS = {"exp_probs_b.bias": "feed_forward.expert_bias"}

_NEMOTRON_ATTENTION = {
    **{f"attn_{x}.weight": f"mixer.{x}_proj.weight" for x in _QKV},
    "attn_output.weight": "mixer.o_proj.weight",
}
_NEMOTRON_MLP = {"ffn_up.weight": "mixer.up_proj.weight", "ffn_down.weight": "mixer.down_proj.weight"}
_NEMOTRON_EXPERTS = {
    "ffn_gate_inp.weight": "mixer.gate.weight",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps.weight": "mixer.experts.up_proj.weight",
    "ffn_down_exps.weight": "mixer.experts.down_proj.weight",
    "ffn_up_shexp.weight": "mixer.shared_experts.up_proj.weight",
    "ffn_down_shexp.weight": "mixer.shared_experts.down_proj.weight",
}
_NEMOTRON_LATENT = {
    "ffn_latent_down.weight": "mixer.fc1_latent_proj.weight",
    "ffn_latent_up.weight": "mixer.fc2_latent_proj.weight",
}

_GRANITE_MLP = {  # halves of one matrix in transformers
    "gate": "shared_mlp.input_linear.weight",
    "up": "shared_mlp.input_linear.weight",
    "down": "shared_mlp.output_linear.weight",
}
_GRANITE_EXPERTS = {
    "ffn_gate_inp.weight": "block_sparse_moe.router.layer.weight",
    "ffn_gate_exps.weight": "block_sparse_moe.input_linear.weight",
    "ffn_up_exps.weight": "block_sparse_moe.input_linear.weight",
    "ffn_down_exps.weight": "block_sparse_moe.output_linear.weight",
}

_FALCON_LINEARS = {
    **{theirs: ours for theirs, ours in ATTENTION.items() if theirs != "attn_norm.weight"},
    **{f"ffn_{x}.weight": f"feed_forward.{x}_proj.weight" for x in ("gate", "up", "down")},
}
_FALCON = {
    **_FALCON_LINEARS,
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm": "pre_ff_layernorm.weight",  # llama.cpp's name has no suffix
    **{theirs: f"mamba.{ours}" for theirs, ours in _MAMBA.items()},
}


def _under(module: str, table: dict[str, str]) -> dict[str, str]:
    return {theirs: f"{module}.{ours}" for theirs, ours in table.items()}


def _biases(table: dict[str, str]) -> dict[str, str]:
    return {f"{theirs[:-6]}bias": f"{ours[:-6]}bias" for theirs, ours in table.items()}


def _common(file: GGUFFile) -> dict[str, Any]:
    """What all of them state."""
    num_layers, heads = depth(file)[0], whole(file, "attention.head_count")
    counts = _kv_heads(file)
    if not any(counts):
        refuse(file, "attention.head_count_kv", "expected layers with attention")
    return {
        "hidden_size": whole(file, "embedding_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(counts),
        "max_position_embeddings": whole(file, "context_length"),
    }


def _kv_heads(file: GGUFFile) -> list[int]:
    """Heads of k and v of each layer; 0: it has no attention. Raises ModelError where layers with attention differ."""
    layers, heads = depth(file)
    found: list[int] = each(file, "attention.head_count_kv", layers + heads, int)
    if min(found) < 0 or len({count for count in found if count}) > 1:
        refuse(file, "attention.head_count_kv", "expected one number for all layers with attention, 0 for others")
    return found[:layers]


def _divided(file: GGUFFile, hidden: int, heads: int) -> int:
    """The size of a head where it follows from the width. Raises ModelError where the file states another one."""
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        if whole(file, key, hidden // heads) != hidden // heads:
            refuse(file, key, f"expected {hidden // heads}: a width of {hidden} in {heads} heads")
    return hidden // heads


def _mamba(file: GGUFFile) -> dict[str, int]:
    """The sizes of Mamba-2, by the names of Granite and Falcon-H1."""
    inner, heads = whole(file, "ssm.inner_size"), whole(file, "ssm.time_step_rank")
    if inner % heads:
        refuse(file, "ssm.inner_size", f"expected a multiple of the {heads} heads")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": whole(file, "ssm.group_count"),
        "mamba_d_state": whole(file, "ssm.state_size"),
        "mamba_d_conv": whole(file, "ssm.conv_kernel"),
    }


def _has(file: GGUFFile, part: str) -> bool:
    """Whether any layer has a tensor of this name."""
    return any(f"blk.{layer}.{part}" in file.tensors for layer in range(depth(file)[0]))


def _lfm2(file: GGUFFile) -> dict[str, Any]:
    found, is_mixture = _common(file), file.get("general.architecture") == "lfm2moe"
    head_dim = _divided(file, found["hidden_size"], found["num_attention_heads"])
    if file.get("{arch}.attention.sliding_window"):
        refuse(file, "attention.sliding_window", "expected none: layers with windows are not read")
    found |= {
        "norm_eps": decimal(file, "attention.layer_norm_rms_epsilon"),
        "rope_parameters": read_rope(file, head_dim, found["max_position_embeddings"]),
        "layer_types": ["full_attention" if count else "conv" for count in _kv_heads(file)],
        "conv_L_cache": whole(file, "shortconv.l_cache"),
        "intermediate_size": whole(file, "feed_forward_length"),
    }
    if not is_mixture:
        return {**found, "block_auto_adjust_ff_dim": False}  # the file has the number that was adjusted
    if whole(file, "expert_gating_func") != _SIGMOID:
        refuse(file, "expert_gating_func", f"expected {_SIGMOID}, a sigmoid")
    return {
        **found,
        "num_dense_layers": whole(file, "leading_dense_block_count", 0),
        "num_experts": whole(file, "expert_count"),
        "num_experts_per_tok": whole(file, "expert_used_count"),
        "moe_intermediate_size": whole(file, "expert_feed_forward_length"),
        "norm_topk_prob": True,  # as llama.cpp has it
        "routed_scaling_factor": decimal(file, "expert_weights_scale", 1.0, zero=True),
        "use_expert_bias": _has(file, "exp_probs_b.bias"),
    }


def _lfm2_layer(file: GGUFFile, layer: int) -> dict[str, str]:
    mixer = _LFM2_ATTENTION if _kv_heads(file)[layer] else _LFM2_CONVOLUTION
    is_mixture = file.get("general.architecture") == "lfm2moe"
    has_experts = is_mixture and layer >= whole(file, "leading_dense_block_count", 0)
    return {**mixer, **(_LFM2_EXPERTS if has_experts else _LFM2_MLP)}


def _nemotron(file: GGUFFile) -> dict[str, Any]:
    found, mamba, kinds = _common(file), _mamba(file), _nemotron_kinds(file)
    widths: list[int] = each(file, "feed_forward_length", sum(depth(file)), int)
    rms = file.get("{arch}.attention.layer_norm_rms_epsilon") is not None
    head_dim = whole(file, "attention.key_length", found["hidden_size"] // found["num_attention_heads"])
    only(file, "attention.value_length", head_dim, "as of q and k")
    whole(file, "rope.dimension_count", head_dim)  # which files state, although nothing is rotated
    found |= {
        "layers_block_type": kinds,
        "head_dim": head_dim,
        "layer_norm_epsilon": decimal(file, f"attention.layer_norm_{'rms_' if rms else ''}epsilon"),
        "mamba_num_heads": mamba["mamba_n_heads"],
        "mamba_head_dim": mamba["mamba_d_head"],
        "n_groups": mamba["mamba_n_groups"],
        "ssm_state_size": mamba["mamba_d_state"],
        "conv_kernel": mamba["mamba_d_conv"],
        "use_conv_bias": _has(file, "ssm_conv1d.bias"),
        "attention_bias": _has(file, "attn_q.bias"),
        "mlp_bias": _has(file, "ffn_up.bias"),
    }
    if "mlp" in kinds:
        found["intermediate_size"] = max(widths)
    if "moe" not in kinds:
        return found
    experts, shared = ("ffn_up_exps.weight", "ffn_up_shexp.weight")
    first = f"blk.{kinds.index('moe')}."
    return {
        **found,
        "n_routed_experts": whole(file, "expert_count"),
        "num_experts_per_tok": whole(file, "expert_used_count"),
        "moe_intermediate_size": file.tensors[first + experts].shape[-2],
        "moe_shared_expert_intermediate_size": file.tensors[first + shared].shape[0],
        "moe_latent_size": file.tensors[first + experts].shape[-1] if _has(file, "ffn_latent_up.weight") else None,
        "n_shared_experts": whole(file, "expert_shared_count", 1),
        "n_group": whole(file, "expert_group_count", 1),
        "topk_group": whole(file, "expert_group_used_count", 1),
        "norm_topk_prob": bool(file.get("{arch}.expert_weights_norm", False)),
        "routed_scaling_factor": decimal(file, "expert_weights_scale", 1.0, zero=True),
    }


def _nemotron_kinds(file: GGUFFile) -> list[str]:
    """The kind of each layer: it has attention, or an MLP, or experts, or none of them: Mamba-2."""
    layers, heads = depth(file)
    widths: list[int] = each(file, "feed_forward_length", layers + heads, int)
    inner = "moe" if file.get("general.architecture") == "nemotron_h_moe" else "mlp"
    return [
        "full_attention" if count else inner if width else "linear_attention"
        for count, width in zip(_kv_heads(file), widths, strict=False)
    ]


def _nemotron_layer(file: GGUFFile, layer: int) -> dict[str, str]:
    kind = _nemotron_kinds(file)[layer]
    mamba = _under("mixer", {**_MAMBA, **_MAMBA_NORM})
    return {
        "linear_attention": mamba, "full_attention": _NEMOTRON_ATTENTION, "mlp": _NEMOTRON_MLP, "moe": _NEMOTRON_EXPERTS,
    }[kind]  # fmt: skip


def _nemotron_may(file: GGUFFile, layer: int) -> dict[str, str]:
    kind = _nemotron_kinds(file)[layer]
    return {
        "linear_attention": _under("mixer", _MAMBA_BIAS), "full_attention": _biases(_NEMOTRON_ATTENTION),
        "mlp": _biases(_NEMOTRON_MLP), "moe": _NEMOTRON_LATENT,
    }[kind]  # fmt: skip


def _granite(file: GGUFFile) -> dict[str, Any]:
    found, mamba = _common(file), _mamba(file)
    hidden, heads = found["hidden_size"], found["num_attention_heads"]
    head_dim, inner = _divided(file, hidden, heads), mamba["mamba_n_heads"] * mamba["mamba_d_head"]
    if inner % hidden:
        refuse(file, "ssm.inner_size", f"expected a multiple of the width, {hidden}")
    experts = whole(file, "expert_count", 0)
    is_turned = bool(file.get("{arch}.rope.scaling.finetuned", True))  # llama.cpp's switch for rotation here
    part = "ffn_gate_shexp.weight" if experts else "ffn_gate.weight"
    return {
        **found,
        **mamba,
        "mamba_expand": inner // hidden,
        "mamba_conv_bias": _has(file, "ssm_conv1d.bias"),
        "attention_bias": _has(file, "attn_q.bias"),
        "rms_norm_eps": decimal(file, "attention.layer_norm_rms_epsilon"),
        "layer_types": ["full_attention" if count else "linear_attention" for count in _kv_heads(file)],
        "position_embedding_type": "rope" if is_turned else None,
        "rope_parameters": read_rope(file, head_dim, found["max_position_embeddings"]),
        "intermediate_size": whole(file, "feed_forward_length"),
        "shared_intermediate_size": file.tensors[f"blk.0.{part}"].shape[0],
        "num_local_experts": experts,
        "num_experts_per_tok": whole(file, "expert_used_count", 0),
        "embedding_multiplier": decimal(file, "embedding_scale", 1.0, zero=True),
        "residual_multiplier": decimal(file, "residual_scale", 1.0, zero=True),
        "attention_multiplier": decimal(file, "attention.scale", head_dim**-0.5, zero=True),
        "logits_scaling": decimal(file, "logit_scale", 1.0, zero=True),
    }


def _granite_layer(file: GGUFFile, layer: int) -> dict[str, str]:
    has_experts = whole(file, "expert_count", 0) > 0
    end = "_shexp" if has_experts else ""
    return {
        **({theirs: ours for theirs, ours in ATTENTION.items() if theirs != "attn_norm.weight"}
           if _kv_heads(file)[layer] else _under("mamba", {**_MAMBA, **_MAMBA_NORM})),
        **{f"ffn_{theirs}{end}.weight": ours for theirs, ours in _GRANITE_MLP.items()},
        **(_GRANITE_EXPERTS if has_experts else {}),
    }  # fmt: skip


def _granite_may(file: GGUFFile, layer: int) -> dict[str, str]:
    attention = {theirs: ours for theirs, ours in ATTENTION.items() if theirs != "attn_norm.weight"}
    return _biases(attention) if _kv_heads(file)[layer] else _under("mamba", _MAMBA_BIAS)


def _turned(file: GGUFFile, ours: str, theirs: tuple[str, ...]) -> Change | None:
    """Beside what all have: rows of q and k as of Llama, also where nothing is rotated."""
    part = theirs[0].split(".")[-2]
    if part not in ("attn_q", "attn_k"):
        return recurrent(file, ours, theirs)
    heads = whole(file, "attention.head_count") if part == "attn_q" else max(_kv_heads(file))
    return Change(order=turned_rows(file, theirs[0], heads))


def _granite_change(file: GGUFFile, ours: str, theirs: tuple[str, ...]) -> Change | None:
    """Beside that: gate and up as halves of one matrix, or of each expert's."""
    return _turned(file, ours, theirs) if len(theirs) == 1 else halves(file, theirs)


def _falcon(file: GGUFFile) -> dict[str, Any]:
    """The converter multiplies weights by the checkpoint's multipliers, so those of the configuration are 1. Raises
    ModelError where the head is the embedding: its own multiplier is lost then."""
    if "output.weight" not in file.tensors:
        raise ModelError(
            f"{file.where} lacks tensor output.weight; of a falcon-h1 model whose head is the embedding "
            "a GGUF file has lost the multipliers: run the save_pretrained directory"
        )
    found, mamba = _common(file), _mamba(file)
    head_dim = whole(file, "attention.key_length", found["hidden_size"] // found["num_attention_heads"])
    only(file, "attention.value_length", head_dim, "as of q and k")
    if _has(file, "ssm_norm.weight"):
        found |= {"mamba_rms_norm": True, "mamba_norm_before_gate": False}  # the gate first, as llama.cpp has it
    return {
        **found,
        **mamba,
        "head_dim": head_dim,
        "intermediate_size": whole(file, "feed_forward_length"),
        "mamba_d_ssm": mamba["mamba_n_heads"] * mamba["mamba_d_head"],
        "mamba_conv_bias": _has(file, "ssm_conv1d.bias"),
        "attention_bias": _has(file, "attn_q.bias"),
        "mlp_bias": _has(file, "ffn_gate.bias"),
        "rms_norm_eps": decimal(file, "attention.layer_norm_rms_epsilon"),
        "rope_parameters": read_rope(file, head_dim, found["max_position_embeddings"]),
    }


_LFM2 = Architecture(
    "lfm2",
    "Lfm2ForCausalLM",
    {"attn_norm.weight": "operator_norm.weight", "ffn_norm.weight": "ffn_norm.weight"},
    _lfm2,
    some=_lfm2_layer,
    may={},
    whole={**_EMBEDDING, "token_embd_norm.weight": "model.embedding_norm.weight"},
    adjust=recurrent,
)
_NEMOTRON = Architecture(
    "nemotron_h",
    "NemotronHForCausalLM",
    {"attn_norm.weight": "norm.weight"},
    _nemotron,
    some=_nemotron_layer,
    may={},
    some_may=_nemotron_may,
    whole={"token_embd.weight": "backbone.embeddings.weight", "output_norm.weight": "backbone.norm_f.weight"},
    adjust=_turned,
    prefix="backbone.layers",
)
HYBRIDS = {
    **DELTA_NETS,
    "lfm2": _LFM2,
    "lfm2moe": replace(_LFM2, model_type="lfm2_moe", class_name="Lfm2MoeForCausalLM", may=_LFM2_BIAS),
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": _NEMOTRON,
    "granitehybrid": Architecture(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        {"attn_norm.weight": "input_layernorm.weight", **FFN_NORM},
        _granite,
        some=_granite_layer,
        may={},
        some_may=_granite_may,
        adjust=_granite_change,
    ),
    "falcon-h1": Architecture(
        "falcon_h1",
        "FalconH1ForCausalLM",
        _FALCON,
        _falcon,
        may={**_under("mamba", {**_MAMBA_NORM, **_MAMBA_BIAS}), **_biases(_FALCON_LINEARS)},
        whole={**_EMBEDDING, "output_norm.weight": "model.final_layernorm.weight"},
        adjust=recurrent,
    ),
}
"""``general.architecture`` -> hybrids."""
