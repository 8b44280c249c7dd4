"""The Triton kernels between the products of ``LeanModel``, in Triton's interpreter, against the torch branch of the same
model."""

from typing import Any

import pytest
import torch
from torch import Tensor

from foretell.core.tree import layout
from foretell.kernels.gpu import ops as operators
from foretell.kernels.gpu.ops import register
from foretell.model import blocks as blocked
from foretell.model.blocks import BlockCache
from foretell.model.llama.run import lean
from foretell.model.llama.run.lean import LeanModel
from tests.model.llama.family import VOCABULARY, make_model


def rows_of(model: LeanModel, memory: Tensor) -> BlockCache:
    """Two rows of 32 slots whose blocks lie among each other; the second has one, enough for its text and tree."""
    cache = BlockCache(2, 32, None, [(2, 16)], model.spec.dtype, torch.device("cpu"))
    cache.fit([10, 10])
    cache.fit([32])
    for row, count in enumerate((32, 16)):
        cache.rows(row, row + 1).restore([memory[0, row]], [memory[1, row]], count)
    return cache


@pytest.fixture(scope="module")
def gpu() -> Any:
    return register("CPU")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter multiplies bfloat16 as integers
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "ministral3", "mistral-window", "gemma2"])
def test_a_pass_equals_its_torch_twin(gpu: Any, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype) -> None:
    """Logits of trees of ragged rows, and the keys and values that the pass wrote: plain, with norms of heads, with an
    offset in float32, with growing queries, a window, a cap on scores."""
    assert_twins(gpu, monkeypatch, kind, dtype, blocks=False)


@pytest.mark.parametrize("kind", ["llama", "mistral-window"])
def test_so_does_a_pass_over_rows_in_blocks(gpu: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    assert_twins(gpu, monkeypatch, kind, torch.float32, blocks=True)


def assert_twins(gpu: Any, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype, *, blocks: bool) -> None:
    """See the tests. blocks: rows take blocks of a common memory."""
    monkeypatch.setattr(lean, "_MIN_ROWS", 0)  # an accelerator pads nothing
    module = make_model(kind, num_hidden_layers=1, layer_types=None).to(dtype)
    parent, length = torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, -1]]), torch.tensor([22, 1])
    torch.manual_seed(1)
    tokens, memory = torch.randint(VOCABULARY, parent.shape), torch.randn(2, 2, 2, 32, 16).to(dtype)
    outputs, caches = [], []
    for fast in (False, True):
        if fast:
            monkeypatch.setattr(lean, "ops", lambda _: gpu)
            monkeypatch.setattr(operators, "SLOTS_EACH", 16)  # two programs share a row's slots
        if blocks:
            monkeypatch.setattr(operators, "BLOCK_SLOTS", 16)
            monkeypatch.setattr(blocked, "BLOCK", 16)
        model = LeanModel.from_hf(module, pack=False)
        assert (model._gpu is not None) == fast
        cache = rows_of(model, memory) if blocks else model.new_cache(2, 32)
        if not blocks:
            cache.keys[0][:], cache.values[0][:] = memory
        before = torch.stack(cache.seen(0, 32, cache.sight(32), torch.float32)).float()
        logits = model.forward(tokens, layout(parent, length, 32), cache).logits
        assert logits is not None
        outputs.append(logits.float())
        caches.append(torch.stack(cache.seen(0, 32, cache.sight(32), torch.float32)).float())
    bound = 4e-6 if dtype == torch.float32 else 4e-3
    for mine, theirs in ((outputs[1], outputs[0]), (caches[1], caches[0])):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=bound * float(theirs.abs().max()))
    assert not torch.equal(caches[1], before)
