"""Several drafts of one node judged together: the frame, and K-SEQ (Sun et al., SpecTr, 2310.15141).

The first children of a node that were drawn IID from its q (its *run*) are judged by one joint rule. The rule says with
which probability the walk goes to each of them, and which distribution the next token has once all of them were
rejected. That distribution must not depend on the drafts: only then may the children after the run (FIXED, COUPLED,
WITHOUT_REPLACEMENT or later IID children) be tried against it by recursive rejection, as in ``Rejection``. A run of one
is plain rejection.

Shapes: R nodes with a run of two or more, C children, V vocabulary. What a rule works out about two distributions (its
*fit*) is small and float64; probs [R, V] keep the dtype they are given.
"""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.core.tree import DrawMode, DrawnBy, is_chain
from foretell.kernels.residual import is_distribution
from foretell.verify.base import Evidence, RatioVerifier, Walk, row_at, stops_from_edges
from foretell.verify.rejection import Rejection, by_node, children_of, try_children

PLAIN = Rejection()

MAX_ELEMENTS, MAX_ON_DEVICE = 1 << 21, 1 << 24
"""Of probs [R, V] that a rule works on at once, on the CPU and on an accelerator: it makes a dozen temporaries of that
size."""

TINY = 1e-37
"""Smaller than any probability that matters, and not zero in float32."""

Fit = tuple[Tensor, ...]
"""What a rule has worked out about p, q and the run's length: tensors with R rows each."""


@dataclass(frozen=True)
class Runs:
    """What ``stops`` leaves for ``residual``."""

    table: Tensor  # [B, N, C] children of each node, -1 after the last
    length: Tensor  # [B, N] int64 length of each node's run
    place: Tensor  # [B, N] int64 a node's row in fit; undefined where length < 2
    fit: Fit


