"""What is asked of an engine, and the row that it is decoded as: tokens, seed, limits, all of it checked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from foretell.core.errors import ConfigError, PromptError
from foretell.core.noise import derive_seed
from foretell.core.params import SamplingParams
from foretell.draft.config import MethodConfig
from foretell.engine.state import Row
from foretell.engine.text import TextStream, Tokenizer
from foretell.engine.vocabulary import checked_ids
from foretell.model.target import CausalModel

Prompt = str | Sequence[int]
"""A text, or its token ids."""


@dataclass(frozen=True)
class Request:
    """One thing to complete."""

    prompt: Prompt
    params: SamplingParams = field(default_factory=SamplingParams)
    prediction: Prompt | None = None  # the caller's guess of the output, for the method ``prediction``
    speculative: MethodConfig | Mapping[str, Any] | str | None = None  # None: the engine's method


def row_of(index: int, request: Request, model: CausalModel, tokenizer: Tokenizer | None, *, write: bool = True) -> Row:
    """A request as it is decoded: tokens, end tokens, seed, limits. write: False where the prompt is only scored, so
    that it may fill the context and have one token more, which is never read. Raises PromptError, ConfigError."""
    spec, params = model.spec, request.params
    if not isinstance(params, SamplingParams):
        raise ConfigError(f"params = {params!r} must be a SamplingParams, e.g. SamplingParams(temperature=0.7)")
    ids = token_ids(request.prompt, tokenizer)
    guess = [] if request.prediction is None else token_ids(request.prediction, tokenizer, add_special_tokens=False)
    if not ids:
        raise PromptError("the prompt is empty: at least one token is needed")
    for token in (*ids, *guess):
        if not 0 <= token < spec.vocab_size:
            raise PromptError(
                f"token id {token} is not in the vocabulary of {spec.display_name!r}: 0 to {spec.vocab_size - 1}"
            )
    if len(ids) > spec.max_positions + (-1 if write else 1):
        room = ", and at least one token of it must be left for the output" if write else ""
        raise PromptError(
            f"the prompt has {len(ids)} tokens; {spec.display_name!r} has a context of {spec.max_positions}{room}: "
            "shorten the prompt"
        )
    seed = model.fresh_seed() if params.seed is None else params.seed
    end_ids = {*params.stop_token_ids, *(() if params.ignore_eos else spec.eos_token_ids)}
    return Row(
        index=index,
        prompt_ids=ids,
        params=replace(params, seed=seed),  # reported, so that a run with a fresh seed can be repeated
        seed=derive_seed(seed),
        end_ids=frozenset(end_ids),
        max_tokens=min(params.max_new_tokens, spec.max_positions - len(ids)),
        text=TextStream(tokenizer, params.stop),
        prediction=guess,
    )


def token_ids(prompt: Prompt, tokenizer: Tokenizer | None, *, add_special_tokens: bool = True) -> list[int]:
    """A prompt's token ids. Raises PromptError, and ConfigError for a text without a tokenizer."""
    if not isinstance(prompt, str):
        return checked_ids(prompt)
    if tokenizer is None:
        raise ConfigError(
            "a text was given to an engine without a tokenizer: give token ids, or load it with tokenizer=..."
        )
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # as JSON's "\\ud83d" alone gives it
        raise PromptError(f"the prompt is no text: its character {error.start} is half a surrogate pair") from None
    return list(tokenizer.encode(prompt, add_special_tokens=add_special_tokens))


def conversation_ids(messages: Sequence[Mapping[str, str]], tokenizer: Tokenizer | None, name: str) -> list[int]:
    """Token ids of a conversation by the chat template of the model of that name. Raises ConfigError where it has none,
    PromptError where it refuses the messages."""
    template = getattr(tokenizer, "apply_chat_template", None)
    if template is None or getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError(f"{name!r} has no chat template: give the prompt as plain text")
    if isinstance(messages, str | Mapping):
        raise PromptError(f"messages = {messages!r:.80} must be a list of objects with 'role' and 'content'")
    try:
        text = template(list(messages), tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates raise their own errors, and any other by what they read
        raise PromptError(
            f"the chat template of {name!r} refuses these messages ({str(error) or type(error).__name__}): mend them"
        ) from error
    return token_ids(text, tokenizer, add_special_tokens=False)
