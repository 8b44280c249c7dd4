"""Gemma 2 and 3; Gemma 4: ``gemma4.py``."""

from typing import Any

from torch import Tensor

from foretell.checkpoints.gguf.families.architecture import Architecture, Change
from foretell.checkpoints.gguf.families.decoders import QK_NORMS, SANDWICH, dense, layer_types
from foretell.checkpoints.gguf.families.gemma4 import GEMMA4, softcap
from foretell.checkpoints.gguf.file import GGUFFile
from foretell.checkpoints.gguf.values import decimal, only, whole

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
