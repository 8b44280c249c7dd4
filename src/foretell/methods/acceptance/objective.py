"""How the acceptance head of SpecDec++ is trained (2405.19715, section 3.2), and calibrated.

The head learns, from a frozen drafter's hidden state after a guess, the probability that the target keeps that guess. So a
text must hold guesses. Two ways to put them there, by ``prefix``:

- ``mixed``, the paper's: each token of the response stays the target's with probability ``target_share`` (0.15 in the
  authors' code), all others are draws from the drafter and carry labels. The labels are those of the text as the target
  wrote it; the drafter reads the mixed text, so most of what stands before a guess are guesses too.
- ``target``: a guess at every token of the response, each read after the target's own text, as in decoding, where a guess
  counts only if all before it were kept.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from foretell.checkpoints.directories import resolve
from foretell.core.errors import ConfigError, ModelError, require
from foretell.core.tree import Plan
from foretell.heads import formats
from foretell.heads.teacher import LabeledBatch, Objective, Outcome, Teacher, TeacherBatch
from foretell.methods.acceptance.head import AcceptanceHead, distribution_inputs
from foretell.model.load import load_model
from foretell.model.target import CausalModel, Target


class ModelReader:
    """A draft model beside its target."""

    def __init__(self, draft: CausalModel) -> None:
        self.draft = Teacher(draft)
        self.hidden_size = draft.spec.hidden_size

    def read(self, batch: TeacherBatch) -> tuple[Tensor, Tensor]:
        """Logits [B, T - 1, V] before token t + 1 of a text is read, and the hidden states [B, T - 1, H] after it is."""
        own = self.draft.label(batch, ())
        return own.logits[:, :-1], own.hidden[:, 1:]

    @torch.no_grad()
    def beside(self, batch: TeacherBatch, guesses: Tensor) -> Tensor:
        """[B, T - 1, H] the hidden state after reading guess t of guesses [B, T - 1], which follows tokens 0 to t of the
        text: one pass over a tree, the text as its trunk and each guess as a leaf."""
        num_rows, num_leaves = guesses.shape
        tokens = torch.cat((batch.tokens[:, :num_leaves], guesses), 1)
        plan = comb(num_rows, num_leaves, guesses.device)
        out = Target(self.draft.model, num_rows, 2 * num_leaves).forward(tokens, plan, head=False)
        return out.hidden[:, num_leaves:].float()


def comb(num_rows: int, num_leaves: int, device: torch.device) -> Plan:
    """The plan of a trunk of n nodes and, after them, a leaf under each: what ``layout`` returns for that tree, without
    its products of N x N matrices, which take longer than the draft model for a long text."""
    trunk = torch.ones(num_leaves, num_leaves, dtype=torch.bool, device=device).tril()
    own = torch.eye(num_leaves, dtype=torch.bool, device=device)
    ancestry = torch.cat((torch.cat((trunk, trunk)), torch.cat((torch.zeros_like(own), own))), 1)  # [2n, 2n]
    slots = torch.arange(2 * num_leaves, device=device).expand(num_rows, -1)
    positions = torch.cat((torch.arange(num_leaves), torch.arange(num_leaves) + 1)).to(device).expand(num_rows, -1)
    length = torch.zeros(num_rows, dtype=torch.int64, device=device)
    return Plan(length, ancestry.expand(num_rows, -1, -1), slots, positions, positions, 2 * num_leaves)


def open_reader(name: str, model: CausalModel) -> ModelReader:
    """The draft model that name leads to, for the target model. Raises ConfigError for a head, ModelError for what cannot
    be loaded."""
    try:
        method = formats.detect(resolve(name)).head.method
    except ModelError:  # a whole model, or unreadable: loading it as a model gives the error
        method = None
    if method is not None:
        raise ConfigError(
            f"--init {name} holds a head of {method!r}; acceptance heads are trained for draft models alone"
        )
    spec = model.spec
    return ModelReader(load_model(name, dtype=spec.dtype, device=spec.device, implementation="transformers"))


PREFIXES = ("mixed", "target")


@dataclass(frozen=True)
class GuessPlaces:
    """M guesses: the inputs of an acceptance head, and the labels."""

    hidden: Tensor  # [M, H] float32 the drafter's hidden state after it has read the guess
    distribution_inputs: Tensor  # [M, 4] float32 ``acceptance.head.distribution_inputs``
    labels: Tensor  # [M] float32 probability that the target keeps it
    row: Tensor  # [M] int64 row of the batch
    at: Tensor  # [M] int64 position of the guess in its text


class AcceptanceObjective(Objective):
    """Rejections weigh more than acceptances, which are far more frequent where drafting pays."""

    head: AcceptanceHead

    def __init__(
        self,
        head: AcceptanceHead,
        reader: ModelReader,
        *,
        rule: str = "coupled",
        temperatures: Sequence[float] = (1.0,),
        prefix: str = "mixed",
        target_share: float = 0.15,
        weight_accepted: float = 1.0,
        weight_rejected: float = 6.0,
    ) -> None:
        """rule: the verifier whose acceptance is the label, a name of LABELS. temperatures: each text is guessed at one of
        them, drawn anew each time it is read. prefix: what stands before a guess, "mixed" or "target". target_share, for
        "mixed": the share of the response's tokens that stay the target's; they carry no labels. Raises ConfigError."""
        require(rule in LABELS, "rule", rule, f"one of {', '.join(LABELS)}")
        require(prefix in PREFIXES, "prefix", prefix, f"one of {', '.join(PREFIXES)}")
        share = "in [0, 1]: the share of tokens that stay the target's"
        require(0 <= target_share <= 1, "target_share", target_share, share)
        one = "below 1: no token carries a label"
        require(target_share < 1 or prefix == "target", "target_share", target_share, one)
        good = len(temperatures) > 0 and all(is_temperature(t) for t in temperatures)
        require(good, "temperatures", temperatures, "some numbers, each at least 0")
        self.head, self.reader = head, reader
        self.label, self.temperatures = LABELS[rule], tuple(temperatures)
        self.prefix, self.target_share = prefix, target_share
        self.weight_accepted, self.weight_rejected = weight_accepted, weight_rejected

    @torch.no_grad()
    def places(self, labeled: LabeledBatch, teacher: Teacher, generator: torch.Generator) -> GuessPlaces:
        """Guesses of a batch with their labels. Guesses are first guesses, drawn from the drafter's distribution on the
        text as it was, all at once; every choice is made on the CPU, by generator. Labels are always those of the text
        as it was."""
        batch = labeled.batch
        which = torch.randint(len(self.temperatures), (len(batch.tokens),), generator=generator)
        temperature = torch.tensor(self.temperatures)[which].to(batch.tokens.device)  # [B]
        before_reading, _ = self.reader.read(batch)
        rows, before = batch.supervised.nonzero(as_tuple=True)  # [R] positions whose next token is guessed
        mixed = self.prefix == "mixed"
        if mixed:
            drawn = torch.rand(len(rows), generator=generator).to(rows.device) >= self.target_share
            rows, before = rows[drawn], before[drawn]
        logits, own = before_reading[rows, before], temperature[rows]
        guesses, tokens = draw(logits, own, generator), batch.tokens.clone()
        tokens[rows, before + 1] = guesses
        read = self.reader.read(replace(batch, tokens=tokens))[1] if mixed else self.reader.beside(batch, tokens[:, 1:])
        probs, labels = [], []
        for part in parts_of(len(rows)):
            p = distribution_of(labeled.logits_at(rows[part], before[part]), own[part])
            labels.append(self.label(p, distribution_of(logits[part], own[part]), guesses[part]))
            probs.append(distribution_inputs(logits[part], guesses[part], own[part]))
        return GuessPlaces(read[rows, before].float(), torch.cat(probs), torch.cat(labels), rows, before + 1)

    def outcome(
        self, labeled: LabeledBatch, teacher: Teacher, generator: torch.Generator, *, training: bool
    ) -> Outcome:
        """No slots: the loss is ``extra``. figures: of the calibrated prediction, how often it is on the label's side of
        one half, its calibration error, and the area under its ROC curve (one half where all are kept, or none)."""
        places = self.places(labeled, teacher, generator)
        logits = self.read(places)
        loss = weighted_bce(logits, places.labels, self.weight_accepted, self.weight_rejected)
        with torch.no_grad():
            chance = torch.sigmoid(logits * self.head.scale + self.head.shift)
            right = ((chance > 0.5) == (places.labels > 0.5)).float()
            auc = area_under_curve(chance, places.labels)
            figures = {
                "accuracy": float(right.mean()),
                "ece": calibration_error(chance, places.labels),
                "auc": 0.5 if math.isnan(auc) else auc,
            }
        return Outcome([], loss, figures if len(logits) else {})

    def read(self, places: GuessPlaces) -> Tensor:
        """[M] raw logits of the head for these guesses."""
        logits: Tensor = self.head(places.hidden, places.distribution_inputs if self.head.config.reads_law else None)
        return logits


def is_temperature(value: object) -> bool:
    """Whether it is a finite number, at least 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


