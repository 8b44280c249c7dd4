"""Fields that this server has not: those of OpenAI's, Anthropic's, Ollama's and other servers, and those that nobody knows.

What would change the text is refused by name, but where its value changes nothing: clients send such values whether or not
their user has set them (``"use_beam_search": false``). What tells of the client, of billing, tracing and caching, and what
nobody knows, is taken, and named in the answer's header; a name that is near a known one is a misspelled one, and refused.
"""

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from typing import Any


@dataclass(frozen=True)
class Unsupported:
    """One field. null changes nothing in any."""

    reason: str
    no_op: tuple[Any, ...] = ()  # further values that change nothing


_SAMPLER = "this server samples by temperature, top_k, top_p and min_p"
_SAMPLERS = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]
"""llama.cpp's own order. Those that this server has not are off by default there, too."""
_TEXT = "this server reads and writes text alone"
_IDS = "provenance tells the id of every token"

_GROUPS: tuple[tuple[Unsupported, str], ...] = (
    (Unsupported("no code of clients runs here", ([], {})), "custom_logit_processor custom_params logits_processors"),
    (Unsupported("use max_tokens"), "max_length max_new_tokens n_predict"),
    (Unsupported("use min_tokens", (0,)), "min_length min_new_tokens"),
    (Unsupported(_TEXT, ([], {})), "files mm_processor_kwargs videos"),
    (Unsupported(_SAMPLER, (0, 0.0)), "dry_multiplier dynatemp_range epsilon_cutoff eta_cutoff no_repeat_ngram_size"),
    (Unsupported(_SAMPLER, (0, 0.0)), "penalty_alpha smoothing_factor top_a xtc_probability"),
)
UNSUPPORTED = {
    **{name: one for one, names in _GROUPS for name in names.split()},
    "audio": Unsupported(_TEXT),
    "bad_words": Unsupported("give their tokens in logit_bias", ([],)),
    "best_of": Unsupported("only as many completions as are returned are made: give n", (1,)),
    "detokenize": Unsupported("texts are always given", (True,)),
    "draft_model": Unsupported(
        "the models are chosen where the server is started; 'speculative' chooses among their methods"
    ),
    "early_stopping": Unsupported("it belongs to beam search", (False,)),
    "echo": Unsupported("it belongs to /v1/completions", (False,)),
    "function_call": Unsupported("it belongs to /v1/chat/completions", ("none", "auto")),
    "functions": Unsupported("it belongs to /v1/chat/completions", ([],)),
    "include_stop_str_in_output": Unsupported("stop texts are no part of the output", (False,)),
    "length_penalty": Unsupported("it belongs to beam search", (1, 1.0)),
    "lora_path": Unsupported(
        "give an adapter's name as model; adapters are loaded where the server is started, by --lora"
    ),
    "mirostat": Unsupported(_SAMPLER, (0,)),
    "n_probs": Unsupported("use logprobs", (0,)),
    "options": Unsupported("give each of them as a field of its own; /api/chat takes them as they are", ({},)),
    "conversation": Unsupported("nothing is stored: send the conversation whole, as input"),
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
    "suffix": Unsupported("this route does not fill gaps: ask /infill, /v1/completions or /api/generate", ("",)),
    "tfs_z": Unsupported(_SAMPLER, (1, 1.0)),
    "typical_p": Unsupported(_SAMPLER, (1, 1.0)),
    "use_beam_search": Unsupported("texts are sampled; ask for several with n", (False,)),
    "verbosity": Unsupported("it belongs to /v1/chat/completions, and to text in /v1/responses", ("medium",)),
    "chat_template": Unsupported("the model's own template is used; give its values in chat_template_kwargs"),
    "documents": Unsupported("give texts as messages", ([],)),
    "do_sample": Unsupported("give temperature 0 for greedy texts", (True,)),
    "num_beams": Unsupported("texts are sampled; ask for several with n", (1,)),
    "prefix": Unsupported("give the assistant's last message, with continue_final_message", (False, "")),
    "thinking_token_budget": Unsupported("use thinking_budget"),
    "top_n_sigma": Unsupported(_SAMPLER, (-1, -1.0, 0, 0.0)),
    "truncate_prompt_tokens": Unsupported("a prompt is read whole, or refused"),
}
"""By name. A request's own fields come first: /v1/completions knows echo and best_of."""


