"""The proof: every exact verifier that reads q, on every tree of at most six guesses, under every law and mixture of laws.

All draws are enumerated as the batch axis (``enumerate.py``); production ``stops`` and ``leftover`` say what is emitted; the
joint law of the text must be the target's within 1e-12. p and q depend on the context, with zeros in both. Rules that read
noise have one-hot stops: their proof is token equality with plain decoding (tests/engine) and the law of the noise.
"""

import itertools
from collections.abc import Iterator

import pytest

from foretoken.tree import Law
from foretoken.verify import VERIFIERS, Verifier
from tests.verify.enumerate import Case, chains, error, labelled, renumbered, shapes, sibling_laws, tables

F, I, W, C = Law.FIXED, Law.IID, Law.WITHOUT_REPLACEMENT, Law.COUPLED  # noqa: E741
TOLERANCE = 1e-12
LAWFUL = [rule for rule in VERIFIERS.values() if rule.exact and "noise" not in rule.reads]
ON_TREES = [rule for rule in LAWFUL if not rule.chains_only]
LOSSY = [rule for rule in VERIFIERS.values() if not rule.exact and "noise" not in rule.reads]


def named(rules: list[Verifier]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("verifier", rules, ids=[rule.name for rule in rules])


def stars(vocab_size: int, max_children: int = 4) -> Iterator[Case]:
    """One node and its children: every way of drawing siblings there is."""
    for count in range(1, max_children + 1):
        for laws in dict.fromkeys(sibling_laws(count, vocab_size)):
            yield Case((-1, *[0] * count), (F, *laws))


def everything_on_pairs(vocab_size: int) -> Iterator[Case]:
    """Trees of two and three guesses with every assignment of laws that is legal."""
    for parent in shapes(3):
        for laws in itertools.product((F, I, W, C), repeat=len(parent) - 1):
            yield Case(parent, (F, *laws))


def test_all_verifiers_are_here() -> None:
    assert {"rejection", "block", "traversal", "k_seq", "importance", "transport", "greedy_block"} == {
        rule.name for rule in LAWFUL
    }


@named(LAWFUL)
def test_chains(verifier: Verifier) -> None:
    """Depth up to 3 (V = 3) and 2 (V = 4), every law at every node; supports that differ, and may be disjoint."""
    for vocab_size, depth in ((3, 3), (4, 2)):
        for seed, sparse in ((0, 0.0), (1, 0.4), (2, 0.6)):
            laws = tables(vocab_size, depth + 1, seed, sparse_p=sparse, sparse_q=sparse / 2)
            for case in chains(depth):
                if all(law != W for law in case.laws) or sparse == 0:
                    assert error(verifier, case, laws) < TOLERANCE, case


@named(ON_TREES)
@pytest.mark.parametrize("vocab_size", [3, 4])
def test_siblings(verifier: Verifier, vocab_size: int) -> None:
    for seed, sparse in ((0, 0.0), (1, 0.3)):
        laws = tables(vocab_size, 2, seed, sparse_p=sparse)
        for case in stars(vocab_size):
            assert error(verifier, case, laws) < TOLERANCE, case


@named(ON_TREES)
def test_every_law_at_every_node_of_small_trees(verifier: Verifier) -> None:
    laws = tables(3, 4, 3, sparse_p=0.2)
    for case in everything_on_pairs(3):
        assert error(verifier, case, laws) < TOLERANCE, case


@named(ON_TREES)
@pytest.mark.parametrize("drafted", [4, 5, 6])
def test_every_shape(verifier: Verifier, drafted: int) -> None:
    """All rooted trees, depth up to 3, up to 4 children; each law alone, and two mixtures, nodes also renumbered."""
    laws = tables(3, 4, 1, sparse_p=0.2)
    tried = 0
    for parent in shapes(drafted):
        if len(parent) != drafted + 1:
            continue
        for case in labelled(parent, 3, num_mixed=2):
            tried += 1
            assert error(verifier, case, laws) < TOLERANCE, case
            if tried % 4 == 0:
                assert error(verifier, renumbered(case, tried), laws) < TOLERANCE, case
    assert tried > 40


@named(ON_TREES)
def test_every_shape_at_v_4(verifier: Verifier) -> None:
    laws = tables(4, 4, 5)
    for parent in shapes(6):
        for case in labelled(parent, 4, num_mixed=1, seed=1):
            if len(parent) <= 5 or not set(case.laws[1:]) <= {I, W}:
                assert error(verifier, case, laws) < TOLERANCE, case


@named(LOSSY)
def test_lossy_rules_do_not_pass(verifier: Verifier) -> None:
    laws = tables(3, 3, 0)
    assert max(error(verifier, case, laws) for case in chains(2)) > 1e-3
