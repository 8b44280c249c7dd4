"""Hybrids of attention and gated delta nets: Qwen3-Next, and Qwen3.5 to 3.8."""

from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from foretell.checkpoints.gguf.families.architecture import Architecture, Change
from foretell.checkpoints.gguf.families.decoders import ATTENTION, EXPERTS, MLP, QK_NORMS
from foretell.checkpoints.gguf.families.gemma4 import less_one
from foretell.checkpoints.gguf.families.mixtures import SHARED_EXPERT
from foretell.checkpoints.gguf.file import GGUFFile
from foretell.checkpoints.gguf.rope import read_rope
from foretell.checkpoints.gguf.values import decimal, depth, each, refuse, whole
from foretell.core.errors import ModelError


def recurrent(file: GGUFFile, ours: str, theirs: tuple[str, ...]) -> Change | None:
    """What the converter changes in recurrent layers: A_log is kept as -exp(A_log), a convolution [C, 1, K] as [C, K], and
    the vectors A_log, D and the gated norm as matrices.

    The exponential was rounded: A_log comes back within 1e-7 or one unit in its last place, whichever is more.
    """
    shape = file.tensors[theirs[0]].shape
    if ours.endswith(".A_log"):
        return Change(undo=partial(_logarithm, file, theirs[0]), shape=(prod(shape),))
    if ours.endswith(("conv1d.weight", ".conv.conv.weight")):
        return Change(shape=(shape[0], 1, shape[-1]))
    is_vector = ours.endswith(".D") or theirs[0].endswith("ssm_norm.weight")
    return Change(shape=(prod(shape),)) if is_vector and len(shape) > 1 else None


def _logarithm(file: GGUFFile, name: str, parts: list[Tensor]) -> Tensor:
    if not bool((parts[0] < 0).all()):
        raise ModelError(f"{file.where} is damaged: tensor {name} has values that are not below 0")
    return torch.log(-parts[0].double()).float().reshape(-1)


def less_one_in_norms(ours: str) -> Change | None:
    """Norms of Qwen, to which the converter adds the 1 that transformers' code adds. The sum was rounded: values come back
    within 6e-8, of those that are larger within one unit in the last place."""
    return Change(undo=less_one) if ours.endswith("norm.weight") else None


def count_rows(file: GGUFFile, theirs: tuple[str, ...], change: Change) -> None:
    """Raise ModelError where tensors have not the rows or columns that a change puts in order."""
    shapes = [file.tensors[name].shape for name in theirs]
    rows = sum(prod(shape[: max(1, len(shape) - 1)]) for shape in shapes)
    for what, found, order in (("rows", rows, change.order), ("columns", shapes[0][-1], change.columns)):
        if order is not None and found != len(order):
            raise ModelError(
                f"{file.name}: tensor {' and '.join(theirs)} has {found} {what}; the heads that {file.path.name} states "
                f"have {len(order)}"
            )


_NORMS = {
    "attn_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
}
_QKVZ = "linear_attn.in_proj_qkvz.weight"
_DELTA = {
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
}
_APART = {  # Qwen3.5
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
    "attn_gate.weight": "linear_attn.in_proj_z.weight",
    "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
    "ssm_beta.weight": "linear_attn.in_proj_b.weight",
}
_INTERVAL = 4  # every so manyth layer has attention, where a file does not say
_EXPERT_TYPES = ("qwen3next", "qwen35moe")


def _layer(file: GGUFFile, layer: int) -> dict[str, str]:
    arch, held = file.get("general.architecture"), file.tensors
    found = {**EXPERTS, **SHARED_EXPERT} if arch in _EXPERT_TYPES else dict(MLP)
    if f"blk.{layer}.ffn_gate_up_exps.weight" in held:  # the converter's --fuse-gate-up-exps
        del found["ffn_gate_exps.weight"], found["ffn_up_exps.weight"]
        found["ffn_gate_up_exps.weight"] = "mlp.experts.gate_up_proj"
    if not _are_recurrent(file)[layer]:
        return {**found, **ATTENTION, **QK_NORMS}
    if arch != "qwen3next":
        return {**found, **_DELTA, **_APART}
    is_early = f"blk.{layer}.ssm_in.weight" in held  # as llama.cpp's first files of it have q, k, v and z
    inputs = ("ssm_in.weight",) if is_early else ("attn_qkv.weight", "attn_gate.weight")
    return {**found, **_DELTA, **dict.fromkeys(inputs, _QKVZ), "ssm_ba.weight": "linear_attn.in_proj_ba.weight"}


def _are_recurrent(file: GGUFFile) -> list[bool]:
    """Whether each layer is a delta net."""
    layers, heads = depth(file)
    interval = whole(file, "full_attention_interval", _INTERVAL)
    if file.get("{arch}.attention.recurrent_layers") is not None:
        return each(file, "attention.recurrent_layers", layers + heads, bool)[:layers]
    return [(layer + 1) % interval != 0 for layer in range(layers)]


def _sizes(file: GGUFFile) -> tuple[int, int, int, int]:
    """Of a delta net: heads of k, heads of v, values of either. Raises ModelError where they do not fit each other."""
    keys, values = whole(file, "ssm.group_count"), whole(file, "ssm.time_step_rank")
    inner = whole(file, "ssm.inner_size")
    if values % keys:
        refuse(file, "ssm.time_step_rank", f"expected a multiple of the {keys} heads of k")
    if inner % values:
        refuse(file, "ssm.inner_size", f"expected a multiple of the {values} heads of v")
    return keys, values, whole(file, "ssm.state_size"), inner // values


