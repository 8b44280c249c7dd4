"""Lossy rules: slow twins in plain Python, strictest settings that are ``coupled``, broken rows, options, mutants.

A rule's tolerance is settled by the noise, so that its walk can be repeated node by node with scalars. The
distributions that come out are in test_distributions.py.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foretell.core.errors import ConfigError
from foretell.core.noise import Noise, exponentials
from foretell.core.probs import one_hot_argmax
from foretell.core.spec import parse_spec, spec_of
from foretell.core.tree import DrawMode, DrawnBy, TokenTree
from foretell.verify import Coupled, Evidence, Verifier, draw
from foretell.verify.lossy import base as lossy, base as lossy_typical
from foretell.verify.lossy.base import Lossy, Mismatch, TopN, Typical
from foretell.verify.lossy.judge import Judge, JudgeHead
from tests.verify.random_trees import HIDDEN, decided, random_evidence, row_of, tensors_of

F, I, W, C = DrawnBy.FIXED, DrawnBy.IID, DrawnBy.WITHOUT_REPLACEMENT, DrawnBy.COUPLED  # noqa: E741
HEAD = JudgeHead(torch.linspace(-1.0, 1.0, HIDDEN - 1), 0.2, start=1)

RULES: list[Lossy] = [
    Typical(),
    Typical(epsilon=0.0),
    TopN(),
    TopN(n=2, delta=1.0),
    TopN(n=3, delta=0.2),
    Judge(head=HEAD),
    Judge(threshold=0.3, off_support=True, head=HEAD),
]
STRICTEST: list[Lossy] = [Typical(epsilon=1.0, delta=math.inf), TopN(n=0), Judge(threshold=1.0, head=HEAD)]


def ids(rules: list[Lossy]) -> list[str]:
    return [spec_of(rule, rule.name) for rule in rules]


def children(parent: list[int], node: int) -> list[int]:
    return [i for i in range(1, len(parent)) if parent[i] == node]


class Naive:
    """One row, with Python numbers: the walk of a lossy rule, node by node."""

    def __init__(self, rule: Lossy, evidence: Evidence) -> None:
        tree, noise = evidence.tree, evidence.noise
        assert noise is not None
        assert evidence.taps is not None
        self.rule = rule
        self.parent, self.tokens = tree.parent[0].tolist(), tree.tokens[0].tolist()
        self.labels, self.p = tree.drawn_by[0].tolist(), evidence.p[0].tolist()
        self.q = None if tree.q is None else tree.q[0].tolist()
        self.taps = evidence.taps[0].tolist()
        depth = [0] * len(self.parent)
        for node in range(1, len(depth)):
            depth[node] = depth[self.parent[node]] + 1 if self.parent[node] >= 0 else 0
        e = exponentials(noise.coupled_keys(len(depth))[0], evidence.p.shape[-1])
        self.drawn = (evidence.p[0] / e[depth]).argmax(-1).tolist()

    def match(self, node: int) -> int | None:
        """The first child that is the target's draw."""
        here = [c for c in children(self.parent, node) if self.tokens[c] == self.drawn[node]]
        return here[0] if here else None

    def walk(self) -> tuple[int, int]:
        node, self.num_asked = 0, 0
        while True:
            step = self.match(node)
            if step is None:
                self.num_asked += bool(children(self.parent, node))
                step = next((c for c in children(self.parent, node) if self.tolerates(node, c)), None)
            if step is None:
                return node, self.drawn[node]
            node = step

    def tolerates(self, node: int, child: int) -> bool:
        p, x, rule = self.p[node], self.tokens[child], self.rule
        if isinstance(rule, Judge):
            h = self.taps[child][1:]
            logit = sum(w * v for w, v in zip(torch.linspace(-1.0, 1.0, HIDDEN - 1).tolist(), h, strict=True)) + 0.2
            return (rule.off_support or p[x] > 0) and 1 / (1 + math.exp(-logit)) > rule.threshold
        if p[x] <= 0:
            return False
        if isinstance(rule, Typical):
            h = -sum(v * math.log(v) for v in p if v > 0)
            return p[x] > min(rule.epsilon, rule.delta * math.exp(-h))
        best = sorted(p, reverse=True)
        return p[x] >= best[min(rule.n, len(best)) - 1] and p[x] >= best[0] - rule.delta


def disagreements(rule: Lossy, evidence: Evidence, twin: Lossy | None = None) -> tuple[int, int]:
    """(rows where the walk is not that of its slow twin, rows where it is not that of coupled)."""
    at, bonus = decided(rule, evidence)
    plain = Coupled().decide(evidence)
    wrong = lossy_rows = 0
    for row in range(len(at)):
        got = (int(at[row]), int(bonus[row]))
        wrong += got != Naive(twin or rule, row_of(evidence, row)).walk()
        lossy_rows += got != (int(plain[0][row]), int(plain[1][row]))
    return wrong, lossy_rows


