"""Settings of method ``draft_model``."""

from dataclasses import dataclass
from typing import Any

import torch

from foretell.checkpoints.names import WEIGHTS
from foretell.core.errors import ConfigError, check_choice, require
from foretell.draft.base import Method
from foretell.draft.config import Loader
from foretell.heads.formats import load_head
from foretell.methods.acceptance.head import AcceptanceHead
from foretell.methods.draft_model.drafter import DraftModel
from foretell.methods.draft_model.vocabulary.tli import TranslatedDraft, check_name, differences, translation
from foretell.methods.head_method import WindowedMethodConfig


@dataclass(frozen=True)
class DraftModelConfig(WindowedMethodConfig):
    """A smaller model, of the same vocabulary or of another."""

    method = DraftModel.name
    capabilities = DraftModel.capabilities

    model: str | None = None  # hub id, directory, or None for the bundled draft (of the bundled target alone)
    draft_weights: str = "least"  # how its matrices are held, as load_model has it; the text does not depend on it
    # Where its vocabulary is not the target's: "tli" guesses the tokens that both have; "same" refuses. "auto": "tli"
    # where they differ.
    vocabulary: str = "auto"
    draft_vocab_size: int = 0  # it guesses its so many most frequent tokens alone (FR-Spec), which is cheaper; 0: all
    acceptance: str | None = None  # directory of the acceptance head for shape "specdec"; None: the bundled draft's

    def __post_init__(self) -> None:
        """Raise ConfigError for invalid values."""
        super().__post_init__()
        check_choice("draft_weights", self.draft_weights, WEIGHTS)
        check_name(self.vocabulary)
        require(self.draft_vocab_size >= 0, "draft_vocab_size", self.draft_vocab_size, "0 (all tokens) or more")

    def load(self, loader: Loader) -> Method:
        """Load the draft model, and its acceptance head where the shape needs one. Tokenizers are compared, where both are
        known: see ``vocabulary``."""
        name = self.model or "bundled/draft"
        weights = () if self.draft_weights == "auto" else (self.draft_weights,)
        tokenizers = loader.tokenizers(name) if self.vocabulary != "same" else None
        crosses = self._crosses(tokenizers)
        draft = loader.draft(name, *weights, checked=False) if crosses else loader.draft(name, *weights)
        if self.window is not None:
            draft = draft.limited(self.window)
        if self.draft_vocab_size:
            from foretell.methods.draft_model.vocabulary.narrow import (
                NarrowModel,
                frequent_tokens,
            )  # it imports the native decoder

            draft = NarrowModel(draft, frequent_tokens(draft, self.draft_vocab_size))
        between = None
        if crosses:
            assert tokenizers is not None
            between = translation(loader.target, draft, tokenizers)
        if not self.proposal_shape.asks_acceptance:
            return DraftModel(draft) if between is None else TranslatedDraft(draft, between)
        if self.acceptance is None and self.model not in (None, "bundled/draft"):
            raise ConfigError(
                f"shape 'specdec' needs an acceptance head, and none is given for draft {self.model}: train one with "
                "'foretell train acceptance' and give its directory as 'acceptance', or choose shape 'adaptive'"
            )
        acceptance = load_head(self.acceptance or "bundled/acceptance", draft.spec, AcceptanceHead, dtype=torch.float32)
        return DraftModel(draft, acceptance) if between is None else TranslatedDraft(draft, between, acceptance)

    def _crosses(self, tokenizers: tuple[Any, Any] | None) -> bool:
        """Whether the vocabularies are crossed; else they are one, or have to be."""
        if tokenizers is None:
            if self.vocabulary == "tli":
                raise ConfigError(
                    f"vocabulary = {self.vocabulary!r} reads the tokenizers of target and draft, and one is missing: give "
                    "tokenizer=... (of the target) and draft_tokenizer=... for models in memory"
                )
            return False
        if self.vocabulary == "tli":
            return True
        if self.model is None:  # the bundled draft is made for the bundled target alone: nobody chose it for another
            return False
        return differences(tokenizers[0].get_vocab(), tokenizers[1].get_vocab()) is not None
