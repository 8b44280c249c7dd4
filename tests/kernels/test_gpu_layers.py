"""The Triton kernels between the products of ``LeanModel``, in Triton's interpreter, against the torch branch of the same
model."""

from typing import Any

import pytest
import torch

from foretell.core.tree import layout
from foretell.kernels.gpu import ops as operators
from foretell.kernels.gpu.ops import register
from foretell.model.llama import lean
from foretell.model.llama.lean import LeanModel
from tests.model.llama.family import VOCABULARY, make_model


@pytest.fixture(scope="module")
def gpu() -> Any:
    return register("CPU")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter multiplies bfloat16 as integers
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "ministral3", "mistral-window", "gemma2"])
def test_a_pass_equals_its_torch_twin(gpu: Any, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype) -> None:
    """Logits of trees of ragged rows, and the keys and values that the pass wrote: plain, with norms of heads, with an
    offset in float32, with growing queries, a window, a cap on scores."""
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
        model = LeanModel.from_hf(module, pack=False)
        assert (model._gpu is not None) == fast
        cache = model.new_cache(2, 32)
        cache.keys[0][:], cache.values[0][:] = memory
        logits = model.forward(tokens, layout(parent, length, 32), cache).logits
        assert logits is not None
        outputs.append(logits.float())
        caches.append(torch.stack([cache.keys[0], cache.values[0]]).float())
    bound = 4e-6 if dtype == torch.float32 else 4e-3
    for mine, theirs in ((outputs[1], outputs[0]), (caches[1], caches[0])):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=bound * float(theirs.abs().max()))
    assert not torch.equal(caches[1], memory.float())