@pytest.mark.parametrize("rule", RULES, ids=ids(RULES))
def test_walk_is_that_of_the_slow_twin(rule: Lossy) -> None:
    num_lossy = 0
    for seed, kinds in enumerate([tuple(DrawnBy), (F, C), (I,)]):
        wrong, rows = disagreements(rule, random_evidence(seed, num_rows=80, kinds=kinds))
        assert wrong == 0
        num_lossy += rows
    assert num_lossy > 0, "the rule did tolerate something"


@pytest.mark.parametrize("rule", RULES, ids=ids(RULES))
def test_float32_takes_the_native_kernels_and_agrees(rule: Lossy) -> None:
    evidence = random_evidence(11, num_rows=80, vocab_size=7, dtype=torch.float32)
    assert disagreements(rule, evidence)[0] == 0


@pytest.mark.parametrize("rule", STRICTEST, ids=ids(STRICTEST))
def test_strictest_setting_is_coupled(rule: Lossy) -> None:
    for seed in range(3):
        evidence = random_evidence(seed, num_rows=400)
        for mine, base in zip(decided(rule, evidence), Coupled().decide(evidence), strict=True):
            assert torch.equal(mine, base)


@pytest.mark.parametrize("rule", [*RULES, *STRICTEST], ids=ids([*RULES, *STRICTEST]))
def test_temperature_0_is_greedy(rule: Lossy) -> None:
    evidence = random_evidence(2)
    evidence = replace(evidence, p=one_hot_argmax(evidence.p))
    at, bonus = decided(rule, evidence)
    if isinstance(rule, Judge) and rule.off_support:
        assert not torch.equal(at, Coupled().decide(evidence)[0]), "the judge may take what greedy decoding would not"
        return
    assert torch.equal(at, Coupled().decide(evidence)[0])
    rows = torch.arange(len(at))
    assert torch.equal(bonus, evidence.p[rows, at].argmax(-1))


@pytest.mark.parametrize("rule", RULES, ids=ids(RULES))
def test_rows_alone_in_ragged_batches_and_padded(rule: Lossy) -> None:
    evidence = random_evidence(5, num_rows=30)
    before = [x.clone() for x in tensors_of(evidence)]
    at, bonus = decided(rule, evidence)
    assert all(torch.equal(x, y) for x, y in zip(before, tensors_of(evidence), strict=True)), "inputs are unchanged"
    for row in range(len(at)):
        alone = row_of(evidence, row, int(evidence.tree.valid[row].sum()))
        one = decided(rule, alone)
        assert (int(one[0]), int(one[1])) == (int(at[row]), int(bonus[row]))


LOOSEST: list[Lossy] = [Typical(epsilon=0.0), TopN(n=64, delta=1.0), Judge(threshold=0.0, head=HEAD)]


def two_children(p: list[float], tokens: list[int], label: DrawnBy = F, q: list[float] | None = None) -> Evidence:
    """50 rows of a root with two children, the first of which has one child."""
    num_rows, vocab_size = 50, len(p)
    distributions = torch.tensor([F, label, label, F]).expand(num_rows, -1)
    given = torch.zeros(num_rows, 4, vocab_size, dtype=torch.float64)
    if q is not None:
        given[:, 0] = torch.tensor(q, dtype=torch.float64)
    tree = TokenTree(
        torch.tensor([0, *tokens, 0]).expand(num_rows, -1),
        torch.tensor([-1, 0, 0, 1]).expand(num_rows, -1),
        distributions,
        None if q is None else given,
    )
    noise = Noise(torch.arange(num_rows), torch.full((num_rows,), 3))
    rows = torch.tensor(p, dtype=torch.float64).expand(num_rows, 4, -1).clone()
    return Evidence(tree, rows, noise, torch.ones(num_rows, 4, HIDDEN))


@pytest.mark.parametrize("rule", LOOSEST, ids=ids(LOOSEST))
def test_impossible_tokens_are_never_tolerated(rule: Lossy) -> None:
    at, _ = decided(rule, two_children([0.3, 0.0, 0.0, 0.7], [1, 2]))
    assert bool((at == 0).all())
    possible, _ = decided(rule, two_children([0.3, 0.3, 0.3, 0.1], [1, 2]))
    assert bool((possible > 0).any(0)), "the control: with a probability they are"
    assert bool((possible != 0).all())


@pytest.mark.parametrize("rule", LOOSEST, ids=ids(LOOSEST))
@pytest.mark.parametrize("where", [0, 1])
def test_rows_that_are_no_law_stop_the_walk_and_are_unsound(rule: Lossy, where: int) -> None:
    for broken in (math.nan, 0.0):
        evidence = two_children([0.2, 0.3, 0.3, 0.2], [1, 2])
        evidence.p[:, where] = broken
        verdict = draw(rule, evidence)
        at = verdict.path.gather(1, verdict.count[:, None] - 1)[:, 0]
        stopped = at == where
        assert bool(stopped.any())
        assert not bool(verdict.sound[stopped].any())
        assert bool(verdict.sound[~stopped].all())
        assert not bool((at == 3).any()), "no walk goes on below a node without a distribution"


def test_the_targets_draw_goes_before_an_earlier_tolerated_child() -> None:
    evidence = two_children([0.3, 0.3, 0.3, 0.1], [1, 2])
    drawn = lossy.target_draws(evidence)[:, 0]
    at = decided(Typical(epsilon=0.0), evidence)[0]
    assert torch.equal(at == 2, drawn == 2)
    assert bool((drawn == 2).any())


