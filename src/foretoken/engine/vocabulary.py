"""Whether target and drafter have the same vocabulary."""

from collections.abc import Mapping
from typing import Protocol

from foretoken.core.errors import VocabularyMismatchError


class HasVocabulary(Protocol):
    """A tokenizer that can list its tokens."""

    def get_vocab(self) -> Mapping[str, int]:
        """Tokens and their ids."""
        ...


def check_vocabulary(target: HasVocabulary, draft: HasVocabulary, *, target_name: str, draft_name: str) -> None:
    """Raise VocabularyMismatchError unless every id that both tokenizers use is the same token in both.

    One may have further tokens at ids the other does not use (added special tokens; padded embedding rows are no
    tokens): tokens that the drafter lacks are never guessed, those that the target lacks are cut.
    """
    ours = {index: token for token, index in target.get_vocab().items()}
    theirs = {index: token for token, index in draft.get_vocab().items()}
    differing = [index for index in sorted(ours.keys() & theirs.keys()) if ours[index] != theirs[index]]
    # Ids known to one tokenizer alone must follow the other's ids, and be few: else the vocabularies differ.
    missing = len(ours.keys() - theirs.keys())
    if not differing and missing <= 0.01 * len(ours):
        return
    examples = [f"id {index}: {ours[index]!r} and {theirs[index]!r}" for index in differing[:3]]
    if not differing:
        first = sorted(ours.keys() - theirs.keys())[:3]
        examples = [f"id {index}: {ours[index]!r} and nothing" for index in first]
    raise VocabularyMismatchError(
        f"target {target_name!r} has {len(ours)} tokens and draft {draft_name!r} has {len(theirs)}; first differences: "
        f"{'; '.join(examples)}. A draft model must share the target's vocabulary: choose one of the same family"
    )
