"""The quality of a drafter, slot by slot, without timing: acceptance, agreement, length, calibration.

Measured on text of the target, under teacher forcing (the guesses before a slot are the text's tokens). At every
place of slot k two figures are taken: sum min(p, q), the chance that a guess drawn from q is kept at temperature 1, and
whether both distributions have one argmax, which decides at temperature 0. A slot's *conditional* figure weights each
place by the chance that the slots before it, of the same proposal, were kept: only such places are ever verified.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foretell.heads.teacher import LabeledBatch, LossSlot, Objective, Outcome, Teacher
from foretell.train.data import sequential_batches
from foretell.train.losses import Divergence
from foretell.train.responses import Responses

BINS = 15
CHUNK = 1024
"""Places whose distributions are held at a time."""
DEPTH = 8
"""Slots of a stepwise objective that are reported."""


@dataclass(frozen=True)
class SlotFigures:
    """One slot, means over its places."""

    num_places: int
    acceptance: float  # sum min(p, q), every place alike
    agreement: float  # argmax q is argmax p
    conditional: float  # acceptance, given that the slots before it were kept
    conditional_greedy: float  # agreement, given that the slots before it agreed
    ece: float  # |q's top probability - p of that token|, expected over bins of the former


@dataclass(frozen=True)
class Evaluation:
    """A drafter on held-out text."""

    num_tokens: int  # responses' tokens looked at
    loss: float  # as it is minimised: the weighted sum over slots, and what the objective adds
    slots: tuple[SlotFigures, ...]
    expected_length: float  # 1 + sum over slots of the product of conditional acceptances up to it
    expected_length_greedy: float
    slot_losses: tuple[float, ...] = ()  # mean divergence of a place of each slot
    loss_per_slot: float | None = None  # their mean by the slots' weights: comparable between numbers of slots
    figures: dict[str, float] = field(default_factory=dict)  # of the objective itself

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "num_tokens": self.num_tokens,
            "loss": self.loss,
            "loss_per_slot": self.loss_per_slot,
            "slot_losses": list(self.slot_losses),
            "expected_length": self.expected_length,
            "expected_length_greedy": self.expected_length_greedy,
            **{
                name: [getattr(slot, name) for slot in self.slots]
                for name in ("acceptance", "agreement", "conditional", "conditional_greedy", "ece", "num_places")
            },
            **self.figures,
        }


@dataclass(frozen=True)
class Places:
    """Figures of each place of a slot, [M] each."""

    acceptance: Tensor
    agreement: Tensor
    stated: Tensor  # q's top probability
    true: Tensor  # p of that token


@torch.no_grad()
def compare(slot: LossSlot, labeled: LabeledBatch) -> Places:
    """The distributions of a slot and the target's. p is never restricted here."""
    parts: list[tuple[Tensor, ...]] = []
    for at in range(0, len(slot.row), CHUNK):
        part = slice(at, at + CHUNK)
        p = labeled.logits_at(slot.row[part], slot.at[part]).float().softmax(-1)
        q = slot.logits[part].float().softmax(-1)
        stated, best = q.max(-1)
        if slot.vocab is not None:
            best = slot.vocab[best]
        overlap = torch.minimum(p if slot.vocab is None else p[:, slot.vocab], q).sum(-1)
        parts.append((overlap, (best == p.argmax(-1)).float(), stated, p.gather(1, best[:, None])[:, 0]))
    if not parts:
        nothing = labeled.hidden.new_zeros(0, dtype=torch.float32)
        return Places(nothing, nothing, nothing, nothing)
    return Places(*(torch.cat(column).clamp(0.0, 1.0) for column in zip(*parts, strict=True)))


