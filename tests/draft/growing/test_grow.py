"""Growing: legal trees, each node drawn as it says, from the distribution that is recorded, whatever the company of a
row."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foretell.core.noise import Noise, exponentials, race, race_top, top
from foretell.core.params import SamplingParams
from foretell.core.tree import DrawMode, DrawnBy, TokenTree, depths
from foretell.draft.growing.children import Drawing, Nodes
from foretell.draft.growing.frontier import Grown
from foretell.draft.growing.grow import CHAIN_LABELS, grow
from foretell.draft.growing.template import compiled, parent_of
from foretell.draft.shapes import Adaptive, Chain, DySpec, Eagle2Shape, OptTree, Sequoia, Shape, Static
from foretell.kernels.small import invert_cdf
from tests.draft.growing.grown import TableExpander, codes, noise_for, rows
from tests.verify.enumerate import tables

VOCAB, DEPTH = 6, 4
DISTRIBUTIONS = [probs.float() for probs in tables(VOCAB, DEPTH, seed=3, sparse_q=0.1).q]
SHAPES: tuple[Shape, ...] = (
    Chain(depth=DEPTH),
    Adaptive(depth=DEPTH),
    Static(branching=(3, 2, 1, 2)),
    Static(branching=(1, 3, 1, 1)),
    Sequoia(depth=DEPTH, size=12),
    DySpec(depth=DEPTH, size=9, width=4),
    DySpec(depth=DEPTH, size=9, width=4, threshold=0.08),
    Eagle2Shape(depth=DEPTH, size=9, width=3),
    OptTree(depth=DEPTH, size=9, width=4),
)
TEMPLATES = (Static(branching=(3, 2, 1, 2)), Static(branching=(1, 3, 1, 1)), Sequoia(depth=DEPTH, size=12))
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.0, top_k=1),
    SamplingParams(temperature=0.7, top_k=2),
    SamplingParams(temperature=1.5, top_p=0.8),
]
ROOM = [100, 3, 2, 1]
CASES = list(itertools.product(SHAPES, DrawMode))


def name(value: object) -> str:
    return value.spec if isinstance(value, Shape) else str(value)


def grown(
    shape: Shape,
    draws: DrawMode,
    params: list[SamplingParams],
    depth_limit: list[int],
    seed: int = 0,
    distributions: list[Tensor] = DISTRIBUTIONS,
) -> Grown:
    context = rows(params, distributions[0].shape[1])
    limits = [min(shape.depth, space) for space in depth_limit]
    return grow(TableExpander(distributions), context, limits, shape, draws, noise_for(context, seed))


def probs_after(params: SamplingParams, code: int, depth: int, distributions: list[Tensor] = DISTRIBUTIONS) -> Tensor:
    """[V] what a row's children at a path are drawn from, by hand; a greedy row's ranking at temperature 1."""
    if params.temperature == 0:
        params = SamplingParams()
    logits = distributions[depth][code].log() / params.temperature
    if params.top_k:
        logits = logits.masked_fill(logits < logits.sort(descending=True).values[params.top_k - 1], -math.inf)
    probs = logits.softmax(-1)
    if params.top_p < 1:
        order = probs.argsort(descending=True)
        before = probs[order].cumsum(0) - probs[order]
        probs[order[before >= params.top_p]] = 0.0
        probs = probs / probs.sum()
    return probs


def siblings(tree: TokenTree, row: int) -> dict[int, list[int]]:
    """Children of each node that has some."""
    out: dict[int, list[int]] = {}
    for node, above in enumerate(tree.parent[row].tolist()):
        if above >= 0:
            out.setdefault(above, []).append(node)
    return out


def allowed(shape: Shape, draws: DrawMode, count: int, rank: int) -> set[DrawnBy]:
    """Distributions that the rank-th of count siblings may have in a sampled row."""
    if shape.is_chain:
        return {CHAIN_LABELS[draws]}
    if draws == DrawMode.COUPLED:
        return {DrawnBy.COUPLED}
    if draws == DrawMode.FIXED or shape.fixed:
        return {DrawnBy.FIXED}
    if draws == DrawMode.IID:
        return {DrawnBy.IID}
    if draws == DrawMode.WITHOUT_REPLACEMENT:
        return {DrawnBy.WITHOUT_REPLACEMENT}
    return {DrawnBy.IID, DrawnBy.FIXED} if rank == 0 else {DrawnBy.FIXED}


@pytest.mark.parametrize(("shape", "draws"), CASES, ids=name)
def test_legal(shape: Shape, draws: DrawMode) -> None:
    """Invariants, limits, labels, and every recorded probs: exactly what the path's distribution is, by hand."""
    kinds = set()
    for seed in range(3):
        tree = grown(shape, draws, PARAMS, ROOM, seed).tree
        tree.check()
        deep, code = depths(tree.parent), codes(tree, VOCAB)
        assert tree.num_nodes <= shape.max_guesses + 1
        for row, (params, depth_limit) in enumerate(zip(PARAMS, ROOM, strict=True)):
            assert 1 <= int(deep[row].max()) <= depth_limit
            for node, children in siblings(tree, row).items():
                probs = probs_after(params, int(code[row, node]), int(deep[row, node]))
                tokens = tree.tokens[row, children]
                assert bool((probs[tokens] > 0).all()), "a token without mass is never proposed"
                labels = [DrawnBy(label) for label in tree.drawn_by[row, children].tolist()]
                kinds.update(labels)
                if params.temperature == 0 and not shape.is_chain:
                    assert set(labels) == {DrawnBy.FIXED}
                    assert tokens.tolist() == probs.argsort(descending=True, stable=True)[: len(children)].tolist()
                    continue
                for rank, label in enumerate(labels):
                    assert label in allowed(shape, draws, len(labels), rank)
                if draws != DrawMode.IID or shape.fixed:
                    assert len(set(tokens.tolist())) == len(children)
                if DrawnBy.IID in labels and draws == DrawMode.GREEDY and not shape.is_chain:
                    assert bool((tree.q[row, node, tokens[1:]] == 0).all()), "the drawn one is none of the FIXED"
                    torch.testing.assert_close(tree.q[row, node].sum(), torch.tensor(1.0))
                elif DrawnBy.IID in labels or DrawnBy.WITHOUT_REPLACEMENT in labels:
                    expected = (
                        probs if params.temperature else torch.nn.functional.one_hot(probs.argmax(), VOCAB).float()
                    )
                    torch.testing.assert_close(tree.q[row, node], expected)
            if tree.q is not None:
                drawn = (tree.drawn_by[row] == DrawnBy.IID) | (tree.drawn_by[row] == DrawnBy.WITHOUT_REPLACEMENT)
                with_q = {above for above, drew in zip(tree.parent[row].tolist(), drawn.tolist(), strict=True) if drew}
                for node in range(tree.num_nodes):
                    assert bool((tree.q[row, node] > 0).any()) == (node in with_q)
    assert kinds


