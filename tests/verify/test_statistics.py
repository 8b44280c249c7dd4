"""Chi-square on a table model through ``draw`` with the real noise: joints of three tokens, and controls that must fail.

Exact enumeration proves the mathematics; this proves that the keyed noise is good enough for it. False-alarm rate of
each test: FALSE_ALARM. Seeds are fixed, so a test that passed once always passes.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from foretell.core.noise import Noise
from foretell.core.tree import DrawnBy, TokenTree
from foretell.draft.base import choose
from foretell.verify import Coupled, Evidence, Exact, Rejection, Verifier, draw
from tests.model.table import TableLM
from tests.verify.enumerate import Case
from tests.verify.test_two_steps import AcceptIsDraft, BonusIsStop

F, I, C = DrawnBy.FIXED, DrawnBy.IID, DrawnBy.COUPLED  # noqa: E741
FALSE_ALARM = 1e-6
ROWS = 60_000
V, HORIZON = 4, 3
TARGET, DRAFT = TableLM(V, seed=5, context=2), TableLM(V, seed=5, context=2, blur=0.7)


def table(model: TableLM) -> Tensor:
    """[V, V, V] distribution after two tokens, float32 as the engine has it."""
    rows = [[model.probs_after([a, b]).tolist() for b in range(V)] for a in range(V)]
    return torch.tensor(rows, dtype=torch.float32)


P, Q = table(TARGET), table(DRAFT)
Lie = Callable[[TokenTree], TokenTree]


def decode(
    case: Case, verifier: Verifier, *, seed: int = 0, make_noise: type[Noise] = Noise, lie: Lie = lambda tree: tree
) -> Tensor:
    """[ROWS, HORIZON] the first tokens after (0, 0) of independent requests: several steps, production code."""
    text = torch.zeros(ROWS, 2 + HORIZON + 2 + len(case.parent), dtype=torch.int64)
    length = torch.full((ROWS,), 2)
    seeds = torch.arange(ROWS) + seed * ROWS  # adjacent seeds, as users have them
    rows = torch.arange(ROWS)
    depth = case.depths
    for _ in range(HORIZON):
        noise = make_noise(seeds, length - 1)
        tokens = [text[rows, length - 1]]
        before = [text[rows, length - 2]]
        q = torch.zeros(ROWS, len(case.parent), V)
        for node in range(1, len(case.parent)):
            parent, how = case.parent[node], case.labels[node]
            probs = Q[before[parent], tokens[parent]]
            tokens.append(choose(probs, how, noise, depth=depth[parent], node=node))
            before.append(tokens[parent])
            if how == I:
                q[:, parent] = probs
        p = torch.stack([P[before[node], tokens[node]] for node in range(len(case.parent))], 1)
        tree = TokenTree(
            torch.stack(tokens, 1),
            torch.tensor(case.parent).expand(ROWS, -1),
            torch.tensor([int(label) for label in case.labels]).expand(ROWS, -1),
            q if I in case.labels else None,
        )
        verdict = draw(verifier, Evidence(lie(tree), p, noise))
        assert bool(verdict.sound.all())
        for k in range(1, int(verdict.count.max())):
            text[rows, length + k - 1] = tree.tokens.gather(1, verdict.path[:, k : k + 1])[:, 0]
        text[rows, length + verdict.count - 1] = verdict.bonus
        length = torch.minimum(length + verdict.count, torch.tensor(2 + HORIZON + 1))
    return text[:, 2 : 2 + HORIZON]


def p_value(tokens: Tensor) -> float:
    """Chi-square of the joint of all positions against the target's; bins expected below 5 are merged."""
    joint = P[0, 0][:, None, None].double() * P[0][:, :, None].double() * P.double()
    joint = joint / joint.sum()
    code = (tokens * V ** torch.arange(HORIZON - 1, -1, -1)).sum(1)
    counts = torch.bincount(code, minlength=V**HORIZON).double()
    expected = joint.flatten() * len(tokens)
    small = expected < 5
    keep = [*counts[~small].tolist(), float(counts[small].sum())]
    wanted = [*expected[~small].tolist(), float(expected[small].sum())]
    if wanted[-1] < 5:
        keep, wanted = [*keep[:-2], keep[-2] + keep[-1]], [*wanted[:-2], wanted[-2] + wanted[-1]]
    assert len(keep) > 20
    return float(stats.chisquare(keep, wanted, sum_check=False).pvalue)


CHAIN, BUSH = (-1, 0, 1), (-1, 0, 0, 1, 1, 2)


@pytest.mark.parametrize("parent", [(-1,), CHAIN, BUSH])
@pytest.mark.parametrize(
    ("verifier", "label"), [(Rejection(), I), (Rejection(), C), (Coupled(), C), (Exact(), F), (Coupled(), I)]
)
def test_joint_law_of_three_tokens(parent: tuple[int, ...], verifier: Verifier, label: DrawnBy) -> None:
    case = Case(parent, (F, *[label] * (len(parent) - 1)))
    assert p_value(decode(case, verifier)) > FALSE_ALARM


def test_coupled_text_is_the_same_for_every_tree() -> None:
    plain = decode(Case((-1,), (F,)), Coupled())
    for parent in (CHAIN, BUSH):
        assert torch.equal(decode(Case(parent, (F, *[C] * (len(parent) - 1))), Coupled()), plain)
    assert not torch.equal(decode(Case((-1,), (F,)), Coupled(), seed=1), plain)


def hotter(tree: TokenTree) -> TokenTree:
    """q at another temperature than the tokens were drawn at (item 6.2)."""
    q = tree.q**0.7
    return replace(tree, q=q / q.sum(-1, keepdim=True).clamp(min=1e-30))


@pytest.mark.parametrize(
    "fault",
    [
        {"lie": hotter},
        {"lie": lambda tree: replace(tree, q=tree.q.flip(-1))},  # another law than the one that drew them
        {"make_noise": AcceptIsDraft},
        {"make_noise": BonusIsStop},
    ],
    ids=["hotter", "flipped", "AcceptIsDraft", "BonusIsStop"],
)
def test_control_a_fault_is_seen(fault: dict[str, Any]) -> None:
    """(A claim that is no law at all is not believed: see ``test_a_q_that_does_not_sum_to_one_is_not_believed``.)"""
    assert p_value(decode(Case(CHAIN, (F, I, I)), Rejection(), **fault)) < FALSE_ALARM


def test_acceptance_rate_is_1_minus_tv() -> None:
    """By sampling what the enumeration proved: the closed form at the first position."""
    noise = Noise(torch.arange(ROWS), torch.full((ROWS,), 7))
    p, q = P[1, 2], Q[1, 2]
    token = choose(q.expand(ROWS, -1), I, noise, depth=0, node=1)
    tree = TokenTree(
        torch.stack([token * 0, token], 1),
        torch.tensor([-1, 0]).expand(ROWS, -1),
        torch.tensor([0, 1]).expand(ROWS, -1),
        torch.stack([q, q * 0]).expand(ROWS, 2, V),
    )
    verdict = draw(Rejection(), Evidence(tree, p.expand(ROWS, 2, V), noise))
    accepted, form = float((verdict.count - 1).double().mean()), float(torch.minimum(p, q).sum())
    assert abs(accepted - form) < 5 * (form * (1 - form) / ROWS) ** 0.5
    assert 0.1 < form < 0.95