class MultiDraft(RatioVerifier):
    """The frame. A rule is three pure functions: ``fit``, ``choose`` and ``rest``."""

    draws = DrawMode.IID
    counts_children = frozenset({DrawMode.IID})

    @abstractmethod
    def fit(self, p: Tensor, q: Tensor, count: Tensor) -> Fit:
        """What the rule reads of p, q [R, V] for runs of count [R]. All finite; q sums to about 1."""

    @abstractmethod
    def choose(self, fit: Fit, p: Tensor, q: Tensor, tokens: Tensor, count: Tensor) -> Tensor:
        """[R, C] float64: the probability that the walk goes to each of the run's drafts tokens[r, :count[r]], which
        were drawn from q independently; columns after the run are undefined."""

    @abstractmethod
    def rest(self, fit: Fit, p: Tensor, q: Tensor, count: Tensor) -> Tensor:
        """[R, V] the distribution (unnormalised: its sum is the probability) of the next token where the run was
        rejected."""

    def acceptance(self, p: Tensor, q: Tensor, num_drafts: int) -> Tensor:
        """[R] float64: the probability that one of num_drafts drafts from q [R, V] is accepted under p [R, V]."""
        count = torch.full(p.shape[:1], num_drafts, device=p.device)
        return 1.0 - self.rest(self.fit(p, q, count), p, q, count).double().sum(-1)

    def stops(self, evidence: Evidence) -> Walk:
        """Stops of the walk. On the CPU the distributions of nodes that have a run are worked on alone; where none has one,
        all is left to ``Rejection``. On an accelerator that would be a read by the host: all nodes are worked on."""
        tree, p = evidence.tree, evidence.p
        if tree.q is None or tree.max_children == 1 or is_chain(tree.parent):
            return PLAIN.stops(evidence)
        table = children_of(tree)
        num_rows, _, width = table.shape
        flat, tokens, labels, real = by_node(tree, table)
        p, q = p.flatten(0, 1), tree.q.flatten(0, 1)
        run = run_of(q, tokens, labels, real)  # [B * N]
        rows = rows_of(run > 1)
        if not len(rows):
            return PLAIN.stops(evidence)
        edges = torch.zeros(tokens.shape, dtype=p.dtype, device=p.device)
        alone = rows_of(real[:, 0] & (run < 2))
        if len(alone):
            wide = int(real[alone].sum(-1).max()) if p.is_cpu else width
            part = (x[alone, :wide] for x in (tokens, labels, real))
            edges[alone, :wide] = try_children(p[alone], q[alone], *part)[0]
        place = torch.zeros_like(run)
        place[rows] = torch.arange(len(rows), device=p.device)
        fits = []
        at_once = max(1, (MAX_ELEMENTS if p.is_cpu else MAX_ON_DEVICE) // max(p.shape[1], 64 * width))
        for start in range(0, len(rows), at_once):
            some = rows[start : start + at_once]
            p_here, q_here, count = p[some], q[some], run[some]
            if not p.is_cpu:  # what takes a run's place where there is none is as sound as a run
                ran = (count > 1)[:, None]
                p_here, q_here = (torch.where(ran, x, 1.0 / x.shape[1]) for x in (p_here, q_here))
                count = count.clamp(min=2)
            found, fit = self.run_edges(p_here, q_here, tokens[some], labels[some], real[some], count)
            edges[some] = found if p.is_cpu else torch.where(ran, found, edges[some])
            fits.append(fit)
        together = tuple(map(torch.cat, zip(*fits, strict=True)))
        out = torch.zeros_like(evidence.p[..., 0])  # [B, N]
        out.scatter_add_(1, flat, (edges * real).reshape(num_rows, -1))
        runs = Runs(table, run.reshape(num_rows, -1), place.reshape(num_rows, -1), together)
        return Walk(stops_from_edges(tree.parent, out), runs)

    def run_edges(
        self, p: Tensor, q: Tensor, tokens: Tensor, probs: Tensor, real: Tensor, count: Tensor
    ) -> tuple[Tensor, Fit]:
        """Edges [R, C] of all children of nodes with runs of count [R] >= 2, and the rule's fit."""
        sound = torch.isfinite(p.sum(-1))
        if not p.is_cpu or not bool(sound.all()):
            p = torch.where(sound[:, None], p, q)
        fit = self.fit(p, q, count)
        inside = torch.arange(tokens.shape[1], device=p.device) < count[:, None]
        chances = self.choose(fit, p, q, tokens, count).masked_fill(~(inside & sound[:, None]), 0.0)
        edges = chances.to(p.dtype)
        behind = real & sound[:, None]
        more = rows_of(behind.sum(-1) > count)
        if len(more):
            rest = self.rest(tuple(x[more] for x in fit), p[more], q[more], count[more])
            left = (1.0 - chances[more].sum(-1)).clamp(min=0.0).to(p.dtype)
            children = tokens[more], probs[more], behind[more]
            edges[more] += try_children(rest, q[more], *children, start=count[more], left=left)[0]
        return edges, fit

    def residual(self, evidence: Evidence, walk: Walk, at: Tensor) -> Tensor:
        """What is left of p at the node where the walk stopped; p itself at a leaf, or where rounding left nothing."""
        tree, runs = evidence.tree, walk.carry
        if not isinstance(runs, Runs):
            return PLAIN.residual(evidence, walk, at)
        assert tree.q is not None
        children = row_at(runs.table, at)  # [B, C]
        p, q = row_at(evidence.p, at), row_at(tree.q, at)  # [B, V]
        length, place = runs.length.gather(1, at[:, None])[:, 0], runs.place.gather(1, at[:, None])[:, 0]
        rest, ran = p, (length > 1) & torch.isfinite(p.sum(-1))
        rows = rows_of(ran)
        if len(rows):
            fit = tuple(x[place[rows]] for x in runs.fit)
            sound = p if p.is_cpu else torch.where(ran[:, None], p, 1.0 / p.shape[1])
            after = self.rest(fit, sound[rows], q[rows], length[rows])
            rest = p.index_copy(0, rows, after) if p.is_cpu else torch.where(ran[:, None], after, p)
        real, start = children >= 0, torch.where(length > 1, length, 0)
        if not p.is_cpu or bool((real.sum(-1) > start).any()):
            safe = children.clamp(min=0)
            tokens, labels = tree.tokens.gather(1, safe), tree.drawn_by.gather(1, safe)
            rest = try_children(rest, q, tokens, labels, real, start=start, asks_rest=True)[1]
        return torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)


def rows_of(mask: Tensor) -> Tensor:
    """[R'] int64: where mask [R] is True; on an accelerator all R, since which they are would be a read by the host."""
    return mask.nonzero()[:, 0] if mask.is_cpu else torch.arange(len(mask), device=mask.device)


def run_of(q: Tensor, tokens: Tensor, labels: Tensor, real: Tensor) -> Tensor:
    """[R] int64: how many of the first children were drawn IID from q [R, V] and consistent with q. Children of an
    invalid q, or with a token that it excludes, count as FIXED and end the run."""
    iid = real & (labels == DrawnBy.IID)
    drawn = iid & (q.gather(1, tokens) > 0)
    ran = drawn[:, :2].all(-1)
    rows = rows_of(ran)  # the sum over V is only for these
    drawn[rows] &= (is_distribution(q[rows]) | ~ran[rows])[:, None]
    return drawn.long().cumprod(1).sum(1)