@pytest.mark.parametrize(("shape", "draws"), CASES, ids=name)
def test_company_changes_nothing(shape: Shape, draws: DrawMode) -> None:
    """A row's tree is the same alone and in a batch of rows with other limits, but for padding."""
    for seed in range(2):
        together = grown(shape, draws, PARAMS, ROOM, seed)
        context = rows(PARAMS, VOCAB)
        for row, (params, depth_limit) in enumerate(zip(PARAMS, ROOM, strict=True)):
            alone = replace_rows(context, row)
            noise = Noise(torch.tensor([row + 1000 * seed]), alone.length)
            single = grow(
                TableExpander(DISTRIBUTIONS), alone, [min(shape.depth, depth_limit)], shape, draws, noise
            ).tree
            mine = paths(together.tree, row)
            assert paths(single, 0) == mine, params


def replace_rows(context: object, row: int) -> object:
    """A context of one of its rows."""
    made = rows([PARAMS[row]], VOCAB)
    made.history.ids = [context.history.ids[row]]  # type: ignore[attr-defined]
    made.lengths = [len(made.history.ids[0]) - 1]
    made.length = torch.tensor(made.lengths)
    return made


def paths(tree: TokenTree, row: int) -> list[tuple[tuple[int, ...], int]]:
    """Path and label of each node, in the tree's order."""
    found: dict[int, tuple[int, ...]] = {0: ()}
    out = []
    for node, (above, token) in enumerate(zip(tree.parent[row].tolist(), tree.tokens[row].tolist(), strict=True)):
        if above >= 0:
            found[node] = (*found[above], token)
            out.append((found[node], int(tree.drawn_by[row, node])))
    return out