class Meter:
    """Sums of the figures over labeled batches."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []  # a slot: places, acceptance, agreement, then (mass, kept) sampled and greedy
        self._bins: list[Tensor] = []  # a slot: [BINS, 3] count, stated, true

    def add(
        self, labeled: LabeledBatch, outcome: Outcome, *, stepwise: bool, places: list[Places] | None = None
    ) -> None:
        """One labeled. stepwise: see ``Objective.stepwise``. places: what ``compare`` returned of each slot, where it is
        known already."""
        size = labeled.batch.tokens.shape
        if places is None:
            places = [compare(slot, labeled) for slot in outcome.slots]
        where = [(slot.row, slot.at) for slot in outcome.slots]
        grids = [_grids(size, spot, place) for spot, place in zip(where, places, strict=True)]
        if stepwise and len(grids) == 1:
            # Slot k from start s is slot 1 from start s + k - 1.
            first = grids[0]
            grids = [first.roll(-k, 2) for k in range(DEPTH)]
            for k, grid in enumerate(grids):
                grid[:, :, size[1] - k :] = torch.nan
                grid[first.isnan()] = torch.nan  # no proposal starts there
            places = places * DEPTH
        else:
            # A place is entered by the start of its proposal: slot k (from 0) at position s + k.
            grids = [grid.roll(-k, 2) for k, grid in enumerate(grids)]
        alive = torch.ones(2, *size, device=labeled.hidden.device)
        for k, (grid, place) in enumerate(zip(grids, places, strict=True)):
            known = ~grid[0].isnan()
            kept = alive * grid.nan_to_num()
            mass = (alive * known).sum((1, 2)).double()
            sums = [torch.tensor(float(known.sum())), *grid.nan_to_num().sum((1, 2)), *mass, *kept.sum((1, 2))]
            self._enter(self._sums, k, torch.stack([torch.as_tensor(value).double().cpu() for value in sums]))
            self._enter(self._bins, k, _binned(place).cpu())
            alive = kept

    @staticmethod
    def _enter(into: list[Tensor], k: int, value: Tensor) -> None:
        if k == len(into):
            into.append(torch.zeros_like(value))
        into[k] += value

    def slots(self) -> tuple[SlotFigures, ...]:
        """The figures so far."""
        out = []
        for sums, bins in zip(self._sums, self._bins, strict=True):
            count, acceptance, agreement, mass, mass_greedy, kept, kept_greedy = sums.tolist()
            total = float(bins[:, 0].sum())
            ece = float((bins[:, 1] - bins[:, 2]).abs().sum()) / max(total, 1.0)
            out.append(
                SlotFigures(
                    num_places=int(count),
                    acceptance=acceptance / max(count, 1.0),
                    agreement=agreement / max(count, 1.0),
                    conditional=kept / mass if mass else 0.0,
                    conditional_greedy=kept_greedy / mass_greedy if mass_greedy else 0.0,
                    ece=ece,
                )
            )
        return tuple(out)


def _grids(size: torch.Size, where: tuple[Tensor, Tensor], place: Places) -> Tensor:
    """[2, B, T]: acceptance and agreement where they are known, NaN elsewhere."""
    grid = torch.full((2, *size), torch.nan, device=place.acceptance.device)
    grid[0, where[0], where[1]] = place.acceptance
    grid[1, where[0], where[1]] = place.agreement
    return grid


def _binned(place: Places) -> Tensor:
    """[BINS, 3] float64: count, sum of stated, sum of true, by the stated probability."""
    index = (place.stated * BINS).long().clamp(max=BINS - 1)
    out = torch.zeros(BINS, 3, dtype=torch.float64, device=place.stated.device)
    return out.index_add_(0, index, torch.stack((torch.ones_like(place.stated), place.stated, place.true), 1).double())


def expected_length(conditional: Sequence[float]) -> float:
    """1 + a1 + a1 a2 + ...: tokens of a step, the bonus included, from acceptances each given the one before."""
    total = product = 1.0
    for rate in conditional:
        product *= rate
        total += product
    return total


@dataclass(frozen=True)
class Losses:
    """What is minimised, and its parts.

    The total grows with the number of slots, which may change in training; the mean of a slot does not.
    """

    total: Tensor  # scalar; gradient flows
    parts: Tensor  # [K, 2] float64, no gradient: of each slot mean(weight * divergence) and mean(weight), 0 without a place


def slot_losses(parts: Tensor) -> list[float | None]:
    """Mean divergence of a place of each slot, from ``Losses.parts`` [K, 2] or a mean of several; None without a place."""
    return [loss / weight if weight else None for loss, weight in parts.tolist()]


def loss_per_slot(parts: Tensor) -> float | None:
    """Mean divergence over the slots by their weights, from ``Losses.parts`` [K, 2]; None without a slot."""
    loss, weight = parts.sum(0).tolist()
    return loss / weight if weight else None


def divergence_of(labeled: LabeledBatch, outcome: Outcome, divergence: Divergence, temperature: float = 1.0) -> Losses:
    """What is minimised: sum over slots of mean(weight * divergence(p, q)), plus extra; and its parts."""
    total = outcome.extra if outcome.extra is not None else torch.zeros((), device=labeled.taps.device)
    parts = torch.zeros(len(outcome.slots), 2, dtype=torch.float64)
    for index, slot in enumerate(outcome.slots):
        if not len(slot.row):
            continue  # a mean of nothing
        p = labeled.logits_at(slot.row, slot.at, slot.vocab)
        loss = (slot.weight * divergence(p, slot.logits, temperature=temperature)).mean()
        total = total + loss
        weight = slot.weight.mean() if isinstance(slot.weight, Tensor) else slot.weight
        parts[index] = torch.tensor([float(loss.detach()), float(weight)], dtype=torch.float64)
    return Losses(total, parts)


@torch.no_grad()
def evaluate(
    objective: Objective,
    teacher: Teacher,
    responses: Responses,
    divergence: Divergence,
    *,
    batch_tokens: int = 2048,
    max_tokens: int | None = None,
    temperature: float = 1.0,
    progress: Callable[[int], None] | None = None,
) -> Evaluation:
    """Slots of a drafter on texts of the target's own, at most max_tokens of them (the first ones)."""
    device = teacher.model.spec.device
    meter, total, weights = Meter(), 0.0, 0
    parts = torch.zeros(0, 2, dtype=torch.float64)
    figures: dict[str, float] = {}
    was_training = objective.head.training
    objective.head.eval()
    try:
        for number, index in enumerate(sequential_batches(responses.length.tolist(), batch_tokens)):
            if max_tokens is not None and weights >= max_tokens:
                break
            batch = responses.batch(index).to(device)
            labeled = teacher.label(batch, objective.taps)
            generator = torch.Generator().manual_seed(number)  # the CPU's: the same numbers everywhere
            outcome = objective.outcome(labeled, teacher, generator, training=False)
            meter.add(labeled, outcome, stepwise=objective.stepwise)
            count = int(batch.supervised.sum())
            weights += count
            losses = divergence_of(labeled, outcome, divergence, temperature)
            total += float(losses.total) * count
            parts = losses.parts * count + (parts if len(parts) else 0.0)
            for name, value in outcome.figures.items():
                figures[name] = figures.get(name, 0.0) + float(value) * count
            if progress is not None:
                progress(weights)
    finally:
        objective.head.train(was_training)
    slots = meter.slots()
    return Evaluation(
        num_tokens=weights,
        loss=total / max(weights, 1),
        slots=slots,
        expected_length=expected_length([slot.conditional for slot in slots]),
        expected_length_greedy=expected_length([slot.conditional_greedy for slot in slots]),
        slot_losses=tuple(loss for loss in slot_losses(parts) if loss is not None),
        loss_per_slot=loss_per_slot(parts),
        figures={name: value / max(weights, 1) for name, value in figures.items()},
    )
