"""Gumbel list sampling: a slow twin, the distribution p at every number of children, agreement above the list bound,
controls.

False-alarm rate of each chi-square that passes: 1e-6. Seeds are fixed.
"""

import math
from dataclasses import replace

import pytest
import torch
from scipy import stats
from torch import Tensor

from foretell.core.noise import Noise, exponentials, exponentials_at, race
from foretell.core.tree import DrawMode, DrawnBy, TokenTree, chain_tree, depths, pad_tree
from foretell.verify import Coupled, Evidence, draw
from foretell.verify.gumbel_list import GumbelList, list_draws, num_children
from tests.verify.random_trees import random_evidence, row_of, tensors_of
from tests.verify.test_statistics import BUSH, FALSE_ALARM, HORIZON, P, Q, p_value

RULE = GumbelList()
ROWS = 30_000


def fan(num_children: int, tokens: Tensor | None = None, num_rows: int = ROWS) -> TokenTree:
    """A root with children; tokens [num_rows, num_children], all 0 by default."""
    tokens = torch.zeros(num_rows, num_children, dtype=torch.int64) if tokens is None else tokens
    return TokenTree(
        torch.nn.functional.pad(tokens, (1, 0)),
        torch.tensor([-1] + [0] * num_children).expand(num_rows, -1),
        torch.tensor([int(DrawnBy.FIXED)] + [int(DrawnBy.COUPLED)] * num_children).expand(num_rows, -1),
    )


def noise_of(num_rows: int = ROWS, position: int = 7) -> Noise:
    return Noise(torch.arange(num_rows), torch.full((num_rows,), position))


def list_children(q: Tensor, noise: Noise, depth: int, count: int) -> Tensor:
    """[B, count] drafts of distribution q [B, V], each from its own noise: what DrawMode.LIST asks for."""
    keys = noise.list_keys(depth, count)
    return torch.stack([race(q, keys[:, k]) for k in range(count)], 1)


def chi_square(tokens: Tensor, probs: Tensor) -> float:
    counts = torch.bincount(tokens, minlength=len(probs)).double()
    assert not bool(counts[probs == 0].any())
    expected = probs.double()[probs > 0]
    return float(stats.chisquare(counts[probs > 0], expected / expected.sum() * len(tokens), sum_check=False).pvalue)


