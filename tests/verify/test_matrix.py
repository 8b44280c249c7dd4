"""The proof: every exact verifier that reads q, on every tree of at most six guesses, under every distribution and mixture.

All draws are enumerated as the batch axis (``enumerate.py``); production ``stops`` and ``residual`` say what is emitted;
the joint distribution of the text must be the target's within 1e-12. p and q depend on the context, with zeros in both.
Rules that read noise have one-hot stops: their proof is token equality with plain decoding (tests/engine) and the
distribution of the noise.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from foretell.core.noise import Noise
from foretell.core.tree import DrawnBy, chain_tree
from foretell.verify import VERIFIERS, Evidence, Verifier, draw, drawing
from tests.verify.enumerate import (  # fmt: skip
    Case,
    batch,
    chains,
    drafts,
    error,
    labelled,
    renumbered,
    shapes,
    sibling_labels,
    tables,
)
from tests.verify.kernels import all_leftovers, inputs, joint_error

F, I, W, C = DrawnBy.FIXED, DrawnBy.IID, DrawnBy.WITHOUT_REPLACEMENT, DrawnBy.COUPLED  # noqa: E741
TOLERANCE = 1e-12
EXACT_RULES = [rule for rule in VERIFIERS.values() if rule.exact and "noise" not in rule.reads]
ON_TREES = [rule for rule in EXACT_RULES if not rule.chains_only]
CHAIN, PAIR, TRIPLE = Case((-1, 0, 1), (F, I, I)), Case((-1, 0, 0), (F, I, I)), Case((-1, 0, 0, 0), (F, I, I, I))
FORK, UNEVEN = Case((-1, 0, 0, 1, 1, 2), (F, *[I] * 5)), Case((-1, 0, 0, 0, 1, 1, 2), (F, *[I] * 6))
MIXED = [Case((-1, 0, 0, 0), (F, W, W, F)), Case((-1, 0, 0, 0), (F, I, I, F)), Case((-1, 0, 0, 1, 1, 2), (F, *[W] * 5))]
HALF_DRAWN = [PAIR, TRIPLE, FORK, Case((-1, 0, 0, 0), (F, I, I, F)), Case((-1, 0, 0, 1), (F, I, F, C)),
              Case((-1, 0, 0, 1, 1), (F, W, I, I, I))]  # fmt: skip
LOSSY = [rule for rule in VERIFIERS.values() if not rule.exact and "noise" not in rule.reads]


def named(rules: list[Verifier]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("verifier", rules, ids=[rule.name for rule in rules])


def stars(vocab_size: int, max_children: int = 4) -> Iterator[Case]:
    """One node and its children: every way of drawing siblings there is."""
    for count in range(1, max_children + 1):
        for probs in dict.fromkeys(sibling_labels(count, vocab_size)):
            yield Case((-1, *[0] * count), (F, *probs))


def everything_on_pairs(vocab_size: int) -> Iterator[Case]:
    """Trees of two and three guesses with every assignment of distributions that is legal."""
    for parent in shapes(3):
        for labels in itertools.product((F, I, W, C), repeat=len(parent) - 1):
            yield Case(parent, (F, *labels))


def test_all_verifiers_are_here() -> None:
    assert {"rejection", "block", "traversal", "k_seq", "importance", "transport", "greedy_block"} == {
        rule.name for rule in EXACT_RULES
    }


@named(EXACT_RULES)
@pytest.mark.usefixtures("kernel")
def test_chains(verifier: Verifier) -> None:
    """Depth up to 3 (V = 3) and 2 (V = 4), every label at every node; supports that differ, and may be disjoint."""
    for vocab_size, depth in ((3, 3), (4, 2)):
        for seed, sparse in ((0, 0.0), (1, 0.4), (2, 0.6)):
            distributions = tables(vocab_size, depth + 1, seed, sparse_p=sparse, sparse_q=sparse / 2)
            for case in chains(depth):
                if all(label != W for label in case.labels) or sparse == 0:
                    assert error(verifier, case, distributions) < TOLERANCE, case
    assert error(verifier, Case((-1, 0, 1, 2, 3), (F, I, I, I, I)), tables(3, 5, 1)) < TOLERANCE


@named(ON_TREES)
@pytest.mark.parametrize("vocab_size", [3, 4])
@pytest.mark.usefixtures("kernel")
def test_siblings(verifier: Verifier, vocab_size: int) -> None:
    for seed, sparse in ((0, 0.0), (1, 0.3)):
        probs = tables(vocab_size, 2, seed, sparse_p=sparse)
        for case in stars(vocab_size):
            assert error(verifier, case, probs) < TOLERANCE, case


@named(ON_TREES)
@pytest.mark.usefixtures("kernel")
def test_siblings_drawn_in_any_order(verifier: Verifier) -> None:
    """Drawn ones first is a matter of acceptance, not of soundness; and runs may end before their siblings do."""
    probs = tables(4, 3, 0, sparse_p=0.3)
    for labels in ("FI", "FWW", "CWI", "FIFI", "IIW", "IIWI", "WII", "IWII", "FII", "IICI", "IIWW", "IIIWF"):
        group = tuple({"F": F, "I": I, "W": W, "C": C}[label] for label in labels)
        assert error(verifier, Case((-1, *[0] * len(group), 1), (F, *group, I)), probs) < TOLERANCE, labels


@named(EXACT_RULES)
@pytest.mark.usefixtures("kernel")
def test_zeros_in_p_and_q_and_disjoint_supports(verifier: Verifier) -> None:
    for seed in range(4):
        probs = tables(4, 3, seed, sparse_p=0.5, sparse_q=0.5)
        for case in (*chains(2), *([] if verifier.chains_only else HALF_DRAWN)):
            assert error(verifier, case, probs) < TOLERANCE, (seed, case)


@named(ON_TREES)
@pytest.mark.usefixtures("kernel")
def test_every_law_at_every_node_of_small_trees(verifier: Verifier) -> None:
    probs = tables(3, 4, 3, sparse_p=0.2)
    for case in everything_on_pairs(3):
        assert error(verifier, case, probs) < TOLERANCE, case


@pytest.mark.parametrize(
    ("kernel", "drafted"), [("c", 4), ("c", 5), ("c", 6), ("torch", 4), ("torch", 5)], indirect=["kernel"]
)
@named(ON_TREES)
def test_every_shape(verifier: Verifier, kernel: str, drafted: int) -> None:
    """All rooted trees, depth up to 3, up to 4 children; each distribution alone, and six mixtures, nodes also
    renumbered."""
    probs = tables(3, 4, 1, sparse_p=0.2)
    tried = 0
    for parent in shapes(drafted):
        if len(parent) != drafted + 1:
            continue
        for case in labelled(parent, 3, num_mixed=6):
            tried += 1
            assert error(verifier, case, probs) < TOLERANCE, case
            if tried % 4 == 0:
                assert error(verifier, renumbered(case, tried), probs) < TOLERANCE, case
    assert tried > 40


@named(ON_TREES)
def test_shapes_at_v_4(verifier: Verifier, kernel: str) -> None:
    probs = tables(4, 4, 5)
    for parent in shapes(4 if kernel == "c" else 3):
        for case in labelled(parent, 4, num_mixed=3):
            assert error(verifier, case, probs) < TOLERANCE, case


@named(ON_TREES)
@pytest.mark.parametrize("most", [5, 6])
def test_every_shape_at_v_4(verifier: Verifier, most: int) -> None:
    probs = tables(4, 4, 5)
    for parent in shapes(most):
        for case in labelled(parent, 4, num_mixed=2, seed=1):
            assert error(verifier, case, probs) < TOLERANCE, case


@named(EXACT_RULES)
@pytest.mark.usefixtures("kernel")
def test_a_q_that_does_not_sum_to_one_is_not_believed(verifier: Verifier) -> None:
    """A drafter's scores, or what is left of a distribution: off by .17 and more before, in silence. Such children are
    FIXED ones, which are exact however they were drawn."""
    probs = tables(3, 3, 0, sparse_p=0.2)
    cases = [CHAIN]
    if not verifier.chains_only:
        cases += [Case((-1, 0, 0, 1), (F, I, I, I)), Case((-1, 0, 0), (F, W, W)), Case((-1, 0, 0, 0), (F, I, I, F))]
    for case in cases:
        out = drafts(case, probs)
        whole = verifier.stops(Evidence(out.tree, out.p)).stops
        for factor in (0.5, 1.002, 30.0, 1e-30):
            for only in (slice(None), slice(0, 1)):
                q = out.tree.q.clone()
                q[:, only] *= factor
                told = Evidence(replace(out.tree, q=q), out.p)
                assert joint_error(verifier, out, probs, told) < TOLERANCE, factor
                assert not torch.allclose(verifier.stops(told).stops, whole, atol=1e-3)
        near = Evidence(replace(out.tree, q=out.tree.q * (1 + 1e-5)), out.p)  # what float32 and bfloat16 leave
        assert torch.allclose(verifier.stops(near).stops, whole, atol=1e-3)


# Mutants of the evidence: a drafter that lies, a caller that mixes up. Every rule must give another distribution then.


def told(verifier: Verifier, case: Case, change: Callable[[Evidence], Evidence], seeds: range = range(4)) -> float:
    """Largest error where the rule is given evidence that is not what happened; not every table shows every bias."""
    worst = 0.0
    for seed in seeds:
        probs = tables(3, 3, seed)
        out = drafts(case, probs)
        worst = max(worst, joint_error(verifier, out, probs, change(Evidence(out.tree, out.p))))
    return worst


def relabelled(label: DrawnBy) -> Callable[[Evidence], Evidence]:
    def change(evidence: Evidence) -> Evidence:
        tree = evidence.tree
        guessed = tree.parent >= 0
        q = tree.q
        if q is None:  # what a drafter would report that ranked by it
            q = torch.full_like(evidence.p, 1 / 3)
        return replace(evidence, tree=replace(tree, drawn_by=torch.where(guessed, int(label), 0), q=q))

    return change


def hotter(evidence: Evidence) -> Evidence:
    """q as if drawn at twice the temperature."""
    q = evidence.tree.q.sqrt()
    return replace(evidence, tree=replace(evidence.tree, q=q / q.sum(-1, keepdim=True).clamp(min=1e-300)))


def swapped(evidence: Evidence) -> Evidence:
    """p and q exchanged where there is a q."""
    p, q = evidence.p, evidence.tree.q
    has = q.sum(-1, keepdim=True) > 0
    return Evidence(replace(evidence.tree, q=torch.where(has, p, q)), torch.where(has, q, p))


@named(EXACT_RULES)
def test_mutant_evidence_is_caught(verifier: Verifier) -> None:
    chain = Case((-1, 0, 1), (F, I, I))
    assert told(verifier, chain, lambda evidence: evidence) < TOLERANCE
    assert told(verifier, chain, hotter) > 1e-3
    assert told(verifier, chain, swapped) > 1e-3
    assert told(verifier, Case((-1, 0, 1), (F, F, F)), relabelled(I)) > 1e-3, "a ranked guess said to be drawn"
    if not verifier.chains_only:
        pair = Case((-1, 0, 0), (F, W, W))
        assert told(verifier, pair, lambda evidence: evidence) < TOLERANCE
        assert told(verifier, pair, relabelled(I)) > 1e-3, "drawn without replacement, said to be independent"
        independent = Case((-1, 0, 0), (F, I, I))
        assert told(verifier, independent, hotter) > 1e-3
        # The other way round it is harmless: given that it differs, a second independent draw is one without
        # replacement, and one that does not differ could not have been drawn so and counts as FIXED.
        assert told(verifier, independent, relabelled(W)) < TOLERANCE


@named(EXACT_RULES)
@pytest.mark.usefixtures("kernel")
def test_inputs_are_not_changed(verifier: Verifier) -> None:
    """What is returned is the caller's: no view of the inputs, nor of the stops."""
    for case in [CHAIN] if verifier.chains_only else [CHAIN, PAIR, FORK, UNEVEN, *MIXED]:
        out = drafts(case, tables(3, 4, 0, sparse_p=0.2))
        evidence = Evidence(out.tree, out.p)
        before = inputs(evidence)
        walk = verifier.stops(evidence)
        kept = walk.stops.clone()
        for node in range(len(case.parent)):
            verifier.residual(evidence, walk, torch.full((len(out.p),), node)).zero_()
        assert all(map(torch.equal, [*before, kept], [*inputs(evidence), walk.stops])), case


