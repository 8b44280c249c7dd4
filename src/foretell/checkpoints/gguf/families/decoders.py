"""Dense architectures: the Llama family and its kin."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from foretell.checkpoints.gguf.families.architecture import BIASES, LINEARS, WHOLE, Architecture, Change
from foretell.checkpoints.gguf.file import GGUFFile
from foretell.checkpoints.gguf.rope import read_rope
from foretell.checkpoints.gguf.values import decimal, depth, each, only, refuse, whole
from foretell.core.errors import ModelError

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
_OLMO3_PATTERN = 4  # every fourth layer of OLMo 3 sees the whole text
_NO_ROPE_STEP = 4  # every fourth layer of SmolLM3 is not rotated


def sizes(file: GGUFFile, *, partial: bool = False, fused: bool = False, layer_norm: bool = False) -> dict[str, Any]:
    """What all of them state: sizes, heads, the epsilon and the rotation. partial: of a part of a head; fused: q, k and v
    are one tensor; layer_norm: the epsilon is of layer norms, and left out. Raises ModelError where they contradict each
    other, or q."""
    arch = file.get("general.architecture")
    hidden, heads = whole(file, "embedding_length"), whole(file, "attention.head_count")
    kv_heads = whole(file, "attention.head_count_kv", heads)
    head_dim = whole(file, "attention.key_length", hidden // heads)
    values = whole(file, "attention.value_length", head_dim)
    rotated = whole(file, "rope.dimension_count", head_dim)
    if values != head_dim or (rotated != head_dim and not partial):
        raise ModelError(
            f"{file.name}: heads of {head_dim} values of which {rotated} are rotated, beside {values} of v; {arch} "
            "models have the same number of all three"
        )
    if rotated > head_dim or rotated % 2:
        refuse(file, "rope.dimension_count", f"expected an even number up to {head_dim}, the values of a head")
    name, rows = ("attn_qkv", heads + 2 * kv_heads) if fused else ("attn_q", heads)
    found, expected = file.tensors[f"blk.0.{name}.weight"].shape, (rows * head_dim, hidden)
    if found != expected:
        raise ModelError(
            f"{file.name}: tensor blk.0.{name}.weight has shape {found}; {file.path.name} states {heads} heads of "
            f"{head_dim} values and a width of {hidden}, so expected {expected}"
        )
    for key, same in (
        ("attention.key_length_swa", head_dim), ("attention.value_length_swa", head_dim),
        ("rope.dimension_count_swa", rotated),
    ):  # fmt: skip
        only(file, key, same, f"layers of {arch} are alike, with a window or without")
    context = whole(file, "context_length")
    return {
        "hidden_size": hidden,
        "num_hidden_layers": depth(file)[0],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": context,
        **({} if layer_norm else {"rms_norm_eps": decimal(file, "attention.layer_norm_rms_epsilon")}),
        "rope_parameters": {
            **read_rope(file, rotated, context), **({"partial_rotary_factor": rotated / head_dim} if partial else {}),
        },
    }  # fmt: skip


def dense(file: GGUFFile, **options: bool) -> dict[str, Any]:
    """The same and the width of MLPs."""
    return {**sizes(file, **options), "intermediate_size": whole(file, "feed_forward_length")}


def _llama(file: GGUFFile) -> dict[str, Any]:
    biases = {"attention_bias": "attn_q", "mlp_bias": "ffn_gate"}
    return {**dense(file), **{key: f"blk.0.{name}.bias" in file.tensors for key, name in biases.items()}}


def _biased(file: GGUFFile, *, layer_norm: bool = False, **names: str) -> dict[str, Any]:
    """A dense model, of which a field of the configuration says whether a linear of each layer has a bias."""
    found = {field: f"blk.0.{name}.bias" in file.tensors for field, name in names.items()}
    return {**dense(file, layer_norm=layer_norm), **found}


def _exaone4(file: GGUFFile) -> dict[str, Any]:
    return {**dense(file), **_windows(file, whole(file, "attention.sliding_window", 0) or None)}


def _windows(file: GGUFFile, window: int | None) -> dict[str, Any]:
    """Of models with a window in three layers of four, or in none."""
    count = depth(file)[0]
    kinds = ["full_attention"] * count if window is None else layer_types(file, count, 4)
    return {"sliding_window": window, "layer_types": kinds}


def _cohere(file: GGUFFile) -> dict[str, Any]:
    eps, scale = decimal(file, "attention.layer_norm_epsilon"), decimal(file, "logit_scale")
    return {**_biased(file, layer_norm=True, attention_bias="attn_q"), "layer_norm_eps": eps, "logit_scale": scale}


def _cohere2(file: GGUFFile) -> dict[str, Any]:
    return {**_cohere(file), **_windows(file, whole(file, "attention.sliding_window"))}


def _starcoder2(file: GGUFFile) -> dict[str, Any]:
    eps, window = decimal(file, "attention.layer_norm_epsilon"), whole(file, "attention.sliding_window", 0) or None
    return {**_biased(file, layer_norm=True, use_bias="attn_q"), "norm_epsilon": eps, "sliding_window": window}


def _olmo2(file: GGUFFile) -> dict[str, Any]:
    """OLMo 2; with windows it is OLMo 3, whose layers with one are rotated without scaling."""
    found = {**dense(file), "attention_bias": False}
    window = whole(file, "attention.sliding_window", 0)
    if not window:
        return found
    num_layers, context = found["num_hidden_layers"], found["max_position_embeddings"]
    base = decimal(file, "rope.freq_base_swa", found["rope_parameters"]["rope_theta"])
    return {
        **found,
        "model_type": "olmo3",
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": min(window, context),
        "layer_types": layer_types(file, num_layers, _OLMO3_PATTERN),
        "rope_parameters": {
            "full_attention": found["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": base},
        },
    }


def layer_types(file: GGUFFile, num_layers: int, usual: int) -> list[str]:
    """Kinds of layers: which ones have a window, by the file's list, or all but every Nth, by the file's N or the usual one
    (0: all, as llama.cpp has it)."""
    key = "attention.sliding_window_pattern"
    stated = file.get(f"{{arch}}.{key}", usual)
    if isinstance(stated, list):
        slides = each(file, key, num_layers, bool)
    elif type(stated) is int and stated >= 0:
        slides = [stated == 0 or (layer + 1) % stated != 0 for layer in range(num_layers)]
    else:
        refuse(file, key, "expected a number, or true and false for each layer")
    return ["sliding_attention" if one else "full_attention" for one in slides]


def _granite(file: GGUFFile) -> dict[str, Any]:
    found = _llama(file)
    scales = {
        "attention_multiplier": ("attention.scale", found["head_dim"] ** -0.5),
        "embedding_multiplier": ("embedding_scale", 1.0),
        "residual_multiplier": ("residual_scale", 1.0),
    }
    only(file, "rope.scaling.finetuned", True, "it is llama.cpp's switch for rotation here, which Granite always has")
    return {
        **found,
        **{ours: decimal(file, *stated, zero=True) for ours, stated in scales.items()},
        "logits_scaling": decimal(file, "logit_scale"),
    }


def _smollm3(file: GGUFFile) -> dict[str, Any]:
    found = _llama(file)
    rotates = [int((layer + 1) % _NO_ROPE_STEP != 0) for layer in range(found["num_hidden_layers"])]
    return {**found, "no_rope_layers": rotates, "use_sliding_window": False, "sliding_window": None}


def _phi3(file: GGUFFile) -> dict[str, Any]:
    found = dense(file, partial=True, fused=True)
    original = whole(file, "rope.scaling.original_context_length", found["max_position_embeddings"])
    window = whole(file, "attention.sliding_window", 0) or None
    return {**found, "original_max_position_embeddings": original, "sliding_window": window}


def _mistral3(file: GGUFFile) -> dict[str, Any]:
    """Ministral 3, whose queries grow with their positions; without that it is Mistral."""
    found = {**dense(file), "sliding_window": None}
    if not file.get("{arch}.attention.temperature_scale"):
        return {**found, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    original = whole(file, "rope.scaling.original_context_length", found["max_position_embeddings"])
    growth = {
        "llama_4_scaling_beta": decimal(file, "attention.temperature_scale"),
        "original_max_position_embeddings": original,
    }
    return {**found, "rope_parameters": found["rope_parameters"] | growth}


def _bitnet(activation: str) -> Callable[[GGUFFile], dict[str, Any]]:
    return lambda file: {**dense(file), "hidden_act": activation}


def _glm4(file: GGUFFile) -> dict[str, Any]:
    of_text_alone(file)
    return {**dense(file, partial=True), "attention_bias": "blk.0.attn_q.bias" in file.tensors}


def of_text_alone(file: GGUFFile) -> None:
    """Raise ModelError for a GLM whose positions are those of images."""
    sections = file.get("{arch}.rope.dimension_sections")
    if isinstance(sections, list) and any(sections):
        refuse(file, "rope.dimension_sections", "GLM-4V is not supported; expected a GLM of text alone")


def turned(file: GGUFFile, ours: str, theirs: tuple[str, ...]) -> Change | None:
    """Rows of q and k in transformers' order, which rotates (i, i + half) of a head; llama.cpp (2i, 2i + 1). Raises
    ModelError where rows cannot be divided among so many heads."""
    part = theirs[0].split(".")[-2]
    if part not in ("attn_q", "attn_k"):
        return None
    num_heads = file.get("{arch}.attention.head_count")
    if part == "attn_k":
        num_heads = file.get("{arch}.attention.head_count_kv", num_heads)
    return Change(order=turned_rows(file, theirs[0], num_heads))


def turned_rows(file: GGUFFile, name: str, num_heads: Any) -> Tensor:
    """[rows] where each row of a tensor of q or k is in the file. Raises ModelError as ``turned``."""
    rows = file.tensors[name].shape[0]
    if type(num_heads) is not int or num_heads < 1 or rows % (2 * num_heads):
        raise ModelError(
            f"{file.name}: tensor {name} has {rows} rows, which are not {num_heads!r} heads of an even size"
        )
    return torch.arange(rows).view(num_heads, -1, 2).transpose(1, 2).reshape(-1)


_PHI3 = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_qkv.weight": "self_attn.qkv_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    **FFN_NORM,
    "ffn_up.weight": "mlp.gate_up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_GLM4 = {
    **ATTENTION,
    "post_attention_norm.weight": "post_self_attn_layernorm.weight",
    **FFN_NORM,
    "ffn_up.weight": "mlp.gate_up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "post_ffw_norm.weight": "post_mlp_layernorm.weight",
}
_BITNET = {
    **LLAMA,
    "attn_sub_norm.weight": "self_attn.attn_sub_norm.weight",
    "ffn_sub_norm.weight": "mlp.ffn_sub_norm.weight",
}
_HEAD_NORMS = {
    f"attn_{x}_norm.weight": f"self_attn.{name}_layernorm.weight" for x, name in (("q", "query"), ("k", "key"))
}
_SEED_OSS = {**ATTENTION, "post_attention_norm.weight": "post_attention_layernorm.weight", **MLP}
_ALL_BIASES = {**BIASES, "attn_norm.bias": "input_layernorm.bias", "ffn_norm.bias": "post_attention_layernorm.bias"}
_STARCODER2, _STARCODER2_MAY = (
    {
        theirs: ours.replace("up_proj", "c_fc").replace("down_proj", "c_proj")
        for theirs, ours in names.items()
        if "gate" not in theirs
    }
    for names in (LLAMA, _ALL_BIASES)
)
_ARCEE = {theirs: ours for theirs, ours in LLAMA.items() if theirs != "ffn_gate.weight"}
_OLMO2 = {theirs: ours for theirs, ours in SANDWICH.items() if theirs not in ("attn_norm.weight", "ffn_norm.weight")}

_BIASED_WHOLE = {**WHOLE, "output_norm.bias": "model.norm.bias"}
_with_bias = partial(_biased, attention_bias="attn_q")
_seed_oss = partial(_with_bias, attention_out_bias="attn_output", mlp_bias="ffn_gate")

DECODERS = {
    "llama": Architecture("llama", "LlamaForCausalLM", LLAMA, _llama, adjust=turned),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", {**LLAMA, **QKV_BIASES}, dense),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", {**LLAMA, **QK_NORMS}, dense),
    "granite": Architecture("granite", "GraniteForCausalLM", LLAMA, _granite, adjust=turned),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", LLAMA, _smollm3, adjust=turned),
    "mistral3": Architecture("ministral3", "Ministral3ForCausalLM", LLAMA, _mistral3, may={}, adjust=turned),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM", {**_OLMO2, **QK_NORMS}, _olmo2, may={}),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", _PHI3, _phi3, may={}),
    "glm4": Architecture("glm4", "Glm4ForCausalLM", _GLM4, _glm4, may=QKV_BIASES),
    # llama.cpp's has the activation of the first models, Microsoft's that of bitnet-b1.58-2B-4T.
    "bitnet": Architecture("bitnet", "BitNetForCausalLM", _BITNET, _bitnet("silu"), may={}),
    "bitnet-b1.58": Architecture("bitnet", "BitNetForCausalLM", _BITNET, _bitnet("relu2"), may={}),
    "seed_oss": Architecture("seed_oss", "SeedOssForCausalLM", _SEED_OSS, _seed_oss),
    "arcee": Architecture("arcee", "ArceeForCausalLM", _ARCEE, partial(_with_bias, mlp_bias="ffn_up"), adjust=turned),
    "ernie4_5": Architecture("ernie4_5", "Ernie4_5ForCausalLM", LLAMA, partial(_biased, use_bias="attn_q")),
    "hunyuan-dense": Architecture(
        "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", {**LLAMA, **_HEAD_NORMS}, _with_bias
    ),
    "exaone4": Architecture("exaone4", "Exaone4ForCausalLM", {**_OLMO2, **QK_NORMS}, _exaone4, may={}),
    "command-r": Architecture("cohere", "CohereForCausalLM", {**ATTENTION, **MLP}, _cohere),
    "cohere2": Architecture("cohere2", "Cohere2ForCausalLM", {**ATTENTION, **MLP}, _cohere2, may={}),
    "starcoder2": Architecture(
        "starcoder2", "Starcoder2ForCausalLM", _STARCODER2, _starcoder2, may=_STARCODER2_MAY, whole=_BIASED_WHOLE
    ),
}
