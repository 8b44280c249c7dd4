"""Lossy rules: exact match, and beside it a tolerance for some drafts that the target did not draw.

At every node the target draws its own token from the stream COUPLED, as under ``coupled``. A child with that token is
accepted; where no child has it, the first child that the rule tolerates. So every rule at its strictest setting is
``coupled``, a refused draft is replaced by the target's own draw, and at temperature 0, where p is one-hot and no
other token has any probability, every rule is greedy decoding. No rule tolerates a token that p gives no probability,
so what the processors ban stays banned (``Judge.off_support`` is the one way out of both).

What a tolerance costs: say a rule tolerates only tokens with p(x) > t. Then, whatever drew the children, no token comes
out with probability above p(x) / t given the text before it, since where it could come by tolerance 1 < p(x) / t.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foretell.core.errors import require
from foretell.core.tree import DrawMode
from foretell.verify.base import Evidence, Verifier, Walk
from foretell.verify.exact import Coupled, has_distribution, target_draws

_BASE = Coupled()


@dataclass(frozen=True)
class Mismatch:
    """The drafts of one step beside the target's draws: what a lossy rule decides on."""

    evidence: Evidence
    drawn: Tensor  # [B, N] int64: the target's draw after each node
    above: Tensor  # [B, N] int64: each node's parent, 0 where it has none
    match: Tensor  # [B, N] bool: children that are their parent's draw
    open: Tensor  # [B, N] bool: nodes that have children, none of which is the draw
    asked: Tensor  # [B, N] bool: the children of open nodes
    chance: Tensor  # [B, N] p of each child in ``asked``, given its parent; 0 elsewhere
    forward: Tensor  # [B, N] int64: the first child that is a node's draw; the node itself where none is

    def of_parent(self, x: Tensor) -> Tensor:
        """[B, N] the entry of x [B, N] at each node's parent."""
        return x.gather(1, self.above)

    def at_open(self, statistic: Callable[[Tensor], Tensor], probs: Tensor) -> Tensor:
        """[B, N] a statistic [R, V] -> [R] of distributions [B, N, V] at the open nodes; undefined elsewhere.

        On the CPU the other rows are never read; leaving them out on an accelerator would take a host read.
        """
        if self.open.device.type != "cpu":
            return statistic(probs.flatten(0, 1)).view_as(self.chance)
        index = self.open.flatten().nonzero()[:, 0]
        out = torch.zeros_like(self.chance)
        out.view(-1)[index] = statistic(probs.flatten(0, 1)[index])
        return out


def compare(evidence: Evidence) -> Mismatch:
    """The drafts beside the target's draws. A node without a distribution is never open: the walk stops there, as under
    Exact."""
    tree, p = evidence.tree, evidence.p
    drawn = target_draws(evidence)
    sound = has_distribution(p, drawn)
    real, above = tree.parent >= 0, tree.parent.clamp(min=0)
    child = real & sound.gather(1, above)
    match = child & (tree.tokens == drawn.gather(1, above))
    has_child, matched = torch.zeros_like(tree.parent), torch.zeros_like(tree.parent)
    has_child.scatter_add_(1, above, child.long())
    matched.scatter_add_(1, above, match.long())
    opened = (has_child > 0) & (matched == 0)
    asked = child & opened.gather(1, above)
    rows = torch.arange(p.shape[0], device=p.device)[:, None]
    chance = torch.where(asked, p[rows, above, tree.tokens.masked_fill(~asked, 0)], 0.0)
    return Mismatch(evidence, drawn, above, match, opened, asked, chance, _first(match, above))


def _first(chosen: Tensor, above: Tensor) -> Tensor:
    """[B, N] int64: each node's first child among the chosen [B, N]; the node itself where none is."""
    num_nodes = chosen.shape[1]
    index = torch.arange(num_nodes, device=chosen.device).expand_as(above)
    first = torch.full_like(above, num_nodes).scatter_reduce_(1, above, index.masked_fill(~chosen, num_nodes), "amin")
    return torch.where(first < num_nodes, first, index)


def _last(forward: Tensor) -> Tensor:
    """[B, N] int64: where steps forward end, from each node; each round doubles their number."""
    for _ in range((forward.shape[1] - 1).bit_length()):
        forward = forward.gather(1, forward)
    return forward