@named(EXACT_RULES)
@pytest.mark.usefixtures("kernel")
def test_a_ragged_padded_batch_equals_its_parts(verifier: Verifier) -> None:
    """On trees rows with runs, and with branching that is even, beside rows without."""
    cases = [Case((-1, 0), (F, C)), CHAIN, Case((-1, 0, 1, 2), (F, W, F, I)), Case((-1,), (F,))]
    cases += [] if verifier.chains_only else [FORK, UNEVEN, TRIPLE, *MIXED]
    parts = [drafts(case, tables(3, 4, 1, sparse_p=0.2)) for case in cases]
    tree, p = batch(parts, 8)
    tree.check()
    evidence, start = Evidence(tree, p), 0
    walk, left = verifier.stops(evidence), list(all_leftovers(verifier, evidence))
    assert bool((walk.stops[~tree.valid] == 0).all())
    for part in parts:
        rows = slice(start, start := start + len(part.weight))
        own = Evidence(part.tree, part.p)
        alone = verifier.stops(own).stops
        assert torch.allclose(walk.stops[rows, : part.p.shape[1]], alone, atol=1e-13, rtol=0)
        for together, single in zip(left, all_leftovers(verifier, own), strict=False):
            assert torch.allclose(together[rows], single, atol=1e-13, rtol=0, equal_nan=True)


