"""Random ragged batches of trees with distributions, noise and hidden states: for rules that read noise and have a slow
twin."""

import random
from dataclasses import replace

import torch
from torch import Tensor

from foretell.core.noise import Noise
from foretell.core.tree import DrawnBy, TokenTree
from foretell.verify import Evidence, Verifier
from foretell.verify.exact import target_draws

HIDDEN = 5


def random_parent(choose: random.Random, num_nodes: int) -> list[int]:
    """Any tree: every node hangs under one before it."""
    return [-1] + [choose.randrange(node) for node in range(1, num_nodes)]


def random_labels(choose: random.Random, parent: list[int], kinds: tuple[DrawnBy, ...]) -> list[DrawnBy]:
    """Each node's distribution, drawn siblings before FIXED ones."""
    labels = [DrawnBy.FIXED] * len(parent)
    for node in range(len(parent)):
        children = [i for i in range(1, len(parent)) if parent[i] == node]
        mine = sorted((choose.choice(kinds) for _ in children), key=lambda label: label == DrawnBy.FIXED)
        for child, probs in zip(children, mine, strict=True):
            labels[child] = probs
    return labels


def random_evidence(
    seed: int,
    *,
    num_rows: int = 200,
    max_nodes: int = 8,
    vocab_size: int = 4,
    sharp: float = 1.5,
    close: float = 0.7,
    kinds: tuple[DrawnBy, ...] = tuple(DrawnBy),
    dtype: torch.dtype = torch.float64,
    padding: int = 1,
) -> Evidence:
    """num_rows trees of 1 to max_nodes nodes, padded. p has zeros; q is p blurred, zero where nothing was drawn; every
    other token is the target's draw, so that walks go deep."""
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    width = max_nodes + padding
    parents, distributions = [], []
    for _ in range(num_rows):
        parent = random_parent(choose, choose.randint(1, max_nodes))
        label = random_labels(choose, parent, kinds)
        pad = width - len(parent)
        parents.append(parent + [-1] * pad)
        distributions.append([int(x) for x in label] + [0] * pad)
    shape = (num_rows, width, vocab_size)
    logits = sharp * torch.randn(shape, generator=generator, dtype=torch.float64)
    cut = torch.rand(shape, generator=generator) < 0.15
    cut.scatter_(2, logits.argmax(-1, keepdim=True), False)
    p = torch.softmax(logits.masked_fill(cut, -torch.inf), -1)
    q = torch.softmax(logits + close * torch.randn(shape, generator=generator, dtype=torch.float64), -1)
    parent_of, distribution_of = torch.tensor(parents), torch.tensor(distributions)
    drawn = ((distribution_of == DrawnBy.IID) | (distribution_of == DrawnBy.WITHOUT_REPLACEMENT)).long()
    has = torch.zeros_like(parent_of).scatter_add_(1, parent_of.clamp(min=0), drawn) > 0
    q = q * has[..., None]
    tokens = torch.randint(0, vocab_size, parent_of.shape, generator=generator)
    tree = TokenTree(tokens, parent_of, distribution_of, q.to(dtype) if bool(has.any()) else None)
    noise = Noise(torch.arange(num_rows) + 1000 * seed, torch.full((num_rows,), 7))
    drawn = target_draws(Evidence(tree, p.to(dtype), noise)).gather(1, parent_of.clamp(min=0))
    near = torch.rand(tokens.shape, generator=generator) < 0.5
    tree = replace(tree, tokens=torch.where(near & (parent_of >= 0), drawn, tokens))
    tree.check()
    taps = torch.randn(num_rows, width, HIDDEN, generator=generator)
    return Evidence(tree, p.to(dtype), noise, taps)


def row_of(evidence: Evidence, row: int, num_nodes: int | None = None) -> Evidence:
    """One row alone, cut to num_nodes."""
    tree, noise, taps = evidence.tree, evidence.noise, evidence.taps
    one = slice(row, row + 1), slice(0, num_nodes)
    alone = replace(
        tree,
        tokens=tree.tokens[one],
        parent=tree.parent[one],
        drawn_by=tree.drawn_by[one],
        q=None if tree.q is None else tree.q[one],
    )
    return Evidence(alone, evidence.p[one], Noise(noise.seeds[one[0]], noise.positions[one[0]]), taps[one])


def tensors_of(evidence: Evidence) -> list[Tensor]:
    """All that a verifier must not change."""
    tree, noise = evidence.tree, evidence.noise
    given = [tree.tokens, tree.parent, tree.drawn_by, tree.q, evidence.p, evidence.taps, noise.seeds, noise.positions]
    return [x for x in given if x is not None]


def decided(rule: Verifier, evidence: Evidence) -> tuple[Tensor, Tensor]:
    """settle, after seeing that stops and residual say the same."""
    result = rule.decide(evidence)
    assert result is not None
    at, bonus = result
    walk = rule.stops(evidence)
    assert bool(((walk.stops == 0) | (walk.stops == 1)).all())
    assert bool((walk.stops.sum(1) == 1).all())
    assert torch.equal(walk.stops.argmax(1), at), "settle agrees with stops"
    left = rule.residual(evidence, walk, at)
    assert torch.equal(left, torch.nn.functional.one_hot(bonus, left.shape[1]).to(left.dtype)), "and with leftover"
    return at, bonus