CHUNK = 256
"""Places whose distributions are computed at once: distributions of a whole batch do not fit a cache, and took twice as
long."""


def parts_of(count: int) -> list[slice]:
    """Slices of that many places, at most CHUNK each; a single empty one where there are none."""
    return [slice(at, at + CHUNK) for at in range(0, max(1, count), CHUNK)]


def draw(logits: Tensor, temperature: Tensor, generator: torch.Generator) -> Tensor:
    """[M] int64 drawn from the distributions of logits [M, V] at temperature [M], by generator on the CPU."""
    drawn = [
        torch.multinomial(distribution_of(logits[part], temperature[part]).cpu(), 1, generator=generator)[:, 0]
        for part in parts_of(len(logits))
        if len(logits)
    ]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *drawn]).to(logits.device)


def distribution_of(logits: Tensor, temperature: Tensor) -> Tensor:
    """[M, V] float32 of logits [M, V] at temperature [M]; temperature 0 is the most probable token for certain."""
    greedy = temperature == 0
    probs = torch.softmax(logits.float() / temperature.masked_fill(greedy, 1.0)[:, None], -1)
    if bool(greedy.any()):
        best = logits[greedy].argmax(-1, keepdim=True)
        probs[greedy] = torch.zeros_like(probs[greedy]).scatter_(-1, best, 1.0)
    return probs