@named(EXACT_RULES)
@pytest.mark.usefixtures("kernel")
def test_broken_q_counts_as_fixed(verifier: Verifier) -> None:
    """All of it, the root's alone, one entry of it, and one entry of each node below."""
    nan, inf = float("nan"), float("inf")
    everywhere, root, below = (slice(None), slice(None)), (slice(None), 0), (slice(None), slice(1, None), 2)
    places = [
        *((everywhere, value) for value in (nan, inf, 0.0)),
        (root, nan),
        ((slice(None), 0, 2), nan),
        (below, inf),
    ]
    for case in [CHAIN] if verifier.chains_only else [CHAIN, PAIR, FORK]:
        probs = tables(3, 3, 0)
        out = drafts(case, probs)
        for place, value in places:
            q = out.tree.q.clone()
            q[place] = value
            assert joint_error(verifier, out, probs, Evidence(replace(out.tree, q=q), out.p)) < TOLERANCE, (case, place)


@named(EXACT_RULES)
@pytest.mark.usefixtures("kernel")
def test_a_p_that_is_no_distribution_stops_the_walk_there(verifier: Verifier) -> None:
    nan = float("nan")
    p = torch.tensor([[[0.5, 0.5, 0.0], [nan, nan, nan], [0.1, 0.2, 0.7]]])
    for label in (F, I):
        q = torch.full_like(p, 1 / 3) if label == I else None
        for token in (0, 2):  # p(2) = 0: the bad node is never reached
            evidence = Evidence(chain_tree(torch.tensor([[0, token, 1]]), drawn_by=label, q=q), p)
            walk = verifier.stops(evidence)
            assert float(walk.stops[0, 2]) == 0.0
            assert abs(float(walk.stops.sum()) - 1.0) < 1e-6
            assert (float(walk.stops[0, 1]) > 0) == (token == 0)
            assert bool(verifier.residual(evidence, walk, torch.tensor([1])).isnan().any())


