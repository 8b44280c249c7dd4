"""How the acceptance head of SpecDec++ is trained (2405.19715, section 3.2), and calibrated.

What it reads is a frozen drafter's hidden state after a guess, so texts must hold guesses: a share of the response's
tokens is replaced by draws from the drafter, the rest stays the target's, and so do most prefixes, as in decoding
(*token mixing*). The label is the probability that the target would keep that token, from both laws on the mixed text.
Which drafter it is, ``reading.Reader`` says.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from foretoken.heads.acceptance import AcceptanceHead
from foretoken.train.lesson import Lesson, Teacher
from foretoken.train.objective import Objective, Outcome
from foretoken.train.objectives.reading import Reader, can_say


@dataclass(frozen=True)
class Places:
    """M guesses: what the drafter's hidden state was after reading each, and what became of it."""

    hidden: Tensor  # [M, H] float32
    labels: Tensor  # [M] float32 probability that the target keeps it


class AcceptanceObjective(Objective):
    """Rejections weigh more than acceptances, which are far more frequent where drafting pays."""

    head: AcceptanceHead

    def __init__(
        self,
        head: AcceptanceHead,
        reader: Reader,
        *,
        rule: str = "coupled",
        temperature: float = 1.0,
        mixing: float = 0.15,
        everywhere: bool = False,
        weight_accepted: float = 1.0,
        weight_rejected: float = 6.0,
    ) -> None:
        """rule: the verifier whose acceptance is the label, a name of LABELS. mixing: share of the response's tokens that
        are replaced. everywhere: learn from all tokens of the response that the drafter could have guessed, not from the
        replaced ones alone."""
        if rule not in LABELS or not 0 < mixing <= 1 or temperature < 0:
            raise ValueError(f"rule {rule!r} of {sorted(LABELS)}, mixing {mixing} in (0, 1], temperature {temperature}")
        self.head, self.reader = head, reader
        self.label, self.temperature = LABELS[rule], temperature
        self.mixing, self.everywhere = mixing, everywhere
        self.weight_accepted, self.weight_rejected = weight_accepted, weight_rejected

    @property
    def taps(self) -> tuple[int, ...]:
        """The drafter's."""
        return self.reader.taps

    @torch.no_grad()
    def places(self, lesson: Lesson, teacher: Teacher, generator: torch.Generator) -> Places:
        """Mix, and let target and drafter read the mixed text. What is mixed in are first guesses, drawn from the drafter's
        law on the text as it was, all at once; labels and hidden states are those of the mixed text, at every depth that
        the drafter tells apart. Choices are made on the CPU, by generator."""
        batch, model = lesson.batch, teacher.model
        (first,) = self.reader.read(lesson, model, first=True)
        rows, before = batch.supervised.nonzero(as_tuple=True)  # [R] positions whose next token may be replaced
        rows, before = rows[before >= first.back], before[before >= first.back]
        drawn = torch.rand(len(rows), generator=generator).to(rows.device) < self.mixing
        q = law_of(self.reader.logits(first.told[rows[drawn], before[drawn] - first.back], model), self.temperature)
        tokens = batch.tokens.clone()
        if len(q):
            tokens[rows[drawn], before[drawn] + 1] = torch.multinomial(q.cpu(), 1, generator=generator)[:, 0].to(
                rows.device
            )
        if not self.everywhere:
            rows, before = rows[drawn], before[drawn]
        mixed = teacher.teach(replace(batch, tokens=tokens), self.taps)
        p, guesses = law_of(mixed.logits[rows, before], self.temperature), tokens[rows, before + 1]
        hidden, labels = [], []
        for reading in self.reader.read(mixed, model):
            there = before >= reading.back
            at = (rows[there], before[there] - reading.back)
            logits = self.reader.logits(reading.told[at], model)
            said = can_say(logits, guesses[there])
            label = self.label(p[there], law_of(logits, self.temperature), guesses[there])
            hidden.append(reading.hidden[at][said].float())
            labels.append(label[said])
        return Places(torch.cat(hidden), torch.cat(labels))

    def outcome(self, lesson: Lesson, teacher: Teacher, generator: torch.Generator, *, training: bool) -> Outcome:
        """No slots: the loss is ``extra``. figures: of the calibrated prediction, how often it is on the label's side of
        one half, and its calibration error."""
        places = self.places(lesson, teacher, generator)
        logits = self.head(places.hidden)
        loss = weighted_bce(logits, places.labels, self.weight_accepted, self.weight_rejected)
        with torch.no_grad():
            chance = torch.sigmoid(logits * self.head.scale + self.head.shift)
            right = ((chance > 0.5) == (places.labels > 0.5)).float()
            figures = {"accuracy": float(right.mean()), "ece": calibration_error(chance, places.labels)}
        return Outcome([], loss, figures if len(logits) else {})