def rejection_label(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """[M] min(1, p(x) / q(x)) of tokens [M] from distributions [M, V of p] and [M, V of q] (Leviathan et al.
    2211.17192)."""
    p, q = same_width(p, q)
    there, here = p.gather(1, tokens[:, None])[:, 0], q.gather(1, tokens[:, None])[:, 0]
    return torch.where(there >= here, (there > 0).to(p.dtype), there / here.clamp(min=1e-30))


def coupled_label(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """[M] the probability that a race of noise E picks x for p too, given that it picked x for q: of token y the score is
    E_y / distribution(y), the least wins. x wins both iff E_y / E_x is at least p(y) / p(x) and q(y) / q(x) for every y, so

        P(x kept | x drafted) = 1 / sum over y of max(q(x) p(y) / p(x), q(y))."""
    p, q = same_width(p, q)
    there, here = p.gather(1, tokens[:, None]), q.gather(1, tokens[:, None])  # [M, 1]
    total = torch.maximum(p * (here / there.clamp(min=1e-30)), q).sum(1)
    return torch.where(there[:, 0] > 0, 1.0 / total.clamp(min=1.0), 0.0)


def same_width(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Both distributions over the larger vocabulary: tokens that a model does not have get probability 0."""
    width = max(p.shape[1], q.shape[1])
    return F.pad(p, (0, width - p.shape[1])), F.pad(q, (0, width - q.shape[1]))


LABELS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"rejection": rejection_label, "coupled": coupled_label}
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


def area_under_curve(score: Tensor, labels: Tensor, weight: Tensor | None = None) -> float:
    """Area under the ROC curve: the probability that a kept guess scores higher than a rejected one, ties counted half.

    score [M]; labels [M] in [0, 1]: a soft label is a kept guess of that weight and a rejected one of the rest. weight [M]
    multiplies both. NaN where all are kept, or none.
    """
    value, place = torch.unique(score, return_inverse=True)
    whole = labels.new_ones(len(labels), dtype=torch.float64) if weight is None else weight.double()
    kept = torch.zeros(len(value), dtype=torch.float64, device=score.device).index_add_(
        0, place, whole * labels.double()
    )
    lost = torch.zeros_like(kept).index_add_(0, place, whole * (1.0 - labels.double()))
    below = lost.cumsum(0) - 0.5 * lost
    total = float(kept.sum() * lost.sum())
    return float((kept * below).sum()) / total if total > 0 else float("nan")


@torch.no_grad()
def calibrate(head: AcceptanceHead, logits: Tensor, labels: Tensor, *, steps: int = 50) -> tuple[float, float]:
    """Set ``head.scale`` and ``head.shift``, and return them: Platt scaling of raw logits [M] of held-out text to soft
    labels [M], by Newton's method on the unweighted cross entropy (convex), each step halved until it helps.
    """
    x, y = logits.double(), labels.double()
    design = torch.stack([x, torch.ones_like(x)], 1)  # [M, 2]
    ridge = 1e-6 * torch.eye(2, dtype=torch.float64, device=x.device)  # for logits that are all equal

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
