"""Rows with a common beginning: attention reads one row's keys and values for all of them."""

from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from foretell.core.tree import layout
from foretell.engine.beginnings import PIECE
from foretell.model.cache import KVCache, Shared, to_codes
from foretell.model.llama.run.native import NativeModel
from tests.model.llama.family import VOCABULARY, make_model

CAPACITY, ROWS = 700, 6
TREE = [-1, 0, 0, 2, 1, 3]


def filled(model: NativeModel, groups: Shared, seed: int) -> KVCache:
    """A cache of random keys and values; rows of a group hold the same in their common slots."""
    cache = model.new_cache(ROWS, CAPACITY)
    generator = torch.Generator().manual_seed(seed)
    for memory in (*cache.keys, *cache.values):
        size = (*memory.shape[:-1], model.shape.head_dim if memory.shape[-1] else 0)
        numbers = torch.randn(size, generator=generator)
        for rows, slots in groups:
            numbers[list(rows), :, :slots] = numbers[rows[0], :, :slots].clone()
        memory[:] = to_codes(numbers) if memory.dtype == torch.int8 and memory.numel() else numbers.to(memory.dtype)
    return cache


def spoil(cache: KVCache, groups: Shared) -> None:
    """Nobody is to read the common slots of any row but the first of its group."""
    for rows, slots in groups:
        for memory in (*cache.keys, *cache.values):
            memory[list(rows[1:]), :, : slots // PIECE * PIECE] = 101 if memory.dtype == torch.int8 else float("nan")


def read(model: NativeModel, cache: KVCache, tokens: Tensor, parent: Tensor, lengths: Tensor) -> Tensor:
    logits = model.forward(tokens, layout(parent, lengths, CAPACITY), cache).logits
    assert logits is not None
    return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "kv", "sizes"),
    [
        ("llama", "auto", {"num_attention_heads": 6}),
        ("mistral-window", "auto", {"sliding_window": 170, "head_dim": 80}),
        ("gemma2", "int8", {"sliding_window": 131}),
        ("gptoss", "auto", {"sliding_window": 170}),
        ("minicpm3", "int8", {}),
    ],
)
def test_the_bits_are_those_of_rows_alone(kind: str, kv: str, sizes: dict[str, Any], dtype: torch.dtype) -> None:
    """Over random groups, ragged rows, lines and trees, by one to three threads; and one row's slots are read for all."""
    model = NativeModel.from_hf(make_model(kind, max_position_embeddings=2048, **sizes).to(dtype), kv=kv)
    for seed in range(3):
        random = Random(seed)
        order = random.sample(range(ROWS), ROWS)
        cut = random.randint(2, 4)
        parts = (order[:cut], order[cut:])[: 1 + seed % 2]
        groups = tuple((tuple(rows), PIECE * random.randint(1, 2)) for rows in parts)
        least = {row: slots for rows, slots in groups for row in rows}
        lengths = torch.tensor([random.randint(least.get(row, 1), CAPACITY - 20) for row in range(ROWS)])
        parent = torch.arange(1 + 15 * (seed % 2)) - 1 if seed != 2 else torch.tensor(TREE)
        parent = parent.expand(ROWS, -1)
        tokens = torch.randint(VOCABULARY, parent.shape, generator=torch.Generator().manual_seed(seed))
        torch.set_num_threads(1 + seed % 3)
        plain = filled(model, groups, seed)
        expected = read(model, plain, tokens, parent, lengths)
        once = filled(model, groups, seed)
        spoil(once, groups)
        once.shared = groups
        found = read(model, once, tokens, parent, lengths)
        assert torch.equal(found, expected), seed
        assert found.isfinite().all()


def test_what_is_shared_ends_where_the_shortest_text_does() -> None:
    """A row of 300 committed slots shares 256 of 512, whatever its memory holds behind them."""
    model = NativeModel.from_hf(make_model("llama", max_position_embeddings=2048))
    lengths, parent = torch.tensor([600, 610, 300] + [1] * (ROWS - 3)), torch.tensor([[-1]] * ROWS)
    tokens = torch.arange(ROWS)[:, None]
    cache = filled(model, (((0, 1, 2), 256),), 0)
    expected = read(model, cache, tokens, parent, lengths)
    cache.shared = (((2, 0, 1), 512),)
    assert torch.equal(read(model, cache, tokens, parent, lengths), expected)
    for wrong in ((((0, 1), 256), ((1, 2), 256)), (((0, 0), 256),), (((0, ROWS), 256),)):
        cache.shared = wrong
        with pytest.raises(RuntimeError, match="slot"):
            read(model, cache, tokens, parent, lengths)


def test_rows_that_change_places_share_nothing_until_told() -> None:
    cache = NativeModel.from_hf(make_model("llama")).new_cache(3, 64)
    for change in (lambda: cache.keep(torch.tensor([1, 0, 2])), lambda: cache.open_rows(1)):
        cache.shared = (((0, 1), 256),)
        assert cache.rows(0, 2).shared == ()
        change()
        assert cache.shared == ()