@pytest.mark.parametrize(("shape", "draws"), list(itertools.product(TEMPLATES, DrawMode)), ids=name)
def test_templates_draw_node_by_node(shape: Static | Sequoia, draws: DrawMode) -> None:
    """Tokens are those of a slow twin that draws each node on its own, keyed by its number in the whole tree."""
    template = compiled(parent_of(shape), shape.depth, draws == DrawMode.GREEDY, torch.device("cpu"))
    full = template.parent.tolist()
    children = {node: [i for i, above in enumerate(full) if above == node] for node in range(len(full))}
    distributions = [probs.float() for probs in tables(VOCAB, DEPTH, seed=4).q]
    for seed in range(3):
        context = rows([SamplingParams()] * 2, VOCAB)
        noise = noise_for(context, seed)
        tree = grow(TableExpander(distributions), context, [shape.depth] * 2, shape, draws, noise).tree
        deep, code = depths(tree.parent), codes(tree, VOCAB)
        assert tree.parent.tolist() == [full, full]
        for row, node in itertools.product(range(2), range(len(full))):
            if children[node]:
                probs = probs_after(SamplingParams(), int(code[row, node]), int(deep[row, node]), distributions)
                one = Noise(noise.seeds[row : row + 1], noise.positions[row : row + 1])
                expected = drawn_by_hand(probs, draws, one, int(deep[row, node]), node, children[node])
                assert tree.tokens[row, children[node]].tolist() == expected


def drawn_by_hand(
    probs: Tensor, draws: DrawMode, noise: Noise, depth: int, node: int, children: list[int]
) -> list[int]:
    """Children of one node, one after the other."""
    count = len(children)
    ranked = probs.argsort(descending=True, stable=True).tolist()
    if draws == DrawMode.FIXED:
        return ranked[:count]
    if draws == DrawMode.IID:
        return [int(invert_cdf(probs[None], noise.draft(child))) for child in children]
    if draws == DrawMode.GREEDY:
        rest = probs.clone()
        rest[ranked[: count - 1]] = 0.0
        return [int(invert_cdf(rest[None], noise.draft(children[0]))), *ranked[: count - 1]]
    keys = (
        noise.coupled_keys(depth + 1)[0, depth]
        if draws == DrawMode.COUPLED
        else noise.race_at(torch.tensor([node]))[0, 0]
    )
    left, out = probs / exponentials(keys, VOCAB), []
    for _ in range(count):  # the winner, then the winner without it, ...
        out.append(int(left.argmax()))
        left[out[-1]] = 0.0
    return out


def test_without_replacement_is_without_replacement() -> None:
    """Frequencies of ordered pairs over 20,000 nodes: chi-square; a false alarm once in 10^6. Control: iid pairs."""
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    drawing = Drawing(DrawMode.WITHOUT_REPLACEMENT, Noise(torch.arange(20_000), torch.full((20_000,), 7)), 1)
    nodes = Nodes(0, torch.tensor([0]), torch.tensor([[1, 2]]))

    def chi_square(draws: DrawMode) -> float:
        tokens = replace(drawing, draws=draws).children(probs.expand(20_000, 1, 4), nodes).tokens[:, 0]
        total = 0.0
        for first, second in itertools.permutations(range(4), 2):
            expected = 20_000 * float(probs[first] * probs[second] / (1 - probs[first]))
            total += (int((tokens == torch.tensor([first, second])).all(1).sum()) - expected) ** 2 / expected
        return total

    edge = 49.2  # chi2.isf(1e-6, 11)
    assert chi_square(DrawMode.WITHOUT_REPLACEMENT) < edge
    assert chi_square(DrawMode.IID) > 5 * edge


