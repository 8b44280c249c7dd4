"""The target's outputs on the training texts, computed once and kept in memory: for runs of several passes over the data.

Of each text the tapped layers are kept in 8 bits, and the last hidden state, of which p is made, in the target's dtype:
exactly what it computed. Logits are not; those that a loss asks for are made again from the hidden state, and where a head
has a smaller vocabulary, for its tokens alone. Each text is read by itself, so that what is kept does not depend on the
batch that met it first: a resumed run sees the same numbers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from foretell.heads.teacher import LabeledBatch, Teacher, TeacherBatch
from foretell.model.cache import from_codes, to_codes
from foretell.model.target import CausalModel

PART = 512
"""Positions whose logits over the whole vocabulary exist at a time."""
GROUP = 64
"""Hidden states that share a scale. Some are hundreds of times as large as others: with one scale for a token they lose
.23 of the length of an early layer's, so .01."""


def rounded(states: Tensor) -> Tensor:
    """Hidden states [..., n] in 8 bits, [..., groups, GROUP + SCALE_BYTES] int8 (``model.codes``). Groups are narrower
    where n is no multiple of theirs. What is not finite stays so."""
    width = states.shape[-1]
    group = math.gcd(GROUP, width)
    return to_codes(states.reshape(*states.shape[:-1], width // group, group))


def opened(codes: Tensor) -> Tensor:
    """[..., n] float32 of what ``rounded`` returned."""
    return from_codes(codes, torch.float32).flatten(-2)


@dataclass(frozen=True)
class Kept:
    """Outputs on one text of T tokens."""

    taps: Tensor  # of ``rounded``, [T, n * H] before
    hidden: Tensor  # [T, H]
    best: Tensor  # [T] int32 the target's most probable next token

    @property
    def num_bytes(self) -> int:
        """Of all three."""
        return sum(part.numel() * part.element_size() for part in (self.taps, self.hidden, self.best))


class LinearHead:
    """Logits of a few columns of the target's vocabulary, as a product with a few rows of its head.

    Where the head is more than a matrix (softcaps, scales, a bias) all columns are computed by the model itself: which
    it is, is found by comparing both on the first positions that are asked for.
    """

    TOLERANCE = 0.02  # of the largest logit: bfloat16 has 3 digits
    LARGE = 100.0  # logits that no softcap in use lets through

    def __init__(self, model: CausalModel, weight: Tensor) -> None:
        """weight [V, H]: the linear part of the head (``head_weight``)."""
        self.model, self._weight = model, weight
        self._rows: tuple[Tensor, Tensor] | None = None  # the vocabulary asked for last, and its rows
        self._linear: bool | None = None

    @torch.no_grad()
    def __call__(self, hidden: Tensor, vocab: Tensor | None) -> Tensor:
        """[M, V or DV] float32 logits after hidden states [M, H] before the final norm. vocab [DV] int64: columns."""
        return self.of_normed(self.model.normed(hidden.to(self.model.spec.dtype)[None])[0], vocab)

    @torch.no_grad()
    def of_normed(self, normed: Tensor, vocab: Tensor | None) -> Tensor:
        """The same after hidden states [M, H] behind the final norm."""
        if vocab is None or not self._is_linear(normed):
            out: Tensor = self.model.head(normed[None])[0].float()
            return out if vocab is None else out[:, vocab]
        rows = self._of(vocab)
        return F.linear(normed.to(rows.dtype), rows).float()

    def _of(self, vocab: Tensor) -> Tensor:
        if self._rows is None or self._rows[0] is not vocab:
            if self._rows is None or not torch.equal(self._rows[0], vocab):
                self._rows = (vocab, self._weight[vocab].to(self.model.spec.dtype))
            else:
                self._rows = (vocab, self._rows[1])
        return self._rows[1]

    def _is_linear(self, normed: Tensor) -> bool:
        if self._linear is None:
            few = normed[:8]
            largest = float(self._distance(few)[1])
            large = few * max(1.0, self.LARGE / max(largest, 1e-6))  # a softcap is a line near 0
            self._linear = all(
                float(off) <= self.TOLERANCE * float(most) for off, most in map(self._distance, (few, large))
            )
        return self._linear

    def _distance(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """(largest difference of the model's logits from the product's, largest of the model's) of states [n, H]."""
        true = self.model.head(normed[None])[0].float()
        return (true - F.linear(normed.float(), self._weight)).abs().max(), true.abs().max()


@dataclass(frozen=True)
class KeptBatch(LabeledBatch):
    """A batch whose logits are made when they are asked for."""

    best: Tensor  # [B, T] int64 the target's most probable next token
    head: LinearHead

    @classmethod
    def of(cls, batch: TeacherBatch, texts: Sequence[Kept], head: LinearHead) -> "KeptBatch":
        """texts: of each row, [T] of at most the batch's width; what lies behind them is zero."""
        size = batch.tokens.shape
        device = batch.tokens.device
        taps = torch.zeros(*size, opened(texts[0].taps[:1]).shape[-1], device=device)
        hidden = torch.zeros(*size, texts[0].hidden.shape[-1], device=device)
        best = torch.zeros(*size, dtype=torch.int64, device=device)
        for row, text in enumerate(texts):
            count = len(text.best)
            taps[row, :count], hidden[row, :count], best[row, :count] = opened(text.taps), text.hidden, text.best
        return cls(batch, taps, hidden, best, head)

    def logits_at(self, row: Tensor, at: Tensor, vocab: Tensor | None = None) -> Tensor:
        """See ``LabeledBatch``."""
        return self.head(self.hidden[row, at], vocab)

    def best_at(self, row: Tensor, at: Tensor) -> Tensor:
        """See ``LabeledBatch``."""
        return self.best[row, at]


class OutputKeeper:
    """The target's outputs on texts, by a number that the caller gives each text; the first that fit are kept."""

    def __init__(self, teacher: Teacher, head: LinearHead, taps: Sequence[int], most_bytes: int) -> None:
        """taps: layers whose outputs are kept; most_bytes: of memory for all texts."""
        self.teacher, self.taps, self.most_bytes = teacher, tuple(taps), most_bytes
        self.num_bytes = 0
        self._head = head
        self._kept: dict[int, Kept] = {}

    def label(self, batch: TeacherBatch, numbers: Sequence[int]) -> LabeledBatch:
        """What ``Teacher.label`` returns, of texts with these numbers. Outputs of texts that are not kept are computed."""
        return KeptBatch.of(batch, [self._text(batch, row, number) for row, number in enumerate(numbers)], self._head)

    def _text(self, batch: TeacherBatch, row: int, number: int) -> Kept:
        found = self._kept.get(number)
        if found is None:
            count = int(batch.length[row])
            alone = TeacherBatch(
                batch.tokens[row : row + 1, :count], batch.length[row : row + 1], batch.start[row : row + 1]
            )
            found = self._read(alone)
            if self.num_bytes + found.num_bytes <= self.most_bytes:
                self._kept[number] = found
                self.num_bytes += found.num_bytes
        return found

    def _read(self, alone: TeacherBatch) -> Kept:
        taps, hidden = self.teacher.states(alone, self.taps)
        best = [self._head(hidden[0, at : at + PART], None).argmax(-1) for at in range(0, hidden.shape[1], PART)]
        return Kept(rounded(taps[0]), hidden[0], torch.cat(best).int())
