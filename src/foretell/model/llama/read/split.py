"""Fused matrices (Phi-3: qkv_proj, gate_up_proj; GLM-4: the latter) under the names of their parts, and partial or
interleaved rope as that of whole heads; names that are not Llama's."""

import re

import torch
from torch import Tensor

from foretell.checkpoints.weights import WeightSource, expect_shape
from foretell.model.llama.read.latent import LatentWeights
from foretell.model.llama.read.parts import Part, PartWeights, in_heads
from foretell.model.llama.shape import LlamaShape
from foretell.model.llama.traits import rotation_order


def split_weights(source: WeightSource, shape: LlamaShape, *, name: str, any_width: bool = False) -> WeightSource:
    """Another source's tensors, its fused ones as rows of several; rows of queries, keys and the norms of their heads in
    ``rotation_order``. The source itself where it has neither. any_width: rows need not be as long as the stream.

    Raises ShapeError, which names the model, for a fused tensor that is not as long as its parts.
    """
    latent = shape.traits.latent
    if latent is not None:
        interleaved = shape.traits.interleaved
        return LatentWeights(source, latent, shape.num_heads, interleaved=interleaved, name=name, any_width=any_width)
    order, parts = _order(shape), dict[str, Part]()
    renames = shape.traits.renames
    if order is None and not shape.traits.is_fused and not renames:
        return source
    dim, inner = shape.head_dim, shape.intermediate_size
    queries, keys = shape.num_heads * dim, shape.num_kv_heads * dim
    sizes = {
        "qkv_proj": (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)),
        "gate_up_proj": (("gate_proj", inner), ("up_proj", inner)),
        "q_proj": (("q_proj", queries),),
        "k_proj": (("k_proj", keys),),
        "q_norm": (("q_norm", queries if shape.traits.qk_norm == "all" else dim),),
        "k_norm": (("k_norm", keys if shape.traits.qk_norm == "all" else dim),),
    }
    for theirs in source.names:
        named = theirs
        for old, new in renames:
            named = named.replace(old, new)
        found = re.search(rf"\.({'|'.join(sizes)})\.", named)
        if found is None:
            parts[named] = Part(theirs)
            continue
        if theirs.endswith(".weight") and len(sizes[found[1]]) > 1:
            width = None if any_width else shape.hidden_size
            expect_shape(source, theirs, (sum(size for _, size in sizes[found[1]]), width), name)
        start = 0
        for part, size in sizes[found[1]]:
            rows: Tensor | tuple[int, int] | None = (start, start + size)
            if order is not None and part[0] in "qk":
                rows = start + in_heads(order, size)
            elif len(sizes[found[1]]) == 1:
                rows = None
            parts[named.replace(found[1], part)] = Part(theirs, rows)
            start += size
    wholes = [whole for whole in sizes if any(f".{whole}." in each for each in source.names)]

    def back(ours: str) -> str:
        for whole in wholes:
            for part, _ in sizes[whole]:
                ours = ours.replace(f".{part}.", f".{whole}.")
        for old, new in renames:
            ours = ours.replace(new, old)
        return ours

    return PartWeights(source, parts, back)


def _order(shape: LlamaShape) -> torch.Tensor | None:
    """The order of a head's rows; None: as it is."""
    rotated, interleaved = shape.traits.rotated, shape.traits.interleaved
    if rotated is None and not interleaved:
        return None
    return rotation_order(shape.head_dim, rotated or shape.head_dim, interleaved=interleaved)
