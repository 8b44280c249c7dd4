"""A drafter in float32 that learns from captured texts: the objectives of ``train``, one text at a time."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foretell.core.errors import ConfigError
from foretell.core.tree import Plan
from foretell.heads.teacher import ComputedBatch, LossSlot, Objective, Teacher
from foretell.learn.options import RECIPES, LearnOptions
from foretell.learn.training.texts import Text
from foretell.methods.draft_model.drafter import DraftModelObjective
from foretell.methods.eagle.eagle3 import Eagle3Head
from foretell.methods.medusa.head import head_weight, norm_weight
from foretell.model.cache import KVCache
from foretell.model.target import WHOLE, CausalModel, ModelSpec, Output, PassOptions
from foretell.train.losses import DIVERGENCES
from foretell.train.making import Making
from foretell.train.methods import recipe_of
from foretell.train.metrics import divergence_of
from foretell.train.responses import Responses

TOLERANCE = 2e-2
"""How far the norm may be from the target's, as a share: half precision rounds to 4e-3."""


@dataclass(frozen=True)
class EndMatrices:
    """Float32, on the CPU."""

    embedding: Tensor  # [V, H]
    head: Tensor  # [V, H]
    norm: Tensor  # [H] weight of the final RMS norm
    epsilon: float


class TargetEnds(CausalModel):
    """``embed``, ``normed`` and ``head`` of a target in float32; it has no layers to run.

    Heads are trained through them, and captured texts bring the target's hidden states, so no layer is needed: a
    learner beside a large target holds two matrices of it. Gradient flows through the head.
    """

    def __init__(self, spec: ModelSpec, matrices: EndMatrices | None, device: torch.device) -> None:
        """matrices: None for drafters that read tokens alone."""
        self.spec = replace(spec, dtype=torch.float32, device=device, implementation="ends")
        self._held = None if matrices is None else replace(
            matrices, embedding=matrices.embedding.to(device), head=matrices.head.to(device),
            norm=matrices.norm.to(device),
        )  # fmt: skip

    @property
    def matrices(self) -> EndMatrices:
        """Raises ConfigError where there are none."""
        if self._held is None:
            raise ConfigError(f"{self.spec.name}: its embedding and head are not known to this learner")
        return self._held

    def embed(self, tokens: Tensor) -> Tensor:
        """[..., H] of token ids."""
        return F.embedding(tokens, self.matrices.embedding)

    def normed(self, hidden: Tensor) -> Tensor:
        """The final norm."""
        held = self.matrices
        return F.rms_norm(hidden.float(), held.norm.shape, held.norm, held.epsilon)

    def head(self, normed: Tensor) -> Tensor:
        """[..., V] logits."""
        return F.linear(normed.float(), self.matrices.head)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] of the residual stream after the last layer."""
        return self.head(self.normed(hidden))

    def new_cache(self, num_rows: int, capacity: int) -> NoReturn:
        """There are no layers."""
        raise RuntimeError("the ends of a target have no layers")

    def forward(self, tokens: Tensor, plan: Plan, cache: KVCache, options: PassOptions = WHOLE) -> Output:
        """There are no layers."""
        raise RuntimeError("the ends of a target have no layers")


@torch.no_grad()
def matrices_of(model: CausalModel) -> EndMatrices:
    """Of a target, for every implementation: read off its functions. Raises ConfigError where its final norm is no RMS
    norm, or its head is not linear."""
    spec = model.spec
    ids = torch.arange(spec.vocab_size, device=spec.device)
    parts = [ids[begin : begin + 8192] for begin in range(0, len(ids), 8192)]
    embedding = torch.cat([model.embed(part[None])[0].float() for part in parts]).cpu()
    head, norm = head_weight(model).cpu(), norm_weight(model).cpu()
    small = torch.full((1, 1, spec.hidden_size), 1e-3, dtype=torch.float32, device=spec.device)
    # A vector of equal numbers c comes out as c w / sqrt(c^2 + epsilon).
    shrunk = (model.normed(small.to(spec.dtype))[0, 0].float().cpu() / norm).median()
    epsilon = max(0.0, float(1e-6 / shrunk**2 - 1e-6)) if shrunk > 0 else 0.0
    found = EndMatrices(embedding, head, norm, epsilon)
    ends = TargetEnds(spec, found, torch.device("cpu"))
    probe = torch.randn(1, 4, spec.hidden_size, generator=torch.Generator().manual_seed(0))
    asked = probe.to(spec.device, spec.dtype)
    pairs = {
        "its final norm is not an RMS norm": (model.normed(asked).float().cpu(), ends.normed(asked.cpu())),
        "its output head is not linear": (model.head(asked).float().cpu(), ends.head(asked.cpu())),
    }
    for reason, (its, mine) in pairs.items():
        if float((its - mine).abs().max()) > TOLERANCE * float(its.abs().max()):
            raise ConfigError(f"{spec.name}: {reason}, so its heads cannot learn while serving; a draft model can")
    return found


LEAST = 0.5
"""Tokens by which one from outside must have been written more often than the one that leaves, as the target expects it."""

MASS = "draft_vocabulary_mass"
"""The name of a version's counts among its weights, so that the next start knows them."""


