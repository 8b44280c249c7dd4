"""A draft model of another vocabulary that guesses the tokens both have: token-level intersection (TLI, 2502.05202).

Its logits are put in the target's order, those of tokens that only one of the two has being -inf: what is drawn, in
whatever way and shape, is then a token of the target, and q a distribution over the target's vocabulary. Coupled draws race
by the target's ids like the target itself. The text is kept twice, in the tokens of each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foretell.core.errors import VocabularyMismatchError, check_choice
from foretell.core.noise import Noise
from foretell.core.tree import DrawMode, Plan, TokenTree
from foretell.core.upload import tensor_on
from foretell.draft.base import Commit, Context, Drafter
from foretell.draft.shapes import Shape
from foretell.heads.draft_vocabulary import spread
from foretell.methods.acceptance.head import AcceptanceHead
from foretell.methods.draft_model.drafter import DraftModel, ModelDrafter
from foretell.methods.draft_model.vocabulary.spelling import Spelling, Translation
from foretell.model.target import CausalModel, Target

MARGIN = 66
"""Slots kept free behind a row's text: the most nodes of a service's proposals, which rows without room compute too."""


def room(capacity: int) -> int:
    """Slots of a row in the draft model's cache: its text may have more tokens than the target's. A row that needs still
    more gets no guesses."""
    return capacity + capacity // 2 + MARGIN


class TLIDrafter(ModelDrafter):
    """Grows any shape over the tokens that both vocabularies have.

    The invariant is ``ModelDrafter``'s, with ``own`` in place of the history.
    """

    can_join = True

    def __init__(
        self,
        model: CausalModel,
        translation: Translation,
        context: Context,
        capacity: int,
        acceptance: AcceptanceHead | None = None,
    ) -> None:
        super().__init__(model, context, room(capacity), acceptance)
        self.translation = translation
        self.own: list[list[int]] = [[] for _ in range(context.num_rows)]  # texts in the draft model's tokens
        self.num_known = [0] * context.num_rows  # how many of the target's tokens they stand for
        self.margin = MARGIN
        ours, theirs = (ids.to(model.spec.device) for ids in translation.pairs)
        known = (ours < context.processors.vocab_size) & (theirs < model.spec.vocab_size)
        self.ours, self.theirs = ours[known], theirs[known]
        self.num_target = context.processors.vocab_size
        # A processor of the user's may lift any token: one that the draft lacks is read as token 0, and again later.
        table = torch.zeros(self.num_target, dtype=torch.int64, device=model.spec.device)
        self.draft_of = table.index_copy_(0, self.ours, self.theirs)
        self.knows_all = True  # ids are translated before they are fed
        self.starts: Tensor | None = None  # [B] slot of the pending token's last piece in the last proposal

    def texts(self, context: Context) -> list[list[int]]:
        """The texts in the draft model's tokens, brought up to date."""
        for row, ids in enumerate(context.history.ids):
            self.follow(row, ids)
            self.num_known[row] = len(ids)
        return self.own

    def follow(self, row: int, ids: Sequence[int]) -> None:
        """A whole text is split as the draft's tokenizer would; later tokens one by one, since guesses that were kept are
        in the cache so."""
        if not self.num_known[row]:
            self.own[row] = self.translation.text(ids)
            return
        for token in ids[self.num_known[row] :]:
            self.own[row] += self.translation.one(token)
        # A token whose bytes the draft cannot write adds nothing, and the last one's logits are needed again.
        self.filled[row] = min(self.filled[row], len(self.own[row]) - 1)

    @property
    def longest(self) -> int:
        """Tokens of the longest text that the draft model can guess for."""
        return min(self.target.spec.max_positions, self.capacity - self.margin)

    def translated(self, context: Context, shape: Shape) -> Context:
        """The context with lengths in the draft model's tokens. Rows that have outgrown the cache get no depth."""
        self.margin = max(self.margin, shape.max_guesses + 2, shape.max_grown + 2)
        lengths = [len(text) - 1 for text in self.texts(context)]
        limits = [
            limit if length < self.longest else 0 for limit, length in zip(context.depth_limit, lengths, strict=True)
        ]
        length = tensor_on(context.device, lengths)
        return replace(context, length=length, lengths=lengths, depth_limit=limits)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop rows of the cache and of the texts."""
        super().keep(rows)
        self.own = [self.own[row] for row in rows]
        self.num_known = [self.num_known[row] for row in rows]

    def join(self, other: Drafter, context: Context) -> None:
        """Add rows to the cache and to the texts."""
        assert isinstance(other, TLIDrafter)
        super().join(other, context)
        self.own += other.own
        self.num_known += other.num_known

    def num_unread(self, context: Context) -> list[int]:
        """As for a model of the same vocabulary, of what fits into the cache."""
        return [
            max(0, len(text) - 1 - filled) if len(text) <= self.longest else 0
            for text, filled in zip(self.texts(context), self.filled, strict=True)
        ]

    def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> TokenTree:
        """A tree of shared tokens, as deep as each row and the draft's own context have room for."""
        own = self.translated(context, shape)
        self.starts = own.length
        return super().propose(own, shape, draws, noise)

    def begin(self, context: Context, limits: Sequence[int]) -> tuple[Tensor, Tensor]:
        """See ``ModelDrafter``."""
        logits, base = super().begin(context, limits)
        logits = self._scattered(logits)
        if self.reads_law:
            self.recent_logits = [logits]
        return logits, base

    def logits(self, tokens: Tensor, plan: Plan) -> Tensor:
        """See ``ModelDrafter``."""
        reads, self.reads_law = self.reads_law, False
        logits = self._scattered(super().logits(self.draft_of[tokens], plan))
        self.reads_law = reads
        if reads:
            self.recent_logits, self.tokens = [logits, *self.recent_logits[:1]], tokens
        return logits

    def _scattered(self, logits: Tensor) -> Tensor:
        """[B, W, Vt] of the draft's logits [B, W, Vd]."""
        return spread(logits.index_select(-1, self.theirs), self.ours, self.num_target)

    def observe(self, commit: Commit) -> None:
        """As for a model of the same vocabulary, in the draft's slots; of a path only the nodes before the first that was
        read as another token."""
        if not self.has_fed:
            return
        assert self.starts is not None
        known, tokens = self.translation.draft_of, commit.tree.tokens.tolist()
        paths = []
        for row, path in enumerate(commit.path):
            missing = next((at for at, node in enumerate(path) if at and known[tokens[row][node]] < 0), len(path))
            paths.append(path[:missing])
        super().observe(replace(commit, length=self.starts, path=paths))


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
