"""Gemma 4: layers of two kinds with heads of two sizes, of which the last ones read the keys and values of earlier ones;
embeddings of each layer's own; experts beside the MLP.
"""

from typing import Any, NamedTuple

from torch import Tensor

from foretell.checkpoints.gguf.families.architecture import HEAD, Architecture, Change
from foretell.checkpoints.gguf.families.decoders import QK_NORMS, SANDWICH, dense, layer_types
from foretell.checkpoints.gguf.families.mixtures import stacked
from foretell.checkpoints.gguf.file import GGUFFile
from foretell.checkpoints.gguf.rope import FREQS, read_factors
from foretell.checkpoints.gguf.values import decimal, depth, each, only, refuse, whole
from foretell.core.errors import ModelError

_GEMMA4 = {
    **{theirs: ours for theirs, ours in SANDWICH.items() if theirs not in ("attn_k.weight", "attn_v.weight")},
    "attn_q_norm.weight": QK_NORMS["attn_q_norm.weight"],
    "layer_output_scale.weight": "layer_scalar",
}
_KEYS = {name: {**SANDWICH, **QK_NORMS}[name] for name in ("attn_k.weight", "attn_k_norm.weight")}
_VALUES = {"attn_v.weight": SANDWICH["attn_v.weight"]}
_EXPERTS = {
    "ffn_gate_inp.weight": "router.proj.weight",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_down_exps.weight": "experts.down_proj",
    "pre_ffw_norm_2.weight": "pre_feedforward_layernorm_2.weight",
    "post_ffw_norm_1.weight": "post_feedforward_layernorm_1.weight",
    "post_ffw_norm_2.weight": "post_feedforward_layernorm_2.weight",
}
_FUSED = {"ffn_gate_up_exps.weight": "experts.gate_up_proj"}
_APART = {"ffn_gate_exps.weight": "experts.gate_up_proj", "ffn_up_exps.weight": "experts.gate_up_proj"}
_OWN_EMBEDDING = {  # each layer's, of the token (Gemma 3n's per-layer embeddings)
    "inp_gate.weight": "per_layer_input_gate.weight",
    "proj.weight": "per_layer_projection.weight",
    "post_norm.weight": "post_per_layer_input_norm.weight",
}
_OWN_EMBEDDINGS = {
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
_SOFTCAP = 30.0  # where a file states none, as llama.cpp has it
_STILL = 1e29  # a factor that stands for "not rotated" is 1e30


class _Kinds(NamedTuple):
    """What differs between the layers of Gemma 4."""

    slides: list[bool]  # which have a window
    own: int  # so many first layers have keys and values of their own; the others read those of the last one of their kind
    same: bool  # values are the keys, in layers without a window


def _kinds(file: GGUFFile) -> _Kinds:
    num_layers = depth(file)[0]
    slides = each(file, "attention.sliding_window_pattern", num_layers, bool)
    own = num_layers - whole(file, "attention.shared_kv_layers", 0)
    first = next((layer for layer in range(own) if not slides[layer]), None)
    if first is None or True not in slides[:own] or slides[-1]:
        refuse(
            file, "attention.sliding_window_pattern", f"expected both kinds among the first {own}, and a full one last"
        )
    return _Kinds(slides, own, f"blk.{first}.attn_v.weight" not in file.tensors)


def _gemma4_layer(file: GGUFFile, layer: int) -> dict[str, str]:
    kinds, tensors = _kinds(file), file.tensors
    found: dict[str, str] = {}
    if layer < kinds.own:
        found |= _KEYS if kinds.same and not kinds.slides[layer] else _KEYS | _VALUES
    if file.get("{arch}.expert_count"):
        found |= _EXPERTS | (_FUSED if f"blk.{layer}.ffn_gate_up_exps.weight" in tensors else _APART)
    return found | (_OWN_EMBEDDING if file.get("{arch}.embedding_length_per_layer_input") else {})


def _gemma4(file: GGUFFile) -> dict[str, Any]:
    num_layers, experts = depth(file)[0], whole(file, "expert_count", 0)
    kinds, width = _kinds(file), whole(file, "embedding_length_per_layer_input", 0)
    missing = [name for name in _OWN_EMBEDDINGS if width and name not in file.tensors]
    if missing:
        raise ModelError(f"{file.name}: {file.path.name} lacks tensor {missing[0]}; expected a whole gemma4 model")
    kv_heads = each(file, "attention.head_count_kv", num_layers, int)
    inner = each(file, "feed_forward_length", num_layers, int)
    wide = inner != [inner[0]] * num_layers
    if wide and inner != [inner[0] * (1 if layer < kinds.own else 2) for layer in range(num_layers)]:
        refuse(file, "feed_forward_length", f"expected {inner[0]}, and twice that from layer {kinds.own} on")
    local, full = kinds.slides.index(True), kinds.slides.index(False)
    head_dim = whole(file, "attention.key_length_swa")
    if whole(file, "rope.dimension_count_swa", head_dim) != head_dim:
        refuse(file, "rope.dimension_count_swa", f"expected {head_dim}, all values of a head")
    wide_head = whole(file, "attention.key_length")
    for key, same in (
        ("attention.value_length", wide_head), ("attention.value_length_swa", head_dim),
        ("rope.dimension_count", wide_head),
    ):  # fmt: skip
        only(file, key, same, "as many values as a head's keys")
    own = {"head_dim": whole(file, "attention.key_length"), "num_key_value_heads": kv_heads[full]}
    moe = {
        "enable_moe_block": True,
        "num_experts": experts,
        "top_k_experts": whole(file, "expert_used_count"),
        "moe_intermediate_size": whole(file, "expert_feed_forward_length"),
    } if experts else {}  # fmt: skip
    return {
        **moe,
        "hidden_size": whole(file, "embedding_length"),
        "intermediate_size": inner[0],
        "num_hidden_layers": num_layers,
        "num_attention_heads": whole(file, "attention.head_count"),
        "num_key_value_heads": kv_heads[local],
        "head_dim": head_dim,
        "per_layer_config": {layer: own for layer in range(num_layers) if not kinds.slides[layer]},
        "max_position_embeddings": whole(file, "context_length"),
        "rms_norm_eps": decimal(file, "attention.layer_norm_rms_epsilon"),
        "sliding_window": whole(file, "attention.sliding_window"),
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in kinds.slides],
        "final_logit_softcapping": softcap(file, _SOFTCAP),
        "hidden_size_per_layer_input": width,
        "vocab_size_per_layer_input": file.tensors[
            "per_layer_token_embd.weight" if width else "token_embd.weight"
        ].shape[0],
        "attention_k_eq_v": kinds.same,
        "num_kv_shared_layers": num_layers - kinds.own,
        "use_double_wide_mlp": wide,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": decimal(file, "rope.freq_base", 10000.0),
                "partial_rotary_factor": _rotated(file, own["head_dim"]),
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": decimal(file, "rope.freq_base_swa", 10000.0)},
        },
    }


