"""Fused matrices (Phi-3: qkv_proj, gate_up_proj) under the names of their parts, and partial rope as a whole one."""

from foretell.model.llama.parts import Part, PartWeights, in_heads
from foretell.model.llama.shape import LlamaShape
from foretell.model.llama.traits import rotation_order
from foretell.model.llama.weights import WeightSource, expect_shape


def split_weights(source: WeightSource, shape: LlamaShape, *, name: str) -> WeightSource:
    """Another source's tensors, its fused ones as rows of several; rows of queries and keys in ``rotation_order``.

    Raises ShapeError, which names the model, for a fused tensor that is not as long as its parts.
    """
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sizes = {
        "qkv_proj": (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)),
        "gate_up_proj": (("gate_proj", shape.intermediate_size), ("up_proj", shape.intermediate_size)),
    }
    parts: dict[str, Part] = {}
    for theirs in source.names:
        whole = next((each for each in sizes if f".{each}." in theirs), None)
        if whole is None:
            parts[theirs] = Part(theirs)
            continue
        if theirs.endswith(".weight"):
            expect_shape(source, theirs, (sum(size for _, size in sizes[whole]), shape.hidden_size), name)
        start = 0
        for part, size in sizes[whole]:
            ours = theirs.replace(whole, part)
            turned = shape.traits.rotated is not None and part in ("q_proj", "k_proj")
            if turned and shape.traits.rotated is not None:
                order = rotation_order(shape.head_dim, shape.traits.rotated)
                parts[ours] = Part(theirs, start + in_heads(order, size))
            else:
                parts[ours] = Part(theirs, (start, start + size))
            start += size
    return PartWeights(source, parts)
