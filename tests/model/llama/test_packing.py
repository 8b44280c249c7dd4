"""Ragged rows packed for the products, against the padded rectangle: the slow twin. And caches whose rows come and go."""

from dataclasses import replace

import pytest
import torch

from foretell.core.errors import CapacityError
from foretell.core.tree import chain_parent, layout
from foretell.model.cache import KVCache
from foretell.model.llama.run.lean import LeanModel
from foretell.model.llama.run.pack import PackedLinear, bucket
from foretell.model.prefill import feed, real_nodes
from foretell.model.target import Target
from tests.model.llama.family import VOCABULARY, make_model

PARENTS = torch.tensor([
    [-1, 0, 1, 1, 2, 0],
    [-1, -1, -1, -1, -1, -1],
    [-1, 0, -1, -1, -1, -1],
    [-1, 0, 0, -1, -1, -1],
])  # fmt: skip
PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10, 11], [12, 13]]


def filled(model: LeanModel) -> Target:
    target = Target(model, len(PROMPTS), 64)
    feed(target, PROMPTS, [0] * len(PROMPTS), head=False)
    return target


@pytest.mark.parametrize("kind", ["llama-mha-bias", "mistral-window", "qwen2", "qwen3-tied"])
@pytest.mark.parametrize("packed_weights", [True, False])
def test_a_packed_pass_is_the_padded_one(kind: str, packed_weights: bool) -> None:
    model = LeanModel.from_hf(make_model(kind), pack=packed_weights)
    length = torch.tensor([len(prompt) for prompt in PROMPTS])
    tokens = torch.arange(24).view(4, 6) % VOCABULARY
    outs, targets = [], []
    for pack in (False, True):
        target = filled(model)
        plan = layout(PARENTS, length, 64, span=16, pack=pack)
        assert (plan.real is not None) == pack
        outs.append(target.forward(tokens, plan, taps=(0, 2)))
        targets.append(target)
    padded, packed = outs
    real = PARENTS >= 0
    real[:, 0] = True
    for name in ("logits", "hidden", "taps"):
        one, other = getattr(padded, name), getattr(packed, name)
        assert one.shape == other.shape
        assert torch.isfinite(other).all()
        assert (one - other)[real].abs().max() < 1e-5
        assert (other[~real] == 0).all()
    for row, prompt in enumerate(PROMPTS):  # and what both wrote
        nodes = real[row].nonzero()[:, 0] + len(prompt)
        for one, other in zip(targets[0].cache.keys, targets[1].cache.keys, strict=True):
            assert (one[row, :, nodes] - other[row, :, nodes]).abs().max() < 1e-5


def test_a_packed_pass_leaves_other_slots_alone() -> None:
    model = LeanModel.from_hf(make_model("qwen3"))
    target = filled(model)
    before = [memory.clone() for memory in target.cache.keys]
    length = torch.tensor([len(prompt) for prompt in PROMPTS])
    target.forward(torch.ones(4, 6, dtype=torch.int64), layout(PARENTS, length, 64, span=16, pack=True))
    for old, new in zip(before, target.cache.keys, strict=True):
        assert torch.equal(old[1, :, 2:], new[1, :, 2:])  # row 1 has a root alone, in slot 1
        assert torch.equal(old[0, :, :3], new[0, :, :3])


def test_layers_apart_are_layers_together() -> None:
    model = LeanModel.from_hf(make_model("llama"))
    length = torch.tensor([len(prompt) for prompt in PROMPTS])
    plan = layout(PARENTS, length, 64, span=16, pack=True)
    tokens = torch.arange(24).view(4, 6)
    whole = filled(model).forward(tokens, plan).logits
    target = filled(model)
    lower = target.forward(tokens, plan, layers=(0, 1), head=False).hidden
    upper = target.forward(tokens, plan, layers=(1, 3), hidden=lower).logits
    assert whole is not None
    assert upper is not None
    assert torch.allclose(whole, upper, atol=1e-6)


def test_buckets_hold_their_rows_and_are_few() -> None:
    sizes = [bucket(count) for count in range(1, 513)]
    assert all(size >= count for count, size in enumerate(sizes, 1))
    assert sizes == sorted(sizes)
    assert all(bucket(size) == size for size in sizes)
    assert max(size / count for count, size in enumerate(sizes, 1)) < 1.125
    assert len(set(sizes)) == 64


