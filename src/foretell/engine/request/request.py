"""What is asked of an engine, and the row that it is decoded as: tokens, seed, limits, all of it checked."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, Protocol

from foretell.core.errors import ConfigError, PromptError, VocabularyMismatchError
from foretell.core.noise import derive_seed
from foretell.core.params import SamplingParams
from foretell.core.places import keyed
from foretell.draft.config import MethodConfig
from foretell.engine.request.row import Row, Submission
from foretell.engine.request.text import TextStream, Tokenizer
from foretell.engine.speculation import Speculation
from foretell.engine.structured.thinking import of_answer
from foretell.methods.draft_model.vocabulary.tli import differences
from foretell.model.target import CausalModel, ModelSpec


class HasVocabulary(Protocol):
    """A tokenizer that can list its tokens."""

    def get_vocab(self) -> Mapping[str, int]:
        """Tokens and their ids."""
        ...


def check_vocabulary(target: HasVocabulary, draft: HasVocabulary, *, target_name: str, draft_name: str) -> None:
    """Raise VocabularyMismatchError unless every id that both tokenizers use is the same token in both, few aside: see
    ``differences``. The message names the ways to use such a draft all the same."""
    found = differences(target.get_vocab(), draft.get_vocab())
    if found is None:
        return
    raise VocabularyMismatchError(
        f"target {target_name!r} has {len(target.get_vocab())} tokens and draft {draft_name!r} has "
        f"{len(draft.get_vocab())}; first differences: {'; '.join(found)}. Choose a draft of the same family, or let "
        "method 'draft_model' cross: vocabulary 'tli' (guesses the tokens that both have)"
    )


def check_sizes(target: ModelSpec, draft: ModelSpec) -> None:
    """The same of models in memory, which have no tokenizers to compare: raise VocabularyMismatchError unless the sizes are
    as near as padding explains."""
    if abs(target.vocab_size - draft.vocab_size) > 0.01 * target.vocab_size:
        raise VocabularyMismatchError(
            f"target {target.name!r} has {target.vocab_size} tokens and draft {draft.name!r} has {draft.vocab_size}: a "
            "draft model must share the target's vocabulary; choose one of the same family, or give both tokenizers "
            "(tokenizer=..., draft_tokenizer=...), with which it may have another"
        )


def checked_ids(prompt: Any) -> list[int]:
    """A prompt that is no text as a list of ids; arrays and tensors of one dimension are taken. Raises PromptError."""
    expected = "expected a text, or token ids: a list of whole numbers"
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()  # of NumPy and torch
    if isinstance(prompt, bytes | Mapping) or not isinstance(prompt, Iterable):
        raise PromptError(f"the prompt is {prompt!r:.80}; {expected}{_hint(prompt)}")
    ids = list(prompt)
    for token in ids:
        if type(token) is int:  # all but always
            continue
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise PromptError(f"the prompt has {token!r:.80} among its token ids; {expected}{_hint(token)}")
    return [int(token) for token in ids]


def _hint(found: object) -> str:
    """What takes that which was given in a prompt's place."""
    if isinstance(found, Mapping):
        return "; for messages use engine.chat_prompt(messages)"
    if isinstance(found, str | list | tuple) or hasattr(found, "params"):
        return "; for several prompts, or Requests, use generate_batch([...]) or completions([...])"
    if isinstance(found, Integral):
        return "; the ids of one prompt are a list: generate([...]), or generate_batch([[...]])"
    return ""


Prompt = str | Sequence[int]
"""A text, or its token ids."""


@keyed
@dataclass(frozen=True)
class Request:
    """One thing to complete."""

    prompt: Prompt
    params: SamplingParams = field(default_factory=SamplingParams)
    prediction: Prompt | None = None  # the caller's guess of the output, for the method ``prediction``
    speculative: MethodConfig | Mapping[str, Any] | str | None = None  # None: the engine's method
    lora: str | None = None  # the name of an adapter that the engine holds; None: the engine's own choice


def submission_of(request_id: str, request: Request, tokenizer: Tokenizer | None, *, write: bool = True) -> Submission:
    """A request with its texts as tokens. Raises PromptError, ConfigError."""
    guess = request.prediction
    return Submission(
        request_id,
        token_ids(request.prompt, tokenizer),
        request.params,
        () if guess is None else token_ids(guess, tokenizer, add_special_tokens=False),
        write=write,
        lora=request.lora,
    )


