"""The draft vocabulary of an EAGLE-3 head that learns: other tokens of the same number.

A head guesses some thousand tokens of its target's vocabulary, chosen by what it was trained on. Of texts in another
language most tokens lie outside, and no gradient reaches those. So tokens that the target writes take the places of
others that it does not, and their rows of the output head are the target's own, as in training (``Eagle3Head.fresh``):
a learner leaves them as they are.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from foretell.learn.training.ends import TargetEnds
from foretell.learn.training.texts import Text
from foretell.methods.eagle.eagle3 import Eagle3Head

LEAST = 0.5
"""Tokens by which one from outside must have been written more often than the one that leaves, as the target expects it."""

MASS = "draft_vocabulary_mass"
"""The name of a version's counts among its weights, so that the next start knows them."""


class DraftVocabulary:
    """Of one head, whose maps and rows it changes in place."""

    def __init__(self, head: Eagle3Head, ends: TargetEnds, base: Tensor, mass: Tensor | None = None) -> None:
        """base [DV] int64: the vocabulary before anything was learned. mass: as a version has it; without one, what the
        head has beside the base was written once."""
        self.head, self.ends = head, ends
        # [V] of the target's distributions, over all places that were learned from.
        self.mass = torch.zeros(ends.spec.vocab_size) if mass is None else mass.clone()
        if mass is None:
            ids = self._ids()
            self.mass[ids[~torch.isin(ids, base.cpu())]] = 2 * LEAST

    def _ids(self) -> Tensor:
        return self.head.target_ids.cpu()

    def renew(self, texts: Sequence[Text]) -> int:
        """Count new texts, and exchange tokens; how many. Those leave that were written least; of equal ones the highest
        number: tokenizers number tokens by how common they are."""
        for text in texts:
            self.mass.index_add_(0, text.ids.long().flatten(), text.logs.float().exp().flatten())
        ids = self._ids().sort().values
        outside = self.mass.clone()
        outside[ids] = 0.0
        wanted = outside.argsort(descending=True, stable=True)[: min(len(ids), int((outside >= LEAST).sum()))]
        leaving = ids.flip(0)[self.mass[ids].flip(0).argsort(stable=True)[: len(wanted)]]
        better = self.mass[wanted] - self.mass[leaving] >= LEAST  # the gain falls from pair to pair
        wanted, leaving = wanted[better], leaving[better]
        if len(wanted):
            kept = ids[~torch.isin(ids, leaving)]
            self._become(torch.cat((kept, wanted)).sort().values)
        return len(wanted)

    @torch.no_grad()
    def _become(self, ids: Tensor) -> None:
        head, before = self.head, self._ids().tolist()
        rows = self.ends.matrices.head[ids.to(self.ends.matrices.head.device)].to(head.lm_head.weight)
        place = {token: row for row, token in enumerate(before)}
        had = [(column, place[token]) for column, token in enumerate(ids.tolist()) if token in place]
        mine, own = torch.tensor(had, dtype=torch.int64).reshape(-1, 2).T
        rows[mine] = head.lm_head.weight[own]
        head.lm_head.weight.copy_(rows)
        head.d2t.copy_(ids - torch.arange(len(ids)))
        head.t2d.zero_()[ids] = True