class DraftVocabulary:
    """The draft vocabulary of an EAGLE-3 head that learns: other tokens of the same number. Changes the head in place.

    A head guesses some thousand tokens of its target's vocabulary, chosen by what it was trained on. Of texts in another
    language most tokens lie outside, and no gradient reaches those. So tokens that the target writes take the places of
    others that it does not, and their rows of the output head are the target's own, as in training
    (``Eagle3Head.fresh``): a learner leaves them as they are.
    """

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


SAMPLED, GREEDY = "tv", "forward_kl"
"""Losses of texts at a temperature, and of greedy ones: total variation is what sampling loses, but far from p it has
almost no gradient, and a greedy text needs the order alone."""

CLIP = 1.0
"""The most that a gradient's norm may be."""
STRIDE = 0.5
"""Share of the way from the weights that serve to the learned ones that a version goes (as lookahead, 1907.08610, and
WiSE-FT, 2109.01903): a few steps of Adam move every weight, most by noise, whose harm falls with the square."""


@dataclass(frozen=True)
class Origin:
    """What a student is made of: it travels to the process that learns."""

    method: str
    init: str  # directory, hub id or "bundled/..." of the weights
    target: ModelSpec
    matrices: EndMatrices | None  # of the target, for heads
    num_slots: int  # guesses in a line
    weights: dict[str, Tensor] | None = None  # other ones than those of ``init``, named as a checkpoint has them
    tokens: Tensor | None = None  # [n] int64 the only ones that a draft model guesses; None: all
    longest: int = 2**62  # tokens that it reads; one with learned positions fails on more