@named(EXACT_RULES)
@pytest.mark.usefixtures("kernel")
def test_float32_gives_what_float64_gives(verifier: Verifier) -> None:
    """Within 2e-6: on forks too, and where a WITHOUT_REPLACEMENT and a FIXED child stand behind a run."""
    behind, deep = Case((-1, 0, 0, 0, 0), (F, I, I, W, F)), Case((-1, 0, 0, 1, 1, 3), (F, I, I, W, W, I))
    for case in [CHAIN] if verifier.chains_only else [CHAIN, FORK, behind, deep]:
        out = drafts(case, tables(4, 4, 2, sparse_p=0.2))
        short, exact = Evidence(replace(out.tree, q=out.tree.q.float()), out.p.float()), Evidence(out.tree, out.p)
        mine, true = verifier.stops(short), verifier.stops(exact)
        assert mine.stops.dtype == torch.float32
        assert torch.allclose(mine.stops.double(), true.stops, atol=2e-6, rtol=0)
        left, expected = (next(all_leftovers(verifier, each)) for each in (short, exact))
        assert left.dtype == torch.float32
        reached = true.stops[:, 0] > 1e-3
        assert torch.allclose(left.double()[reached], expected[reached], atol=1e-4, rtol=0)


@named(LOSSY)
def test_lossy_rules_do_not_pass(verifier: Verifier) -> None:
    probs = tables(3, 3, 0)
    assert max(error(verifier, case, probs) for case in chains(2)) > 1e-3


@pytest.mark.parametrize("name", ["rejection", "coupled", "traversal", "transport"])
def test_rows_in_turn_are_rows_at_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A batch too large for one call of a verifier is drawn in parts, with the same outcome."""
    verifier = VERIFIERS[name]
    out = drafts(Case((-1, 0, 0, 1), (F, I, I, W)), tables(3, 3, 0))
    noise = Noise(torch.arange(len(out.weight)), torch.zeros(len(out.weight), dtype=torch.int64))
    evidence = Evidence(out.tree, out.p, noise)
    whole = draw(verifier, evidence)
    monkeypatch.setattr(drawing, "MAX_ELEMENTS", 5 * out.p[0].numel())
    parts = draw(verifier, evidence)
    assert len(out.weight) > 11
    for column in ("path", "count", "bonus", "sound"):
        assert torch.equal(getattr(whole, column), getattr(parts, column))