def _config(file: GGUFFile) -> dict[str, Any]:
    arch = file.get("general.architecture")
    keys, values, key_size, value_size = _sizes(file)
    hidden, heads = whole(file, "embedding_length"), whole(file, "attention.head_count")
    head_dim, context = whole(file, "attention.key_length", hidden // heads), whole(file, "context_length")
    if whole(file, "attention.value_length", head_dim) != head_dim:
        refuse(file, "attention.value_length", f"expected {head_dim}, as of q and k")
    turned = whole(file, "rope.dimension_count", head_dim)
    if turned > head_dim or turned % 2:
        refuse(file, "rope.dimension_count", f"expected an even number up to the {head_dim} values of a head")
    found: dict[str, Any] = {
        "hidden_size": hidden,
        "num_hidden_layers": depth(file)[0],
        "num_attention_heads": heads,
        "num_key_value_heads": whole(file, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": decimal(file, "attention.layer_norm_rms_epsilon"),
        "rope_parameters": {**read_rope(file, turned, context), "partial_rotary_factor": turned / head_dim},
        "layer_types": ["linear_attention" if each else "full_attention" for each in _are_recurrent(file)],
        "linear_conv_kernel_dim": whole(file, "ssm.conv_kernel"),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_key_head_dim": key_size,
        "linear_value_head_dim": value_size,
    }
    sections = file.get("{arch}.rope.dimension_sections")
    if arch != "qwen3next" and isinstance(sections, list) and sum(sections) == turned // 2:  # of images; texts have one
        found["rope_parameters"] |= {"mrope_section": sections[:3], "mrope_interleaved": True}
    if arch not in _EXPERT_TYPES:
        return {**found, "intermediate_size": whole(file, "feed_forward_length")}
    found |= {
        "num_experts": whole(file, "expert_count"),
        "num_experts_per_tok": whole(file, "expert_used_count"),
        "moe_intermediate_size": whole(file, "expert_feed_forward_length", 0)
        or file.tensors["blk.0.ffn_down_exps.weight"].shape[-1],
        "shared_expert_intermediate_size": file.tensors["blk.0.ffn_down_shexp.weight"].shape[-1],
    }
    if arch == "qwen3next":
        inner = whole(file, "feed_forward_length", 0) or found["moe_intermediate_size"]  # read by no layer
        found |= {"intermediate_size": inner, "norm_topk_prob": True, "decoder_sparse_step": 1}
    return found


def _adjust(file: GGUFFile, ours: str, theirs: tuple[str, ...]) -> Change | None:
    module, _, part = ours.rpartition(".linear_attn.")
    if not module:
        shape = file.tensors[theirs[0]].shape
        is_vector = ours.endswith("shared_expert_gate.weight") and len(shape) == 1
        return Change(shape=(1, *shape)) if is_vector else less_one_in_norms(ours)
    found = recurrent(file, ours, theirs) or Change()
    sizes = _sizes(file)
    if part == "in_proj_qkvz.weight" and len(theirs) > 1:
        order = _by_key(*sizes)
        found = Change(order=order, shape=(len(order), file.tensors[theirs[0]].shape[-1]))
    elif file.get("general.architecture") != "qwen3next" and sizes[0] != sizes[1]:
        found = found._replace(order=_order(part, *sizes))
        if part == "out_proj.weight":
            found = Change(columns=_tiled(sizes[0], sizes[1], sizes[3]))
    count_rows(file, theirs, found)
    return found


def _order(part: str, keys: int, values: int, key_size: int, value_size: int) -> Tensor | None:
    """[rows] where each row of a tensor of Qwen3.5 is in a file; None: at its place."""
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        others = 2 * keys * key_size  # q and k
        return torch.cat([torch.arange(others), others + _tiled(keys, values, value_size)])
    if part == "in_proj_z.weight":
        return _tiled(keys, values, value_size)
    return _tiled(keys, values, 1) if part in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias") else None


def _tiled(keys: int, values: int, size: int) -> Tensor:
    """[values * size] where each row of v is in a file. transformers has the heads of v of one head of k beside each other;
    the converter puts the first of every head of k first (``_LinearAttentionVReorderBase``)."""
    return torch.arange(values * size).view(values // keys, keys, size).transpose(0, 1).reshape(-1)


def _by_key(keys: int, values: int, key_size: int, value_size: int) -> Tensor:
    """[rows] where each row of in_proj_qkvz is in attn_qkv and attn_gate. transformers has q, k, v and z of one head of k
    beside each other; the converter of Qwen3-Next all q, then all k, v and z."""
    found, start = [], 0
    for size in (key_size, key_size, *[values // keys * value_size] * 2):
        found.append(start + torch.arange(keys * size).view(keys, size))
        start += keys * size
    return torch.cat(found, 1).reshape(-1)


def _architecture(model_type: str, class_name: str) -> Architecture:
    return Architecture(model_type, class_name, _NORMS, _config, some=_layer, may={}, adjust=_adjust)


DELTA_NETS = {
    "qwen3next": _architecture("qwen3_next", "Qwen3NextForCausalLM"),
    "qwen35": _architecture("qwen3_5_text", "Qwen3_5ForCausalLM"),
    "qwen35moe": _architecture("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
}
