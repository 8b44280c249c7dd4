"""Trees and layouts against naive Python: random trees, ragged, padded, in any numbering."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from foretell.core import tree as tree_module
from foretell.core.tree import (
    DrawnBy,
    TokenTree,
    ancestors,
    ancestors_by_squaring,
    chain_parent,
    chain_tree,
    depths,
    is_chain,
    layout,
    pad_tree,
    root_tree,
)
from foretell.verify.base import follow


@st.composite
def parents(draw: st.DrawFn, max_rows: int = 3, max_nodes: int = 9) -> list[list[int]]:
    """Parent rows of one width: any earlier valid node, or -1 for padding (also between nodes)."""
    num_rows, num_nodes = draw(st.integers(1, max_rows)), draw(st.integers(1, max_nodes))
    rows = []
    for _ in range(num_rows):
        row = [-1]
        for node in range(1, num_nodes):
            valid = [0, *[i for i in range(1, node) if row[i] >= 0]]
            row.append(draw(st.sampled_from([-1, *valid])))
        rows.append(row)
    return rows


def path_of(row: list[int], node: int) -> list[int]:
    """From the root (or, for padding, itself) down to a node."""
    path = [node]
    while row[path[0]] >= 0:
        path.insert(0, row[path[0]])
    return path


@given(parents())
def test_ancestors_and_depths(rows: list[list[int]]) -> None:
    reach, depth = ancestors(torch.tensor(rows)), depths(torch.tensor(rows))
    for b, row in enumerate(rows):
        for i in range(len(row)):
            path = path_of(row, i)
            assert reach[b, i].nonzero()[:, 0].tolist() == path
            assert int(depth[b, i]) == len(path) - 1


@given(parents(), st.data())
def test_the_kernel_and_squaring_agree(rows: list[list[int]], data: st.DataObject) -> None:
    parent = torch.tensor(rows)
    reach = ancestors_by_squaring(parent)
    assert torch.equal(ancestors(parent), reach)
    assert torch.equal(depths(parent), reach.sum(-1) - 1)
    length = torch.tensor([data.draw(st.integers(0, 6)) for _ in rows])
    with pytest.MonkeyPatch.context() as patch:
        plan = layout(parent, length, 40)
        patch.setattr(tree_module, "ancestors_and_depths", lambda parent: None)
        slow = layout(parent, length, 40)
        assert torch.equal(depths(parent), reach.sum(-1) - 1)
    assert torch.equal(plan.ancestry, slow.ancestry)
    assert torch.equal(plan.positions, slow.positions)


@given(parents(), st.data())
def test_layout(rows: list[list[int]], data: st.DataObject) -> None:
    num_nodes = len(rows[0])
    lengths = [data.draw(st.integers(0, 6)) for _ in rows]
    needed = max(lengths) + num_nodes
    span = data.draw(st.one_of(st.none(), st.integers(needed, needed + 4)))
    capacity = needed + 5
    plan = layout(torch.tensor(rows), torch.tensor(lengths), capacity, span=span)
    width = capacity if span is None else span
    assert plan.span == width
    assert plan.num_nodes == num_nodes
    assert plan.mask.shape == (len(rows), 1, num_nodes, width)
    assert plan.mask.dtype == torch.bool
    for b, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        held = list(range(length)) + [length + len(path_of(row, j)) - 1 for j in range(num_nodes)]
        assert plan.key_positions[b].tolist() == held + [-1] * (width - len(held))
        for i in range(num_nodes):
            path = path_of(row, i)
            assert int(plan.slots[b, i]) == length + i
            assert int(plan.positions[b, i]) == length + len(path) - 1
            seen = plan.mask[b, 0, i].nonzero()[:, 0].tolist()
            assert seen == [*range(length), *[length + j for j in path]]


@pytest.mark.parametrize("num_nodes", [2, 5])
def test_a_layout_of_lines_needs_no_products(num_nodes: int) -> None:
    """Of chains of every length, padding behind them, as of any trees."""
    index = torch.arange(num_nodes)
    parent = torch.where(index < index[:, None] + 1, index - 1, -1)
    ancestry, depth = tree_module._lines(parent)
    assert torch.equal(ancestry, ancestors_by_squaring(parent))
    assert torch.equal(depth, depths(parent))


@given(parents(), st.data())
def test_plan_of_some_nodes(rows: list[list[int]], data: st.DataObject) -> None:
    num_nodes = len(rows[0])
    start = data.draw(st.integers(0, num_nodes - 1))
    stop = data.draw(st.integers(start + 1, num_nodes))
    whole = layout(torch.tensor(rows), torch.arange(len(rows)), 20)
    part = whole.nodes(start, stop)
    assert part.num_nodes == stop - start
    assert torch.equal(part.slots, whole.slots[:, start:stop])
    assert torch.equal(part.positions, whole.positions[:, start:stop])
    assert torch.equal(part.mask, whole.mask[:, :, start:stop])
    assert torch.equal(part.key_positions, whole.key_positions)
    again = part.nodes(0, 1)
    assert torch.equal(again.mask, whole.mask[:, :, start : start + 1])


@given(parents(), st.data())
def test_follow(rows: list[list[int]], data: st.DataObject) -> None:
    at = [data.draw(st.sampled_from([0, *[i for i in range(1, len(row)) if row[i] >= 0]])) for row in rows]
    path, count = follow(torch.tensor(rows), torch.tensor(at))
    assert path.shape == (len(rows), len(rows[0]))
    for b, row in enumerate(rows):
        expected = path_of(row, at[b])
        assert path[b, : int(count[b])].tolist() == expected
        assert sorted(path[b].tolist()) == list(range(len(row)))


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 5, 8, 9, 17, 33])
def test_the_chain_fast_path_equals_the_general_one(num_nodes: int) -> None:
    chain = chain_parent(num_nodes, torch.device("cpu")).expand(2, -1)
    assert is_chain(chain)
    # A second row that is no chain sends the whole batch down the general path.
    star = torch.tensor([[-1] + [0] * (num_nodes - 1)])
    mixed = torch.cat([chain, star])
    assert is_chain(mixed) == (num_nodes <= 2)
    assert torch.equal(ancestors(chain), ancestors(mixed)[:2])
    assert torch.equal(depths(chain), depths(mixed)[:2])
    length = torch.tensor([0, 4, 1])
    fast, general = layout(chain, length[:2], 40), layout(mixed, length, 40)
    for name in ("slots", "positions", "tree_positions", "mask", "key_positions", "ancestry"):
        assert torch.equal(getattr(fast, name), getattr(general, name)[:2]), name
    at = torch.tensor([0, num_nodes - 1, 0])
    (path, count), (other, others) = follow(chain, at[:2]), follow(mixed, at)
    assert torch.equal(count, others[:2])
    assert all(torch.equal(path[b, : int(count[b])], other[b, : int(count[b])]) for b in range(2))


def test_span_changes_no_meaning() -> None:
    parent, length = torch.tensor([[-1, 0, 0, 1]]), torch.tensor([3])
    narrow, wide = layout(parent, length, 30, span=7), layout(parent, length, 30)
    assert torch.equal(narrow.mask, wide.mask[..., :7])
    assert not bool(wide.mask[..., 7:].any())


def test_layout_is_pure() -> None:
    parent, length = torch.tensor([[-1, 0, 0]]), torch.tensor([2])
    plan = layout(parent, length, 8)
    _ = plan.mask, plan.key_positions
    assert parent.tolist() == [[-1, 0, 0]]
    assert length.tolist() == [2]


# Trees


def a_tree() -> TokenTree:
    """Two rows, the second one ragged."""
    return TokenTree(
        torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0]]),
        torch.tensor([[-1, 0, 0, 1], [-1, 0, -1, -1]]),
        torch.tensor([[0, 1, 0, 2], [0, 3, 0, 0]]),
        torch.full((2, 4, 8), 0.125),
        hidden=torch.ones(2, 4, 3),
        hidden_layer=1,
    )


def test_valid_and_check() -> None:
    tree = a_tree()
    tree.check()
    assert tree.valid.tolist() == [[True] * 4, [True, True, False, False]]
    assert tree.num_nodes == 4


def changed(name: str, b: int, i: int, value: int) -> TokenTree:
    tree = a_tree()
    tensor = getattr(tree, name).clone()
    tensor[b, i] = value
    return replace(tree, **{name: tensor})


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (changed("parent", 0, 0, 0), "node 0"),
        (changed("parent", 0, 2, 3), "before"),
        (changed("parent", 0, 2, 2), "before"),
        (changed("parent", 1, 3, -2), "before"),
        (changed("parent", 1, 3, 2), "padding node has children"),
        (changed("drawn_by", 0, 0, DrawnBy.IID), "FIXED"),
        (changed("drawn_by", 0, 0, DrawnBy.COUPLED), "FIXED"),
        (changed("drawn_by", 1, 2, DrawnBy.WITHOUT_REPLACEMENT), "FIXED"),
        (changed("drawn_by", 1, 2, DrawnBy.COUPLED), "FIXED"),
        (replace(a_tree(), q=None), "q must"),
        (replace(a_tree(), drawn_by=torch.zeros(2, 4, dtype=torch.int64)), "q must"),
        (replace(a_tree(), drawn_by=torch.zeros(2, 3, dtype=torch.int64)), "drawn_by"),
        (replace(a_tree(), parent=torch.zeros(1, 4, dtype=torch.int64)), "parent"),
        (replace(a_tree(), drawn_by=torch.tensor([[0, 0, 1, 2], [0, 3, 0, 0]])), "before FIXED"),
    ],
)
def test_check_raises_on_each_broken_invariant(tree: TokenTree, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        tree.check()


def test_pad_tree() -> None:
    tree = a_tree()
    wide = pad_tree(tree, 6)
    wide.check()
    assert wide.num_nodes == 6
    assert wide.parent[:, 4:].eq(-1).all()
    assert wide.valid[:, 4:].logical_not().all()
    assert wide.q is not None
    assert wide.hidden is not None
    assert wide.q.shape == (2, 6, 8)
    assert wide.q[:, 4:].eq(0).all()
    assert wide.hidden.shape == (2, 6, 3)
    for name in ("tokens", "parent", "drawn_by", "q", "hidden"):
        assert torch.equal(getattr(wide, name)[:, :4], getattr(tree, name)), name
    assert wide.hidden_layer == 1
    assert pad_tree(tree, 4) is tree
    assert pad_tree(tree, 2) is tree
    plain = pad_tree(root_tree(torch.tensor([3, 4])), 3)
    assert plain.q is None
    assert plain.parent.tolist() == [[-1, -1, -1]] * 2


@given(parents(), st.integers(0, 5))
def test_padding_changes_no_real_node(rows: list[list[int]], extra: int) -> None:
    num_nodes, length = len(rows[0]), torch.arange(len(rows))
    parent = torch.tensor(rows)
    wide = torch.nn.functional.pad(parent, (0, extra), value=-1)
    a, b = layout(parent, length, 30), layout(wide, length, 30)
    assert torch.equal(a.positions, b.positions[:, :num_nodes])
    assert torch.equal(a.mask, b.mask[:, :, :num_nodes])


def naive_chain_parent(count: int, num_nodes: int) -> list[int]:
    return [i - 1 if i < count else -1 for i in range(num_nodes)]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_chain_tree(counts: list[int]) -> None:
    tokens = torch.arange(len(counts) * 6).view(-1, 6)
    q = torch.full((len(counts), 6, 4), 0.25)
    tree = chain_tree(tokens, torch.tensor(counts), drawn_by=DrawnBy.IID, q=q)
    assert tree.parent.tolist() == [naive_chain_parent(count, 6) for count in counts]
    assert tree.drawn_by.tolist() == [[int(0 < i < count) for i in range(6)] for count in counts]
    whole = chain_tree(tokens)
    assert is_chain(whole.parent)
    assert int(whole.drawn_by.abs().sum()) == 0
    whole.check()


def test_shared_constants_are_not_written() -> None:
    """``chain_parent`` is shared between calls: building trees from it leaves it alone."""
    before = chain_parent(5, torch.device("cpu")).clone()
    tree = chain_tree(torch.zeros(2, 5, dtype=torch.int64), torch.tensor([2, 3]))
    _ = tree.valid, layout(tree.parent, torch.tensor([0, 1]), 9).mask, tree.check()
    whole = chain_tree(torch.zeros(2, 5, dtype=torch.int64))
    valid: Tensor = whole.valid
    assert bool(valid.all())
    assert torch.equal(chain_parent(5, torch.device("cpu")), before)
