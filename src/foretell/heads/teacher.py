"""The input of training: texts of the target, and the frozen target's outputs on them, computed in each step.

Outputs are not stored on disk: hidden states of three layers are a thousand times the size of their text. In memory they
may be kept (``heads.stored_outputs``).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from foretell.core.tree import chain_tree, layout
from foretell.model.target import CausalModel, Output, Target


@dataclass(frozen=True)
class TeacherBatch:
    """B texts, padded on the right: a prompt, and the target's own response to it."""

    tokens: Tensor  # [B, T] int64
    length: Tensor  # [B] int64 real tokens
    start: Tensor  # [B] int64 index of the first token of the response

    @cached_property
    def supervised(self) -> Tensor:
        """[B, T] bool: positions t whose *next* token, t + 1, belongs to the response: where p is worth imitating."""
        index = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return (index + 1 >= self.start[:, None]) & (index + 1 < self.length[:, None])

    def to(self, device: torch.device) -> "TeacherBatch":
        """The same batch on a device."""
        return TeacherBatch(self.tokens.to(device), self.length.to(device), self.start.to(device))


@dataclass(frozen=True)
class LabeledBatch(ABC):
    """A batch and the target's outputs on it, without gradient, in float32 for every dtype of the target."""

    batch: TeacherBatch
    taps: Tensor  # [B, T, n * H] outputs of the tapped layers, concatenated
    hidden: Tensor  # [B, T, H] residual stream after the last layer, before the final norm

    @abstractmethod
    def logits_at(self, row: Tensor, at: Tensor, vocab: Tensor | None = None) -> Tensor:
        """[M, V] logits of the next token at rows and positions [M]; of columns vocab [DV] int64 alone, [M, DV], where it
        is given."""

    @abstractmethod
    def best_at(self, row: Tensor, at: Tensor) -> Tensor:
        """[M] int64 the most probable next token at rows and positions [M]."""


@dataclass(frozen=True)
class ComputedBatch(LabeledBatch):
    """A batch of which all logits are in memory."""

    logits: Tensor  # [B, T, V] position t: logits of token t + 1

    def logits_at(self, row: Tensor, at: Tensor, vocab: Tensor | None = None) -> Tensor:
        """See ``LabeledBatch``."""
        found = self.logits[row, at]
        return found if vocab is None else found[:, vocab]

    def best_at(self, row: Tensor, at: Tensor) -> Tensor:
        """See ``LabeledBatch``."""
        return self.logits[row, at].argmax(-1)


class Teacher:
    """The frozen target."""

    def __init__(self, model: CausalModel) -> None:
        """model: ``model.embed``, ``model.normed`` and ``model.head`` must follow autograd, as ``transformers`` does. Its
        weights are frozen, so that no step computes a gradient for them on the way to the head's."""
        self.model = model
        module = getattr(model, "module", None)
        if isinstance(module, nn.Module):
            module.requires_grad_(requires_grad=False)

    @torch.no_grad()
    def label(self, batch: TeacherBatch, taps: Sequence[int]) -> ComputedBatch:
        """Run the target over a batch. taps: layers whose outputs are wanted (may be empty, or repeat)."""
        out = self._run(batch, taps, head=True)
        assert out.logits is not None
        return ComputedBatch(batch, _tapped(out).float(), out.hidden.float(), out.logits.float())

    @torch.no_grad()
    def states(self, batch: TeacherBatch, taps: Sequence[int]) -> tuple[Tensor, Tensor]:
        """``taps`` and ``hidden`` of ``label`` alone, as the target computed them: in its dtype."""
        out = self._run(batch, taps, head=False)
        return _tapped(out), out.hidden

    def _run(self, batch: TeacherBatch, taps: Sequence[int], *, head: bool) -> Output:
        num_rows, num_tokens = batch.tokens.shape
        target = Target(self.model, num_rows, num_tokens)
        tree = chain_tree(batch.tokens, batch.length)
        plan = replace(layout(tree.parent, torch.zeros_like(batch.length), num_tokens), known=batch.length.cpu())
        return target.forward(batch.tokens, plan, taps=tuple(taps), head=head)


def _tapped(out: Output) -> Tensor:
    return out.taps if out.taps is not None else out.hidden[..., :0]


@dataclass(frozen=True)
class LossSlot:
    """Distributions of the draft at M places of a batch, and where the target's distribution for the same token stands."""

    logits: Tensor  # [M, Vd] of q; gradient flows
    row: Tensor  # [M] int64 row of the batch
    at: Tensor  # [M] int64 position of the target's logits for the same next token: labeled.logits[row, at]
    weight: float | Tensor = 1.0  # of the slot in the loss, or of each place: [M]
    vocab: Tensor | None = None  # [Vd] int64 target ids of the draft's columns; None: the same vocabulary


@dataclass(frozen=True)
class Outcome:
    """The result of a head on a labeled."""

    slots: list[LossSlot]  # slot 1 first
    extra: Tensor | None = None  # a scalar to add to the loss (feature regression, confidence): gradient flows
    figures: dict[str, float] = field(default_factory=dict)  # further metrics for the log


class Objective(ABC):
    """A head with the way it is trained. The loss is sum over slots of weight * mean divergence(p, q), plus extra.

    A *slot* is one guess of a proposal: slot 1 follows the pending token, slot 2 the first guess, and so on, each
    given that the guesses before it were right (they are the text's own tokens: teacher forcing). Slots are what
    acceptance is counted by, so losses and metrics are functions of slots, the same for all methods.
    """

    head: nn.Module
    divergence: str = "forward_kl"  # a name of ``train.losses``
    share: float = 0.0
    """Share of training done, 0 to 1: set by the trainer before each step."""
    stepwise: bool = False
    """Whether slot 1 determines all slots: slot k of a proposal has the distribution that slot 1 has k - 1 positions
    later. True where the drafter computes its distribution from the text alone (draft models, early exits), False where
    it feeds on its own guesses."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose outputs ``outcome`` reads in ``labeled.taps``: the head's; a draft model has none."""
        return getattr(self.head, "taps", ())

    @abstractmethod
    def outcome(
        self, labeled: LabeledBatch, teacher: Teacher, generator: torch.Generator, *, training: bool
    ) -> Outcome:
        """All slots of all supervised places. Random choices (noise, anchors) come from generator alone. With
        training=False nothing is dropped or noised, and slots beyond those trained may be unrolled."""