OF_THE_CLIENT = frozenset(
    {
        # who asks, and what for
        "client_metadata", "metadata", "request_id", "rid", "safety_identifier", "thread", "thread_id", "user",
        # what it costs, where and when it is made, and what is kept
        "cache_control", "cache_prompt", "cache_salt", "id_slot", "inference_geo", "prompt_cache_key",
        "prompt_cache_options", "prompt_cache_retention", "provider", "service_tier", "speed",
        # tools of a provider's server
        "container", "max_tool_calls", "mcp_servers", "web_search_options",
        # how a list of tools, an answer or a summary is handed over
        "allowed_callers", "defer_loading", "eager_input_streaming", "generate_summary", "include_obfuscation",
        "input_examples", "insecure", "output_schema", "summary", "timings_per_token", "verbose",
        # how a model is loaded, and settings of a sampler that is off
        "embedding_only", "f16_kv", "keep_alive", "logits_all", "low_vram", "main_gpu", "mirostat_eta", "mirostat_tau",
        "num_batch", "num_ctx", "num_gpu", "num_keep", "num_thread", "numa", "penalize_newline", "use_mlock",
        "use_mmap", "vocab_only",
    }
)  # fmt: skip
"""Fields of all routes that change no text, whatever their value. The answer's header names them."""
_RETURNED = (
    "annotations caller citations extra_content id index parsed parsed_arguments phase provider_specific_fields "
    "reasoning_details refusal signature status thinking_blocks"
)
RETURNED = frozenset(_RETURNED.split())
"""What clients and servers add to messages and their parts. Histories come back with it, and no header names it."""
HOSTED_TOOL = re.compile(
    r"(web_search|web_fetch|file_search|code_interpreter|code_execution|image_generation|mcp|mcp_toolset|local_shell|"
    r"tool_search|tool_search_tool_\w+?)(_preview)?(_20[\d_]+)?"
)
"""Types of tools that a provider's server runs: they are not offered to the model."""
MOST_NAMES, MOST_LETTERS = 256, 64


@dataclass
class Taken:
    """What a request had that changes no text, by the names that the answer's header has."""

    strict: bool = False  # refuse what nobody knows
    names: dict[str, None] = field(default_factory=dict)
    meant: dict[str, str] = field(default_factory=dict)  # of refused names those that they are near

    def without_others(
        self, given: Mapping[str, Any], known: frozenset[str], everywhere: Container[str], place: str
    ) -> dict[str, Any]:
        """An object of a request with its known fields, and those that must be refused. everywhere: ``plain`` names of
        fields of other objects; place: what the names of others begin with."""
        kept = dict[str, Any]()
        for name, value in given.items():
            if name in known or not (changes_nothing(name, value) or self._may_be_any(name, known, everywhere)):
                kept[name] = value
            elif name not in RETURNED and value is not None and name not in UNSUPPORTED:
                self.names[place + name] = None
        return kept

    def _may_be_any(self, name: str, known: frozenset[str], everywhere: Container[str]) -> bool:
        if name in OF_THE_CLIENT:
            return True
        if name in UNSUPPORTED or len(name) > MOST_LETTERS or len(self.names) + len(self.meant) >= MOST_NAMES:
            return False
        if (meant := near(name, known)) is not None:
            self.meant[name] = meant
        return meant is None and not self.strict and plain(name) not in everywhere


def changes_nothing(name: str, value: Any) -> bool:
    """Whether the value is null, or one of the field's own. true is not 1."""
    if value is None or name in RETURNED:
        return True
    same = UNSUPPORTED[name].no_op if name in UNSUPPORTED else ()
    return any(type(value) is type(one) and value == one for one in same)


def plain(name: str) -> str:
    """A name as it is compared: topP is top_p."""
    return re.sub(r"[-_.\s]", "", name).lower()


@lru_cache(4096)
def near(name: str, known: frozenset[str]) -> str | None:
    """Of the known names and the unsupported ones that which was meant. None: none is near."""
    given, names = plain(name), {plain(one): one for one in sorted({*UNSUPPORTED, *known})}
    if given in names or len(given) < 4:
        return names.get(given)
    close = [one for one in names if _cuts(given) & _cuts(one)] or get_close_matches(given, names, n=1, cutoff=0.87)
    return names[close[0]] if close else None


def _cuts(word: str) -> set[str]:
    """The word and what one letter less leaves of it: words have one in common where one letter is another, missing or too
    many, or two neighbours have changed places."""
    return {word, *(word[:at] + word[at + 1 :] for at in range(len(word)))}
