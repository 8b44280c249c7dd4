"""Embedding, final norm and head on their own: what drafters that share them read."""

import pytest
import torch
from torch import Tensor

from foretell.core.errors import ModelError
from foretell.model.hf.adapter import TransformersModel
from foretell.model.llama.run.lean import LeanModel
from foretell.model.llama.run.native import NativeModel
from foretell.model.target import CausalModel
from tests.model.llama.family import FAMILY, make_model
from tests.model.table import TableLM
from tests.model.tiny import VOCAB, tiny_module


def parts_agree(model: CausalModel, stream: Tensor) -> Tensor:
    """head(normed(x)), equal to logits(x) up to rounding."""
    logits = model.head(model.normed(stream))
    torch.testing.assert_close(logits, model.logits(stream), rtol=1e-5, atol=1e-5)
    return logits


@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "gemma2", "gemma3", "gpt2", "gpt_neox", "cohere", "granite", "gpt_oss"]
)
def test_norm_and_head_make_the_logits(name: str) -> None:
    module = tiny_module(name)
    model = TransformersModel(module)
    stream = torch.randn(2, 5, model.spec.hidden_size, generator=torch.Generator().manual_seed(0))
    logits = parts_agree(model, stream)
    assert logits.shape == (2, 5, VOCAB)
    assert not torch.allclose(model.head(stream), logits), "the head alone applies no norm"
    tokens = torch.tensor([[3, 1, 4], [1, 5, 9]])
    assert torch.equal(model.embed(tokens), module.get_input_embeddings()(tokens))
    assert torch.equal(model.logits(stream), model.logits(stream)), "nothing is left behind in the module"


@pytest.mark.parametrize("kind", FAMILY)
@pytest.mark.parametrize("fast", [LeanModel, NativeModel])
def test_the_fast_twins_agree_with_the_module(kind: str, fast: type[LeanModel] | type[NativeModel]) -> None:
    module = make_model(kind)
    try:
        twin = fast.from_hf(module)
    except ModelError as error:
        pytest.skip(str(error))
    model = TransformersModel(module)
    stream = torch.randn(1, 3, model.spec.hidden_size, generator=torch.Generator().manual_seed(1))
    tokens = torch.tensor([[7, 0, 2]])
    torch.testing.assert_close(twin.normed(stream), model.normed(stream), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(parts_agree(twin, stream), model.logits(stream), rtol=1e-4, atol=1e-4)
    assert torch.equal(twin.embed(tokens), model.embed(tokens))


def test_gradients_pass_through_norm_and_head_of_the_module() -> None:
    model = TransformersModel(tiny_module("gemma2"))
    stream = torch.randn(1, 2, model.spec.hidden_size, requires_grad=True)
    model.head(model.normed(stream)).square().sum().backward()
    assert stream.grad is not None
    assert bool((stream.grad != 0).any())


def test_the_table_has_them_too() -> None:
    model = TableLM(8)
    tokens = torch.tensor([[1, 2]])
    assert model.embed(tokens)[..., 0].tolist() == [[1.0, 2.0]]
    parts_agree(model, model.embed(tokens))
