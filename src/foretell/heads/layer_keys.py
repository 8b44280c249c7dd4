"""Read a decoder layer's keys from other tools' config.json: rotary frequencies, windows, and keys without effect.

A key that is neither read nor known to have no effect is refused by name: a wrongly computed head is still exact,
and only a low acceptance would show the error.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from foretell.core.errors import ModelError
from foretell.heads.config_keys import Keys
from foretell.heads.layout import MARKER, TargetInfo
from foretell.heads.modules import KINDS, RopeScaling
from foretell.model.llama.traits import default_attention_factor

HARMLESS = frozenset(
    {
        MARKER, "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "architectures",
        "attention_dropout", "attn_implementation", "auto_map", "base_model_name_or_path", "bos_token_id",
        "chunk_size_feed_forward", "dtype", "embed_requires_grad", "eos_token_id", "finetuning_task",
        "has_no_defaults_at_init", "id2label", "initializer_range", "is_decoder", "is_encoder_decoder", "label2id",
        "max_position_embeddings", "max_window_layers", "model_type", "name_or_path", "num_target_layers",
        "original_max_position_embeddings", "output_attentions", "output_hidden_states", "pad_token_id",
        "pretraining_tp", "problem_type", "return_dict", "speculators_config", "speculators_model_type",
        "speculators_version", "target_model_type", "tie_word_embeddings", "tokenizer_class", "torch_dtype",
        "torchscript", "transformers_version", "use_bfloat16", "use_cache",
        # What transformers before 5 wrote of text generation into every config.json.
        "add_cross_attention", "bad_words_ids", "begin_suppress_tokens", "cross_attention_hidden_size",
        "decoder_start_token_id", "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id", "length_penalty",
        "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences",
        "output_scores", "prefix", "pruned_heads", "remove_invalid_values", "repetition_penalty",
        "return_dict_in_generate", "sep_token_id", "suppress_tokens", "task_specific_params", "temperature",
        "tf_legacy_loss", "tie_encoder_decoder", "top_k", "top_p", "typical_p",
    }
)  # fmt: skip
"""Keys of config.json without effect on a head's results here. Keys about embeddings (tied ones, for example) are
ignored too: the tensors of the file are used."""


def refuse_unknown(keys: Keys, harmless: Iterable[str] = HARMLESS) -> None:
    """Raise ModelError for the first key that was not read, is not harmless and is not off (null, false, empty)."""
    known = keys.read | set(harmless)
    for key, value in sorted(keys.values.items()):
        if key not in known and not (value is None or value is False or value == "" or value == [] or value == {}):
            raise ModelError(
                f"{keys.name}: {keys.prefix}{key} is {value!r} in config.json, which is not known here and may change what "
                "the head computes; where it does not, delete the key"
            )


def rope(keys: Keys) -> tuple[float, RopeScaling | None]:
    """(base, scaling) of either spelling: rope_theta and rope_scaling, or rope_parameters as transformers 5 writes them.

    Raises ModelError for frequencies that are not implemented (see ``heads.modules``), naming the key.
    """
    parts = [keys.inner(key) for key in ("rope_scaling", "rope_parameters")]
    for part in parts:
        for key, value in part.values.items():
            if isinstance(value, Mapping):
                raise ModelError(
                    f"{keys.name}: {part.prefix}{key} in config.json holds frequencies of one type of layer; only one "
                    "kind for all layers is supported"
                )
    both = Keys({key: value for part in parts for key, value in part.values.items()}, keys.name, parts[-1].prefix)
    if all(part.values for part in parts):
        kinds = [_kind(part) for part in parts]
        if kinds[0] != kinds[1]:
            raise ModelError(
                f"{keys.name}: rope_scaling is of type {kinds[0]!r} and rope_parameters of type {kinds[1]!r} in "
                "config.json: delete the wrong one"
            )
    elif parts[0].values:
        both.prefix = parts[0].prefix
    theta = both.number("rope_theta", keys.number("rope_theta", 10000.0))
    for source in (keys, both):
        source.only("partial_rotary_factor", 1.0)
    kind = _kind(both)
    positions = {"original_max_position_embeddings", "max_position_embeddings"}
    if kind == "default":
        # Sections say which dimensions turn by an image's rows and columns: in a text all three positions are one.
        refuse_unknown(both, {"factor", "mrope_interleaved", "mrope_section", *positions})
        return theta, None
    if kind not in KINDS:
        raise ModelError(
            f"{keys.name}: {both.prefix}rope_type is {kind!r} in config.json; only plain rotary positions ('default') and "
            f"{', '.join(map(repr, KINDS))} are supported"
        )
    scaling = _linear(both) if kind == "linear" else (_llama3 if kind == "llama3" else _yarn)(both, keys)
    refuse_unknown(both, positions)
    return theta, scaling


def _kind(keys: Keys) -> str:
    keys.read.update(("rope_type", "type"))
    kind = keys.values.get("rope_type", keys.values.get("type"))
    return "default" if kind is None else str(kind)


def _linear(keys: Keys) -> RopeScaling:
    return RopeScaling("linear", keys.number("factor"))


def _llama3(keys: Keys, layer: Keys) -> RopeScaling:
    return RopeScaling(
        "llama3", keys.number("factor"), _original(keys, layer), keys.number("low_freq_factor"),
        keys.number("high_freq_factor"),
    )  # fmt: skip


def _yarn(keys: Keys, layer: Keys) -> RopeScaling:
    original = _original(keys, layer)
    # Without a factor it is how much longer texts may be than those of the pretraining.
    factor = keys.number("factor") if "factor" in keys else layer.size("max_position_embeddings") / original
    scale, scale_all = keys.number("mscale", 0.0), keys.number("mscale_all_dim", 0.0)
    attention = default_attention_factor(factor)
    if scale and scale_all:
        attention = default_attention_factor(factor, scale) / default_attention_factor(factor, scale_all)
    return RopeScaling(
        "yarn", factor, original,
        beta_fast=keys.number("beta_fast", 0.0) or 32.0, beta_slow=keys.number("beta_slow", 0.0) or 1.0,
        truncate=keys.flag("truncate", default=True), attention_factor=keys.number("attention_factor", attention),
    )  # fmt: skip


def _original(keys: Keys, layer: Keys) -> int:
    """The longest text of the pretraining, from where transformers takes it."""
    name = "original_max_position_embeddings"
    for source in (layer, keys):
        if name in source:
            return source.size(name)
    return layer.size("max_position_embeddings")


def windows(keys: Keys, num_layers: int, *, qwen: bool) -> tuple[int, ...]:
    """How many last positions each layer sees, 0 for all; empty where all layers see all.

    "layer_types" says it. Where it is absent, Qwen's rule holds for Qwen's layers: with "use_sliding_window", those from
    number "max_window_layers" on. Raises ModelError where the keys do not determine the windows of all layers.
    """
    size = keys.integer("sliding_window", 0)
    used = keys.flag("use_sliding_window") if "use_sliding_window" in keys else None
    keys.read.update(("layer_types", "sliding_window", "use_sliding_window"))
    types = keys.values.get("layer_types")
    if types is None:
        first = keys.integer("max_window_layers", 28 if qwen else 0)
        if used is False or first >= num_layers or (not size and not used):
            return ()
        if not (qwen and used and size > 0):
            raise ModelError(
                f"{keys.name}: {keys.prefix}sliding_window is {keys.values.get('sliding_window')!r} in config.json, and "
                "nothing says which layers have that window: write layer_types ('full_attention' or 'sliding_attention' "
                "for each layer)"
            )
        sliding = [index >= first for index in range(num_layers)]
    else:
        sliding = [kind == "sliding_attention" for kind in _types(keys, types, num_layers)]
    if not any(sliding):
        return ()
    if size < 1 or used is False:
        raise ModelError(
            f"{keys.name}: {keys.prefix}layer_types in config.json has 'sliding_attention', sliding_window is "
            f"{keys.values.get('sliding_window')!r} and use_sliding_window {used!r}: write the size of the window and "
            "true, or 'full_attention'"
        )
    return tuple(size if slides else 0 for slides in sliding)


def _types(keys: Keys, types: Any, num_layers: int) -> list[str]:
    """The types of the head's layers: the first ones of a list that some trainers copy from the whole target."""
    if not isinstance(types, list) or len(types) < num_layers:
        raise keys.wrong("layer_types", f"a list of {num_layers} types or more")
    for kind in types[:num_layers]:
        if kind not in ("full_attention", "sliding_attention"):
            raise ModelError(
                f"{keys.name}: {keys.prefix}layer_types has {kind!r} in config.json; only 'full_attention' and "
                "'sliding_attention' are supported"
            )
    return types[:num_layers]