@dataclass(frozen=True)
class Lossy(Verifier):
    """The frame of all lossy rules; a rule says which mismatches it tolerates."""

    exact = False
    reads = frozenset({"noise"})
    draws = DrawMode.COUPLED

    @abstractmethod
    def tolerated(self, mismatch: Mismatch) -> Tensor:
        """[B, N] bool: children that may be accepted though the target drew another token. Read only where
        ``Mismatch.asked``."""

    def possible(self, mismatch: Mismatch) -> Tensor:
        """[B, N] bool: children that the rule may tolerate at all: those that p gives a probability."""
        return mismatch.chance > 0

    def accepted(self, mismatch: Mismatch) -> Tensor:
        """[B, N] bool: the children in ``asked`` that the rule accepts."""
        return mismatch.asked & self.possible(mismatch) & self.tolerated(mismatch)

    def end(self, mismatch: Mismatch) -> Tensor:
        """[B] int64: the node at which the walk ends.

        It follows the target's draws to a node where no child has them, evaluates the rule at that node, and goes on if
        a child is accepted: as many rounds as mismatches on the longest path, and no other row of p is read.
        """
        if mismatch.open.device.type != "cpu":
            return self.end_at_once(mismatch)
        tree, last = mismatch.evidence.tree, _last(mismatch.forward)
        index = torch.arange(tree.num_nodes).expand_as(last)
        at, opened = last[:, :1], mismatch.open  # [B, 1], [B, N]
        while bool(opened.gather(1, at).any()):
            here = opened & (index == at)
            narrow = replace(mismatch, open=here, asked=mismatch.asked & here.gather(1, mismatch.above))
            child = _first(self.accepted(narrow), mismatch.above).gather(1, at)
            opened = opened & ~here
            at = last.gather(1, child)
        return at[:, 0]

    def end_at_once(self, mismatch: Mismatch) -> Tensor:
        """The same without a host read: the rule is evaluated at all nodes."""
        child = _first(self.accepted(mismatch), mismatch.above)
        return _last(torch.where(mismatch.open, child, mismatch.forward))[:, 0]

    def stops(self, evidence: Evidence) -> Walk:
        """One-hot stops; carry is the target's draws [B, N]."""
        mismatch = compare(evidence)
        stops = torch.zeros_like(evidence.p[..., 0])
        return Walk(stops.scatter_(1, self.end(mismatch)[:, None], 1.0), mismatch.drawn)

    def decide(self, evidence: Evidence) -> tuple[Tensor, Tensor]:
        """Follow the accepted children, then the target's draw: deterministic given the noise."""
        mismatch = compare(evidence)
        at = self.end(mismatch)
        return at, mismatch.drawn.gather(1, at[:, None])[:, 0]

    def residual(self, evidence: Evidence, walk: Walk, at: Tensor) -> Tensor:
        """One-hot at the target's draw, as under Exact."""
        return _BASE.residual(evidence, walk, at)


def entropy(probs: Tensor) -> Tensor:
    """[R] entropy in nats of distributions [R, V]."""
    return -(probs * probs.clamp(min=torch.finfo(probs.dtype).tiny).log()).sum(-1)


def largest(probs: Tensor, count: int) -> Tensor:
    """[R, min(count, V)] the largest probabilities of distributions [R, V], descending."""
    return probs.topk(min(count, probs.shape[-1]), dim=-1).values


@dataclass(frozen=True)
class TopN(Lossy):
    """TensorRT-LLM's relaxed acceptance: tolerate x iff it is among the n most probable and p(x) >= max p - delta.

    n = 10 and delta = 0.6 are those of the DeepSeek-R1 article (TensorRT-LLM, tech blog 2), which relaxes only inside
    the model's thinking; this rule relaxes everywhere. Tokens that tie with the n-th count as among them. delta = 1
    leaves the rank alone (AutoJudge's "top-K" baseline, 2504.20039); n = 0 tolerates nothing.
    """

    name = "top_n"
    summary = "lossy: also accept guesses among the target's n most probable, within delta of the best"
    distance = "measured, not bounded (p at least max p - delta for every token that comes by tolerance)"

    n: int = 10
    delta: float = 0.6

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        require(0 <= self.n <= 64, "n", self.n, "between 0 (tolerate nothing) and 64")
        require(0 <= self.delta <= 1, "delta", self.delta, "between 0 and 1")

    def tolerated(self, mismatch: Mismatch) -> Tensor:
        """By a floor on p: the n-th largest, and the largest less delta."""
        if self.n == 0:
            return torch.zeros_like(mismatch.asked)

        def floor(probs: Tensor) -> Tensor:
            best = largest(probs, self.n)
            return torch.maximum(best[:, -1], best[:, 0] - self.delta)

        return mismatch.chance >= mismatch.of_parent(mismatch.at_open(floor, mismatch.evidence.p))


@dataclass(frozen=True)
class Typical(Lossy):
    """Medusa's typical acceptance (2401.10774, section 3.3): tolerate x iff p(x) > min(epsilon, delta exp(-H(p))).

    H in nats, of p after all processors. Medusa adds 1e-5 inside the logarithm, always accepts the first guess, and at
    a refusal emits the most probable token; here nothing is accepted for free and a refusal emits the target's draw.
    epsilon = 1 with delta = inf tolerates nothing.
    """

    name = "typical"
    summary = "lossy: also accept guesses that are probable for the target where it is sure, less so where it is not"
    distance = (
        "a token's probability, given the text before it, at most p / min(epsilon, delta exp(-H)); no uniform bound"
    )

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        require(0 <= self.epsilon <= 1, "epsilon", self.epsilon, "between 0 and 1 (1 with delta=inf: tolerate nothing)")
        require(self.delta >= 0, "delta", self.delta, "at least 0")

    def tolerated(self, mismatch: Mismatch) -> Tensor:
        """By a floor on p that falls with the entropy at the parent."""

        def floor(probs: Tensor) -> Tensor:
            return (self.delta * torch.exp(-entropy(probs))).clamp(max=self.epsilon)

        return mismatch.chance > mismatch.of_parent(mismatch.at_open(floor, mismatch.evidence.p))