PROBS = torch.tensor([0.4, 0.05, 0.0, 0.25, 0.2, 0.1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_are_those_of_the_slow_twin(dtype: torch.dtype) -> None:
    evidence = random_evidence(0, num_rows=120, max_nodes=9, dtype=dtype)
    tree, noise = evidence.tree, evidence.noise
    assert noise is not None
    depth, count = depths(tree.parent), num_children(tree)
    drawn = list_draws(evidence)
    assert int(count.max()) > 3
    differ = 0
    for row in range(120):
        for node in range(int(tree.valid[row].sum())):
            keys = noise.list_keys(int(depth[row, node]), max(int(count[row, node]), 1))[row]
            best = exponentials(keys, evidence.p.shape[-1]).amin(0)
            assert int(drawn[row, node]) == int((evidence.p[row, node] / best).argmax())
            differ += int(drawn[row, node]) != int(Coupled().choices(evidence)[row, node]) if row < 20 else 0
    assert differ > 0


def test_one_exponential_is_that_of_the_whole_row() -> None:
    keys, tokens = noise_of(50).list_keys(0, 3), torch.arange(150).view(50, 3) % 11
    assert torch.equal(exponentials_at(keys, tokens), exponentials(keys, 11).gather(2, tokens[..., None])[..., 0])
    noise, depth = noise_of(50), torch.arange(4).expand(50, -1)
    for k in range(3):
        wanted = torch.stack([noise.list_keys(d, 3)[:, k] for d in range(4)], 1)
        assert torch.equal(noise.list_keys_at(depth, k), wanted)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_law_of_the_draw_is_p(count: int) -> None:
    evidence = Evidence(fan(count), PROBS.expand(ROWS, count + 1, -1), noise_of())
    drawn = list_draws(evidence)
    assert chi_square(drawn[:, 0], PROBS) > FALSE_ALARM
    if count > 1:  # the leaves read one noise
        assert not torch.equal(drawn[:, 0], drawn[:, 1])
        assert torch.equal(drawn[:, 1], Coupled().choices(evidence)[:, 1])


def test_control_children_dropped_by_their_token() -> None:
    """The second child drawn only if the first is token 0: C then depends on the noise, and the draw is biased."""
    noise = noise_of()
    first = list_children(PROBS.expand(ROWS, -1), noise, 0, 1)
    tree = fan(2)
    tree = replace(tree, parent=torch.where((first == 0) | (torch.arange(3) < 2), tree.parent, -1))
    tree = replace(tree, drawn_by=torch.where(tree.valid, tree.drawn_by, 0))
    tree.check()
    assert chi_square(list_draws(Evidence(tree, PROBS.expand(ROWS, 3, -1), noise))[:, 0], PROBS) < FALSE_ALARM


def test_control_the_largest_minimum() -> None:
    """argmax of max_k E^(k) in place of the minimum is no draw from p."""
    e = exponentials(noise_of().list_keys(0, 2), len(PROBS)).amax(1)
    assert chi_square((PROBS / e).argmax(-1), PROBS) < FALSE_ALARM


def list_bound(p: Tensor, q: Tensor, count: int) -> float:
    """2506.05632: sum_j C / (sum_i max(q_i / q_j, p_i / p_j) + (C - 1) / p_j)."""
    total = 0.0
    for a, b in zip(p.double().tolist(), q.double().tolist(), strict=True):
        if a > 0 and b > 0:
            total += count / (float(torch.maximum(q.double() / b, p.double() / a).sum()) + (count - 1) / a)
    return total


@pytest.mark.parametrize("count", [1, 2, 4])
def test_agreement_is_at_least_the_list_bound(count: int) -> None:
    q = torch.tensor([0.1, 0.3, 0.1, 0.1, 0.1, 0.3])
    noise = noise_of()
    tree = fan(count, list_children(q.expand(ROWS, -1), noise, 0, count))
    result = RULE.decide(Evidence(tree, PROBS.expand(ROWS, count + 1, -1), noise))
    rate, bound = float((result[0] > 0).double().mean()), list_bound(PROBS, q, count)
    sigma = math.sqrt(bound * (1 - bound) / ROWS)
    assert 0.3 < bound < 0.95
    assert rate > bound - 5 * sigma
    if count == 1:
        assert rate < bound + 5 * sigma, "an equality for one draft"
    else:
        other = fan(count, list_children(q.expand(ROWS, -1), noise_of(position=8), 0, count))
        chance = float((RULE.decide(Evidence(other, PROBS.expand(ROWS, count + 1, -1), noise))[0] > 0).double().mean())
        assert chance < bound - 5 * sigma, "the control: drafts from other noise agree by chance alone"


def test_noises_are_independent_over_children_and_positions() -> None:
    """Winners of two noises of one position, and of one noise at two positions: contingency against the product."""
    noise, probs = noise_of(), PROBS.expand(ROWS, -1)
    here, there = list_children(probs, noise, 0, 3), list_children(probs, noise, 1, 3)
    pairs = [(here[:, 0], here[:, 1]), (here[:, 1], here[:, 2]), (here[:, 1], there[:, 1]), (here[:, 0], there[:, 1])]
    for a, b in pairs:
        joint = torch.outer(PROBS, PROBS).flatten()
        assert chi_square(a * len(PROBS) + b, joint) > FALSE_ALARM
    assert torch.equal(list_children(probs, Noise(noise.seeds, noise.positions + 1), 0, 3), there), "keyed by position"
    assert chi_square(here[:, 0] * len(PROBS) + here[:, 0], torch.outer(PROBS, PROBS).flatten()) == 0.0, "the control"


def test_one_child_is_coupled_token_for_token() -> None:
    evidence = random_evidence(1, num_rows=300)
    tree = chain_tree(evidence.tree.tokens, 1 + torch.arange(300) % evidence.tree.num_nodes)
    for given in (tree, replace(tree, max_children=None)):
        chains = replace(evidence, tree=given)
        for mine, base in zip(RULE.decide(chains), Coupled().decide(chains), strict=True):
            assert torch.equal(mine, base)


def decode(parent: tuple[int, ...], seed: int = 0) -> Tensor:
    """[ROWS, HORIZON] tokens after (0, 0) of independent requests: several steps on trees drawn as DrawMode.LIST asks."""
    num_nodes, rows = len(parent), torch.arange(ROWS)
    text = torch.zeros(ROWS, 2 + HORIZON + 2 + num_nodes, dtype=torch.int64)
    length, seeds = torch.full((ROWS,), 2), torch.arange(ROWS) + seed * ROWS
    parents = torch.tensor(parent).expand(ROWS, -1)
    depth = depths(parents[:1])[0].tolist()
    labels = torch.tensor([0] + [int(DrawnBy.COUPLED)] * (num_nodes - 1)).expand(ROWS, -1)
    for _ in range(HORIZON):
        noise = Noise(seeds, length - 1)
        tokens, before = [text[rows, length - 1]], [text[rows, length - 2]]
        for node in range(1, num_nodes):
            above = parent[node]
            rank = sum(parent[i] == above for i in range(1, node))
            probs = Q[before[above], tokens[above]]
            before.append(tokens[above])
            tokens.append(race(probs, noise.list_keys(depth[above], rank + 1)[:, rank]))
        p = torch.stack([P[before[node], tokens[node]] for node in range(num_nodes)], 1)
        tree = TokenTree(torch.stack(tokens, 1), parents, labels)
        verdict = draw(RULE, Evidence(tree, p, noise))
        assert bool(verdict.sound.all())
        for k in range(1, int(verdict.count.max())):
            text[rows, length + k - 1] = tree.tokens.gather(1, verdict.path[:, k : k + 1])[:, 0]
        text[rows, length + verdict.count - 1] = verdict.bonus
        length = torch.minimum(length + verdict.count, torch.tensor(2 + HORIZON + 1))
    return text[:, 2 : 2 + HORIZON]


@pytest.mark.parametrize("parent", [(-1, 0, 0, 0, 1, 2, 3), BUSH])
def test_joint_law_of_three_tokens_through_several_steps(parent: tuple[int, ...]) -> None:
    """Three chains from the root, and a bush."""
    assert p_value(decode(parent)) > FALSE_ALARM


def test_the_text_depends_on_the_tree() -> None:
    """Exact, but not drafter-invariant: what the docstring warns of."""
    evidence = Evidence(fan(2, num_rows=200), PROBS.expand(200, 3, -1), noise_of(200))
    assert not torch.equal(RULE.decide(evidence)[1], Coupled().decide(evidence)[1])
    assert RULE.exact is True
    assert RULE.draws == DrawMode.LIST
    assert RULE.counts_children == {DrawMode.LIST, DrawMode.COUPLED}


def test_rows_alone_padding_and_inputs() -> None:
    evidence = random_evidence(6, num_rows=80)
    before = [x.clone() for x in tensors_of(evidence)]
    at, bonus = RULE.decide(evidence)
    walk = RULE.stops(evidence)
    assert torch.equal(walk.stops.argmax(1), at)
    left = RULE.residual(evidence, walk, at)
    assert torch.equal(left, torch.nn.functional.one_hot(bonus, left.shape[1]).to(left.dtype))
    assert all(torch.equal(x, y) for x, y in zip(before, tensors_of(evidence), strict=True))
    for row in range(80):
        alone = row_of(evidence, row, int(evidence.tree.valid[row].sum()))
        one = RULE.decide(alone)
        assert (int(one[0]), int(one[1])) == (int(at[row]), int(bonus[row]))
    wide = evidence.tree.num_nodes + 5
    p = torch.nn.functional.pad(evidence.p, (0, 0, 0, 5), value=0.25)
    padded = RULE.decide(Evidence(pad_tree(replace(evidence.tree, q=None), wide), p, evidence.noise))
    assert torch.equal(padded[0], at)
    assert torch.equal(padded[1], bonus)


def test_equal_siblings_have_a_noise_each_and_the_first_counts() -> None:
    evidence = Evidence(fan(2, torch.full((500, 2), 3), num_rows=500), PROBS.expand(500, 3, -1), noise_of(500))
    at, _ = RULE.decide(evidence)
    assert set(at.tolist()) == {0, 1}
    assert torch.equal(at == 1, list_draws(evidence)[:, 0] == 3)


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("broken", [math.nan, 0.0])
def test_rows_that_are_no_law_stop_the_walk_and_are_unsound(where: int, broken: float) -> None:
    evidence = random_evidence(7)
    p = evidence.p.clone()
    p[:, where] = broken
    verdict = draw(RULE, replace(evidence, p=p))
    at = verdict.path.gather(1, verdict.count[:, None] - 1)[:, 0]
    assert torch.equal(verdict.sound, at != where)
    assert bool((at == where).any())
    impossible = p.gather(2, list_draws(replace(evidence, p=p))[..., None])[..., 0] == 0
    sound = evidence.tree.valid & (torch.arange(p.shape[1]) != where)
    assert not bool(impossible[sound].any()), "a token without probability is never drawn"
