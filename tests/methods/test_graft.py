"""Guesses of one method in the trees of another, against paths as sets."""

import torch
from hypothesis import given, strategies as st

from foretell.core.tree import DrawnBy, TokenTree
from foretell.methods.hybrid.graft import graft, graft_there

TOKENS = 3  # few, so that guesses often run along nodes of the tree


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    """Ragged trees with padding anywhere, and siblings of one token."""
    num_rows, num_nodes = draw(st.integers(1, 3)), draw(st.integers(1, 7))
    parents, tokens = [], []
    for _ in range(num_rows):
        row = [-1]
        for node in range(1, num_nodes):
            row.append(draw(st.sampled_from([-1, *(i for i in range(node) if i == 0 or row[i] >= 0)])))
        parents.append(row)
        tokens.append([draw(st.integers(0, TOKENS - 1)) for _ in row])
    parent = torch.tensor(parents)
    labels = torch.where(parent >= 0, int(DrawnBy.COUPLED), int(DrawnBy.FIXED))
    return TokenTree(torch.tensor(tokens), parent, labels)


def paths(tree: TokenTree, row: int) -> list[tuple[int, ...]]:
    """The tokens below the root as far as each node."""
    tokens, parent = tree.tokens[row].tolist(), tree.parent[row].tolist()
    found: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, len(parent)):
        if parent[node] >= 0:
            found[node] = (*found[parent[node]], tokens[node])
    return list(found.values())[1:]


@given(trees(), st.data())
def test_every_path_of_either_is_there_once(tree: TokenTree, data: st.DataObject) -> None:
    guesses = [data.draw(st.lists(st.integers(0, TOKENS - 1), max_size=4)) for _ in tree.tokens]
    grown = graft(tree, guesses)
    grown.check()
    before = tree.num_nodes
    if any(guesses):  # by tensors alone: the same, with more padding behind it
        there, width = graft_there(tree, guesses), grown.num_nodes
        assert torch.equal(there.tokens[:, :width][grown.valid], grown.tokens[grown.valid])
        assert torch.equal(there.parent[:, :width], grown.parent)
        assert torch.equal(there.drawn_by[:, :width], grown.drawn_by)
        assert not there.valid[:, width:].any()
    assert torch.equal(grown.tokens[:, :before][tree.valid], tree.tokens[tree.valid])
    assert torch.equal(grown.parent[:, :before][tree.valid], tree.parent[tree.valid])
    assert torch.equal(grown.drawn_by[:, :before][tree.valid], tree.drawn_by[tree.valid])
    for row, guess in enumerate(guesses):
        old, new = paths(tree, row), paths(grown, row)
        line = {tuple(guess[: k + 1]) for k in range(len(guess))}
        assert set(new) == set(old) | line
        if len(old) == len(set(old)):  # else a guess follows the first of two nodes, and the other may have the rest
            assert len(new) == len(old) + len(line - set(old)), "nothing stands twice that did not before"


def test_drawn_siblings_come_first_and_their_distributions_stay() -> None:
    labels = torch.tensor([[0, 1, 1], [0, 1, 0]])
    q = torch.zeros(2, 3, 5)
    q[:, 0, :2] = 0.5
    tree = TokenTree(torch.tensor([[4, 0, 1], [4, 1, 0]]), torch.tensor([[-1, 0, 0], [-1, 0, -1]]), labels, q)
    grown = graft(tree, [[3, 2], [1, 3]])
    grown.check()
    assert grown.tokens.tolist() == [[4, 0, 1, 3, 2], [4, 1, 0, 3, 0]]
    assert grown.parent.tolist() == [[-1, 0, 0, 0, 3], [-1, 0, -1, 1, -1]]
    assert grown.drawn_by.tolist() == [[0, 1, 1, 0, 0], [0, 1, 0, 0, 0]]
    assert torch.equal(grown.q[:, :3], q)
    assert not grown.q[:, 3:].any()
