"""Unsupported configurations are refused with the reason, before any weights are read."""

from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

from foretell.core.errors import ModelError
from foretell.model.hf.attention import KNOWN_KINDS
from foretell.model.llama.traits import longrope_positions

# Layers that keep a state instead of keys and values, or beside them, or that keep nothing (Nemotron-H's own names too).
RECURRENT_KINDS = frozenset(("linear_attention", "conv", "hybrid", "mamba", "moe", "mlp"))
UNLIMITED = 1 << 20


def needs_tower(config: Any) -> bool:
    """Whether transformers has this model's language model only together with what reads images (Qwen-VL, LLaVA)."""
    return type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def check_config(config: Any, *, name: str, model_class: type | None = None) -> None:
    """Raise ModelError unless config is that of a decoder-only model whose memory is within reach.

    model_class defaults to the class that transformers would load for it.
    """
    kind = getattr(config, "model_type", type(config).__name__)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{name} is an encoder-decoder model ({kind}); expected a decoder-only language model")
    if model_class is None:
        if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
            raise ModelError(f"{name} is an encoder-only model ({kind}); expected a decoder-only language model")
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not needs_tower(config):
            raise ModelError(f"{name}: transformers knows no causal language model of type {kind!r}")
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ()) - KNOWN_KINDS - RECURRENT_KINDS
    if kinds:
        raise ModelError(
            f"{name} has layers of kind {', '.join(sorted(kinds))} ({kind}); known: {', '.join(sorted(KNOWN_KINDS))}"
        )


def context_length(config: Any) -> tuple[int, str]:
    """(positions that a model takes, ``ModelSpec.cut``), config being its text configuration.

    For LongRoPE (Phi-3 128k) only those before its switch: beyond it transformers recomputes the rotary table for *all*
    rows of a pass as soon as one is long, so a row's logits would depend on its neighbours and on rejected guesses. For
    Doge those before it begins to choose keys: equal tokens tie there, and which of them wins depends on their slots.
    """
    for key in ("max_position_embeddings", "max_seq_len", "seq_length", "max_sequence_length"):
        length = getattr(config, key, None)
        if length:
            break
    else:
        return UNLIMITED, ""
    first, why = longrope_positions(config, int(length))
    window = int(getattr(config, "keep_window_size", None) or first)
    if window < first:
        return window, f"of the {length} that it states: from there on it chooses keys, of which equal ones tie"
    return first, why