class Student:
    """Not thread-safe. ``learn`` adds one text's gradient, ``apply`` takes the step."""

    def __init__(self, origin: Origin, options: LearnOptions) -> None:
        """Raises ConfigError, ModelError."""
        if origin.method not in RECIPES:
            raise ConfigError(f"method {origin.method!r} cannot learn while it serves: choose {', '.join(RECIPES)}")
        self.origin, self.options = origin, options
        self.device = torch.device(options.learn_device or "cpu")
        ends = TargetEnds(origin.target, origin.matrices, self.device)
        self.teacher = Teacher(ends)
        self.objective = self._objective()
        self.objective.share = 1.0  # of training done: what is only for its beginning is over
        head = self.objective.head.to(self.device)
        reduced = head if isinstance(head, Eagle3Head) and head.vocabulary is not None else None
        base = torch.zeros(0) if reduced is None else reduced.target_ids
        found = dict(origin.weights or {})
        mass = found.pop(MASS, None)
        if found:
            head.load_state_dict(found)
        head.train()
        self.parameters = [each for each in head.parameters() if each.requires_grad]
        self.vocabulary = None if reduced is None else DraftVocabulary(reduced, ends, base, mass)
        hidden = origin.target.hidden_size
        self.optimizer = torch.optim.AdamW(self.parameters, lr=options.lr(hidden), betas=(0.9, 0.95), weight_decay=0.0)
        self.generator = torch.Generator().manual_seed(options.seed)
        self._dropping = torch.Generator().manual_seed(options.seed)  # seeds of dropout, of each text
        self._pending = 0

    def _objective(self) -> Objective:
        recipe = recipe_of(RECIPES[self.origin.method])
        nothing = torch.zeros(0, dtype=torch.int64)
        empty = Responses(torch.zeros(0, 0, dtype=torch.int32), nothing, nothing)
        settings = dict(recipe.options)
        if "num_slots" in settings:
            settings["num_slots"] = self.origin.num_slots
        made = recipe.build(Making(self.teacher.model, empty, self.options.seed, self.origin.init), settings)
        if isinstance(made, DraftModelObjective):
            made.tokens = self.origin.tokens
        return made

    @property
    def longest(self) -> int:
        """Tokens of a text that can be learned from."""
        return self.origin.longest

    # -- learning ----------------------------------------------------------------------------------------------------

    def renew(self, texts: Sequence[Text]) -> int:
        """Before new texts are learned: their tokens enter the draft vocabulary of a head that has one; how many did."""
        return 0 if self.vocabulary is None else self.vocabulary.renew(texts)

    @contextmanager
    def _dropout(self) -> Iterator[None]:
        """Dropout draws from the process's generator, which is others' too: it is seeded here, and put back behind it."""
        seed = int(torch.randint(2**62, (), generator=self._dropping))
        device = self.device if self.device.type == "cuda" else None
        with torch.random.fork_rng([] if device is None else [device]):
            torch.default_generator.manual_seed(seed)
            if device is not None:
                torch.cuda.manual_seed(seed)
            yield

    def learn(self, text: Text, share: float = 1.0) -> float:
        """Add ``share`` of the gradient of a text's loss, and return the loss."""
        labeled = self._labeled(text)
        with self._dropout():
            outcome = self.objective.outcome(labeled, self.teacher, self.generator, training=True)
        divergence = DIVERGENCES[SAMPLED if text.temperature else GREEDY]
        losses = divergence_of(labeled, outcome, divergence, text.loss_temperature)
        if losses.total.requires_grad:
            (losses.total * share).backward()  # type: ignore[no-untyped-call]
            self._pending += 1
        return float(losses.total.detach())

    def apply(self) -> bool:
        """One optimiser step of what was learned since the last. False where a number was not finite: no change."""
        if not self._pending:
            return False
        self._pending = 0
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, CLIP)
        finite = bool(torch.isfinite(norm))
        if finite:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return finite

    def forget(self) -> None:
        """Drop gradients of which no step was taken: they are of other weights."""
        self._pending = 0
        self.optimizer.zero_grad(set_to_none=True)

    # -- judging -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def score(self, text: Text) -> float:
        """Expected share of guesses kept in a line of ``num_slots``: sum min(p, q) of a text at a temperature, agreement
        of a greedy one. Of a draft model the share of first guesses, which all others are like."""
        head = self.objective.head
        head.eval()
        try:
            labeled = self._labeled(text)
            generator = torch.Generator().manual_seed(0)
            outcome = self.objective.outcome(labeled, self.teacher, generator, training=False)
            size = labeled.batch.tokens.shape[1]
            alive = torch.ones(size, device=self.device)
            kept: list[float] = []
            for depth, slot in enumerate(outcome.slots):
                if not len(slot.row):
                    break
                grid = torch.zeros(size, device=self.device)
                grid[slot.at - depth] = self._kept(labeled, slot, text)
                alive = alive * grid
                kept.append(float(alive.sum()) / len(slot.row))
            return sum(kept) / len(kept) if kept else 0.0
        finally:
            head.train()

    def _kept(self, labeled: ComputedBatch, slot: LossSlot, text: Text) -> Tensor:
        """[M] the chance that a guess is kept, at each place of a slot."""
        p, q = labeled.logits[slot.row, slot.at], slot.logits.float()
        if not text.temperature:
            best = q.argmax(-1)
            return (p.argmax(-1) == (best if slot.vocab is None else slot.vocab[best])).float()
        p, q = (p / text.temperature).softmax(-1), (q / text.temperature).softmax(-1)
        return torch.minimum(p if slot.vocab is None else p[:, slot.vocab], q).sum(-1)

    def scores(self, texts: Sequence[Text]) -> list[float]:
        """Of each text."""
        return [self.score(text) for text in texts]

    def _labeled(self, text: Text) -> ComputedBatch:
        labeled = text.labeled(self.origin.target.vocab_size)
        if self.device.type == "cpu":
            return labeled
        place = self.device
        return ComputedBatch(
            labeled.batch.to(place), labeled.taps.to(place), labeled.hidden.to(place), labeled.logits.to(place)
        )

    # -- weights -----------------------------------------------------------------------------------------------------

    def weights(self) -> dict[str, Tensor]:
        """A copy of all weights, float32 on the CPU."""
        state = self.objective.head.state_dict()
        return {name: value.detach().cpu().clone() for name, value in state.items()}

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Go on from what ``weights`` returned. The optimiser's state is kept: gradients are of the same size."""
        self.objective.head.load_state_dict(dict(weights))

    def between(self, served: Mapping[str, Tensor], learned: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights that are asked to serve: what is trained lies ``STRIDE`` of the way from those that serve to the
        learned ones. The draft vocabulary with its rows is the learned one's whole."""
        named = self.objective.head.named_parameters(remove_duplicate=False)  # tied ones by each name
        trained = {name for name, each in named if each.requires_grad}
        return {
            name: torch.lerp(served[name], value, STRIDE) if name in trained else value
            for name, value in learned.items()
        }

    def checkpoint(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What ``weights`` returned as ``Method.rebuilt`` takes it, and what else the next start goes on from."""
        return dict(weights) if self.vocabulary is None else {**weights, MASS: self.vocabulary.mass.clone()}

    def module(self, weights: Mapping[str, Tensor]) -> nn.Module:
        """The drafter with these weights, to be written: a copy on the CPU."""
        made = copy.deepcopy(self.objective.head).cpu()
        made.load_state_dict({name: weights[name] for name in made.state_dict()})
        return made
