"""Fused matrices (Phi-3: qkv_proj, gate_up_proj; GLM-4: the latter) under the names of their parts, and partial or
interleaved rope as that of whole heads."""

import re

import torch
from torch import Tensor

from foretell.model.llama.parts import Part, PartWeights, in_heads
from foretell.model.llama.shape import LlamaShape
from foretell.model.llama.traits import rotation_order
from foretell.model.llama.weights import WeightSource, expect_shape


def split_weights(source: WeightSource, shape: LlamaShape, *, name: str) -> WeightSource:
    """Another source's tensors, its fused ones as rows of several; rows of queries and keys in ``rotation_order``.

    Raises ShapeError, which names the model, for a fused tensor that is not as long as its parts.
    """
    queries, keys, inner = (
        shape.num_heads * shape.head_dim,
        shape.num_kv_heads * shape.head_dim,
        shape.intermediate_size,
    )
    sizes = {
        "qkv_proj": (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)),
        "gate_up_proj": (("gate_proj", inner), ("up_proj", inner)),
        "q_proj": (("q_proj", queries),),
        "k_proj": (("k_proj", keys),),
    }
    order, parts = _order(shape), dict[str, Part]()
    for theirs in source.names:
        found = re.search(r"\.(qkv_proj|gate_up_proj|q_proj|k_proj)\.", theirs)
        if found is None:
            parts[theirs] = Part(theirs)
            continue
        if theirs.endswith(".weight") and len(sizes[found[1]]) > 1:
            expect_shape(source, theirs, (sum(size for _, size in sizes[found[1]]), shape.hidden_size), name)
        start = 0
        for part, size in sizes[found[1]]:
            turned = order is not None and part in ("q_proj", "k_proj")
            rows: Tensor | tuple[int, int] | None = (start, start + size)
            if turned and order is not None:
                rows = start + in_heads(order, size)
            elif len(sizes[found[1]]) == 1:
                rows = None
            parts[theirs.replace(found[1], part)] = Part(theirs, rows)
            start += size
    return PartWeights(source, parts)


def _order(shape: LlamaShape) -> torch.Tensor | None:
    """The order of a head's rows; None: as it is."""
    rotated, interleaved = shape.traits.rotated, shape.traits.interleaved
    if rotated is None and not interleaved:
        return None
    return rotation_order(shape.head_dim, rotated or shape.head_dim, interleaved=interleaved)