@pytest.mark.parametrize(
    ("num_rows", "num_nodes"), [(1, 1), (1, 2), (1, 17), (2, 1), (3, 1), (3, 7), (4, 5), (5, 7), (1, 50)]
)
@pytest.mark.parametrize("kind", ["mistral-window", "qwen3-tied"])
def test_a_pass_of_any_size_runs_a_buckets_rows_and_gives_what_single_nodes_give(
    kind: str, num_rows: int, num_nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = LeanModel.from_hf(make_model(kind), pack=True)
    tokens = torch.randint(1, VOCABULARY, (num_rows, num_nodes), generator=torch.Generator().manual_seed(7))
    alone = Target(model, num_rows, 64)
    expected = []
    for node in range(num_nodes):
        plan = layout(chain_parent(1, torch.device("cpu")).expand(num_rows, 1), torch.full((num_rows,), node), 64)
        expected.append(alone.forward(tokens[:, node : node + 1], plan, taps=(1,)))
    seen: list[int] = []
    run = PackedLinear.__call__
    monkeypatch.setattr(PackedLinear, "__call__", lambda self, x: seen.append(x[..., 0].numel()) or run(self, x))
    target = Target(model, num_rows, 64)
    plan = layout(
        chain_parent(num_nodes, torch.device("cpu")).expand(num_rows, -1), torch.zeros(num_rows, dtype=torch.int64), 64
    )
    out = target.forward(tokens, plan, taps=(1,))
    for name in ("logits", "hidden", "taps"):
        one = torch.cat([getattr(each, name) for each in expected], 1)
        assert getattr(out, name).shape == one.shape
        assert (getattr(out, name) - one).abs().max() < 1e-5
    for memory, other in zip(alone.cache.values, target.cache.values, strict=True):
        assert (memory - other).abs().max() < 1e-5
    assert (model.logits(out.hidden) - out.logits).abs().max() < 1e-5
    assert (model.head(model.normed(out.hidden)) - out.logits).abs().max() < 1e-5
    assert seen
    assert all(count == bucket(count) >= num_rows * num_nodes for count in seen)


def test_real_nodes_of_chains() -> None:
    assert real_nodes([3, 0, 1], 3).tolist() == [0, 1, 2, 6]  # type: ignore[union-attr]
    assert real_nodes([3, 3], 3) is None
    plan = layout(PARENTS, torch.zeros(4, dtype=torch.int64), 64, pack=True)
    assert plan.real.tolist() == [0, 1, 2, 3, 4, 5, 6, 12, 13, 18, 19, 20]
    assert replace(plan).nodes(0, 1).real is None


def cache(rows: int, capacity: int = 8, reserve: int = 0) -> KVCache:
    made = KVCache(
        rows, capacity, [(2, 4)] * 3, torch.float32, [torch.device("cpu")] * 3, value_dims=[5, 5, 5], reserve=reserve
    )
    for row in range(rows):
        for memory in (*made.keys, *made.values):
            memory[row] = row + 1
    return made


def rows_of(made: KVCache, used: int) -> list[float]:
    first = [float(memory[row, :, :used].mean()) for memory in made.keys[:1] for row in range(made.num_rows)]
    for memory in (*made.keys, *made.values):
        assert [float(memory[row, :, :used].mean()) for row in range(made.num_rows)] == first
    return first


@pytest.mark.parametrize("reserve", [0, 9])
def test_rows_come_go_and_change_places(reserve: int) -> None:
    one, other = cache(3, reserve=reserve), cache(2)
    one.join(other, 6)
    assert rows_of(one, 6) == [1, 2, 3, 1, 2]
    one.keep(torch.tensor([4, 1, 2, 0]), 6)
    assert rows_of(one, 6) == [2, 2, 3, 1]
    one.keep(torch.tensor([2]))
    assert rows_of(one, 6) == [3]
    one.open_rows(2)
    assert one.num_rows == 3
    assert all(torch.isfinite(memory).all() for memory in (*one.keys, *one.values))
    view = one.rows(1, 3)
    view.keys[0][:] = 7
    assert (one.keys[0][1:] == 7).all()
    assert (one.keys[0][0] == 3).all()


def test_a_row_that_is_too_long_cannot_join() -> None:
    with pytest.raises(CapacityError):
        cache(1).join(cache(1, capacity=16), 12)


def test_released_rows_are_zero_again_and_others_untouched() -> None:
    made = KVCache(4, 4096, [(2, 64)], torch.float32, [torch.device("cpu")])
    made.clear()
    made.open_rows(3)
    for row in range(3):
        made.keys[0][row], made.values[0][row] = row + 1, row + 1
    made.keep(torch.tensor([0, 1]))
    made.release(2)
    made.open_rows(1)
    assert (made.keys[0][2] == 0).all()
    assert (made.values[0][2] == 0).all()
    assert (made.keys[0][1] == 2).all()
