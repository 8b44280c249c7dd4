"""Trees that follow the draft distribution: exact by enumeration of every outcome, equal to slow searches node by node."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from foretell.core.noise import Noise, exponentials, mix, race_top
from foretell.core.params import SamplingParams
from foretell.core.tree import DrawMode, DrawnBy, TokenTree, ancestors
from foretell.draft.base import Context
from foretell.draft.config import refusal
from foretell.draft.growing import dynamic
from foretell.draft.growing.children import Children, Drawing, Nodes
from foretell.draft.growing.frontier import Expander, Grown
from foretell.draft.growing.grow import grow
from foretell.draft.shapes import DySpec, Eagle2Shape, OptTree
from foretell.methods.draft_model.drafter import DraftModel
from foretell.verify import VERIFIERS
from foretell.verify.rejection import Rejection
from tests.draft.growing.grown import TableExpander, enumerate_growth, error, noise_for, rows
from tests.verify.enumerate import tables

V, TOLERANCE = 3, 1e-12
W, IID = DrawMode.WITHOUT_REPLACEMENT, DrawMode.IID
GROWN = [
    *itertools.product([W], [2, 3, 4], [2, 3], [2, 3], [0.0, 0.15]),
    *itertools.product([IID], [2, 3], [2], [2, 3], [0.0, 0.15]),
    *itertools.product([IID], [4], [2], [2], [0.0, 0.15]),
]


def paths(tree: TokenTree, row: int) -> dict[tuple[int, ...], int]:
    """Each node's path, and its label. (Of equal siblings one is kept.)"""
    found: dict[int, tuple[int, ...]] = {0: ()}
    for node, above in enumerate(tree.parent[row].tolist()):
        if above >= 0:
            found[node] = (*found[above], int(tree.tokens[row, node]))
    return {path: int(tree.drawn_by[row, node]) for node, path in found.items()}


# -- exact -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("draws", "size", "width", "depth", "threshold"), GROWN)
def test_dyspec_is_exact(
    monkeypatch: pytest.MonkeyPatch, draws: DrawMode, size: int, width: int, depth: int, threshold: float
) -> None:
    """Recursive rejection on every tree that can be grown, each with its probability: the target's joint distribution."""
    shape = DySpec(depth=depth, size=size, width=width, threshold=threshold)
    for seed in range(2):
        probs = tables(V, depth + 1, seed)
        tree, weight = enumerate_growth(monkeypatch, probs, shape, draws, depth)
        if len(weight) > 1500:  # a slow case, no other kind of case
            continue
        tree.check()
        assert error(Rejection(), tree, weight, probs, depth) < TOLERANCE


def test_dyspec_with_impossible_tokens_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft distributions with zeros: fewer children than places."""
    for seed, draws in itertools.product(range(3), (W, IID)):
        probs = tables(V, 3, seed, sparse_q=0.4, sparse_p=0.3)
        tree, weight = enumerate_growth(monkeypatch, probs, DySpec(depth=2, size=4, width=2), draws, 2)
        tree.check()
        assert error(Rejection(), tree, weight, probs, 2) < TOLERANCE


@pytest.mark.parametrize("draws", [W, IID])
@pytest.mark.parametrize("rule", [rule for rule in VERIFIERS if VERIFIERS[rule].exact and "q" in VERIFIERS[rule].reads])
def test_every_rule_on_dyspec_trees(monkeypatch: pytest.MonkeyPatch, rule: str, draws: DrawMode) -> None:
    """Exact wherever it is legal. Rules that treat independent siblings together err, for how many there are depends on
    their tokens: that is why they are refused there."""
    verifier, shape = VERIFIERS[rule], DySpec(depth=2, size=5, width=2)
    if verifier.chains_only:
        assert "branches" in str(refusal("draft_model", DraftModel.capabilities, verifier, shape, draws))
        return
    worst = 0.0
    for seed in range(3):
        probs = tables(V, 3, seed)
        tree, weight = enumerate_growth(monkeypatch, probs, shape, draws, 2)
        worst = max(worst, error(verifier, tree, weight, probs, 2))
    if refusal("draft_model", DraftModel.capabilities, verifier, shape, draws) is None:
        assert worst < TOLERANCE
    else:
        assert worst > 1e-6


def test_shapes_depend_on_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tested above is not a fixed tree: drawn tokens decide what else is drawn."""
    probs = tables(V, 4, 0)
    tree, _ = enumerate_growth(monkeypatch, probs, DySpec(depth=3, size=4, width=2), W, 3)
    assert len({tuple(parent) for parent in tree.parent.tolist()}) >= 4


