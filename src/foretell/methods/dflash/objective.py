"""How a block drafter is trained: many blocks on one text, packed into one pass (DFlash 2602.06036, section 4).

Of each text some positions are anchors. After each a block is drafted from the features before it, as in decoding, and
slot k is compared with the target's distribution of the text's own next token. Slots count less the deeper they lie, by
exp(-(k - 1) / gamma): the paper has gamma = 4 for blocks of 8, 7 for 16.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from foretell.heads.teacher import LabeledBatch, LossSlot, Objective, Outcome, Teacher, TeacherBatch
from foretell.methods.dflash.head import DFlashHead


class DFlashObjective(Objective):
    """Blocks after random anchors; a confidence head (DSpark 2607.05147, section 3) has its own loss."""

    head: DFlashHead

    def __init__(self, head: DFlashHead, *, num_anchors: int = 64, gamma: float = 4.0) -> None:
        """num_anchors: blocks of a text in one pass, at most; gamma: see above."""
        self.head, self.num_anchors, self.gamma = head, num_anchors, gamma
        self.vocabulary = head.vocabulary

    def outcome(
        self, labeled: LabeledBatch, teacher: Teacher, generator: torch.Generator, *, training: bool
    ) -> Outcome:
        """Slots 1, 2, ... of a block, each over the anchors whose text is long enough for it.

        training=False takes anchors spread evenly over each text instead of random ones. In training, places whose most
        probable token lies outside the draft vocabulary are left out, as for EAGLE-3.
        """
        head, config, batch = self.head, self.head.config, labeled.batch
        anchors, real = choose_anchors(batch, self.num_anchors, generator if training else None)  # [B, A]
        with torch.no_grad():
            mask_token = torch.full_like(anchors[:1, :1], config.mask_token_id)
            mask_row = teacher.model.embed(mask_token).to(head.dtype)[:, :, None]  # [1, 1, 1, H]
            first = teacher.model.embed(batch.tokens.gather(1, anchors)).to(head.dtype)[:, :, None]
        blocks = torch.cat((first, mask_row.expand(*anchors.shape, config.block_size - 1, -1)), 2)
        normed = head(labeled.taps, blocks, anchors)  # [B, A, Q, H]
        slots: list[LossSlot] = []
        extra = normed.new_zeros(())
        kept = total = 0.0
        for index in range(config.num_guesses):
            # [B, A] the position of the token before the guess, by which the target's distribution is found.
            at = anchors + index
            inside = at < batch.tokens.shape[1]
            here = real & inside & batch.supervised.gather(1, at.clamp(max=batch.tokens.shape[1] - 1))
            row, block = here.nonzero(as_tuple=True)
            place = at[row, block]
            if training and self.vocabulary is not None:
                known = head.t2d[labeled.best_at(row, place)]
                row, block, place = row[known], block[known], place[known]
            before = batch.tokens[row, place]
            hidden = normed[row, block, index + config.first_row]  # [M, H]
            logits = head.logits(hidden[None], teacher.model)[0].float()
            if head.markov_head is not None:
                logits = logits + head.bias(before)
            weight = math.exp(-index / self.gamma)
            slots.append(LossSlot(logits, row, place, weight, self.vocabulary))
            if config.confidence and len(row):
                overlap = acceptance(labeled.logits_at(row, place), logits.detach(), self.vocabulary)
                stated = head.confidence(hidden, before)
                extra = extra + weight * F.binary_cross_entropy_with_logits(stated, overlap)
                kept, total = kept + float(overlap.sum() - stated.detach().sigmoid().sum()), total + len(row)
        if config.confidence:
            kept = kept / max(total, 1)
            return Outcome(slots, extra, {"confidence_loss": float(extra.detach()), "underconfidence": kept})
        return Outcome(slots)


def acceptance(p: Tensor, q: Tensor, vocabulary: Tensor | None = None) -> Tensor:
    """[M] the chance that a draw from the draft distribution is kept at temperature 1: 1 - TV, from logits p [M, V] and q
    [M, V], or [M, DV] of the tokens vocabulary [DV]."""
    p = p.softmax(-1)
    overlap: Tensor = torch.minimum(p if vocabulary is None else p[:, vocabulary], q.softmax(-1)).sum(-1)
    return overlap.clamp(max=1.0)


def choose_anchors(batch: TeacherBatch, count: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """(anchors [B, A] int64, real [B, A] bool), A <= count: positions whose next token is the response's.

    The prompt's last token is one of them: decoding begins there. Random ones without repetition if there is a generator,
    else evenly spread. A text with fewer positions has all of them.
    """
    able = batch.supervised
    found = able.sum(1)  # [B]
    width = max(1, min(count, int(found.max())))
    order = torch.rand(able.shape, generator=generator) if generator is not None else torch.zeros(able.shape)
    if generator is None:
        rank = able.cumsum(1) - 1  # of each position among those that could be one
        # The i-th of ``width`` evenly spread ones is the rank i * found / width, rounded down.
        wanted = torch.arange(width, device=able.device) * found[:, None] // width
        chosen = (rank[:, None, :] == wanted[:, :, None]) & able[:, None, :]
        order = chosen.any(1).float()
    ranked = order.to(able.device).masked_fill(~able, -1.0).sort(dim=1, descending=True, stable=True).indices[:, :width]
    real = able.gather(1, ranked) & (torch.arange(width, device=able.device) < found[:, None])
    return torch.where(real, ranked, 0), real