ROUNDING = 1e-14
"""Of sums over V in float64: without it, K-SEQ would reject now and then where p = q."""

NUM_FACTORS = 128
"""Candidates of K-SEQ's factor, from 1 to n in equal steps."""

NUM_EVALUATIONS = 3
"""Of a sum over V, by which the factor is found between two candidates; its acceptance was within 2e-4 of the best
factor's wherever it was measured."""


@dataclass(frozen=True)
class KSeq(MultiDraft):
    """Accept the first draft x that passes min(1, p(x) / (rho q(x))), rho in [1, n] as small as exactness allows."""

    name = "k_seq"
    summary = "several drafts, each accepted with min(1, p / (rho q)), by one factor rho for all (SpecTr)"

    def fit(self, p: Tensor, q: Tensor, count: Tensor) -> Fit:
        """(rho, gain): gain is P(one of n drafts passes) / P(one draft passes).

        A draft passes with beta(rho) = sum of min(q, p / rho). The rest is a distribution iff 1 - (1 - beta)^n <= rho
        beta: true at rho = n and from the smallest solution on. That lies between low and high throughout; high is what
        counts, and there the condition holds, so that the distribution is exact however few evaluations there are.
        """
        n = count.double()

        def slack(rho: Tensor, beta: Tensor, n: Tensor) -> Tensor:
            return rho * beta - any_passes(beta, n)

        # rho beta = sum of min(rho q, p) at all candidates at once, from p and q by the first candidate not below p / q.
        per_step = (n - 1.0).clamp(min=TINY)[:, None] / (NUM_FACTORS - 1)
        first = ((p / q.clamp(min=TINY) - 1.0) / per_step.to(p.dtype)).ceil_().clamp_(0, NUM_FACTORS).long()
        zero = torch.zeros(p.shape[0], NUM_FACTORS + 1, dtype=torch.float64, device=p.device)
        p_below = zero.scatter_add(1, first, p.double()).cumsum(1)[:, :-1]
        q_above = zero.scatter_add_(1, first, q.double()).flip(1).cumsum(1).flip(1)[:, 1:]
        rhos = 1.0 + per_step * torch.arange(NUM_FACTORS, device=p.device)  # [R, F]
        betas = (p_below / rhos + q_above).clamp(max=1.0)
        slacks = slack(rhos, betas, n[:, None])
        at = (slacks < -ROUNDING).sum(1, keepdim=True).clamp(max=NUM_FACTORS - 1)
        below = (at - 1).clamp(min=0)
        low, high, tight = (x.gather(1, i)[:, 0] for x, i in ((rhos, below), (rhos, at), (betas, at)))
        slack_low, slack_high = (slacks.gather(1, i)[:, 0] for i in (below, at))
        for _ in range(NUM_EVALUATIONS):
            # A little above where the chord is zero, so that mostly high is what moves.
            chord = high - 0.9 * (high - low) * slack_high / (slack_high - slack_low).clamp(min=TINY)
            rho = torch.maximum(chord, low)
            beta = torch.minimum(q, p / rho[:, None].to(p.dtype)).sum(-1).double().clamp(max=1.0)
            here = slack(rho, beta, n)
            holds = here >= 0.0
            low, high = torch.where(holds, low, rho), torch.where(holds, rho, high)
            slack_low, slack_high = torch.where(holds, slack_low, here), torch.where(holds, here, slack_high)
            tight = torch.where(holds, beta, tight)
        return high, any_passes(tight, n) / tight.clamp(min=TINY)

    def choose(self, fit: Fit, p: Tensor, q: Tensor, tokens: Tensor, count: Tensor) -> Tensor:
        """The first that passes."""
        rho = fit[0][:, None]
        inside = torch.arange(tokens.shape[1], device=p.device) < count[:, None]
        drafted = torch.where(inside, q.gather(1, tokens).double(), 1.0)
        ratio = p.gather(1, tokens).double() / (rho * drafted)
        passed = torch.where(inside, ratio.clamp(max=1.0), 0.0)
        failed = (1.0 - passed).cumprod(1)
        return passed * torch.cat([torch.ones_like(failed[:, :1]), failed[:, :-1]], 1)

    def rest(self, fit: Fit, p: Tensor, q: Tensor, count: Tensor) -> Tensor:
        """P without the part covered by the run."""
        rho, gain = (x[:, None].to(p.dtype) for x in fit)
        return (p - torch.minimum(q, p / rho) * gain).clamp(min=0.0)


def any_passes(beta: Tensor, n: Tensor) -> Tensor:
    """1 - (1 - beta)^n."""
    return 1.0 - (1.0 - beta).pow(n)
