"""TableLM: its distributions, and that nothing but the right slot, mask, position and commit gives the right text."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foretell.core.tree import chain_tree, layout, root_tree
from foretell.model.target import Target
from tests.model.table import TableLM

TREE = torch.tensor([[-1, 0, 0, 1, 1, 2, 3]])  # two branches, the first one three deep
TOKENS = torch.tensor([[5, 1, 2, 3, 4, 6, 7]])


def prefilled(model: TableLM, texts: list[list[int]], capacity: int = 32) -> Target:
    """A target that has read the texts (of one length), slot by slot."""
    target = Target(model, len(texts), capacity)
    tokens = torch.tensor(texts)
    plan = layout(chain_tree(tokens).parent, torch.zeros(len(texts), dtype=torch.int64), capacity)
    target.forward(tokens, plan, head=False)
    return target


def distributions_of(model: TableLM, texts: list[list[int]]) -> Tensor:
    """[len(texts), V] the oracle's distributions."""
    return torch.stack([model.probs_after(text) for text in texts])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_chain_logits_are_the_log_laws_of_each_prefix(dtype: torch.dtype) -> None:
    model = TableLM(8, seed=3, context=3, dtype=dtype)
    text = [1, 7, 0, 3, 3, 5]
    target = Target(model, 1, 16)
    out = target.forward(torch.tensor([text]), layout(torch.arange(-1, 5)[None], torch.tensor([0]), 16))
    assert out.logits.dtype == dtype
    expected = distributions_of(model, [text[: i + 1] for i in range(6)])
    assert torch.equal(out.logits[0], expected.log().to(dtype))
    assert torch.allclose(expected.sum(-1), torch.ones(6, dtype=torch.float64))


def test_tree_logits_are_those_of_each_path_in_any_batch_and_span() -> None:
    model = TableLM(8, seed=1, context=4)
    prefix = [2, 2, 6]
    paths = [[5], [5, 1], [5, 2], [5, 1, 3], [5, 1, 4], [5, 2, 6], [5, 1, 3, 7]]
    expected = distributions_of(model, [prefix + path for path in paths]).log().float()
    for span in (10, 17, 32):
        target = prefilled(model, [prefix, [0, 1, 0]])
        plan = layout(TREE.expand(2, -1), torch.tensor([3, 3]), 32, span=span)
        out = target.forward(TOKENS.expand(2, -1), plan)
        assert torch.equal(out.logits[0], expected)
        assert not torch.equal(out.logits[1], expected)  # another prefix, another distribution


def test_nodes_one_by_one_equal_all_at_once() -> None:
    model = TableLM(8, seed=1, context=4)
    plan = layout(TREE, torch.tensor([3]), 32)
    whole = prefilled(model, [[2, 2, 6]]).forward(TOKENS, plan).logits
    target = prefilled(model, [[2, 2, 6]])
    parts = [target.forward(TOKENS[:, i : i + 1], plan.nodes(i, i + 1)).logits for i in range(7)]
    assert torch.equal(torch.cat([part for part in parts if part is not None], 1), whole)


def test_commit_of_a_side_branch_then_next_step() -> None:
    model = TableLM(8, seed=1, context=4)
    target = prefilled(model, [[2, 2, 6]])
    target.forward(TOKENS, layout(TREE, torch.tensor([3]), 32))
    target.commit(torch.tensor([[3, 5, 8]]), torch.tensor([[3, 4, 5]]))  # path of nodes 0, 2, 5
    out = target.forward(torch.tensor([[4]]), layout(root_tree(torch.tensor([4])).parent, torch.tensor([6]), 32))
    assert torch.equal(out.logits[0, 0], model.probs_after([2, 2, 6, 5, 2, 6, 4]).log().float())


def next_logits(model: TableLM, src: list[int]) -> Tensor:
    """Logits after committing slots src onto 3, 4, 5, then token 4."""
    target = prefilled(model, [[2, 2, 6]])
    target.forward(TOKENS, layout(TREE, torch.tensor([3]), 32))
    target.commit(torch.tensor([src]), torch.tensor([[3, 4, 5]]))
    out = target.forward(torch.tensor([[4]]), layout(torch.tensor([[-1]]), torch.tensor([6]), 32))
    assert out.logits is not None
    return out.logits


