"""Convert a request's fields to the engine's parameters."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
from torch import Tensor

from foretell.core.errors import ConfigError
from foretell.core.noise import derive_seed
from foretell.core.params import MAX_SEED, LogitsProcessor, SamplingParams, fresh_seed
from foretell.draft.config import MethodConfig
from foretell.draft.prediction import Prediction
from foretell.engine.request.row import Submission
from foretell.engine.structured.thoughts import Thinking
from foretell.server.backend import Backend
from foretell.server.errors import bad, of_engine
from foretell.server.protocol.sampling import Sampling, Speculative

if TYPE_CHECKING:
    from foretell.service.service import Service

RESERVED = ("model", "judge", "acceptance", "suffix_decoding_max_cached_tokens")
"""Keys of a configuration that name files or take memory beyond the request: chosen where the server is started."""

SAME = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "ignore_eos")
"""Settings that a request and SamplingParams call alike and that mean the same in both."""

MakeProcessor = Callable[[int], LogitsProcessor]
"""From the number of a prompt's tokens to the processor of one choice."""


def submissions(
    backend: Backend,
    request: Sampling,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    num_prompt_logprobs: int | None = None,
    prediction: Sequence[int] | None = None,
    processor: MakeProcessor | None = None,
    thinking: Thinking | None = None,
) -> list[Submission]:
    """n of each prompt, prompt by prompt. max_tokens None: as many as fit the context; 0: nothing is written.
    num_prompt_logprobs, thinking: see ``Submission``. Raises ApiError 400."""
    n = request.n or 1
    options = backend.options
    if n * len(prompts) > options.max_choices:
        raise bad(
            f"{n * len(prompts)} completions were asked for; this server makes at most {options.max_choices} a request",
            "n",
        )
    speculative = speculation(backend.service, request, has_prediction=prediction is not None)
    always = isinstance(request.speculative, Speculative) and bool(request.speculative.always)
    unused = prediction is not None and prediction_method(backend.service) is None
    base = fresh_seed() if request.seed is None else request.seed
    made = []
    for prompt in prompts:
        params = sampling(backend, request, len(prompt), max_tokens)
        for index in range(n):
            changes: dict[str, Any] = {"seed": base if index == 0 else derive_seed(base, index) & MAX_SEED}
            if processor is not None:
                changes["logits_processor"] = processor(len(prompt))
            made.append(
                Submission(
                    request_id=uuid4().hex,
                    prompt_ids=prompt,
                    params=SamplingParams(**params, **changes, logprobs=logprobs),
                    prediction_ids=tuple(prediction or ()),
                    speculative=speculative,
                    always=always,
                    num_prompt_logprobs=num_prompt_logprobs,
                    write=max_tokens != 0,
                    trace=bool(request.trace),
                    thinking=thinking,
                    timeout_s=options.request_timeout_s,
                    note="speculation is off in this service: the prediction was not used" if unused else "",
                )
            )
    return made


class AllowedTokens:
    """A LogitsProcessor: an output of these tokens alone, or the answer after a thought (see ``Held``)."""

    error, left_out = "", ()

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._known = frozenset(token_ids)
        self._ids = torch.tensor(sorted(self._known))

    def begins(self, token_ids: Sequence[int]) -> bool:
        """See ``Held``."""
        return self._known.issuperset(token_ids)

    def expected(self, ids: Sequence[int]) -> Sequence[int]:
        """See ``Held``."""
        return ()

    def stop(self, reason: str) -> None:
        """See ``Held``: another processor has its own."""

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        """See ``LogitsProcessor``."""
        allowed = self._ids.to(logits.device)
        return torch.full_like(logits, -torch.inf).scatter_(0, allowed, logits[allowed])


def allowed(backend: Backend, request: Sampling, other: MakeProcessor | None) -> MakeProcessor | None:
    """The processor of a format or of tools, or that of allowed_token_ids. Raises ApiError 400."""
    field, token_ids = "allowed_token_ids", request.allowed_token_ids
    if token_ids is None:
        return other
    beyond = [token for token in token_ids if token >= backend.vocab_size]
    if beyond:
        raise bad(f"{field}: token id {beyond[0]} is not one of 0 to {backend.vocab_size - 1}", field)
    if other is not None:
        raise bad(f"{field} and a format or tools exclude each other: give one of them", field)
    made = AllowedTokens(token_ids)
    return lambda num_prompt: made