@pytest.mark.parametrize("vocab_size", [3, 512, 4099])
def test_the_compiled_race_is_the_slow_one(vocab_size: int) -> None:
    """Tokens of ``race_top`` and ``top`` in float32 (compiled, where it was built) and float64; the first is ``race``'s."""
    generator = torch.Generator().manual_seed(vocab_size)
    probs = (torch.randn(40, vocab_size, generator=generator) * 3).softmax(-1)
    probs[:5, ::2] = 0.0
    probs[5] = 0.0
    probs[6] = torch.nan
    keys = torch.randint(-(2**62), 2**62, (40,), generator=generator)
    for count in (1, 2, 5, 16):
        for (tokens, scores), (twins, expected) in (
            (race_top(probs, keys, count), race_top(probs.double(), keys, count)),
            (top(probs, count), top(probs.double(), count)),
        ):
            possible = expected > 0
            assert torch.equal(scores > 0, possible)
            assert torch.equal(tokens[possible], twins[possible])
            assert not bool(possible[5:7].any()), "nothing can be drawn from zeros or NaN"
            torch.testing.assert_close(scores[possible].double(), expected[possible], rtol=1e-5, atol=0)
    rest = torch.arange(40) > 6
    assert torch.equal(race_top(probs, keys, 1)[0][rest, 0], race(probs, keys)[rest])
    tied = torch.tensor([[0.1, 0.3, 0.3, 0.0, 0.3]])
    assert top(tied, 2)[0].tolist() == top(tied.double(), 2)[0].tolist() == [[1, 2]]


# -- templates -------------------------------------------------------------------------------------------------------


def test_template_shapes() -> None:
    assert parent_of(Static(branching=(2, 1))) == (-1, 0, 0, 1, 2)
    assert parent_of(Static(branching=(1, 2, 1))) == (-1, 0, 1, 1, 2, 3)
    assert len(parent_of(Sequoia(depth=4, size=7))) == 8
    cpu = torch.device("cpu")
    template = compiled((-1, 0, 0, 1, 1, 2, 3), 3, False, cpu)
    assert template.parent.tolist() == [-1, 0, 1, 2, 1, 0, 5], "depth first, first children first"
    assert template.depth.tolist() == [0, 1, 2, 3, 2, 1, 2]
    assert template.slots.tolist() == [0, 1, 2, -1, -1, 5, -1], "leaves are never fed"
    cut = compiled((-1, 0, 0, 1, 1, 2, 3), 1, False, cpu)
    assert cut.parent.tolist() == [-1, 0, 0]
    assert cut.levels[0].nodes.numbers.tolist() == [[1, 5]], "draws are keyed by the number in the whole tree"
    rotated = compiled((-1, 0, 0, 1, 1, 2, 3), 3, True, cpu)
    assert rotated.parent.tolist() == [-1, 0, 1, 0, 3, 3, 5], "the drawn child, first, has the last one's subtree"


@pytest.mark.parametrize("draws", [DrawMode.FIXED, DrawMode.IID, DrawMode.COUPLED])
def test_a_template_of_one_child_is_a_chain(draws: DrawMode) -> None:
    params = [SamplingParams(), SamplingParams(temperature=0.8, top_k=3)]
    distributions = [probs.float() for probs in tables(VOCAB, DEPTH, seed=4).q]
    chain = grown(Chain(depth=3), draws, params, [3, 3], distributions=distributions).tree
    tree = grown(Static(branching=(1, 1, 1)), draws, params, [3, 3], distributions=distributions).tree
    assert torch.equal(chain.tokens, tree.tokens)
    assert torch.equal(chain.parent, tree.parent)
    assert torch.equal(chain.drawn_by, tree.drawn_by)
    assert (chain.q is None) == (tree.q is None)
    if chain.q is not None and tree.q is not None:
        assert torch.equal(chain.q, tree.q)


