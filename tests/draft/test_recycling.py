"""Token recycling: templates, the walk over the matrix and its update, against plain loops."""

import pytest
import torch
from hypothesis import given, strategies as st

from foretell.core.errors import ConfigError
from foretell.core.tree import TokenTree
from foretell.draft.recycling import CandidateTree, Matrix, Recycling, template
from foretell.draft.shapes import Chain, Sequoia, Shape, Static
from foretell.theory.shape import best_tree

CPU = torch.device("cpu")
SHAPES: list[Shape] = [
    Chain(depth=4),
    Static(branching=(3, 2, 1, 1)),
    Static(branching=(1, 4)),
    Static(branching=(1, 3, 1, 1)),
    Static(branching=(2, 1, 1)),
    Sequoia(depth=4, size=9, acceptance=(0.5, 0.2, 0.1)),
]


def matrix_of(rows: dict[int, list[int]], vocab_size: int, num_candidates: int) -> Matrix:
    matrix = Matrix(vocab_size, num_candidates, CPU)
    for token, candidates in rows.items():
        matrix.entries[token] = torch.tensor(candidates, dtype=torch.int32)
    return matrix


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.spec)
def test_a_template_is_the_shape_depth_first(shape: Shape) -> None:
    form = template(shape, 64, shape.depth)
    assert len(form.parent) == shape.max_guesses + 1
    assert max(form.depth) <= shape.depth
    assert sorted(node for level in form.levels for node in level) == list(range(1, len(form.parent)))
    for node in range(1, len(form.parent)):
        assert form.parent[node] < node
        assert form.depth[node] == form.depth[form.parent[node]] + 1
        siblings = [other for other in range(1, len(form.parent)) if form.parent[other] == form.parent[node]]
        assert form.rank[node] == siblings.index(node)
        if form.rank[node] == 0:
            assert form.parent[node] == node - 1, "a first child follows its parent: the leading path is 0, 1, 2, ..."


def test_branching_is_what_static_says() -> None:
    form = template(Static(branching=(3, 2)), 8, 2)
    assert form.parent == (-1, 0, 1, 1, 0, 4, 4, 0, 7, 7)
    assert template(Static(branching=(1, 2, 1)), 8, 3).parent == (-1, 0, 1, 2, 1, 4)
    assert template(Chain(depth=3), 8, 3).parent == (-1, 0, 1, 2)


def test_sequoia_is_the_best_tree() -> None:
    acceptance = (0.5, 0.2, 0.1)
    assert template(Sequoia(depth=4, size=9, acceptance=acceptance), 8, 4).parent == best_tree(acceptance, 10, 4)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.spec)
@pytest.mark.parametrize("depth_limit", [1, 2])
def test_room_and_candidates_cut_a_template(shape: Shape, depth_limit: int) -> None:
    assert max(template(shape, 8, depth_limit).depth) == depth_limit
    assert max(template(shape, 2, depth_limit).rank) <= 1


VOCAB = 6
ROWS = st.dictionaries(
    st.integers(0, VOCAB - 1), st.permutations(range(VOCAB)).map(lambda order: list(order[:3])), max_size=VOCAB
)


@given(rows=ROWS, pending=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3), index=st.integers(0, 5))
def test_growing_is_looking_up(rows: dict[int, list[int]], pending: list[int], index: int) -> None:
    form = template(SHAPES[index], 3, 4)
    depth_limit = [2, 0, 4][: len(pending)]
    matrix = matrix_of(rows, VOCAB, 3)
    tokens, parent = matrix.grow(torch.tensor(pending), form, depth_limit)
    for row, root in enumerate(pending):
        known: dict[int, int] = {0: root}
        for node in range(1, len(form.parent)):
            above = known.get(form.parent[node])
            if above is not None and above in rows and form.depth[node] <= depth_limit[row]:
                known[node] = rows[above][form.rank[node]]
        found = {
            node: int(tokens[row, node]) for node in range(len(form.parent)) if node == 0 or parent[row, node] >= 0
        }
        assert found == known
        assert all(parent[row, node] == form.parent[node] for node in found)
    TokenTree(tokens, parent, torch.zeros_like(tokens)).check()


@given(
    tokens=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=4, max_size=4), min_size=1, max_size=3),
    padding=st.lists(st.booleans(), min_size=3, max_size=3),
    rows=ROWS,
)
def test_an_update_remembers_the_last_of_each_token(
    tokens: list[list[int]], padding: list[bool], rows: dict[int, list[int]]
) -> None:
    matrix = matrix_of(rows, VOCAB, 3)
    parent = torch.tensor([[-1, *(-1 if hole else 0 for hole in padding)]] * len(tokens))
    tree = TokenTree(torch.tensor(tokens), parent, torch.zeros_like(parent))
    candidates = torch.randint(0, VOCAB, (len(tokens), 4, 3), generator=torch.Generator().manual_seed(1))
    matrix.update(tree, candidates)
    expected = dict(rows)
    for row, nodes in enumerate(tokens):
        for node, token in enumerate(nodes):
            if node == 0 or not padding[node - 1]:
                expected[token] = candidates[row, node].tolist()
    assert matrix.entries[VOCAB].tolist() == [VOCAB] * 3, "nothing follows no token"
    for token in range(VOCAB):
        assert matrix.entries[token].tolist() == expected.get(token, [VOCAB] * 3)


def test_what_the_matrix_takes() -> None:
    entries = Matrix(32768, 8, CPU).entries
    assert (entries.numel() - 2 * 8) * entries.element_size() == 32768 * 8 * 4


def test_a_template_of_any_tree() -> None:
    assert CandidateTree.of((-1, 0, 0, 1, 2, 1)).parent == (-1, 0, 1, 1, 0, 4)


@pytest.mark.parametrize("num_candidates", [0, 65])
def test_candidates_that_cannot_be(num_candidates: int) -> None:
    with pytest.raises(ConfigError, match=f"num_candidates = {num_candidates} must be between 1 and 16"):
        Recycling(num_candidates=num_candidates)