def sampling(backend: Backend, request: Sampling, num_prompt: int, max_tokens: int | None) -> dict[str, Any]:
    """Fields of SamplingParams, the seed left out. Raises ApiError 400."""
    limit = backend.options.max_tokens_limit
    if limit is not None and max_tokens is not None and max_tokens > limit:
        raise bad(f"max_tokens = {max_tokens} is more than this server allows, {limit}", "max_tokens")
    room = backend.max_model_len - num_prompt
    if room < (max_tokens != 0):
        left = "" if max_tokens == 0 else ", and at least one token of it must be left for the output"
        raise bad(
            f"the prompt has {num_prompt} tokens; the context is of {backend.context}{left}: shorten the prompt",
            "prompt",
            "context_length_exceeded",
        )
    most = min(room if max_tokens is None else max_tokens, room if limit is None else limit)
    least = request.min_tokens or 0
    if max_tokens is not None and least > max_tokens:
        raise bad(f"min_tokens = {least} is more than max_tokens, {max_tokens}", "min_tokens")
    if limit is not None and least > limit:
        raise bad(f"min_tokens = {least} is more than this server allows, {limit}", "min_tokens")
    bias = {int(token): value for token, value in (request.logit_bias or {}).items()}
    for field, tokens in (("logit_bias", bias), ("stop_token_ids", request.stop_token_ids or ())):
        beyond = [token for token in tokens if token >= backend.vocab_size]
        if beyond:
            raise bad(f"{field}: token id {beyond[0]} is not one of 0 to {backend.vocab_size - 1}", field)
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    plain = {name: getattr(request, name) for name in SAME}
    return {
        **{name: value for name, value in plain.items() if value is not None},  # the others keep their defaults
        "top_k": max(0, request.top_k or 0),
        "logit_bias": bias,
        "min_new_tokens": min(least, most),  # the context ends the text, whatever was asked for
        "max_new_tokens": max(1, most),  # 0: see ``Submission.write``
        "stop": tuple(stop),
        "stop_token_ids": tuple(request.stop_token_ids or ()),
    }


def prediction_method(service: "Service") -> MethodConfig | None:
    """The method that reads clients' predictions; None, the service's own choice, where it is not loaded."""
    try:
        return service.method(Prediction.name)
    except ConfigError:
        return None


def speculation(service: "Service", request: Sampling, *, has_prediction: bool) -> MethodConfig | None:
    """The request's method configuration; None: the service's default. Raises ApiError 400."""
    asked, most = request.speculative, request.num_draft_tokens
    try:
        if asked is False:
            if most:
                raise ConfigError(f"speculative is false and num_draft_tokens is {most}: drop one of the two")
            return service.method("none")
        given: dict[str, Any] = asked.model_dump(exclude_none=True) if isinstance(asked, Speculative) else {}
        numbers = [given.pop("num_draft_tokens", None), most, given.get("num_speculative_tokens")]
        chosen = {number for number in numbers if number is not None}
        if len(chosen) > 1:
            raise ConfigError("num_draft_tokens and num_speculative_tokens are one setting: give it once")
        if 0 in chosen:
            return service.method("none")
        given.pop("always", None)  # of the request, not of its method
        if chosen:
            given["num_speculative_tokens"] = chosen.pop()
        reserved = [key for key in RESERVED if key in given]
        if reserved:
            raise ConfigError(f"{reserved[0]!r} is chosen where the server is started, not by a request")
        predicted = prediction_method(service) if has_prediction and "method" not in given else None
        if not given:
            return predicted
        return service.method(given if predicted is None else {"method": predicted.method, **given})
    except ConfigError as error:
        param = "speculative" if asked is not None else "num_draft_tokens"
        raise of_engine(error, param) from None
