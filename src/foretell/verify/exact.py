"""Exact match: the target draws its own token at every node, and the walk follows it as long as a child carries it.

Exact whatever drew the children, since the emitted tokens are the target's own draws. With noise keyed by seed,
position and token id the *text* is a function of target and seed alone: the same for every drafter, tree or none.
``Coupled`` is the same rule with a drafter that draws from the same noise (Daliri, Musco and Suresh, arXiv 2408.07978),
so that both usually draw the same token: acceptance at least (1 - TV) / (1 + TV), and 1 where q = p.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foretell.core.noise import race
from foretell.core.tree import DrawMode, depths, is_chain
from foretell.verify.base import Evidence, Verdict, Verifier, Walk, stops_from_edges


def target_draws(evidence: Evidence) -> Tensor:
    """[B, N] int64: the token that the target itself draws after each node: argmax of p / E, E keyed by depth.

    At temperature 0 p is one-hot and this is the argmax. Ties go to the lowest id.
    """
    noise = evidence.noise
    assert noise is not None, "exact match reads the stream COUPLED"
    tree, p = evidence.tree, evidence.p
    num_nodes = tree.num_nodes
    if is_chain(tree.parent):
        return race(p, noise.coupled_keys(num_nodes))
    depth = depths(tree.parent)  # [B, N], at most the node's index
    return race(p, noise.coupled_keys(num_nodes).gather(1, depth))


def follow_draws(evidence: Evidence) -> tuple[Tensor, Tensor]:
    """(at [B], bonus [B]): where the target's draws lead, and the draw after it. Draws only on the path, for each depth
    all rows that still walk, and reads every draw on the host: for the CPU. Equivalent to ``stops`` and
    ``residual``; the slow twin of ``Deferred.walk``."""
    noise, tree = evidence.noise, evidence.tree
    assert noise is not None, "exact match reads the stream COUPLED"
    parents, tokens = tree.parent.tolist(), tree.tokens.tolist()
    at, bonus = [0] * len(parents), [0] * len(parents)
    going, depth = list(range(len(parents))), 0
    while going:
        drawn = evidence.draws(going, [at[row] for row in going], [noise.coupled_key(row, depth) for row in going])
        walking = []
        for row, (token, possible) in zip(going, drawn, strict=True):
            bonus[row] = token
            above, guesses, here = parents[row], tokens[row], at[row]
            for node in range(here + 1, len(above)):  # of equal siblings the first counts
                if possible and above[node] == here and guesses[node] == token:
                    at[row] = node
                    walking.append(row)
                    break
        going, depth = walking, depth + 1
    return torch.tensor(at), torch.tensor(bonus)


def has_distribution(p: Tensor, drawn: Tensor) -> Tensor:
    """[B, N] bool: nodes whose draw is defined; at a node without a valid distribution the winner is any token."""
    return p.gather(2, drawn[:, :, None])[..., 0] > 0


@dataclass(frozen=True)
class Exact(Verifier):
    """Accept a child iff the target drew its token; drafters propose their argmax."""

    name = "exact"
    exact = True
    reads = frozenset({"noise"})
    draws = DrawMode.FIXED
    summary = "accept iff equal to the target's own draw; greedy at temperature 0; the drafter proposes its argmax"

    invariant: ClassVar[bool] = True
    lazy: ClassVar[bool] = True  # choices are target_draws: on the CPU only the nodes on the path are drawn

    def __init_subclass__(cls) -> None:
        """A subclass with choices, or a walk, of its own is not passed over."""
        super().__init_subclass__()
        if vars(cls).keys() & {"choices", "stops", "decide"}:
            cls.lazy = False

    def choices(self, evidence: Evidence) -> Tensor:
        """[B, N] int64: the token that the target takes after each node."""
        return target_draws(evidence)

    def stops(self, evidence: Evidence) -> Walk:
        """One-hot stops; carry is the target's draws [B, N]."""
        tree = evidence.tree
        drawn = self.choices(evidence)
        above = tree.parent.clamp(min=0)
        match = (
            (tree.parent >= 0)
            & (tree.tokens == drawn.gather(1, above))
            & has_distribution(evidence.p, drawn).gather(1, above)
        )
        if tree.num_nodes > 2:
            # Of equal siblings the first counts.
            same = (tree.parent[:, :, None] == tree.parent[:, None, :]) & match[:, None, :] & match[:, :, None]
            match = match & ~same.tril(-1).any(-1)
        return Walk(stops_from_edges(tree.parent, match.to(evidence.p.dtype)), drawn)

    def walk(self, evidence: Evidence) -> Verdict | None:
        """In one call, where the logits decide every draw; on an accelerator in three launches."""
        if not self.lazy or evidence.deferred is None or evidence.noise is None:
            return None
        walked = evidence.deferred.walk_all(evidence.tree, evidence.noise)
        if walked is not None:
            return Verdict(walked[:, 3:], walked[:, 0], walked[:, 1], walked[:, 2] > 0)
        found = evidence.deferred.walk(evidence.tree, evidence.noise)
        if found is None:
            return None
        paths, bonus = [path for path, _ in found], [token for _, token in found]
        return Verdict.of(paths, bonus, [True] * len(found), evidence.tree.num_nodes)

    def decide(self, evidence: Evidence) -> tuple[Tensor, Tensor]:
        """Follow the target's draws: deterministic given the noise."""
        tree = evidence.tree
        if self.lazy and tree.parent.device.type == "cpu":
            return follow_draws(evidence)
        if tree.num_nodes > 1 and tree.max_children != 1 and not is_chain(tree.parent):
            walk = self.stops(evidence)
            at = walk.stops.argmax(1)
            return at, walk.carry.gather(1, at[:, None])[:, 0]
        drawn = self.choices(evidence)
        if tree.num_nodes == 1:
            return tree.parent[:, 0] + 1, drawn[:, 0]
        # A chain's node follows the one before it; padding, after the last, matches nothing.
        match = (
            (tree.tokens[:, 1:] == drawn[:, :-1])
            & (tree.parent[:, 1:] >= 0)
            & has_distribution(evidence.p, drawn)[:, :-1]
        )
        at = match.long().cumprod(1).sum(1)
        return at, drawn.gather(1, at[:, None])[:, 0]

    def residual(self, evidence: Evidence, walk: Walk, at: Tensor) -> Tensor:
        """One-hot at the target's draw; zero where p itself was not a distribution, so that ``draw`` marks the row
        unsound."""
        assert walk.carry is not None
        token = walk.carry.gather(1, at[:, None])  # [B, 1]
        rows = torch.arange(at.shape[0], device=at.device)
        chance = evidence.p[rows, at].gather(1, token)
        probs = torch.zeros_like(evidence.p[:, 0])
        return probs.scatter_(1, token, (chance > 0).to(probs.dtype))


@dataclass(frozen=True)
class Coupled(Exact):
    """``Exact`` with drafters that draw from the target's own noise: the default."""

    name = "coupled"
    draws = DrawMode.COUPLED
    summary = "exact match under noise shared by drafter and target: the same text with any drafter, any tree or none"
