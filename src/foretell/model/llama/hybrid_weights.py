"""The tensors of hybrids under the names that the decoder reads them by (``hybrids.py``: what such models are)."""

import re
from collections.abc import Mapping

import torch

from foretell.core.errors import ModelError
from foretell.model.llama.mixers import Mixer
from foretell.model.llama.parts import Part, PartWeights, in_heads
from foretell.model.llama.shape import LlamaShape
from foretell.model.llama.weights import WeightSource, expect_shape

Renames = tuple[tuple[str, str], ...]
"""(pattern of the checkpoint's names, our name for it), applied one after the other."""
_MAMBA_FEED: Renames = (
    (r"\.mamba\.", ".mixer."),
    (r"\.feed_forward\.", ".mlp."),
    (r"\.pre_ff_layernorm\.", ".post_attention_layernorm."),
    (r"^model\.final_layernorm\.", "model.norm."),
)
_QWEN: Renames = ((r"^model\.language_model\.", "model."), (r"\.linear_attn\.", ".mixer."))
_LFM2: Renames = (
    (r"\.conv\.conv\.", ".mixer.conv1d."),
    (r"\.conv\.(in_proj|out_proj)\.", r".mixer.\1."),
    (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
    (r"\.self_attn\.([qk])_layernorm\.", r".self_attn.\1_norm."),
    (r"\.feed_forward\.w1\.", ".mlp.gate_proj."),
    (r"\.feed_forward\.w3\.", ".mlp.up_proj."),
    (r"\.feed_forward\.w2\.", ".mlp.down_proj."),
    (r"\.feed_forward\.", ".mlp."),
    (r"\.operator_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"^model\.embedding_norm\.", "model.norm."),
)
_NEMOTRON: Renames = (
    (r"^backbone\.", "model."),
    (r"^model\.embeddings\.", "model.embed_tokens."),
    (r"^model\.norm_f\.", "model.norm."),
    (r"\.mixer\.([qkvo]_proj)\.", r".self_attn.\1."),
    (r"\.mixer\.(up_proj|down_proj|gate|experts|shared_experts)\.", r".mlp.\1."),
)
_GRANITE: Renames = ((r"\.mamba\.", ".mixer."),)
_DENSE_GRANITE: Renames = (
    *_GRANITE,
    (r"\.shared_mlp\.input_linear\.", ".mlp.gate_up_proj."),
    (r"\.shared_mlp\.output_linear\.", ".mlp.down_proj."),
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
_IGNORED = re.compile(r"^(mtp\.|model\.visual\.|visual\.)|\.mup_vector$")
"""Tensors that belong to other parts of a checkpoint: heads for several tokens, images."""


def hybrid_weights(source: WeightSource, shape: LlamaShape, *, name: str) -> WeightSource:
    """A hybrid's tensors under the names of ``shape.layer_names`` and ``mixers.name_of``.

    Raises ShapeError, which names the model, for a fused tensor that is not as long as its parts.
    """
    parts, renames = dict[str, Part](), RENAMES[shape.hybrid]
    if renames is _GRANITE and shape.mixture is None:
        renames = _DENSE_GRANITE
    if shape.hybrid == "qwen3_next":
        _expect_fused(source, shape, name)
    for theirs in source.names:
        if _IGNORED.search(theirs):
            continue
        ours = theirs
        for pattern, new in renames:
            ours = re.sub(pattern, new, ours)
        layer = re.match(r"model\.layers\.(\d+)\.norm\.", ours)
        if layer and shape.hybrid == "nemotron_h":  # one norm a layer, of whatever it has
            own = "post_attention_layernorm" if shape.has_mlp(int(layer[1])) else "input_layernorm"
            ours = ours.replace(".norm.", f".{own}.")
        parts |= _split(source, shape, ours, theirs, name)
    return PartWeights(source, parts)


def _expect_fused(source: WeightSource, shape: LlamaShape, name: str) -> None:
    """Raise ModelError for a fused projection that is missing, by its own name: its parts are called otherwise."""
    named = [f"model.layers.{layer}.linear_attn.{key}.weight" for layer in range(shape.num_layers) if shape.mixer(layer)
             for key in ("in_proj_qkvz", "in_proj_ba")]  # fmt: skip
    missing = [each for each in named if each not in source.names]
    if missing and not any(".in_proj_qkv." in each for each in source.names):
        raise ModelError(
            f"{name}: the weights do not match the configuration: {missing[0]} is missing"
            f"{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}; expected both of one checkpoint"
        )


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
