"""LeanModel: packed matrices, a fixed width, and what it loads. test_implementations.py has it against transformers."""

from pathlib import Path

import pytest
import torch

from foretell.core.errors import ModelError
from foretell.core.tree import layout
from foretell.model.llama.run.lean import LeanModel
from foretell.model.llama.run.pack import PackedLinear, PlainLinear, packing_unsupported
from tests.model.llama.family import BUSHY, CAPACITY, chain, make_model, prefill, prompts_of, run_tree, tokens_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_packed_equals_plain(dtype: torch.dtype, biased: bool) -> None:
    reason = packing_unsupported(dtype, CPU)
    if reason is not None:
        pytest.skip(reason)
    torch.manual_seed(0)
    weight, bias = torch.randn(96, 64).to(dtype), torch.randn(96).to(dtype) if biased else None
    x = torch.randn(2, 3, 64).to(dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 0.2
    with torch.no_grad():
        torch.testing.assert_close(
            PackedLinear(weight, bias)(x), PlainLinear(weight, bias)(x), atol=tolerance, rtol=tolerance
        )


def test_packed_model_equals_plain_model() -> None:
    module = make_model("qwen2")
    results = []
    for pack in (None, False):
        model = LeanModel.from_hf(module, pack=pack)
        cache = model.new_cache(2, CAPACITY)
        length = prefill(model, cache, prompts_of((8, 8)), chunk=8)
        results.append(run_tree(model, cache, tokens_of(*BUSHY.shape), BUSHY, length)[0].logits)
    assert results[0] is not None
    assert results[1] is not None
    torch.testing.assert_close(results[0], results[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fixed_width_gives_the_same_bits_for_a_chain_and_for_plain_decoding(dtype: torch.dtype) -> None:
    module = make_model("llama", hidden_size=64, intermediate_size=128, head_dim=16).to(dtype)
    model = LeanModel.from_hf(module)
    width, capacity = 8, 512
    tokens = tokens_of(1, 40)
    chained, single = model.new_cache(1, capacity), model.new_cache(1, capacity)
    seen_chained, seen_single = [], []
    for start in range(0, 40, width):
        plan = layout(chain(1, width), torch.tensor([start]), capacity)
        seen_chained.append(model.forward(tokens[:, start : start + width], plan, chained).logits)
    for start in range(40):
        padded = torch.zeros(1, width, dtype=torch.int64)
        padded[0, 0] = tokens[0, start]
        parent = torch.full((1, width), -1)
        plan = layout(parent, torch.tensor([start]), capacity)
        logits = model.forward(padded, plan, single).logits
        seen_single.append(logits[:, :1])
    assert torch.equal(torch.cat([x for x in seen_chained if x is not None], 1), torch.cat(seen_single, 1))


@pytest.mark.parametrize("kind", ["qwen3-tied", "llama"])
def test_loads_from_a_directory(tmp_path: Path, kind: str) -> None:
    module = make_model(kind)
    module.generation_config.eos_token_id = [5, 6]
    module.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    tokens, plan = tokens_of(1, 9), layout(BUSHY[:1], torch.tensor([0]), CAPACITY)
    models = (LeanModel.load(tmp_path, dtype=torch.float32), LeanModel.from_hf(module))
    results = [model.forward(tokens, plan, model.new_cache(1, CAPACITY)).logits for model in models]
    assert torch.equal(*results)  # type: ignore[arg-type]
    spec = LeanModel.load(tmp_path, dtype=torch.bfloat16, name="x").spec
    assert (spec.name, spec.implementation, spec.dtype) == ("x", "lean", torch.bfloat16)
    assert spec.eos_token_ids == ((5, 6, 2) if kind == "llama" else (5, 6))  # the configuration's too, where it has one


def test_a_directory_without_safetensors_is_refused_with_the_way_out(tmp_path: Path) -> None:
    make_model("llama").config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="save_pretrained"):
        LeanModel.load(tmp_path, dtype=torch.float32)
