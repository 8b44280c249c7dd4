"""The distributions that lossy rules emit, exactly and by chi-square: their bounds hold, their defaults are not exact.

Enumerated are all drafts times all draws of the target; chi-square goes through several steps
with the real noise.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foretell.core.noise import Noise
from foretell.core.tree import DrawnBy
from foretell.verify import Evidence, Verifier
from foretell.verify.lossy import base as lossy
from foretell.verify.lossy.base import TopN, Typical
from tests.verify import enumerate as exact, test_statistics as statistics
from tests.verify.enumerate import Case, Drafts, Tables
from tests.verify.test_exact import given_noise

F, I, W, C = DrawnBy.FIXED, DrawnBy.IID, DrawnBy.WITHOUT_REPLACEMENT, DrawnBy.COUPLED  # noqa: E741
__all__ = ["given_noise"]  # a fixture

# Laws, exactly: all drafts times all draws of the target, which are independent of drafts that do not read COUPLED.


def all_draws(out: Drafts, monkeypatch: pytest.MonkeyPatch) -> tuple[Drafts, Evidence]:
    """Every row once for each combination of draws at its nodes, weighted; verifiers are handed these draws."""
    num_rows, num_nodes, size = out.p.shape
    index = torch.cartesian_prod(*[torch.arange(size)] * num_nodes).view(-1, num_nodes)
    row = torch.arange(num_rows).repeat_interleave(len(index))
    drawn = index.repeat(num_rows, 1)
    weight = out.weight[row] * out.p[row].gather(2, drawn[..., None])[..., 0].prod(1)
    row, drawn, weight = row[weight > 0], drawn[weight > 0], weight[weight > 0]
    tree = out.tree
    tree = replace(
        tree,
        tokens=tree.tokens[row],
        parent=tree.parent[row],
        drawn_by=tree.drawn_by[row],
        q=None if tree.q is None else tree.q[row],
    )
    monkeypatch.setattr(lossy, "target_draws", lambda evidence: drawn)
    noise = Noise(torch.zeros_like(row), torch.zeros_like(row))
    every = Drafts(tree, out.p[row], out.code[row], out.depth, weight)
    return every, Evidence(tree, every.p, noise)


def emitted(
    rule: Verifier, case: Case, distributions: Tables, monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, Tensor]:
    """(emitted, target) joint distributions [V ** horizon]."""
    every, evidence = all_draws(exact.drafts(case, distributions), monkeypatch)
    return exact.emitted_joint(rule, every, distributions, evidence), exact.target_joint(
        distributions, max(every.depth) + 1
    )


CASES = [
    Case((-1, 0), (F, I)),
    Case((-1, 0, 1), (F, I, I)),
    Case((-1, 0, 0), (F, I, F)),
    Case((-1, 0, 0, 1), (F, W, W, I)),
]


@pytest.mark.parametrize("case", CASES)
def test_enumerated_laws_and_their_bounds(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """coupled is exact; a rule with p(x) > t for what it tolerates emits a text with at most t^-n of its probability."""
    depth, worst = max(case.depths), dict.fromkeys(["coupled", "typical", "top_n"], 0.0)
    for seed in range(4):
        distributions = exact.tables(3, depth + 1, seed, sparse_p=0.2)
        entropy = [torch.special.entr(p).sum(-1) for p in distributions.p]
        floor = float(min((0.3 * (-h).exp()).clamp(max=0.09).min() for h in entropy))
        for name, rule, least in (
            ("coupled", Typical(epsilon=1.0, delta=math.inf), 1.0),
            ("typical", Typical(), floor),
            ("top_n", TopN(), 0.0),
        ):
            probs, target = emitted(rule, case, distributions, monkeypatch)
            assert least == 0.0 or bool((probs <= target * least**-depth + 1e-12).all())
            worst[name] = max(worst[name], float((probs - target).abs().max()))
    assert worst.pop("coupled") < 1e-12
    assert min(worst.values()) > 1e-2


# Through several steps with the real noise. False-alarm rate of each that passes: statistics.FALSE_ALARM = 1e-6.

CHAIN, FORK = (-1, 0, 1), (-1, 0, 0, 1)


@pytest.mark.parametrize(("rule", "label", "parent"), [(Typical(), C, CHAIN), (TopN(), C, CHAIN)])
def test_defaults_are_not_exact(rule: Verifier, label: DrawnBy, parent: tuple[int, ...]) -> None:
    case = Case(parent, (F, *[label] * (len(parent) - 1)))
    assert statistics.p_value(statistics.decode(case, rule)) < statistics.FALSE_ALARM


@pytest.mark.parametrize(("rule", "label"), [(TopN(n=0), C)])
def test_strictest_settings_are_exact(rule: Verifier, label: DrawnBy) -> None:
    case = Case(CHAIN, (F, label, label))
    assert statistics.p_value(statistics.decode(case, rule)) > statistics.FALSE_ALARM
