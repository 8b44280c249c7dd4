"""Fields of OpenAI's API and of other servers that are refused: why, and which of their values change nothing.

Clients send such values whether or not their user has set them (``"functions": null``, ``"use_beam_search": false``), so
these are taken. Any other value would change the text, and is refused by name.
"""

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json, to_json


@dataclass(frozen=True)
class Unsupported:
    """One field. null changes nothing in any."""

    reason: str
    no_op: tuple[Any, ...] = ()  # further values that change nothing


_SAMPLER = "this server samples by temperature, top_k, top_p and min_p"
_SAMPLERS = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]
"""llama.cpp's own order. Those that this server has not are off by default there, too."""
_IDS = "provenance tells the id of every token"

UNSUPPORTED = {
    "audio": Unsupported("this server writes text alone"),
    "bad_words": Unsupported("give their tokens in logit_bias", ([],)),
    "best_of": Unsupported("only as many completions as are returned are made: give n", (1,)),
    "detokenize": Unsupported("texts are always given", (True,)),
    "draft_model": Unsupported(
        "the models are chosen where the server is started; 'speculative' chooses among their methods"
    ),
    "dry_multiplier": Unsupported("use repetition_penalty", (0, 0.0)),
    "early_stopping": Unsupported("it belongs to beam search", (False,)),
    "echo": Unsupported("it belongs to /v1/completions", (False,)),
    "function_call": Unsupported("use tool_choice", ("none", "auto")),
    "functions": Unsupported("use tools", ([],)),
    "include_stop_str_in_output": Unsupported("stop texts are no part of the output", (False,)),
    "length_penalty": Unsupported("it belongs to beam search", (1, 1.0)),
    "lora_path": Unsupported(
        "give an adapter's name as model; adapters are loaded where the server is started, by --lora"
    ),
    "mirostat": Unsupported(_SAMPLER, (0,)),
    "n_predict": Unsupported("use max_tokens"),
    "n_probs": Unsupported("use logprobs", (0,)),
    "options": Unsupported("give each of them as a field of its own; /api/chat takes them as they are", ({},)),
    "container": Unsupported("nothing is kept between requests"),
    "mcp_servers": Unsupported("the server runs no tools itself", ([],)),
    "conversation": Unsupported("nothing is stored: send the conversation whole, as input"),
    "max_tool_calls": Unsupported("the server runs no tools itself"),
    "previous_response_id": Unsupported("nothing is stored: send the conversation whole, as input"),
    "priority": Unsupported("requests are taken in the order they come", (0,)),
    "prompt_logprobs": Unsupported("ask /v1/completions or /v1/chat/completions"),
    "guided_decoding_backend": Unsupported("grammars are read by one program alone"),
    "reasoning": Unsupported("give reasoning_effort"),
    "reasoning_effort": Unsupported("it belongs to /v1/chat/completions"),
    "structural_tag": Unsupported("use tools, or response_format of type 'structural_tag'"),
    "repeat_penalty": Unsupported("use repetition_penalty", (1, 1.0)),
    "return_hidden_states": Unsupported("texts alone are given", (False,)),
    "return_prompt_token_ids": Unsupported("usage counts the prompt's tokens", (False,)),
    "return_token_ids": Unsupported("ask /v1/completions or /v1/chat/completions", (False,)),
    "return_tokens_as_token_ids": Unsupported(_IDS, (False,)),
    "samplers": Unsupported(_SAMPLER, ([], _SAMPLERS)),
    "separate_reasoning": Unsupported("it belongs to /v1/chat/completions"),
    "skip_special_tokens": Unsupported("special tokens are no part of the text", (True,)),
    "spaces_between_special_tokens": Unsupported("special tokens are no part of the text", (True,)),
    "stop_regex": Unsupported("give stop texts, or a regular expression that the whole text matches as regex"),
    "include_reasoning": Unsupported("what was thought comes apart from the text: leave it out there", (True,)),
    "stream_reasoning": Unsupported("streams tell what is thought as it comes", (True, False)),
    "suffix": Unsupported("this route does not fill gaps: ask /infill, or /v1/completions", ("",)),
    "tfs_z": Unsupported(_SAMPLER, (1, 1.0)),
    "top_a": Unsupported(_SAMPLER, (0, 0.0)),
    "typical_p": Unsupported(_SAMPLER, (1, 1.0)),
    "use_beam_search": Unsupported("texts are sampled; ask for several with n", (False,)),
    "verbosity": Unsupported("it belongs to /v1/chat/completions, and to text in /v1/responses", ("medium",)),
    "web_search_options": Unsupported("this server has no network access"),
    "xtc_probability": Unsupported(_SAMPLER, (0, 0.0)),
}
"""By name. A request's own fields come first: /v1/completions knows echo and best_of."""


HARMLESS = frozenset(
    {
        "cache_prompt", "cache_salt", "id_slot", "keep_alive", "provider", "request_id", "rid", "timings_per_token",
    }
)  # fmt: skip
"""Fields whose value, whatever it is, is of where and when a text is made, not of the text: they are left out."""


def without_no_ops(known: Container[str], body: bytes) -> bytes | None:
    """A request without the fields that are not known and change nothing; None where there are none. body: JSON."""
    given = from_json(body)
    if not isinstance(given, dict):
        return None
    kept = {name: value for name, value in given.items() if name in known or not changes_nothing(name, value)}
    return to_json(kept) if len(kept) < len(given) else None


def changes_nothing(name: str, value: Any) -> bool:
    """Whether the value is null, or one of the field's own. true is not 1."""
    if value is None or name in HARMLESS:
        return True
    same = UNSUPPORTED[name].no_op if name in UNSUPPORTED else ()
    return any(type(value) is type(one) and value == one for one in same)
