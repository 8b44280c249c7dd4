"""Configurations of the Llama family without transformers, whose import takes seconds: what ``llama/shape.py`` reads of a
config.json, with the defaults that transformers' classes would fill in.

Whatever is not understood here (a type, a key, a value of another kind) is left to transformers, which reads it or refuses
it: a configuration is read here in full or not at all.
"""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from foretell.checkpoints.config_defaults import ARCHITECTURES, DEFAULTS, PARTIAL, THETAS
from foretell.core.jsontext import parse_json

_OPTIONAL = {
    "num_key_value_heads": int, "head_dim": int, "sliding_window": int, "final_logit_softcapping": float,
    "attn_logit_softcapping": float, "clip_qkv": float, "moe_latent_size": int, "mamba_d_head": int,
    "position_embedding_type": str, "num_hidden_layers": int, "n_group": int, "topk_group": int,
    "num_experts_per_tok": int,
}  # fmt: skip
_MAY_BE_0 = (
    "sliding_window", "num_local_experts", "num_experts_per_tok", "shared_intermediate_size", "num_dense_layers",
    "first_k_dense_replace", "num_nextn_predict_layers",
)  # fmt: skip
_MAY_BE_WHOLE = (
    "embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier", "routed_scaling_factor",
    "query_pre_attn_scalar",
)  # fmt: skip
_UNREAD = frozenset((
    "model_type", "architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache",
    "initializer_range", "attention_dropout", "pretraining_tp", "rope_theta", "rope_scaling", "rope_parameters",
    "output_router_logits", "router_aux_loss_coef", "bos_token_id", "eos_token_id", "pad_token_id", "is_llama_config",
    "rope_interleaved", "max_window_layers", "router_jitter_noise", "mtp_layers_block_type",
    "full_attn_idxs", "mamba_chunk_size", "chunk_size", "expand", "use_mamba_kernels", "mamba_ssm_cache_dtype",
    "hidden_dropout", "moe_shared_expert_overlap", "rescale_prenorm_residual", "residual_in_fp32", "num_logits_to_keep",
    "time_step_floor", "time_step_max", "mamba_proj_bias", "experts_per_token", "initial_context_length",
    "qk_head_dim",
))  # fmt: skip
"""Keys that are read otherwise, or that no pass depends on."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_KINDS = ("full_attention", "sliding_attention")
_DELTA_KINDS, _CONV_KINDS = ("full_attention", "linear_attention"), ("full_attention", "conv")
_KINDS_OF = {  # of hybrids, whose lists of layers have to be stated
    "lfm2": _CONV_KINDS, "lfm2_moe": _CONV_KINDS, "qwen3_next": _DELTA_KINDS, "qwen3_5_text": _DELTA_KINDS,
    "qwen3_5_moe_text": _DELTA_KINDS, "granitemoehybrid": ("full_attention", "attention", "linear_attention", "mamba"),
    "nemotron_h": ("full_attention", "linear_attention", "mlp", "moe"),
}  # fmt: skip
_NO_LIMITS = ([0.0, {"__float__": "Infinity"}], [0.0, float("inf")])
_LISTS: dict[str, type] = {"layer_types": str, "layers_block_type": str, "mlp_only_layers": int}
_ROPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # type -> numbers that it needs, and that it may have
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ("original_max_position_embeddings",)),
    "yarn": (
        ("factor",),
        (
            "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
            "truncate",
        ),
    ),
    "longrope": ((), ("original_max_position_embeddings", "attention_factor", "factor", "short_factor", "long_factor")),
}  # fmt: skip
_SCALED = ("llama3", "yarn", "longrope")  # those that know the length before they were stretched


class PlainConfig(SimpleNamespace):
    """A configuration as transformers has it, of the fields in DEFAULTS."""

    def get_text_config(self) -> "PlainConfig":
        """The configuration itself, which is of text alone."""
        return self


def read_plain(path: Path) -> PlainConfig | None:
    """The configuration of a directory; None where transformers has to read it."""
    raw = stated(path / "config.json")
    return None if raw is None else plain_config(raw)


def stated(file: Path) -> dict[str, Any] | None:
    """The JSON object of a file; None where there is none."""
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def plain_config(raw: Mapping[str, Any]) -> PlainConfig | None:
    """The configuration of these values, those of a config.json; None where transformers has to read them."""
    kind = raw.get("model_type")
    if kind == "qwen3_moe" and "num_local_experts" in raw:  # as transformers saves it
        raw = {"num_experts": raw["num_local_experts"], **raw}
        del raw["num_local_experts"]
    if raw.get("time_step_limit") in _NO_LIMITS:  # as transformers saves infinity, and as others do
        raw = {key: value for key, value in raw.items() if key != "time_step_limit"}
    if kind == "gemma3_text" and raw.get("layer_types"):  # they say what the pattern would
        raw = {key: value for key, value in raw.items() if key != "_sliding_window_pattern"}
    known = DEFAULTS.get(kind) if isinstance(kind, str) else None
    more = ("partial_rotary_factor",) if known is not None and kind in PARTIAL else ()
    if (
        known is None
        or not raw.keys() <= {*known, *_UNREAD, *more}
        or raw.get("architectures") not in (None, [ARCHITECTURES[str(kind)]])
    ):
        return None
    values = {key: raw.get(key, default) for key, default in known.items() if not key.endswith("_token_id")}
    dtype = raw.get("dtype") or raw.get("torch_dtype")
    if not all(_fits(key, value, known[key]) for key, value in values.items()) or dtype not in (None, *_DTYPES):
        return None
    ids = {key: raw.get(key, known.get(key)) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if not all(_is_ids(key, value, values["vocab_size"]) for key, value in ids.items()):
        return None
    config = PlainConfig(model_type=kind, architectures=raw.get("architectures"), **values, **ids)
    config.dtype = None if dtype is None else _DTYPES[dtype]
    if not _complete(config):
        return None
    rope = _rope(raw, config)
    if rope is None:
        return None
    config.rope_parameters = rope
    return config


def _fits(key: str, value: Any, default: Any) -> bool:
    """Whether a value is of the kind of a field."""
    if key in _LISTS:
        return value is None or (isinstance(value, list) and all(type(item) is _LISTS[key] for item in value))
    if key == "use_bidirectional_attention":
        return not value
    if key == "quantization_config":
        return value is None or isinstance(value, dict)
    if value is None:
        return default is None or key in ("sliding_window", "q_lora_rank")
    is_whole = type(value) is int and key in _MAY_BE_WHOLE
    if not is_whole and type(value) is not _OPTIONAL.get(key, type(default)):
        return False
    return bool(value > 0 or key in _MAY_BE_0) if type(value) is int else type(value) is not float or value >= 0


def _is_ids(key: str, value: Any, size: int) -> bool:
    each: list[Any] = value if key == "eos_token_id" and isinstance(value, list) else [value]
    return value is None or all(type(one) is int and 0 <= one < size for one in each)


def _complete(config: PlainConfig) -> bool:
    """Fill in the fields that follow from others; False where they contradict each other."""
    kind = config.model_type
    if kind in _KINDS_OF and not _complete_hybrid(config):
        return False
    layers = config.num_hidden_layers
    if config.num_key_value_heads is None:
        config.num_key_value_heads = config.num_attention_heads
    if getattr(config, "head_dim", None) is None:
        if config.hidden_size % config.num_attention_heads:
            return False
        config.head_dim = config.hidden_size // config.num_attention_heads
    if kind == "llama" and config.hidden_size % config.num_attention_heads:
        return False
    if hasattr(config, "use_sliding_window"):
        without = 0 if kind == "qwen2_moe" else None
        config.sliding_window = config.sliding_window if config.use_sliding_window else without
    if hasattr(config, "mlp_only_layers"):
        config.mlp_only_layers = config.mlp_only_layers or []
    if getattr(config, "sliding_window", None) == 0 and getattr(config, "use_sliding_window", True):
        return False
    if not hasattr(config, "layer_types"):
        return True
    if config.layer_types is None:
        config.layer_types = [_KINDS[_slides(config, layer)] for layer in range(layers)]
    known = set(_KINDS_OF.get(kind, _KINDS))
    return len(config.layer_types) == layers and known.issuperset(config.layer_types)


def _complete_hybrid(config: PlainConfig) -> bool:
    """The same of what hybrids alone have."""
    if config.model_type == "nemotron_h":
        kinds = config.layers_block_type
        if not kinds or config.num_hidden_layers not in (None, len(kinds)):
            return False
        config.num_hidden_layers = len(kinds)
        return set(_KINDS_OF["nemotron_h"]).issuperset(kinds)
    if config.model_type == "granitemoehybrid":
        inner = config.mamba_expand * config.hidden_size
        config.mamba_d_head = config.mamba_d_head or inner // config.mamba_n_heads
        if config.mamba_d_head * config.mamba_n_heads != inner or config.position_embedding_type not in (None, "rope"):
            return False
    return bool(config.layer_types)


def _slides(config: PlainConfig, layer: int) -> bool:
    """Whether a layer has a window, where config.json lists no kinds of layers."""
    if config.model_type.startswith("gemma"):
        return (layer + 1) % (2 if config.model_type == "gemma2" else 6) != 0
    if config.model_type == "gpt_oss":
        return layer % 2 == 0
    if config.model_type == "qwen2_moe":
        return bool(config.use_sliding_window) and layer < config.max_window_layers and layer % 2 == 0
    return config.sliding_window is not None and bool(layer >= config.max_window_layers)


def _rope(raw: Mapping[str, Any], config: PlainConfig) -> dict[str, Any] | None:
    """rope_parameters; None where they are not understood."""
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    theta = raw.get("rope_theta", THETAS.get(config.model_type, 10000.0))
    if not isinstance(given, Mapping) or not _is_number(theta) or (config.model_type == "gpt_oss" and not given):
        return None  # of gpt-oss another rope is the default
    if config.model_type in PARTIAL:
        return _partial_rope(given, theta, raw.get("partial_rotary_factor", PARTIAL[config.model_type]), config)
    if config.model_type != "gemma3_text":
        return _one_rope(given, theta, config.max_position_embeddings)
    if given.keys() != set(_KINDS) or "rope_theta" in raw:
        return None
    each = {key: _one_rope(given[key], None, config.max_position_embeddings) for key in _KINDS}
    return None if None in each.values() else each


def _partial_rope(given: Mapping[str, Any], theta: Any, part: Any, config: PlainConfig) -> dict[str, Any] | None:
    """One of a part of a head; sections are those of images, and texts have one."""
    part = given.get("partial_rotary_factor", part)
    own = ("partial_rotary_factor", *(("mrope_section", "mrope_interleaved") if "qwen3_5" in config.model_type else ()))
    rope = _one_rope(
        {key: value for key, value in given.items() if key not in own}, theta, config.max_position_embeddings
    )
    return None if rope is None or not _is_number(part) or part > 1 else {**rope, "partial_rotary_factor": part}


def _one_rope(given: Any, theta: Any, positions: int) -> dict[str, Any] | None:
    if not isinstance(given, Mapping):
        return None
    rope = {"rope_theta": theta, **given}
    rope.setdefault("rope_type", rope.get("type", "default"))
    kind = rope["rope_type"]
    if not isinstance(kind, str) or kind not in _ROPES or rope.get("type", kind) != kind:
        return None
    needed, more = _ROPES[kind]
    if kind in _SCALED:
        rope.setdefault("original_max_position_embeddings", positions)
    if kind == "longrope":
        needed = ("short_factor", "long_factor")
    fine = rope.keys() <= {"rope_type", "type", "rope_theta", *needed, *more} and all(key in rope for key in needed)
    numbers = [
        value
        for key, value in rope.items()
        if key not in ("rope_type", "type", "truncate", "short_factor", "long_factor")
    ]
    lists = [rope[key] for key in ("short_factor", "long_factor") if key in rope]
    fine = fine and all(map(_is_number, numbers)) and type(rope.get("truncate", True)) is bool
    fine = fine and all(isinstance(values, list) and all(map(_is_number, values)) for values in lists)
    return rope if fine and (kind == "default" or rope.get("factor", 1.0) >= 1) else None


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and value > 0
