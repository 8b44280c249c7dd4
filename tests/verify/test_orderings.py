"""How much each rule accepts: orderings that are theorems, and the optimum that nothing passes. By exact enumeration."""

import pytest
import torch
from benchmarks.theory import optimum
from torch import Tensor

from foretell.core.tree import DrawnBy
from foretell.verify import VERIFIERS, Block, Evidence, Rejection, Traversal, Verifier
from tests.verify.enumerate import Case, Drafts, Tables, drafts, shapes, tables
from tests.verify.kernels import accepted, joint_error

F, I, W = DrawnBy.FIXED, DrawnBy.IID, DrawnBy.WITHOUT_REPLACEMENT  # noqa: E741
pytestmark = pytest.mark.usefixtures("kernel")
READERS = [rule for rule in VERIFIERS.values() if rule.exact and "noise" not in rule.reads]
ON_TREES = [rule for rule in READERS if not rule.chains_only]


def first_token(verifier: Verifier, out: Drafts) -> float:
    """P(some child of the root is accepted)."""
    return float((out.weight * (1.0 - verifier.stops(Evidence(out.tree, out.p)).stops[:, 0])).sum())


def star(count: int, label: DrawnBy) -> Case:
    return Case((-1, *[0] * count), (F, *[label] * count))


@pytest.mark.parametrize("seed", range(6))
def test_block_accepts_at_least_what_token_rejection_does(seed: int) -> None:
    probs, gains = tables(3, 4, seed), []
    for length in (1, 2, 3):
        out = drafts(Case(tuple(range(-1, length)), (F,) + (I,) * length), probs)
        token, block = accepted(Rejection(), out), accepted(Block(), out)
        gains.append(block - token)
        assert block >= token - 1e-12
        if length == 1:
            assert block == pytest.approx(token, abs=1e-12), "one guess: the same rule"
        assert accepted(Traversal(), out) == pytest.approx(block, abs=1e-12), "traversal of a chain is block"
    assert max(gains) > 0.02


@pytest.mark.parametrize("label", [I, W])
def test_traversal_accepts_at_least_what_top_down_rejection_does(label: DrawnBy) -> None:
    gained = 0
    for seed in range(4):
        distributions = tables(3, 4, seed)
        for parent in shapes(4):
            if label == W and max(parent.count(node) for node in range(len(parent))) > 3:
                continue
            out = drafts(Case(parent, (F,) + (label,) * (len(parent) - 1)), distributions)
            below, above = accepted(Rejection(), out), accepted(Traversal(), out)
            assert above >= below - 1e-12, (seed, parent)
            gained += above > below + 1e-6
    assert gained > 10, "where a subtree is deeper than its root, it usually gains"


def test_the_example_of_the_block_paper() -> None:
    """p = (1/3, 2/3), q = (2/3, 1/3), two guesses: 10/9 tokens by token, 11/9 by block (Sun et al. 2403.10444)."""
    p = torch.tensor([[1 / 3, 2 / 3]], dtype=torch.float64)
    probs = Tables(2, [p.expand(2**d, 2) for d in range(3)], [p.flip(1).expand(2**d, 2) for d in range(3)])
    out = drafts(Case((-1, 0, 1), (F, I, I)), probs)
    assert accepted(Rejection(), out) == pytest.approx(10 / 9, abs=1e-12)
    assert accepted(Block(), out) == pytest.approx(11 / 9, abs=1e-12)
    assert accepted(Traversal(), out) == pytest.approx(11 / 9, abs=1e-12)


@pytest.mark.parametrize("verifier", ON_TREES, ids=[rule.name for rule in ON_TREES])
def test_no_rule_passes_the_optimum(verifier: Verifier) -> None:
    """First-token acceptance of n independent draws and of n without replacement, against Hu et al. 2502.18779."""
    for seed in range(12):
        distributions = tables(4, 2, seed, sparse_p=0.2)
        p, q = distributions.p[0], distributions.q[0]
        for count in (1, 2, 3, 4):
            for label, most in (
                (I, optimum.with_replacement(p, q, count)), (W, optimum.without_replacement(p, q, count).upper),
            ):  # fmt: skip
                got = first_token(verifier, drafts(star(count, label), distributions))
                assert got <= float(most) + 1e-9, (seed, count, label)
                if count == 1:
                    assert got == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-9), "1 - TV, by every rule"
        if verifier.name == "transport":
            for count in (2, 3, 4):
                got = first_token(verifier, drafts(star(count, I), distributions))
                assert got == pytest.approx(float(optimum.with_replacement(p, q, count)), abs=1e-9), "it attains it"


def greedy_construction(p: Tensor, q: Tensor, count: int) -> Drafts:
    """All outcomes of one draw off the top of q [V] with the top FIXED behind it, as ``Draws.GREEDY`` makes them."""
    top = q.argsort(descending=True)[: count - 1]
    rest = q.clone()
    rest[top] = 0.0
    rest = rest / rest.sum()
    drawn = torch.nonzero(rest)[:, 0]
    probs = Tables(len(p), [p[None], p.expand(len(p), -1)], [rest[None], q.expand(len(p), -1)])
    out = drafts(Case((-1, *[0] * count), (F, I, *[F] * (count - 1))), probs)
    tokens = out.tree.tokens.clone()
    tokens[:, 2:] = top
    assert sorted(out.tree.tokens[:, 1].tolist()) == drawn.tolist()
    out.tree.tokens.copy_(tokens)
    return out


def test_the_greedy_construction_attains_its_optimum_by_plain_recursive_rejection() -> None:
    for seed in range(20):
        distributions = tables(5, 1, seed)
        p, q = distributions.p[0][0], distributions.q[0][0]
        for count in (2, 3, 4):
            got = first_token(Rejection(), greedy_construction(p, q, count))
            assert got == pytest.approx(float(optimum.greedy(p[None], q[None], count)), abs=1e-12)


@pytest.mark.parametrize("verifier", READERS, ids=[rule.name for rule in READERS])
def test_equal_laws_accept_all_and_disjoint_ones_nothing(verifier: Verifier) -> None:
    distributions = tables(3, 3, 1)
    same = Tables(3, distributions.p, distributions.p)
    cases = [Case((-1, 0, 1), (F, I, I))]
    if not verifier.chains_only:
        cases += [Case((-1, 0, 0), (F, I, I)), Case((-1, 0, 0, 1), (F, W, W, I))]
    for case in cases:
        stops = verifier.stops(Evidence((out := drafts(case, same)).tree, out.p)).stops
        assert joint_error(verifier, out, same) < 1e-12
        if verifier.name == "greedy_block" and case.parent.count(0) > 1 and I in case.labels[1:3]:
            # The best of several draws does not have the distribution of one: where p = q the rule loses by choosing.
            assert float(stops[:, 0].max()) > 0.1
            continue
        assert float(stops[:, 0].abs().max()) < 1e-12, "the first child is always right"
    split = torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64)
    other = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64)
    apart = Tables(3, [split.expand(3**d, 3) for d in range(3)], [other.expand(3**d, 3) for d in range(3)])
    for case in cases:
        stops = verifier.stops(Evidence((out := drafts(case, apart)).tree, out.p)).stops
        assert joint_error(verifier, out, apart) < 1e-12
        assert float((1.0 - stops[:, 0]).abs().max()) < 1e-12
