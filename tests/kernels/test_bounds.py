"""No index reaches C, or torch, out of its range: one clear error instead of foreign memory or a crash."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foretell.core import noise
from foretell.core.errors import ConfigError, ForetellError, ModelError, VocabularyMismatchError
from foretell.core.noise import Noise, Stream, race, race_top, stream_keys, top
from foretell.core.tree import DrawnBy, TokenTree
from foretell.kernels import bounds
from foretell.kernels.small import invert_cdf
from foretell.verify import VERIFIERS, Evidence, Rejection, draw
from foretell.verify.base import RowVerifiers
from foretell.verify.greedy_block import GreedyBlock
from foretell.verify.traversal import Traversal
from tests.verify.kernels import use

V = 11
READ_Q = ("rejection", "block", "traversal", "greedy_block", "k_seq", "importance", "transport")
VERIFIERS_HERE = sorted(name for name, rule in VERIFIERS.items() if "taps" not in rule.reads)


def evidence(name: str) -> Evidence:
    """Two rows of four nodes, a chain where the rule wants one; drawn IID where it reads q."""
    generator = torch.Generator().manual_seed(0)
    p, q = torch.softmax(torch.randn(2, 2, 4, V, generator=generator), -1).unbind(0)
    chain = VERIFIERS[name].chains_only
    parent = torch.tensor([[-1, 0, 1, 2] if chain else [-1, 0, 0, 1]]).repeat(2, 1)
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    label = torch.full((2, 4), int(DrawnBy.IID if name in READ_Q else DrawnBy.FIXED))
    label[:, 0] = int(DrawnBy.FIXED)
    noise = Noise(torch.tensor([3, 4]), torch.tensor([10, 20]))
    return Evidence(TokenTree(tokens, parent, label, q if name in READ_Q else None), p, noise)


def with_tree(given: Evidence, **changed: Tensor | None) -> Evidence:
    return replace(given, tree=replace(given.tree, **changed))


def put(x: Tensor, row: int, node: int, value: int) -> Tensor:
    changed = x.clone()
    changed[row, node] = value
    return changed


@pytest.mark.parametrize("kernel", ["c", "torch"])
@pytest.mark.parametrize("name", VERIFIERS_HERE)
@pytest.mark.parametrize("token", [V, 1_000_000, -1, -(1 << 62)])
def test_draw_refuses_a_guess_outside_the_vocabulary(
    name: str, token: int, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(kernel, monkeypatch)
    given = evidence(name)
    bad = with_tree(given, tokens=put(given.tree.tokens, 1, 2, token))
    with pytest.raises(VocabularyMismatchError, match=rf"row 1, node 2 .* id {token}; .* 0 to {V - 1}"):
        draw(VERIFIERS[name], bad)
    assert draw(VERIFIERS[name], given).sound.all()


@pytest.mark.parametrize("name", VERIFIERS_HERE)
@pytest.mark.parametrize(("node", "parent"), [(2, 1_000_000), (2, 2), (3, -2), (0, 0)])
def test_draw_refuses_a_parent_that_is_no_earlier_node(name: str, node: int, parent: int) -> None:
    given = evidence(name)
    with pytest.raises(ModelError, match=rf"node {node} of a tree has parent {parent}; it must be"):
        draw(VERIFIERS[name], with_tree(given, parent=put(given.tree.parent, 0, node, parent)))


def test_draw_checks_all_rows_of_a_panel() -> None:
    given = evidence("rejection")
    panel = RowVerifiers((VERIFIERS["coupled"], VERIFIERS["rejection"]), (1, 2))
    with pytest.raises(VocabularyMismatchError, match="row 1, node 3"):
        draw(panel, with_tree(given, tokens=put(given.tree.tokens, 1, 3, V)))


@pytest.mark.parametrize("rule", [Rejection(), Traversal(), GreedyBlock()])
def test_laws_asked_for_directly_are_checked_too(rule: Rejection | Traversal | GreedyBlock) -> None:
    """``stops`` and ``residual`` are called without ``draw`` by ``certify`` and by others' verifiers."""
    given = evidence("rejection")
    bad = with_tree(given, tokens=put(given.tree.tokens, 0, 1, 1_000_000))
    with pytest.raises(VocabularyMismatchError):
        rule.stops(bad)
    walk = rule.stops(given)
    at = torch.tensor([0, 1])
    assert rule.residual(given, walk, at).shape == (2, V)
    with pytest.raises(VocabularyMismatchError):
        rule.residual(bad, walk, at)
    for wrong in (torch.tensor([0, 4]), torch.tensor([-1, 0]), torch.tensor([0]), at.int()):
        with pytest.raises(ModelError, match="node"):
            rule.residual(given, walk, wrong)


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: {"parent": tree.parent[:, :3]},
        lambda tree: {"tokens": tree.tokens.int()},
        lambda tree: {"parent": tree.parent.int()},
        lambda tree: {"drawn_by": tree.drawn_by[:1]},
        lambda tree: {"q": tree.q[..., : V - 1]},
        lambda tree: {"q": tree.q[:, :3]},
    ],
)
def test_draw_refuses_tensors_that_do_not_fit(change: Callable[[TokenTree], dict[str, Tensor]]) -> None:
    given = evidence("rejection")
    with pytest.raises(ModelError, match="of a tree"):
        draw(Rejection(), with_tree(given, **change(given.tree)))
    with pytest.raises(ModelError, match="p of a tree"):
        draw(Rejection(), replace(given, p=given.p[:, :3]))


