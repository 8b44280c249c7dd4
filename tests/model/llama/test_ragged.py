"""Native passes leave the padding of ragged rows out: the bits of all nodes are those of the padded rectangle."""

import pytest
import torch

from foretell.core.tree import Plan, layout
from foretell.model.cache import KVCache
from foretell.model.llama.run.native import NativeModel
from foretell.model.target import PassOptions
from tests.model.llama.family import VOCABULARY, make_model

CAPACITY = 300
KINDS = ("llama-mha-bias", "mistral-window", "gemma2", "qwen3moe", "granite", "glm4")
PARENTS = torch.tensor([
    [-1, 0, 1, 1, 2, 0],
    [-1, -1, -1, -1, -1, -1],
    [-1, 0, -1, -1, -1, -1],
    [-1, 0, 0, -1, -1, -1],
    [-1, 0, 1, 2, 3, 4],
    [-1, -1, -1, -1, -1, -1],
])  # fmt: skip
REAL = PARENTS >= 0
REAL[:, 0] = True
ROWS, NODES = PARENTS.shape
LENGTHS = torch.tensor([250, 3, 141, 128, 200, 17])
TOKENS = torch.randint(VOCABULARY, PARENTS.shape, generator=torch.Generator().manual_seed(5))


@pytest.fixture(autouse=True, params=[1, 3])
def threads(request: pytest.FixtureRequest) -> None:
    torch.set_num_threads(request.param)


def filled(model: NativeModel, *, same: bool = False) -> KVCache:
    """A cache of random keys and values; the same: rows 0, 2, 4 begin alike, and passes are told."""
    cache = model.new_cache(ROWS, CAPACITY)
    generator = torch.Generator().manual_seed(3)
    for memory in (*cache.keys, *cache.values):
        memory[:] = torch.randn(memory.shape, generator=generator)
        if same:
            memory[[2, 4], :, :140] = memory[0, :, :140].clone()
    if same:
        cache.shared = (((4, 0, 2), 140),)
    return cache


def plan_of(*, pack: bool) -> Plan:
    plan = layout(PARENTS, LENGTHS, CAPACITY, pack=pack)
    assert (plan.real is not None) == pack
    return plan


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("same", [False, True])
def test_the_bits_are_those_of_the_rectangle(kind: str, same: bool) -> None:
    model = NativeModel.from_hf(make_model(kind, max_position_embeddings=2048))
    outs, caches = [], []
    for pack in (False, True):
        cache = filled(model, same=same)
        outs.append(model.forward(TOKENS, plan_of(pack=pack), cache, PassOptions(taps=(0, 2))))
        caches.append(cache)
    for name in ("logits", "hidden", "taps"):
        rectangle, ragged = (getattr(out, name) for out in outs)
        assert ragged.shape == rectangle.shape
        assert torch.equal(ragged[REAL], rectangle[REAL]), name
        assert ragged.isfinite().all(), "a verifier may read all of it"
    before = filled(model, same=same)
    for of_rectangle, of_ragged, old in zip(caches[0].keys, caches[1].keys, before.keys, strict=True):
        for row in range(ROWS):
            length, count = int(LENGTHS[row]), int(REAL[row].sum())
            assert torch.equal(of_ragged[row, :, : length + count], of_rectangle[row, :, : length + count])
            assert torch.equal(of_ragged[row, :, length + count :], old[row, :, length + count :])


def test_layers_apart_are_layers_together() -> None:
    model = NativeModel.from_hf(make_model("llama", max_position_embeddings=2048))
    plan, cache = plan_of(pack=True), filled(model)
    whole = model.forward(TOKENS, plan, cache).logits
    lower = model.forward(TOKENS, plan, cache, PassOptions(layers=(0, 1), head=False)).hidden
    given = lower.clone()
    upper = model.forward(TOKENS, plan, cache, PassOptions(layers=(1, 3), hidden=lower)).logits
    assert torch.equal(whole[REAL], upper[REAL])
    assert torch.equal(lower, given)


def test_quantised_rows_are_the_same_with_and_without_padding() -> None:
    model = NativeModel.from_hf(make_model("llama", max_position_embeddings=2048), weights="int4")
    rectangle, ragged = (model.forward(TOKENS, plan_of(pack=pack), filled(model)).logits for pack in (False, True))
    assert torch.equal(ragged[REAL], rectangle[REAL])


@pytest.mark.parametrize("real", [[0, 0, 6], [6, 0], [0, ROWS * NODES], [-1, 0]])
def test_nodes_out_of_order_or_of_range_are_refused(real: list[int]) -> None:
    model = NativeModel.from_hf(make_model("llama", max_position_embeddings=2048))
    plan = layout(PARENTS, LENGTHS, CAPACITY, pack=True)
    object.__setattr__(plan, "real", torch.tensor(real))
    with pytest.raises(RuntimeError, match="slot"):
        model.forward(TOKENS, plan, filled(model))