def pruned_after(drawn: Children, chance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A place worth what its own token turned out to be worth: ranked after the draw."""
    return chance, chance


@pytest.mark.parametrize("draws", [W, IID])
def test_mutant_that_prunes_after_seeing_tokens(monkeypatch: pytest.MonkeyPatch, draws: DrawMode) -> None:
    monkeypatch.setitem(dynamic._WORTH, draws, pruned_after)
    worst = 0.0
    for seed in range(3):
        probs = tables(V, 3, seed)
        tree, weight = enumerate_growth(monkeypatch, probs, DySpec(depth=2, size=2, width=2), draws, 2)
        worst = max(worst, error(Rejection(), tree, weight, probs, 2))
    assert worst > 1e-2


def test_mutant_beam_of_drawn_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A beam ranked after the draw whose nodes call themselves drawn; called FIXED they are sound."""
    probs, shape = tables(V, 3, 1), Eagle2Shape(depth=2, size=2, width=2)
    monkeypatch.setattr(dynamic, "_ranked", lambda draws: draws)
    monkeypatch.setitem(dynamic._WORTH, W, pruned_after)
    tree, weight = enumerate_growth(monkeypatch, probs, shape, W, 2)
    assert error(Rejection(), tree, weight, probs, 2) > 1e-2
    fixed = TokenTree(tree.tokens, tree.parent, torch.full_like(tree.drawn_by, int(DrawnBy.FIXED)))
    assert error(Rejection(), fixed, weight, probs, 2) < TOLERANCE


# -- slow twins ------------------------------------------------------------------------------------------------------


def by_context(drawing: Drawing, probs: torch.Tensor, nodes: Nodes) -> Children:
    """Children by a noise that knows the distribution alone, so that the order in which nodes are read does not matter."""
    if isinstance(nodes.depth, torch.Tensor) and drawing.draws == DrawMode.COUPLED:  # of the heap, whose rows part
        keys = drawing.noise.coupled_keys(drawing.depth + 1).gather(1, nodes.depth)
        tokens, scores = race_top(probs, keys, nodes.numbers.shape[1])
        return Children(tokens, torch.tensor(int(DrawnBy.COUPLED)), scores > 0, scores=scores)
    if drawing.draws not in (W, IID):
        return drawing.children(probs, nodes)
    keys = mix((probs[..., 0] * 2**40).long())
    tokens, scores = race_top(probs, keys, nodes.numbers.shape[1])
    return Children(tokens, torch.tensor(int(DrawnBy.WITHOUT_REPLACEMENT)), scores > 0, probs)


def grow_the_heap(
    expander: Expander, context: Context, limits: Sequence[int], shape: DySpec, draws: DrawMode, noise: Noise
) -> Grown:
    """As published: fill the best place and read its node at once; one pass of the drafter per node."""
    drawing = Drawing.of(draws, noise, context.processors, max(limits))
    growth, least = dynamic.TreeGrowth(expander, context, limits), max(shape.threshold, 1.0 / shape.size)
    taken = torch.zeros_like(growth.place, dtype=torch.bool)
    taken[:, 0] = True
    for node in range(shape.size):
        depth = growth.depth[:, -1:].clamp(max=drawing.depth - 1)
        dynamic._expand(growth, drawing, shape.width, node, depth, least)  # type: ignore[arg-type]
        taken = torch.nn.functional.pad(taken, (0, shape.width))
        value, chosen = growth.place.masked_fill(taken, 0.0).max(1, keepdim=True)
        alive = (value > 0) & (value >= shape.threshold)
        if node + 1 == shape.size or not bool(alive.any()):
            break
        taken = taken.scatter(1, chosen, True)
        growth.feed(chosen, alive)
    return growth.finish(shape.size, shape.threshold, shape.width)


@pytest.mark.parametrize("draws", [W, IID, DrawMode.FIXED, DrawMode.COUPLED])
@pytest.mark.parametrize("threshold", [0.0, 0.05])
def test_a_pass_a_depth_grows_the_heaps_tree(
    monkeypatch: pytest.MonkeyPatch, draws: DrawMode, threshold: float
) -> None:
    """The published heap fills one place at a time; the frontier finds the same tree in as many passes as depths."""
    monkeypatch.setattr(dynamic, "draw_children", by_context)
    for seed in range(8):
        probs = tables(6, 4, seed).q
        context = rows([SamplingParams()] * 3, 6, depth_limit=[4, 4, 2])
        trees = []
        shape = DySpec(depth=4, size=10, width=4, threshold=threshold)
        for grown, most in ((dynamic.grow_dyspec, shape.depth), (grow_the_heap, shape.size)):
            expander = TableExpander(probs)
            trees.append(grown(expander, context, [4, 4, 2], shape, draws, noise_for(context, seed)).tree)
            assert expander.num_passes <= most
        for row in range(3):
            assert paths(trees[0], row) == paths(trees[1], row)


def values(
    distributions: Any, path: tuple[int, ...], row: int, draws: DrawMode, noise: Any, width: int
) -> dict[int, float]:
    """Worth, relative to its parent, of each child of a path."""
    code = 0
    for token in path:
        code = code * 6 + token
    probs = distributions[len(path)][code]
    if draws == DrawMode.FIXED:
        best = probs.argsort(descending=True)[:width]
        return {int(token): float(probs[token]) for token in best}
    score = probs / exponentials(noise.coupled_keys(8)[row, len(path)], 6)
    best = score.argsort(descending=True)[:width]
    return {int(token): float(score[token] / score[best].sum()) for token in best}


@pytest.mark.parametrize("draws", [DrawMode.FIXED, DrawMode.COUPLED])
@pytest.mark.parametrize("width", [2, 4])
def test_eagle2_is_a_beam_search(draws: DrawMode, width: int) -> None:
    for seed in range(6):
        probs = tables(6, 4, seed).q
        context = rows([SamplingParams()] * 2, 6)
        noise = noise_for(context, seed)
        shape = Eagle2Shape(depth=4, size=9, width=width)
        tree = grow(TableExpander(probs), context, [4, 3], shape, draws, noise).tree
        tree.check()
        for row, depth_limit in enumerate((4, 3)):
            beam: dict[tuple[int, ...], float] = {(): 1.0}
            found: dict[tuple[int, ...], float] = {}
            for _ in range(depth_limit):
                level = {
                    (*path, token): worth * share
                    for path, worth in beam.items()
                    for token, share in values(probs, path, row, draws, noise, width).items()
                }
                found |= level
                beam = dict(sorted(level.items(), key=lambda item: -item[1])[:width])
            best = sorted(found.items(), key=lambda item: -item[1])[:9]
            assert set(paths(tree, row)) == {(), *(path for path, _ in best)}


@pytest.mark.parametrize("draws", [DrawMode.FIXED, DrawMode.COUPLED])
def test_opt_tree_is_the_best_tree(draws: DrawMode) -> None:
    """Without a threshold: the nodes of largest path value of all, by looking at all. So is dyspec without draws."""
    for seed in range(6):
        probs = tables(6, 3, seed).q
        context = rows([SamplingParams()] * 2, 6)
        noise = noise_for(context, seed)
        for shape in (OptTree(depth=3, size=8, width=3, threshold=0.0), DySpec(depth=3, size=8, width=3)):
            tree = grow(TableExpander(probs), context, [3, 2], shape, draws, noise).tree
            for row, depth_limit in enumerate((3, 2)):
                found: dict[tuple[int, ...], float] = {(): 1.0}
                level = found
                for _ in range(depth_limit):
                    level = {
                        (*path, token): worth * share
                        for path, worth in level.items()
                        for token, share in values(probs, path, row, draws, noise, 3).items()
                    }
                    found = found | level
                best = sorted(found.items(), key=lambda item: -item[1])[:9]
                assert set(paths(tree, row)) == {path for path, _ in best}


def test_opt_tree_stops_where_a_pass_does_not_pay() -> None:
    """Row by row: a depth that adds less than the threshold is the last."""
    found = set()
    for seed, threshold in itertools.product(range(5), (0.05, 0.45, 0.97)):
        probs, context = tables(6, 4, seed).q, rows([SamplingParams()], 6)
        last, expected = 0.0, 0
        for depth in range(1, 5):
            whole = OptTree(depth=depth, size=8, width=4, threshold=0.0)
            tree = grow(TableExpander(probs), context, [depth], whole, DrawMode.FIXED, noise_for(context)).tree
            total = sum(worth(probs, path) for path in paths(tree, 0) if path)
            expected = depth
            if total - last < threshold:
                break
            last = total
        expander = TableExpander(probs)
        shape = OptTree(depth=4, size=8, width=4, threshold=threshold)
        grow(expander, context, [4], shape, DrawMode.FIXED, noise_for(context))
        assert expander.num_passes == expected
        found.add(expected)
    assert len(found) >= 3


def worth(probs: Any, path: tuple[int, ...]) -> float:
    """Path probability."""
    code, out = 0, 1.0
    for depth, token in enumerate(path):
        out *= float(probs[depth][code, token])
        code = code * 6 + token
    return out


def test_depth_first_order() -> None:
    parent = torch.tensor([[-1, 0, 0, 1, 2, 1, 3], [-1, 0, -1, 0, 1, -1, 3], [-1, -1, -1, -1, -1, -1, -1]])
    place = dynamic.depth_first(parent)
    assert place.tolist() == [[0, 1, 5, 2, 6, 4, 3], [0, 1, 5, 3, 2, 6, 4], [0, 1, 2, 3, 4, 5, 6]]


def test_ties_keep_parents_first() -> None:
    """A draft distribution that is sure of everything: all values equal, and still every node's parent is in the tree."""
    sure = [torch.zeros(6**d, 6, dtype=torch.float64).index_fill_(1, torch.tensor([2]), 1.0) for d in range(4)]
    context = rows([SamplingParams()], 6)
    for shape in (Eagle2Shape(depth=4, size=3, width=2), OptTree(depth=4, size=3, width=2), DySpec(depth=4, size=3)):
        tree = grow(TableExpander(sure), context, [4], shape, DrawMode.FIXED, noise_for(context)).tree
        tree.check()
        assert set(paths(tree, 0)) == {(), (2,), (2, 2), (2, 2, 2)}
        assert bool(ancestors(tree.parent)[0].diagonal().all())