@pytest.mark.parametrize("src", [[3, 4, 8], [3, 5, 7], [3, 5, 9], [3, 4, 5], [4, 5, 8]])
def test_a_wrong_commit_changes_the_law(src: list[int]) -> None:
    model = TableLM(8, seed=1, context=4)
    assert not torch.allclose(next_logits(model, src), next_logits(model, [3, 5, 8]), atol=1e-3)


def test_a_wrong_mask_slot_position_or_length_changes_the_law() -> None:
    model = TableLM(8, seed=1, context=4)
    plan = layout(TREE, torch.tensor([3]), 32)
    right = prefilled(model, [[2, 2, 6]]).forward(TOKENS, plan).logits
    assert right is not None
    everything = torch.ones_like(plan.ancestry).tril()
    wrong = {
        "causal mask instead of ancestry": replace(plan, ancestry=everything),
        "blind to its parent": replace(plan, ancestry=torch.eye(7, dtype=torch.bool)[None]),
        "positions by slot": replace(plan, positions=plan.slots),
        "slots shifted by one": replace(plan, slots=plan.slots + 1),
        "one slot too many committed": layout(TREE, torch.tensor([4]), 32),
        "one slot too few committed": layout(TREE, torch.tensor([2]), 32),
    }
    for name, broken in wrong.items():
        out = prefilled(model, [[2, 2, 6]]).forward(TOKENS, broken).logits
        assert out is not None
        assert not torch.allclose(out, right, atol=1e-3), name


def test_layer_ranges_taps_and_exits() -> None:
    model = TableLM(8, seed=1, context=4, num_layers=3)
    plan = layout(TREE, torch.tensor([3]), 32)
    whole = prefilled(model, [[2, 2, 6]]).forward(TOKENS, plan, taps=(0, 2))
    target = prefilled(model, [[2, 2, 6]])
    lower = target.forward(TOKENS, plan, layers=(0, 1))
    upper = target.forward(TOKENS, plan, layers=(1, 3), hidden=lower.hidden)
    assert lower.logits is None
    assert torch.equal(upper.logits, whole.logits)
    assert torch.equal(whole.taps, torch.cat([lower.hidden, upper.hidden], -1))
    assert whole.taps.shape[-1] == 2 * model.spec.hidden_size
    early = model.logits(lower.hidden).exp()
    assert torch.allclose(early.sum(-1), torch.ones(1, 7))
    distance = (early - whole.logits.exp()).abs().sum(-1) / 2
    assert bool((distance > 0.01).all())
    assert bool((distance < 0.5).all())
    skipped = prefilled(model, [[2, 2, 6]]).forward(TOKENS, plan, layers=(2, 3), hidden=lower.hidden).logits
    assert skipped is not None
    assert not torch.allclose(skipped, whole.logits, atol=1e-3)


def test_explicit_laws_and_blur() -> None:
    calls: list[tuple[int, ...]] = []

    def probs(context: tuple[int, ...]) -> list[float]:
        calls.append(context)
        return [0.5, 0.5, 0.0] if context[-1] == 0 else [0.0, 0.0, 1.0]

    model = TableLM(3, context=2, probs=probs, dtype=torch.float64)
    out = Target(model, 1, 8).forward(
        torch.tensor([[0, 1, 2, 0]]), layout(torch.tensor([[-1, 0, 1, 2]]), torch.tensor([0]), 8)
    )
    assert out.logits.exp()[0].tolist() == [[0.5, 0.5, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 1.0], [0.5, 0.5, 0.0]]
    assert calls == [(0,), (0, 1), (1, 2), (2, 0)]
    sharp, soft = TableLM(16, seed=2, sharpness=4.0), TableLM(16, seed=2, sharpness=0.5)
    assert sharp.probs_after([1, 2]).max() > soft.probs_after([1, 2]).max()
    near, same = TableLM(16, seed=2, blur=0.2), TableLM(16, seed=2)
    distance = (near.probs_after([1, 2]) - same.probs_after([1, 2])).abs().sum() / 2
    assert 0.0 < float(distance) <= 0.2
    assert not torch.equal(TableLM(16, seed=3).probs_after([1, 2]), same.probs_after([1, 2]))


def test_parameters_that_cannot_be() -> None:
    for wrong in ({"vocab_size": 0}, {"context": 0}, {"num_layers": 0}, {"blur": 1.5}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            TableLM(**wrong)  # type: ignore[arg-type]
