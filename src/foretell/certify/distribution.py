"""Check that a rule emits p: the exact distribution of the next token, by production ``stops`` and ``residual``,
without sampling.

At a visited context with distributions p and q and one guess x: the sum over all x of q(x) [P(accept x) on x + P(stop)
residual]. For an exact rule this is p to the last bits of float32, over the whole vocabulary; a lossy one has a
distance from p.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.certify.recorder import Visit
from foretell.certify.report import DEFECT, Check, Finding, Tally
from foretell.core.tree import DrawnBy, TokenTree
from foretell.verify.base import Evidence, Verifier
from foretell.verify.contract import checked

TOLERANCE = 2e-5
"""Of a probability: float32 distributions, summed over a vocabulary (measured: docs/certify.md)."""
MAX_GUESSES = 1024
"""Most values of x that are summed over; a longer q is cut to its heaviest tokens, which is a distribution like any
other."""
CHUNK = 2**20
"""Most entries of p in one call."""


@dataclass(frozen=True)
class VisitedContext:
    """A visited node that had a child."""

    p: Tensor  # [V]
    q: Tensor | None  # [V]; None where the child was FIXED
    token: int  # the first child's
    where: str


def contexts_of(visits: Sequence[Visit], limit: int) -> list[VisitedContext]:
    """At most ``limit`` nodes with a child, sampled distributions (temperature above 0) only, spread over the visits."""
    found = []
    for visit in visits:
        if visit.text.params.temperature == 0:
            continue
        parents = visit.parent.tolist()
        for node in visit.nodes():
            children = [child for child in range(1, len(parents)) if parents[child] == node]
            if not children:
                continue
            drawn = int(visit.drawn_by[children[0]]) in (DrawnBy.IID, DrawnBy.WITHOUT_REPLACEMENT)
            q = visit.q[node] if drawn and visit.q is not None else None
            token = int(visit.tokens[children[0]])
            found.append(VisitedContext(visit.p[node], q, token, visit.where(node)))
    if len(found) <= limit:
        return found
    return [found[index * len(found) // limit] for index in range(limit)]


def emitted_distribution(verifier: Verifier, p: Tensor, q: Tensor | None, token: int) -> tuple[Tensor, float]:
    """([V] float64 distribution of the next token, mass of q that was cut) of one guess: drawn from q, or FIXED at
    token."""
    vocab_size = len(p)
    if q is None:
        guesses, weights, cut = torch.tensor([token], device=p.device), torch.ones(1, dtype=torch.float64), 0.0
    else:
        heaviest = q.double().sort(descending=True)
        mass = heaviest.values.cumsum(0)
        count = min(int((mass < mass[-1] * (1.0 - 1e-9)).sum()) + 1, MAX_GUESSES)
        guesses, weights = heaviest.indices[:count], heaviest.values[:count]
        cut = 1.0 - float(weights.sum() / mass[-1])
        # Any distribution will do: the guesses are drawn from it, and the verifier gets it as q.
        q = torch.zeros_like(q).scatter(0, guesses, (weights / weights.sum()).to(q.dtype))
        weights = q[guesses].double()
        weights = weights / weights.sum()
    verifier = checked(verifier)
    emitted = torch.zeros(vocab_size, dtype=torch.float64, device=p.device)
    step = max(1, CHUNK // (2 * vocab_size))
    for begin in range(0, len(guesses), step):
        chosen, weight = guesses[begin : begin + step], weights[begin : begin + step].to(p.device)
        rows = len(chosen)
        tokens = torch.stack([torch.zeros_like(chosen), chosen], 1)
        parent = torch.tensor([-1, 0], device=p.device).expand(rows, 2)
        label = DrawnBy.FIXED if q is None else DrawnBy.IID
        drawn_by = torch.tensor([int(DrawnBy.FIXED), int(label)], device=p.device).expand(rows, 2)
        given_q = None if q is None else torch.stack([q, torch.zeros_like(q)]).expand(rows, 2, vocab_size)
        tree = TokenTree(tokens, parent, drawn_by, given_q, max_children=1)
        evidence = Evidence(tree, p.expand(rows, 2, vocab_size))
        walk = verifier.stops(evidence)
        stops = walk.stops.double()
        emitted.index_add_(0, chosen, weight * stops[:, 1])
        left = verifier.residual(evidence, walk, torch.zeros_like(chosen)).double()
        total = left.sum(1, keepdim=True)
        left = torch.where(total > 0, left / torch.where(total > 0, total, 1.0), 0.0)
        emitted += (weight * stops[:, 0]) @ left
    return emitted, cut


def check_distribution(verifier: Verifier, spec: str, contexts: Sequence[VisitedContext]) -> Check:
    """Compare the emitted distribution with p at every context."""
    tally, variations, largest_cut = Tally(), list[float](), 0.0
    for context in contexts:
        emitted, cut = emitted_distribution(verifier, context.p, context.q, context.token)
        difference = (emitted - context.p.double()).nan_to_num(nan=float("inf")).abs()
        gap, variation = float(difference.max()), 0.5 * float(difference.sum())
        variations.append(variation)
        largest_cut = max(largest_cut, cut)
        tally.add(gap, TOLERANCE, context.where)
        if verifier.exact and not gap <= TOLERANCE:
            token = int(difference.argmax())
            words = f"token {token}: emitted {float(emitted[token]):.6f}, p {float(context.p[token]):.6f}"
            figures = {"probability": gap, "total_variation": variation}
            tally.findings.append(Finding(DEFECT, context.where, words, figures))
    told = {"largest_total_variation": max(variations, default=0.0), "largest_mass_cut": largest_cut}
    if variations:
        told["mean_total_variation"] = sum(variations) / len(variations)
    measure = "largest difference of a probability, emitted against p"
    return tally.check("law", spec, "one guess", "laws", measure, told, exact=verifier.exact)
