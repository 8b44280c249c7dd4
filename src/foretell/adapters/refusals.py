"""What transformers' ``generate`` can be asked for and this project's loop cannot keep: refused by name, never left out."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from foretell.core.errors import ConfigError

STOPS = {"MaxLengthCriteria", "EosTokenCriteria"}
"""Stopping criteria that are read from the generation configuration."""
SETTINGS = {
    "output_scores": "scores are not kept",
    "output_logits": "logits are not kept",
    "output_attentions": "attention weights are not kept",
    "output_hidden_states": "hidden states are not kept",
    "return_dict_in_generate": "the sequences alone are returned",
    "penalty_alpha": "contrastive search is another loop",
    "dola_layers": "DoLa is another loop",
    "constraints": "constrained beam search is another loop",
    "force_words_ids": "constrained beam search is another loop",
    "use_mtp": "name a method where the loop is made, e.g. Speculative('mtp')",
    "prompt_lookup_num_tokens": "name a method where the loop is made, e.g. Speculative('ngram')",
    "assistant_early_exit": "name a method where the loop is made, e.g. Speculative('kangaroo')",
}
"""Fields of a generation configuration that would change the output, and why not here."""
PROCESSORS = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale needs a second pass over every text",
    "ClassifierFreeGuidanceLogitsProcessor": "guidance needs a second row for every text",
    "SynthIDTextWatermarkLogitsProcessor": "a SynthID watermark remembers the calls before, and guesses are calls too",
}
"""Logits processors that are no function of one text and its scores."""
INPUTS = {
    "attention_mask", "position_ids", "past_key_values", "cache_params", "use_cache", "logits_to_keep", "inputs_embeds",
    "assistant_model", "synced_gpus", "token_type_ids", "mm_token_type_ids", *SETTINGS,
}  # fmt: skip
"""Inputs of a model that are read, or checked to say nothing."""


def check_settings(config: Any, num_rows: int, streamer: Any) -> None:
    """Raises ConfigError for a generation configuration that asks for another loop, or for what is not kept."""
    for name, reason in SETTINGS.items():
        if getattr(config, name, None):
            raise ConfigError(f"{name} is not for this loop: {reason}")
    for name in ("num_beams", "num_beam_groups"):
        if (getattr(config, name, 1) or 1) > 1:
            raise ConfigError(f"{name} is not for this loop: texts are sampled, or greedy")
    if "quantized" in str(getattr(config, "cache_implementation", "")):
        raise ConfigError("cache_implementation='quantized' is not for this loop: it keeps keys and values as they are")
    if streamer is not None and num_rows > 1:
        raise ConfigError(f"a streamer shows one text, and {num_rows} were given")


def check_calls(processors: Sequence[Any], criteria: Sequence[Any]) -> None:
    """Raises ConfigError for a logits processor or stopping criterion that cannot be asked about single texts."""
    for one in processors:
        for kind in type(one).__mro__:
            if kind.__name__ in PROCESSORS:
                raise ConfigError(f"{type(one).__name__} is not for this loop: {PROCESSORS[kind.__name__]}")
    for one in criteria:
        if type(one).__name__ not in STOPS:
            raise ConfigError(
                f"the stopping criterion {type(one).__name__} is not for this loop: cut the text afterwards"
            )


def check_inputs(given: Mapping[str, Any], mask: Tensor) -> None:
    """Raises ConfigError for a model's inputs that this loop would not hand on. mask [B, L] int64: 0 where padded."""
    if given.get("assistant_model") is not None:
        raise ConfigError("give the draft model where the loop is made: Speculative(draft=model)")
    if given.get("synced_gpus"):
        raise ConfigError("synced_gpus is not for this loop: the processes of a model would decode different steps")
    for name in ("past_key_values", "cache_params"):
        cache = given.get(name)
        if cache is None:
            continue
        if "Quantized" in type(cache).__name__:
            raise ConfigError(f"{type(cache).__name__} is not for this loop: it keeps keys and values as they are")
        if getattr(cache, "get_seq_length", lambda: 0)() > 0:
            raise ConfigError(f"{name} is not for this loop: give the whole prompt")
    if given.get("inputs_embeds") is not None:
        raise ConfigError("inputs_embeds is not for this loop: give input_ids")
    for name, value in given.items():
        if name not in INPUTS and value is not None:
            raise ConfigError(f"{name} is not for this loop: a model is given token ids and their mask alone")
    for name in ("token_type_ids", "mm_token_type_ids"):
        kinds = given.get(name)
        if kinds is not None and bool(kinds.any()):
            raise ConfigError(f"{name} is not for this loop: a model is given token ids and their mask alone")
    places, real = given.get("position_ids"), mask.bool()
    if places is not None and not torch.equal(
        places.expand(mask.shape)[real] if places.dim() == mask.dim() else places, (mask.cumsum(-1) - 1)[real]
    ):
        raise ConfigError("position_ids is not for this loop: positions count the tokens of a text from 0 on")