def row_of(
    index: int, submission: Submission, choice: Speculation, model: CausalModel, tokenizer: Tokenizer | None
) -> Row:
    """A submission as it is decoded: end tokens, seed, limits. One that is only scored may fill the context, and have one
    token more, which is never read. Raises PromptError, ConfigError."""
    spec, params, write = model.spec, submission.params, submission.write
    if not isinstance(params, SamplingParams):
        raise ConfigError(f"params = {params!r} must be a SamplingParams, e.g. SamplingParams(temperature=0.7)")
    ids, guess = checked_ids(submission.prompt_ids), checked_ids(submission.prediction_ids)
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
            f"the prompt has {len(ids)} tokens; {spec.display_name!r} has a context of {spec.context()}{room}: "
            "shorten the prompt"
        )
    seed = model.fresh_seed() if params.seed is None else params.seed
    end_ids, answer_ends, text = ends_of(submission, spec.eos_token_ids, tokenizer)
    return Row(
        index=index,
        submission=submission,
        choice=choice,
        prompt_ids=ids,
        # The seed is reported, so that a run with a fresh one can be repeated.
        params=replace(params, seed=seed, stop_token_ids=() if answer_ends else params.stop_token_ids),
        seed=derive_seed(seed),
        end_ids=end_ids,
        answer_ends=answer_ends,
        max_tokens=min(params.max_new_tokens, spec.max_positions - len(ids)),
        text=text,
        prediction=guess,
        lora=model.lora_of(submission.lora),
    )


def ends_of(
    submission: Submission, eos_token_ids: Iterable[int], tokenizer: Tokenizer | None
) -> tuple[frozenset[int], frozenset[int], TextStream]:
    """(tokens that end the output, tokens that end the answer alone, what reads the text for stop texts)."""
    params, thinking = submission.params, submission.thinking
    own = frozenset(() if params.ignore_eos else eos_token_ids)
    stops = frozenset(params.stop_token_ids)
    text = TextStream(tokenizer, params.stop, of_answer("stop", thinking))
    if of_answer("stop_token_ids", thinking) is None:
        return own | stops, frozenset(), text
    return own, stops - own, text


def token_ids(prompt: Prompt, tokenizer: Tokenizer | None, *, add_special_tokens: bool = True) -> list[int]:
    """A prompt's token ids. add_special_tokens: with what the tokenizer puts around a text, but no second BOS where the
    text begins with one. Raises PromptError, and ConfigError for a text without a tokenizer."""
    if not isinstance(prompt, str):
        return checked_ids(prompt)
    if tokenizer is None:
        raise ConfigError(
            "a text was given to an engine without a tokenizer: give token ids, or load it with tokenizer=..."
        )
    check_text(prompt)
    ids = list(tokenizer.encode(prompt, add_special_tokens=add_special_tokens))
    if add_special_tokens and ids[:1] and ids[0] in ids[1:]:
        first = _leading(tokenizer)
        if first and ids[len(first) : 2 * len(first)] == first:  # a template, or a person, has begun the text with it
            return ids[len(first) :]
    return ids


def check_several(prompts: object) -> None:
    """Raise PromptError for one prompt where a list of them is expected."""
    if not isinstance(prompts, Iterable) or isinstance(prompts, str | bytes | Mapping):
        what = "one prompt" if isinstance(prompts, str | Request) else f"{prompts!r:.80}"
        raise PromptError(f"{what} was given where a list of prompts is expected: use generate, or give [prompt]")


def check_text(text: str) -> None:
    """Raise PromptError for what is no text, which tokenizers raise various errors for."""
    try:
        text.encode()
    except UnicodeEncodeError as error:  # as JSON's "\\ud83d" alone gives it
        raise PromptError(f"the prompt is no text: its character {error.start} is half a surrogate pair") from None


def _leading(tokenizer: Tokenizer) -> list[int]:
    """What a tokenizer puts before a text: BOS, or nothing."""
    whole, bare = (list(tokenizer.encode("a", add_special_tokens=special)) for special in (True, False))
    at = next(at for at in range(len(whole) + 1) if whole[at : at + len(bare)] == bare or at == len(whole))
    return whole[:at] if at < len(whole) else []