def law_of(logits: Tensor, temperature: float) -> Tensor:
    """[M, V] float32; temperature 0 is the most probable token for certain."""
    if temperature == 0:
        return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.softmax(logits.float() / temperature, -1)


def rejection_label(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """[M] min(1, p(x) / q(x)) of tokens [M] from laws [M, V of p] and [M, V of q] (Leviathan et al. 2211.17192)."""
    p, q = same_width(p, q)
    there, here = p.gather(1, tokens[:, None])[:, 0], q.gather(1, tokens[:, None])[:, 0]
    return torch.where(there >= here, (there > 0).to(p.dtype), there / here.clamp(min=1e-30))


def coupled_label(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """[M] the probability that a race of noise E picks x for p too, given that it picked x for q: of token y the score is
    E_y / law(y), the least wins. x wins both iff E_y / E_x is at least p(y) / p(x) and q(y) / q(x) for every y, so

        P(x kept | x drafted) = 1 / sum over y of max(q(x) p(y) / p(x), q(y))."""
    p, q = same_width(p, q)
    there, here = p.gather(1, tokens[:, None]), q.gather(1, tokens[:, None])  # [M, 1]
    total = torch.maximum(p * (here / there.clamp(min=1e-30)), q).sum(1)
    return torch.where(there[:, 0] > 0, 1.0 / total.clamp(min=1.0), 0.0)


def same_width(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Both laws over the larger vocabulary: what a model does not have it never says."""
    width = max(p.shape[1], q.shape[1])
    return F.pad(p, (0, width - p.shape[1])), F.pad(q, (0, width - q.shape[1]))


LABELS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "rejection": rejection_label,
    "coupled": coupled_label,
}
"""By verifier: the probability that a guess is kept."""


def weighted_bce(logits: Tensor, labels: Tensor, weight_accepted: float, weight_rejected: float) -> Tensor:
    """Scalar: cross entropy of soft labels [M], their two sides weighted, over the sum of the weighted labels."""
    accepted, rejected = weight_accepted * labels, weight_rejected * (1.0 - labels)
    loss = -(accepted * F.logsigmoid(logits) + rejected * F.logsigmoid(-logits)).sum()
    return loss / (accepted + rejected).sum().clamp(min=1e-9)


def calibration_error(chance: Tensor, labels: Tensor, num_bins: int = 10) -> float:
    """Expected calibration error of predictions [M] against (soft) labels [M]: over bins of equal width, the distance of
    the mean prediction from the mean label, weighted by how many there are."""
    if not len(chance):
        return 0.0
    bins = (chance * num_bins).long().clamp(max=num_bins - 1)
    gap = torch.zeros(num_bins, dtype=torch.float64, device=chance.device)
    gap.index_add_(0, bins, (chance - labels).double())
    return float(gap.abs().sum() / len(chance))


@torch.no_grad()
def calibrate(head: AcceptanceHead, logits: Tensor, labels: Tensor, *, steps: int = 50) -> tuple[float, float]:
    """Set ``head.scale`` and ``head.shift``, and return them: Platt scaling of raw logits [M] of held-out text to soft
    labels [M], by Newton's method on the unweighted cross entropy (convex), each step halved until it helps.
    """
    x, y = logits.double(), labels.double()
    design = torch.stack([x, torch.ones_like(x)], 1)  # [M, 2]
    ridge = 1e-6 * torch.eye(2, dtype=torch.float64, device=x.device)  # where the logits are all alike

    def loss(at: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(design @ at, y)

    now = torch.tensor([1.0, 0.0], dtype=torch.float64, device=x.device)
    for _ in range(steps):
        chance = torch.sigmoid(design @ now)
        gradient = design.t() @ (chance - y) / len(y)
        curvature = design.t() @ (design * (chance * (1.0 - chance))[:, None]) / len(y) + ridge
        move = torch.linalg.solve(curvature, gradient)
        share = 1.0
        while share > 1e-6 and bool(loss(now - share * move) > loss(now)):
            share /= 2
        now = now - share * move
        if float((share * move).abs().max()) < 1e-10:
            break
    head.scale.copy_(now[0])
    head.shift.copy_(now[1])
    return float(now[0]), float(now[1])