def softcap(file: GGUFFile, default: float = 0.0) -> float | None:
    """Where logits are bounded; 0 stands for nowhere."""
    stated = file.get("{arch}.final_logit_softcapping", default)
    return decimal(file, "final_logit_softcapping", default) if stated else None


def _rotated(file: GGUFFile, head_dim: int) -> float:
    """The part of a head that layers without a window rotate: frequencies of factor 1, not those as good as infinite."""
    if FREQS not in file.tensors:
        raise ModelError(f"{file.name}: {file.path.name} lacks tensor {FREQS}; expected a whole gemma4 model")
    factors = read_factors(file, FREQS, head_dim)
    count = int((factors == 1.0).sum())
    if not (factors[:count] == 1.0).all() or not (factors[count:] > _STILL).all():
        raise ModelError(f"{file.name}: tensor {FREQS} scales frequencies; expected factors 1, then 1e30")
    return 2 * count / head_dim


GEMMA4 = Architecture(
    "gemma4_text",
    "Gemma4ForCausalLM",
    _GEMMA4,
    _gemma4,
    some=_gemma4_layer,
    may={},
    whole_may={**HEAD, **_OWN_EMBEDDINGS},
    adjust=stacked,
)


_GEMMA2_PATTERN = 2  # every second layer of Gemma 2 sees the whole text
_GEMMA3_PATTERN = 6  # every sixth layer of Gemma 3 sees the whole text
_GEMMA2_WINDOW = 4096  # where a file states none, as llama.cpp has it
_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62  # queries of these are scaled otherwise


def _gemma2(file: GGUFFile) -> dict[str, Any]:
    found = dense(file)
    num_layers, heads = found["num_hidden_layers"], found["num_attention_heads"]
    usual = found["hidden_size"] // heads
    only(file, "rope.freq_base_swa", file.get("{arch}.rope.freq_base", 10000.0), "layers of Gemma 2 are rotated alike")
    return {
        **found,
        "layer_types": layer_types(file, num_layers, _GEMMA2_PATTERN),
        "sliding_window": whole(file, "attention.sliding_window", _GEMMA2_WINDOW),
        "query_pre_attn_scalar": usual if num_layers == _GEMMA2_27B_LAYERS else found["head_dim"],
        "attn_logit_softcapping": decimal(file, "attn_logit_softcapping", 50.0),
        "final_logit_softcapping": decimal(file, "final_logit_softcapping", 30.0),
    }


def _gemma3(file: GGUFFile) -> dict[str, Any]:
    found = dense(file)
    num_layers, context, head_dim = found["num_hidden_layers"], found["max_position_embeddings"], found["head_dim"]
    usual = found["hidden_size"] // found["num_attention_heads"]
    window = whole(file, "attention.sliding_window", 0) or None
    kinds = layer_types(file, num_layers, _GEMMA3_PATTERN) if window else ["full_attention"] * num_layers
    local = {"rope_type": "default", "rope_theta": decimal(file, "rope.freq_base_swa", 10000.0)}
    return {
        **found,
        "layer_types": kinds,
        "sliding_window": window or context,
        "query_pre_attn_scalar": usual if num_layers == _GEMMA3_27B_LAYERS else head_dim,
        "final_logit_softcapping": softcap(file),
        "rope_parameters": {"full_attention": found["rope_parameters"], "sliding_attention": local},
    }


def offset_norms(file: GGUFFile, ours: str, theirs: tuple[str, ...]) -> Change | None:
    """Norms of Gemma, to which llama.cpp's converter adds the 1 that transformers' code adds."""
    return Change(undo=less_one) if ours.endswith("norm.weight") else None


def less_one(parts: list[Tensor]) -> Tensor:
    """The values of the only part, each less 1."""
    return parts[0] - 1.0


GEMMAS = {
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", SANDWICH, _gemma2, may={}, adjust=offset_norms),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", {**SANDWICH, **QK_NORMS}, _gemma3, adjust=offset_norms),
    "gemma4": GEMMA4,
}
