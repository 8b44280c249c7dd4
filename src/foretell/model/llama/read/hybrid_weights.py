"""The tensors of hybrids under the names that the decoder reads them by (``llama/hybrids.py``: what such models are)."""

import re
from collections.abc import Mapping

import torch

from foretell.checkpoints.weights import WeightSource, expect_shape
from foretell.model.llama.mixers import Mixer
from foretell.model.llama.read.parts import Part, PartWeights, in_heads
from foretell.model.llama.shape import LlamaShape

Renames = tuple[tuple[str, str], ...]
"""(the checkpoint's text, ours for it), one after the other; backwards they say what a checkpoint calls what it lacks."""
_MAMBA_FEED: Renames = (
    (".mamba.", ".mixer."),
    (".feed_forward.", ".mlp."),
    (".pre_ff_layernorm.", ".post_attention_layernorm."),
    ("model.final_layernorm.", "model.norm."),
)
_QWEN: Renames = (("model.language_model.", "model."), (".linear_attn.", ".mixer."))
_LFM2: Renames = (
    (".conv.conv.", ".conv.conv1d."),
    (".conv.", ".mixer."),
    (".self_attn.out_proj.", ".self_attn.o_proj."),
    (".q_layernorm.", ".q_norm."),
    (".k_layernorm.", ".k_norm."),
    (".feed_forward.", ".mlp."),
    (".mlp.w1.", ".mlp.gate_proj."),
    (".mlp.w3.", ".mlp.up_proj."),
    (".mlp.w2.", ".mlp.down_proj."),
    (".mlp.expert_bias", ".mlp.gate.e_score_correction_bias"),
    (".operator_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
    ("model.embedding_norm.", "model.norm."),
)
_NEMOTRON: Renames = (
    ("backbone.", "model."),
    ("model.embeddings.", "model.embed_tokens."),
    ("model.norm_f.", "model.norm."),
    *((f".mixer.{key}_proj.", f".self_attn.{key}_proj.") for key in "qkvo"),
    *((f".mixer.{key}.", f".mlp.{key}.") for key in ("up_proj", "down_proj", "gate", "experts")),
    (".mixer.shared_experts.", ".mlp.shared_expert."),
)
_GRANITE: Renames = ((".mamba.", ".mixer."),)
_DENSE_GRANITE: Renames = (
    *_GRANITE,
    (".shared_mlp.input_linear.", ".mlp.gate_up_proj."),
    (".shared_mlp.output_linear.", ".mlp.down_proj."),
)
RENAMES: Mapping[str, Renames] = {
    "qwen3_next": _QWEN,
    "qwen3_5_text": _QWEN,
    "qwen3_5_moe_text": _QWEN,
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2,
    "nemotron_h": _NEMOTRON,
    "granitemoehybrid": _GRANITE,
    "falcon_h1": _MAMBA_FEED,
    "bamba": _MAMBA_FEED,
}
_PARTS: Mapping[str, Renames] = {  # (what the checkpoint has, one of several that are made of it)
    "qwen3_next": (
        *((".in_proj_qkvz.", f".in_proj_{key}.") for key in ("qkv", "z")),
        *((".in_proj_ba.", f".in_proj_{key}.") for key in "ba"),
    ),
    "nemotron_h": tuple((".norm.", f".{key}_layernorm.") for key in ("input", "post_attention")),
}
_IGNORED = re.compile(r"^(mtp\.|model\.visual\.|visual\.)|\.mup_vector$")
"""Tensors that belong to other parts of a checkpoint: heads for several tokens, images."""


def hybrid_weights(source: WeightSource, shape: LlamaShape, *, name: str) -> WeightSource:
    """A hybrid's tensors under the names of ``shape.layer_names`` and ``mixers.name_of``.

    Raises ShapeError, which names the model, for a fused tensor that is not as long as its parts.
    """
    parts, renames, names = dict[str, Part](), RENAMES[shape.hybrid], source.names
    if renames is _GRANITE and shape.mixture is None:
        renames = _DENSE_GRANITE
    for theirs in names:
        if _IGNORED.search(theirs):
            continue
        ours = theirs
        for old, new in renames:
            ours = ours.replace(old, new, 1)
        layer = re.match(r"model\.layers\.(\d+)\.norm\.", ours)
        if layer and shape.hybrid == "nemotron_h":  # one norm a layer, of whatever it has
            own = "post_attention_layernorm" if shape.has_mlp(int(layer[1])) else "input_layernorm"
            ours = ours.replace(".norm.", f".{own}.")
        parts |= _split(source, shape, ours, theirs, name)

    def back(ours: str) -> str:
        for old, new in (*_PARTS.get(shape.hybrid, ()), (".q_proj.", ".gates_proj."), *reversed(renames)):
            if new != "model." or any(each.startswith(old) for each in names):
                ours = ours.replace(new, old, 1)
        return ours

    return PartWeights(source, parts, back)


def _split(source: WeightSource, shape: LlamaShape, ours: str, theirs: str, name: str) -> dict[str, Part]:
    """The parts of one tensor."""
    if ".self_attn.q_proj." in ours and shape.traits.is_gated:
        dim, queries = shape.head_dim, shape.num_heads * shape.head_dim
        expect_shape(source, theirs, (2 * queries, *source.shape(theirs)[1:]), name)
        return {
            ours.replace("q_proj", key): Part(theirs, in_heads(torch.arange(at, at + dim), queries, of=2 * dim))
            for key, at in (("q_proj", 0), ("gates_proj", dim))
        }
    stem = ours.removesuffix(".weight")
    if stem.endswith((".mixer.in_proj_qkvz", ".mixer.in_proj_ba")):
        mixer = shape.mixer(int(stem.split(".")[2]))
        if mixer is None:
            return {ours: Part(theirs)}
        orders = _qwen3_next_orders(mixer)
        found = {
            key: order for key, order in orders.items() if (key in ("in_proj_b", "in_proj_a")) == stem.endswith("ba")
        }
        expect_shape(source, theirs, (sum(map(len, found.values())), shape.hidden_size), name)
        return {f"{stem.rpartition('.')[0]}.{key}.weight": Part(theirs, order) for key, order in found.items()}
    return {ours: Part(theirs)}


def _qwen3_next_orders(mixer: Mixer) -> dict[str, torch.Tensor]:
    """Rows of Qwen3-Next's fused projections: each group of heads has its q, k, v and z together, and its b and a."""
    each = mixer.heads // mixer.groups
    width, values = 2 * mixer.rows, each * mixer.columns
    whole = torch.arange(mixer.groups)[:, None]
    start = whole * (width + 2 * values)
    q, k = (start + torch.arange(mixer.rows) + at for at in (0, mixer.rows))
    v, z = (start + torch.arange(values) + at for at in (width, width + values))
    b, a = (whole * 2 * each + torch.arange(each) + at for at in (0, each))
    qkv = torch.cat([part.flatten() for part in (q, k, v)])
    return {"in_proj_qkv": qkv, "in_proj_z": z.flatten(), "in_proj_b": b.flatten(), "in_proj_a": a.flatten()}
