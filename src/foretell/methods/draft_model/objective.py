"""Distilling the target into an existing draft model (DistillSpec, 2310.08461), by any divergence of ``train.losses``.

The paper finds training on the target's text nearly as good as on the draft's own, and far cheaper.
"""

from typing import Any

import torch
from torch import Tensor, nn

from foretell.core.errors import ConfigError
from foretell.heads.objective import LossSlot, Objective, Outcome
from foretell.heads.teacher import LabeledBatch, Teacher
from foretell.model.target import ModelSpec


def check_draft(draft: ModelSpec, target: ModelSpec, longest: int, *, name: str) -> None:
    """Raise ConfigError where a model cannot read the target's texts, of at most ``longest`` tokens, as they are."""
    if abs(draft.vocab_size - target.vocab_size) > 0.01 * target.vocab_size:
        raise ConfigError(
            f"--init {name} has a vocabulary of {draft.vocab_size} tokens, and target {target.name!r} one of "
            f"{target.vocab_size}: it is trained on the target's tokens, so give a model of the same vocabulary"
        )
    if longest > draft.max_positions:
        raise ConfigError(
            f"--init {name} reads texts of at most {draft.max_positions} tokens, and the longest has {longest}: give "
            f"max_length = {draft.max_positions}"
        )


class DraftModelObjective(Objective):
    """One slot: a draft model reads only the text, so slot k equals slot 1 at a later position."""

    stepwise = True

    def __init__(
        self, module: nn.Module, *, divergence: str = "forward_kl", tokens: Tensor | None = None,
        num_tokens: int = 2**62,
    ) -> None:  # fmt: skip
        """module: called as ``module(input_ids=[B, T], use_cache=False)``, it answers with ``.logits`` [B, T, Vd].
        tokens [n] int64: the only ones that the drafter guesses; None: all. num_tokens: that it has embeddings of; what
        lies beyond is read as the last one, as in drafting."""
        self.num_tokens = num_tokens
        self.head, self.divergence, self.tokens = module, divergence, tokens

    def outcome(
        self, labeled: LabeledBatch, teacher: Teacher, generator: torch.Generator, *, training: bool
    ) -> Outcome:
        """Nothing is drawn. Texts are padded on the right, which a causal model does not see: no mask is needed.

        Vocabularies of different size (padding, as a rule) are compared on the columns that both have.
        """
        row, at = labeled.batch.supervised.nonzero(as_tuple=True)
        known = min(self.num_tokens, teacher.model.spec.vocab_size)
        answer: Any = self.head(input_ids=labeled.batch.tokens.clamp(max=known - 1), use_cache=False)
        logits: Tensor = answer.logits[row, at]
        if self.tokens is not None:
            vocab = self.tokens.to(logits.device)
            return Outcome([LossSlot(logits[:, vocab].float(), row, at, vocab=vocab)])
        wide, mine = teacher.model.spec.vocab_size, logits.shape[-1]
        both = torch.arange(mine, device=logits.device) if mine < wide else None
        return Outcome([LossSlot(logits[:, :wide].float(), row, at, vocab=both)])