def test_statistics_are_computed_on_the_way_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of p for each mismatch that the walk meets."""
    rule, evidence, seen = Typical(), random_evidence(4), []
    wanted = [Naive(rule, row_of(evidence, row)) for row in range(len(evidence.p))]
    for naive in wanted:
        naive.walk()

    def spy(probs: Tensor) -> Tensor:
        seen.append(len(probs))
        return torch.special.entr(probs).sum(-1)

    monkeypatch.setattr(lossy_typical, "entropy", spy)
    rule.decide(evidence)
    assert sum(seen) == sum(naive.num_asked for naive in wanted)
    assert 1 < len(seen) < 8
    assert sum(seen) < int(lossy.compare(evidence).open.sum())


@pytest.mark.parametrize("rule", RULES, ids=ids(RULES))
def test_all_nodes_at_once_are_the_same_walk(rule: Lossy) -> None:
    """The way without host reads, as accelerators take it."""
    mismatch = lossy.compare(random_evidence(8))
    assert torch.equal(rule.end_at_once(mismatch), rule.end(mismatch))


class Greedy(Typical):
    """A mutant: the first tolerated child, whether or not a later one is the draw."""

    def end(self, mismatch: Mismatch) -> Tensor:
        tree, p = mismatch.evidence.tree, mismatch.evidence.p
        rows = torch.arange(p.shape[0])[:, None]
        loose = (tree.parent >= 0) & (p[rows, mismatch.above, tree.tokens] > 0.05)
        return lossy._last(lossy._first(mismatch.match | loose, mismatch.above))[:, 0]


class Shameless(Typical):
    """A mutant: tolerates what p excludes."""

    def possible(self, mismatch: Mismatch) -> Tensor:
        return torch.ones_like(mismatch.asked)

    def tolerated(self, mismatch: Mismatch) -> Tensor:
        return mismatch.chance >= 0.0


@pytest.mark.parametrize("mutant", [Greedy(epsilon=0.05, delta=math.inf), Shameless(epsilon=0.0)])
def test_mutants_differ_from_the_twin(mutant: Typical) -> None:
    twin = Typical(epsilon=mutant.epsilon, delta=mutant.delta)
    assert disagreements(mutant, random_evidence(1), twin)[0] > 5


# Options and refusals.

ALL: dict[str, Verifier] = {rule.name: rule for rule in (Typical(), TopN(), Judge())}


@pytest.mark.parametrize("rule", ALL.values(), ids=ALL)
def test_a_lossy_rule_says_so(rule: Verifier) -> None:
    assert rule.exact is False
    assert rule.summary.startswith("lossy: ")
    assert rule.distance
    assert "\n" not in rule.distance
    assert parse_spec(spec_of(rule, rule.name), ALL, "verifier") == rule
    assert rule.draws == (DrawMode.WITHOUT_REPLACEMENT if "q" in rule.reads else DrawMode.COUPLED)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("typical/epsilon=1.5", "epsilon"),
        ("typical/delta=-1", "delta"),
        ("top_n/n=-1", "n = -1"),
        ("top_n/n=65", "n = 65"),
        ("top_n/delta=2", "delta"),
        ("judge/threshold=2", "threshold"),
        ("judge/head=x", "unknown option 'head'"),
    ],
)
def test_options_that_cannot_be(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_spec(text, ALL, "verifier")


def test_options_are_read() -> None:
    assert parse_spec("typical/epsilon=0.2/delta=inf", ALL, "verifier") == Typical(0.2, math.inf)
    assert parse_spec("judge/threshold=0.7/off_support=true", ALL, "verifier") == Judge(0.7, True)


def test_a_judge_without_a_head_or_hidden_states_is_refused() -> None:
    evidence = random_evidence(0)
    with pytest.raises(ConfigError, match="no head"):
        Judge().decide(evidence)
    with pytest.raises(ConfigError, match="none are tapped"):
        Judge(head=HEAD).decide(replace(evidence, taps=None))
    with pytest.raises(ConfigError, match="columns 3 to 6 of 5"):
        Judge(head=JudgeHead(torch.ones(4), start=3)).decide(evidence)


def test_the_judge_reads_the_drafted_tokens_own_state() -> None:
    """Only the second child's hidden state passes; any callable is a head."""
    evidence = two_children([0.3, 0.3, 0.3, 0.1], [1, 2])
    evidence.taps[:] = -9.0
    evidence.taps[:, 2] = 9.0
    head: Callable[[Tensor], Tensor] = lambda taps: taps.mean(-1)  # noqa: E731
    drawn = lossy.target_draws(evidence)[:, 0]
    for judge in (Judge(head=head), Judge(head=JudgeHead(torch.ones(HIDDEN)))):
        at, _ = decided(judge, evidence)
        assert torch.equal(at == 2, drawn != 1)
    evidence.taps[:, 2] = math.nan
    assert torch.equal(decided(Judge(head=head), evidence)[0], Coupled().decide(evidence)[0])
