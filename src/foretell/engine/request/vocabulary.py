"""Token ids of callers, and whether target and drafter have the same vocabulary."""

from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any, Protocol

from foretell.core.errors import PromptError, VocabularyMismatchError
from foretell.methods.draft_model.vocabulary.tli import differences
from foretell.model.target import ModelSpec


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
