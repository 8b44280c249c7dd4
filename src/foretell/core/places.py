"""Where an option belongs, and what users of other libraries call it: for errors about a key in the wrong place."""

from collections.abc import Callable, Collection
from functools import wraps
from inspect import Parameter, signature
from typing import ParamSpec, TypeVar

from foretell.core.errors import ConfigError, nearest

P = ParamSpec("P")
T = TypeVar("T")

_LOAD = "Engine.load({}=...)"
_REQUEST = "a Request: generate_batch([Request(prompt, {}=...)])"
_METHOD = "the method's configuration, e.g. Engine.load(speculative={{'{}': ...}})"
_SERVICE = "ServiceOptions({}=...) of a Service, or an option of 'foretell serve'"
_SAMPLING = "each request, in its SamplingParams: generate(prompt, {}=...)"
PLACES: dict[str, tuple[str, ...]] = {
    _SAMPLING: (
        "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
        "logit_bias", "banned_token_ids", "min_new_tokens", "max_new_tokens", "stop", "stop_token_ids", "ignore_eos",
        "seed", "logits_processor", "logprobs", "json_schema", "regex", "grammar", "choice", "lenient_schema",
    ),
    _REQUEST: ("prediction", "speculative", "lora"),
    _LOAD: (
        "target", "draft", "draft_tokenizer", "tokenizer", "device", "dtype", "device_map", "implementation",
        "tensor_parallel", "width", "prefix_memory_gib", "speculation", "drafter_errors", "weights", "kv", "progress",
        "memory_gib", "cuda_graphs", "trust_remote_code",
    ),
    _METHOD: (
        "method", "model", "num_speculative_tokens", "verify", "shape", "draws", "judge", "acceptance", "discount",
        "draft_vocab_size", "draft_weights", "draft_window", "head_weights",
        "prompt_lookup_max", "prompt_lookup_min", "second", "second_shape", "second_tokens",
        "suffix_decoding_max_cached_tokens",
        "suffix_decoding_min_token_prob", "vocabulary",
    ),
    _SERVICE: (
        "max_num_seqs", "max_queue", "max_model_len", "kv_memory_gib", "stall_target_s", "prefix_reuse",
        "shared_drafts", "state_dir", "prefix_dir", "prefix_max_gib", "cost_time_limit_s", "models_at_once",
    ),
    "generate_batch(requests, {}=...) and completions(...)": ("batch_size",),
}  # fmt: skip
"""Places, with ``{}`` for the key, and the keys that belong there."""

OTHERS: dict[str, str] = {
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_length", "n_predict"), "it is called max_new_tokens"),
    "min_tokens": "it is called min_new_tokens",
    **dict.fromkeys(("num_logprobs", "top_logprobs"), "it is called logprobs"),
    **dict.fromkeys(
        ("prompt_logprobs", "num_prompt_logprobs", "echo"), "Engine.score([prompt], num_logprobs=...) scores a prompt"
    ),
    **dict.fromkeys(("guided_json", "response_format"), "give the schema as json_schema={...}"),
    **dict.fromkeys(
        ("structured_outputs", "guided_decoding"), "give json_schema, regex, grammar or choice as an option of its own"
    ),
    "guided_regex": "it is called regex",
    **dict.fromkeys(("guided_grammar", "ebnf", "gbnf"), "it is called grammar"),
    "guided_choice": "it is called choice",
    "bad_words": "give token ids as banned_token_ids",
    "do_sample": "temperature=0 is greedy",
    "stream": "Engine.stream(prompt) yields pieces",
    "messages": "give engine.chat_prompt(messages) as the prompt",
    **dict.fromkeys(("n", "best_of"), "give the prompt several times to generate_batch, as Requests with other seeds"),
    "prompts": "generate_batch(prompts) and completions(prompts) take several",
    **dict.fromkeys(("speculative_config", "speculative_model"), "it is called speculative, of Engine.load(...)"),
    **dict.fromkeys(("draft_model", "assistant_model"), "it is called draft, of Engine.load(...)"),
    "num_draft_tokens": "it is called num_speculative_tokens, a key of Engine.load(speculative={...})",
    "torch_dtype": "it is called dtype, of Engine.load(...)",
    **dict.fromkeys(("quantization", "load_format"), "it is called weights, of Engine.load(...)"),
    "tensor_parallel_size": "tensor_parallel=True of Engine.load(...) takes the processes of torchrun",
}
"""Keys that belong nowhere here, and what serves their purpose."""


def place_of(key: str, known: Collection[str]) -> str:
    """A hint where a key that is not among the known ones belongs: ``; it belongs in ...``, else the nearest known."""
    place = next((place for place, keys in PLACES.items() if key in keys), None)
    if place is not None and not (place == _METHOD and "num_speculative_tokens" in known):  # of another method
        return f"; it belongs in {place.format(key)}"
    other = OTHERS.get(key)
    return nearest(key, known) if other is None else f"; {other}"


def keyed(kind: type[T]) -> type[T]:
    """``tells_places`` for the constructor of a dataclass."""
    kind.__init__ = tells_places(kind.__init__)  # type: ignore[method-assign]
    return kind


def tells_places(function: Callable[P, T]) -> Callable[P, T]:
    """A decorator: a keyword that the function does not take is refused by a ConfigError that says where it belongs."""
    taken = signature(function).parameters.values()
    known = [one.name for one in taken if one.kind in (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]
    names = frozenset(known)
    where = function.__qualname__.removesuffix(".__init__")

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        if not options.keys() <= names:
            unknown = next(key for key in options if key not in names)
            shown = [name for name in known if name != "self"]
            raise ConfigError(f"unknown key {unknown!r} in {where}(...){place_of(unknown, shown)}")
        return function(*args, **options)

    return call
