"""Method ``draft_model`` with a draft model of another vocabulary."""

from collections.abc import Mapping
from typing import Any

from foretell.core.errors import VocabularyMismatchError, check_choice
from foretell.draft.base import Context, Drafter
from foretell.methods.acceptance.head import AcceptanceHead
from foretell.methods.draft_model.drafter import DraftModel
from foretell.methods.draft_model.vocabulary.spelling import Spelling
from foretell.methods.draft_model.vocabulary.tli import TLIDrafter
from foretell.methods.draft_model.vocabulary.translation import Translation
from foretell.model.target import CausalModel, Target

VOCABULARIES = ("auto", "same", "tli")
FEWEST = 256
"""Shared tokens below which no draft model is taken: those of single bytes alone guess nothing worth a pass."""


def check_name(vocabulary: str) -> None:
    """Raise ConfigError for no value of the key ``vocabulary``."""
    check_choice("vocabulary", vocabulary, VOCABULARIES)


def differences(target: Mapping[str, int], draft: Mapping[str, int]) -> list[str] | None:
    """The first ids that are other tokens in the two vocabularies; None where they are one vocabulary.

    One may have further tokens at ids the other does not use (added special tokens; padded embedding rows are no
    tokens): tokens that the drafter lacks are never guessed, those that the target lacks are cut.
    """
    ours = {index: token for token, index in target.items()}
    theirs = {index: token for token, index in draft.items()}
    differing = [index for index in sorted(ours.keys() & theirs.keys()) if ours[index] != theirs[index]]
    # Ids known to one tokenizer alone must follow the other's ids, and be few: else the vocabularies differ.
    if not differing and len(ours.keys() - theirs.keys()) <= 0.01 * len(ours):
        return None
    if differing:
        return [f"id {index}: {ours[index]!r} and {theirs[index]!r}" for index in differing[:3]]
    return [f"id {index}: {ours[index]!r} and nothing" for index in sorted(ours.keys() - theirs.keys())[:3]]


def translation(target: CausalModel, draft: CausalModel, tokenizers: tuple[Any, Any]) -> Translation:
    """Between the vocabularies of two models with these tokenizers, target's first. Raises VocabularyMismatchError where
    a tokenizer is of a kind that cannot be translated, or too few tokens are in both."""
    ours, theirs = (
        Spelling(tokenizer, model.spec.vocab_size, name=model.spec.name, end_token_ids=model.spec.eos_token_ids)
        for tokenizer, model in zip(tokenizers, (target, draft), strict=True)
    )
    found = Translation(ours, theirs)
    common = len(found.pairs[0])
    if common < min(FEWEST, len(ours.by_bytes) // 2):
        raise VocabularyMismatchError(
            f"target {target.spec.name!r} and draft {draft.spec.name!r} have {common} tokens in common, too few to guess "
            "with: choose a draft model whose tokenizer was trained on texts of the same languages"
        )
    return found


class TranslatedDraft(DraftModel):
    """A draft model of another vocabulary: it guesses in any shape the tokens that both have."""

    def __init__(self, model: CausalModel, translation: Translation, acceptance: AcceptanceHead | None = None) -> None:
        """acceptance: as of ``DraftModel``."""
        super().__init__(model, acceptance)
        self.max_positions = None  # they are counted in its own tokens, by its drafters
        self.translation = translation

    @property
    def runs_as(self) -> str:
        """How much the vocabularies share."""
        common, whole = len(self.translation.pairs[0]), len(self.translation.target.by_bytes)
        return f"tli: another vocabulary, {common} of the target's {whole} tokens are the draft's too"

    @property
    def bytes_per_token(self) -> int:
        """The draft model's keys and values, of which a text may have more than the target has."""
        return super().bytes_per_token * 3 // 2  # see ``tli.room``

    def open(self, context: Context, capacity: int, target: Target) -> Drafter:
        """A fresh cache for these rows."""
        return TLIDrafter(self.model, self.translation, context, capacity, self.acceptance)