def test_the_check_equals_its_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both name the same node, or none, in 300 random trees with up to three changed entries each."""
    if bounds._bounds_library() is None:
        pytest.skip("no C compiler")
    generator = torch.Generator().manual_seed(1)
    refused = 0
    for number in range(300):
        parent = torch.arange(-1, 4).repeat(3, 1)
        tokens = torch.randint(0, V, (3, 5), generator=generator)
        for _ in range(number % 4):
            row, node, value = (int(torch.randint(0, high, (1,), generator=generator)) for high in (3, 5, V + 3))
            changed = tokens if value % 2 else parent
            changed[row, node] = value - 2
        tree = TokenTree(tokens, parent, torch.zeros(3, 5, dtype=torch.int64))
        said = []
        for library in (bounds._bounds_library, lambda: None):
            with monkeypatch.context() as context:
                context.setattr(bounds, "_bounds_library", library)
                try:
                    bounds.check_tree(tree, V)
                    said.append("")
                except ForetellError as error:
                    said.append(f"{type(error).__name__}: {error}")
        assert said[0] == said[1]
        refused += bool(said[0])
    assert 100 < refused < 250


def test_nodes_are_checked_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "_bounds_library", lambda: None)
    bounds.check_nodes(torch.tensor([0, 3]), 2, 4)
    with pytest.raises(ModelError, match="row 1 refers to node 4"):
        bounds.check_nodes(torch.tensor([0, 4]), 2, 4)


@pytest.mark.parametrize("native", [True, False])
def test_races_want_one_key_a_row(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(noise, "race_library", lambda: None)
    probs = torch.full((2, 3, V), 1.0 / V)
    keys = torch.zeros(2, 3, dtype=torch.int64)
    assert race(probs, keys).shape == (2, 3)
    for wrong in (keys[:1], keys.int(), torch.zeros(2, 4, dtype=torch.int64)):
        with pytest.raises(ConfigError, match="keys"):
            race(probs, wrong)
        with pytest.raises(ConfigError, match="keys"):
            race_top(probs, wrong, 2)
    with pytest.raises(ConfigError, match="count is at least 1"):
        top(probs, 0)


def test_keys_are_made_of_int64() -> None:
    if noise.race_library() is None:
        pytest.skip("no C compiler")
    with pytest.raises(ConfigError, match="int64"):
        stream_keys(torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64), Stream.DRAFT)


def test_invert_cdf_wants_one_uniform_a_row() -> None:
    probs, uniform = torch.full((2, V), 1.0 / V), torch.full((2,), 0.5, dtype=torch.float64)
    assert invert_cdf(probs, uniform).tolist() == [V // 2] * 2
    for wrong in ((probs, uniform[:1]), (probs, uniform.float()), (probs[:, :0], uniform), (probs[0], uniform)):
        with pytest.raises(ConfigError, match="invert_cdf takes"):
            invert_cdf(*wrong)