def describe_rope(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """The keys that ``rope`` reads; scaled frequencies in both spellings, since engines differ in which they read."""
    if scaling is None:
        return {"rope_theta": theta}
    parameters = scaling.as_parameters()
    return {"rope_theta": theta, "rope_scaling": parameters, "rope_parameters": {"rope_theta": theta, **parameters}}


def describe_windows(sizes: tuple[int, ...]) -> dict[str, Any]:
    """The keys that ``windows`` reads; none where all layers see all."""
    if not any(sizes):
        return {}
    types = ["sliding_attention" if size else "full_attention" for size in sizes]
    return {"layer_types": types, "sliding_window": max(sizes), "use_sliding_window": True}


def describe_layers(config: Any, target: TargetInfo) -> dict[str, Any]:
    """The sizes of decoder layers, as transformers' configurations have them."""
    out = {
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
        **describe_windows(config.windows),
    }
    return out if target.max_positions is None else {**out, "max_position_embeddings": target.max_positions}


def layer_sizes(keys: Keys, head_dim: int | None = None) -> dict[str, Any]:
    """What ``describe_layers`` wrote, but for windows and the number of layers, by the names that heads have for it.
    head_dim: where none is named; None: as many as share the hidden size."""
    hidden, num_heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    return {
        "hidden_size": hidden,
        "vocab_size": keys.size("vocab_size"),
        "intermediate_size": keys.size("intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": keys.size("num_key_value_heads", num_heads),
        "head_dim": keys.size("head_dim", head_dim or hidden // num_heads),
        "rms_norm_eps": keys.number("rms_norm_eps", 1e-6),
    }
