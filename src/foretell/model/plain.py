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

from foretell.core.jsontext import parse_json
from foretell.model.llama.traits import ARCHITECTURES

_COMMON: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_LLAMA = {
    **_COMMON, "vocab_size": 32000, "intermediate_size": 11008, "num_key_value_heads": None, "head_dim": None,
    "max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_MISTRAL = {
    **_COMMON, "vocab_size": 32000, "intermediate_size": 14336, "num_key_value_heads": 8, "head_dim": None,
    "max_position_embeddings": 131072, "sliding_window": 4096, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_WINDOW = {"use_sliding_window": False, "sliding_window": 4096}
_QWEN = {**_COMMON, **_WINDOW, "head_dim": None, "max_window_layers": 28, "layer_types": None}
_EXPERTS = {
    "hidden_size": 2048, "num_hidden_layers": 24, "decoder_sparse_step": 1, "norm_topk_prob": False,
    "mlp_only_layers": None,
}  # fmt: skip
_GEMMA = {
    **_COMMON, "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072, "tie_word_embeddings": True, "attention_bias": False, "query_pre_attn_scalar": 256,
    "sliding_window": 4096, "layer_types": None, "final_logit_softcapping": None, "attn_logit_softcapping": None,
    "use_bidirectional_attention": False, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip
del _GEMMA["hidden_act"]
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128, "attention_bias": False},
    "qwen3_moe": {
        **_COMMON, **_WINDOW, **_EXPERTS, "intermediate_size": 6144, "num_key_value_heads": 4, "attention_bias": False,
        "head_dim": None, "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128,
    },
    "qwen2_moe": {
        **_QWEN, **_EXPERTS, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16,
        "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4,
        "num_experts": 60, "qkv_bias": True,
    },
    "gemma3_text": _GEMMA,
}  # fmt: skip
"""Type -> the fields that are read, and transformers' defaults of them."""
_OPTIONAL = {
    "num_key_value_heads": int, "head_dim": int, "sliding_window": int, "final_logit_softcapping": float,
    "attn_logit_softcapping": float,
}  # fmt: skip
_UNREAD = frozenset((
    "model_type", "architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache",
    "initializer_range", "attention_dropout", "pretraining_tp", "rope_theta", "rope_scaling", "rope_parameters",
    "output_router_logits", "router_aux_loss_coef", "bos_token_id", "eos_token_id", "pad_token_id", "is_llama_config",
    "rope_interleaved", "max_window_layers",
))  # fmt: skip
"""Keys that are read otherwise, or that no pass depends on."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_KINDS = ("full_attention", "sliding_attention")
_ROPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # type -> numbers that it needs, and that it may have
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ("original_max_position_embeddings",)),
    "yarn": (
        ("factor",),
        (
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    ),
    "longrope": (
        (),
        ("original_max_position_embeddings", "attention_factor", "factor", "short_factor", "long_factor"),
    ),
}
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
    if kind == "gemma3_text" and raw.get("layer_types"):  # they say what the pattern would
        raw = {key: value for key, value in raw.items() if key != "_sliding_window_pattern"}
    known = DEFAULTS.get(kind) if isinstance(kind, str) else None
    if known is None or not raw.keys() <= {*known, *_UNREAD} or raw.get("architectures") not in (None, [_class(kind)]):
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


def _class(kind: Any) -> str:
    return ARCHITECTURES[kind]


def _fits(key: str, value: Any, default: Any) -> bool:
    """Whether a value is of the kind of a field."""
    if key in ("layer_types", "mlp_only_layers"):
        each = (lambda item: item in _KINDS) if key == "layer_types" else (lambda item: type(item) is int)
        return value is None or (isinstance(value, list) and all(map(each, value)))
    if key == "use_bidirectional_attention":
        return not value
    if value is None:
        return default is None or key == "sliding_window"
    if type(value) is not _OPTIONAL.get(key, type(default)):
        return False
    return bool(value > 0 or key == "sliding_window") if type(value) is int else type(value) is not float or value >= 0


def _is_ids(key: str, value: Any, size: int) -> bool:
    each: list[Any] = value if key == "eos_token_id" and isinstance(value, list) else [value]
    return value is None or all(type(one) is int and 0 <= one < size for one in each)


def _complete(config: PlainConfig) -> bool:
    """Fill in the fields that follow from others; False where they contradict each other."""
    kind, layers = config.model_type, config.num_hidden_layers
    if config.num_key_value_heads is None:
        config.num_key_value_heads = config.num_attention_heads
    if config.head_dim is None:
        if config.hidden_size % config.num_attention_heads:
            return False
        config.head_dim = config.hidden_size // config.num_attention_heads
    if kind == "llama" and config.hidden_size % config.num_attention_heads:
        return False
    if kind.startswith("qwen"):
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
    return bool(len(config.layer_types) == layers)


def _slides(config: PlainConfig, layer: int) -> bool:
    """Whether a layer has a window, where config.json lists no kinds of layers."""
    if config.model_type == "gemma3_text":
        return (layer + 1) % 6 != 0
    if config.model_type == "qwen2_moe":
        return bool(config.use_sliding_window) and layer < config.max_window_layers and layer % 2 == 0
    return config.sliding_window is not None and bool(layer >= config.max_window_layers)


def _rope(raw: Mapping[str, Any], config: PlainConfig) -> dict[str, Any] | None:
    """rope_parameters; None where they are not understood."""
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    theta = raw.get("rope_theta", 10000.0)
    if not isinstance(given, Mapping) or not _is_number(theta):
        return None
    if config.model_type != "gemma3_text":
        return _one_rope(given, theta, config.max_position_embeddings)
    if given.keys() != set(_KINDS) or "rope_theta" in raw:
        return None
    each = {key: _one_rope(given[key], None, config.max_position_embeddings) for key in _KINDS}
    return None if None in each.values() else each


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
