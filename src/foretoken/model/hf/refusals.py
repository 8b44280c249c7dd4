"""Unsupported configurations are refused with the reason, before any weights are read."""

from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

from foretoken.core.errors import ModelError
from foretoken.model.hf.attention import KNOWN_KINDS

# Keys that only configurations with a state beside K and V have: state spaces, convolutions, linear attention.
STATE_KEYS = (
    "state_size",
    "ssm_cfg",
    "ssm_state_size",
    "mamba_d_state",
    "mamba_d_ssm",
    "conv_L_cache",
    "linear_num_value_heads",
    "lru_width",
    "rescale_every",
)
# Keys of models that make windows or sparse masks inside their attention, by slot (GPT-Neo's local layers, Doge): out
# of reach of the masks they are given, and of a short probe.
OWN_MASK_KEYS = ("attention_types", "keep_window_size")
UNLIMITED = 1 << 20


def check_config(config: Any, *, name: str, model_class: type | None = None) -> None:
    """Raise ModelError unless config is that of a decoder-only model whose whole memory is K and V per layer.

    model_class defaults to the class that transformers would load for it.
    """
    kind = getattr(config, "model_type", type(config).__name__)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{name} is an encoder-decoder model ({kind}); expected a decoder-only language model")
    if model_class is None:
        if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
            raise ModelError(f"{name} is an encoder-only model ({kind}); expected a decoder-only language model")
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ModelError(f"{name}: transformers knows no causal language model of type {kind!r}")
        known: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        model_class = known[0] if isinstance(known, tuple) else known
    assert model_class is not None
    text = config.get_text_config()
    states = [key for key in STATE_KEYS if getattr(text, key, None) is not None]
    kinds = set(getattr(text, "layer_types", None) or ()) - KNOWN_KINDS
    if states or getattr(model_class, "_is_stateful", False) or kinds & {"linear_attention", "conv", "hybrid"}:
        found = ", ".join(sorted(kinds) + states) or f"{model_class.__name__} is stateful"
        raise ModelError(
            f"{name} keeps a recurrent state ({kind}: {found}): such a state cannot be rolled back or branched into a "
            "tree; expected attention with keys and values in every layer"
        )
    if getattr(text, "alibi", False) or kind in ("bloom", "mpt"):
        raise ModelError(
            f"{name} biases its attention by the distance of slots (ALiBi, {kind}); in a tree slot is not "
            "position, and transformers gives no way to state positions there"
        )
    own = [key for key in OWN_MASK_KEYS if getattr(text, key, None) is not None]
    if own:
        raise ModelError(
            f"{name} makes attention masks of its own inside its layers ({kind}: {own[0]}); a tree of guesses "
            "needs a model that takes masks"
        )
    if kinds:
        raise ModelError(
            f"{name} has layers of kind {', '.join(sorted(kinds))} ({kind}); known: {', '.join(sorted(KNOWN_KINDS))}"
        )


def context_length(config: Any) -> int:
    """Positions that a model takes, config being its text configuration.

    For LongRoPE (Phi-3 128k) only those before its switch: beyond it transformers recomputes the rotary table for *all*
    rows of a pass as soon as one is long, so a row's logits would depend on its neighbours and on rejected guesses.
    """
    for key in ("max_position_embeddings", "max_seq_len", "seq_length", "max_sequence_length"):
        length = getattr(config, key, None)
        if length:
            break
    else:
        return UNLIMITED
    rope = getattr(config, "rope_parameters", None) or {}
    for entry in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if entry.get("rope_type") == "longrope":
            length = min(length, entry.get("original_max_position_embeddings") or length)
    return int(length)