@pytest.mark.parametrize("shape", SHAPES, ids=name)
def test_passes_and_slots(shape: Shape) -> None:
    """One pass a depth, within the slots that the shape promised; all parents were fed."""
    for draws in DrawMode:
        context = rows(PARAMS, VOCAB)
        expander = TableExpander(DISTRIBUTIONS)
        limits = [min(shape.depth, depth_limit) for depth_limit in ROOM]
        found = grow(expander, context, limits, shape, draws, noise_for(context))
        assert expander.num_passes <= shape.depth
        assert sum(expander.widths) <= shape.max_grown + 1
        for row in range(len(PARAMS)):
            slots = found.slots[row].tolist()
            assert slots[0] == 0
            parents = list(siblings(found.tree, row))
            assert all(slots[node] >= 0 for node in parents)
            assert len({slots[node] for node in parents}) == len(parents)


# -- chains ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "threshold"), [("path", 0.3), ("probability", 0.5)])
@pytest.mark.parametrize("draws", [DrawMode.FIXED, DrawMode.IID, DrawMode.COUPLED])
def test_adaptive(rule: str, threshold: float, draws: DrawMode) -> None:
    """The chain of Chain, cut at the first distribution (after the first) by which the rule would not draw."""
    params = [SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(temperature=0.6), SamplingParams()]
    depth_limit, lengths = [4, 4, 4, 2], set()
    for seed in range(20):
        distributions = [probs.float() for probs in tables(VOCAB, DEPTH, seed).q]
        whole = grown(Chain(depth=DEPTH), draws, params, depth_limit, seed, distributions).tree
        tree = grown(
            Adaptive(depth=DEPTH, rule=rule, threshold=threshold), draws, params, depth_limit, seed, distributions
        ).tree
        tree.check()
        code = codes(whole, VOCAB)
        for row, space in enumerate(depth_limit):
            length = 1
            while length < space:
                probs = probs_after(params[row], int(code[row, length]), length, distributions).double()
                above = [
                    probs_after(params[row], int(code[row, depth]), depth, distributions).max()
                    for depth in range(length)
                ]
                unsure = {
                    "path": math.prod(map(float, above)) < threshold,
                    "probability": float(probs.max()) < threshold,
                }[rule]
                if unsure:
                    break
                length += 1
            lengths.add(length)
            assert int(tree.valid[row].sum()) == length + 1
            assert torch.equal(tree.tokens[row, : length + 1], whole.tokens[row, : length + 1])
    assert len(lengths) >= 3, "the rule is worth testing"


@pytest.mark.parametrize(("rule", "num_passes"), [("path", 2), ("probability", 3)])
def test_the_path_s_rule_stops_before_a_pass(rule: str, num_passes: int) -> None:
    """Of guesses with probabilities .8, .6 and .4 a threshold of .5 leaves two: nothing is read after the second."""
    tops = (0.8, 0.6, 0.4)
    distributions = [
        torch.tensor([[top, (1 - top) / 2, (1 - top) / 2]]).repeat(3**depth, 1) for depth, top in enumerate(tops)
    ]
    expander = TableExpander(distributions)
    context = rows([SamplingParams()], 3)
    shape = Adaptive(depth=3, rule=rule, threshold=0.5 if rule == "probability" else 0.481)
    found = grow(expander, context, [3], shape, DrawMode.COUPLED, noise_for(context))
    assert found.tree.num_nodes - 1 == 2
    assert expander.num_passes == num_passes
    assert found.slots.tolist() == [[0, 1, -1 if rule == "path" else 2]]
