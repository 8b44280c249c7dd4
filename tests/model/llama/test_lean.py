"""LeanModel against the unmodified transformers module."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.core.errors import ModelError
from foretell.core.tree import Plan, layout
from foretell.model.llama.run import lean
from foretell.model.llama.run.lean import LeanModel
from foretell.model.llama.run.pack import PackedLinear, PlainLinear, packing_unsupported
from foretell.model.target import PassOptions
from tests.model.llama.family import (
    BUSHY,
    CAPACITY,
    FAMILY,
    VOCABULARY,
    chain,
    make_model,
    oracle_logits,
    path_tokens,
    prefill,
    run_tree,
    valid,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models gain nothing from threads, and lose much where another process has the other core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def prompts_of(lengths: tuple[int, ...]) -> list[list[int]]:
    return [random_tokens(length, seed=row + 1).tolist() for row, length in enumerate(lengths)]


@pytest.mark.parametrize("kind", FAMILY)
def test_equals_the_module_on_trees_ragged_rows_and_after_moves(kind: str) -> None:
    module = make_model(kind)
    model = LeanModel.from_hf(module)
    prompts = prompts_of((13, 5))
    cache = model.new_cache(2, CAPACITY)
    length = prefill(model, cache, prompts, chunk=6)
    tokens = random_tokens(*BUSHY.shape)
    output, _ = run_tree(model, cache, tokens, BUSHY, length)
    assert output.logits is not None
    for row in range(2):
        expected = oracle_logits(module, prompts[row], tokens[row], BUSHY[row])
        torch.testing.assert_close(
            output.logits[row][valid(BUSHY)[row]], expected[valid(BUSHY)[row]], atol=1e-4, rtol=1e-4
        )
    assert torch.isfinite(output.logits).all()
    # Commit a side branch in row 0 (nodes 0, 1, 4, 7) and a leading one in row 1 (nodes 0, 1): ragged, and it moves KV.
    path = torch.tensor([[0, 1, 4, 7], [0, 1, 0, 0]])
    count = torch.tensor([4, 2])
    dst = length[:, None] + torch.arange(4)
    src = torch.where(torch.arange(4) < count[:, None], length[:, None] + path, dst)
    cache.move(src, dst)
    prompts = [prompts[0] + path_tokens(tokens[0], BUSHY[0], 7), prompts[1] + path_tokens(tokens[1], BUSHY[1], 1)]
    tokens = random_tokens(*BUSHY.shape, seed=9)
    output, _ = run_tree(model, cache, tokens, BUSHY.flip(0), length + count)
    assert output.logits is not None
    for row in range(2):
        parent = BUSHY.flip(0)[row]
        expected = oracle_logits(module, prompts[row], tokens[row], parent)
        real = valid(BUSHY.flip(0))[row]
        torch.testing.assert_close(output.logits[row][real], expected[real], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("fault", ["position", "mask"])
def test_control_a_wrong_plan_is_seen(fault: str) -> None:
    module = make_model("llama")
    model = LeanModel.from_hf(module)
    prompts = prompts_of((9, 4))
    cache = model.new_cache(2, CAPACITY)
    length = prefill(model, cache, prompts, chunk=16)
    tokens = random_tokens(*BUSHY.shape)
    plan = layout(BUSHY, length, CAPACITY)
    if fault == "position":
        plan = Plan(plan.length, plan.ancestry, plan.slots, plan.slots, plan.tree_positions, plan.span)
    else:
        plan = Plan(
            plan.length, plan.ancestry.new_ones(plan.ancestry.shape).tril(), plan.slots, plan.positions,
            plan.tree_positions, plan.span,
        )  # fmt: skip
    logits = model.forward(tokens, plan, cache).logits
    expected = oracle_logits(module, prompts[0], tokens[0], BUSHY[0])
    assert (logits[0] - expected).abs().max() > 1e-2


@pytest.mark.parametrize("kind", ["llama", "mistral-window", "qwen3-tied"])
def test_bfloat16_is_near_the_float32_module(kind: str) -> None:
    module = make_model(kind)
    model = LeanModel.from_hf(module.to(torch.bfloat16))
    module = module.float()
    prompts = prompts_of((9,))
    cache = model.new_cache(1, CAPACITY)
    length = prefill(model, cache, prompts, chunk=16)
    tokens = random_tokens(1, 9)
    output, _ = run_tree(model, cache, tokens, BUSHY[:1], length)
    assert output.logits.dtype == torch.bfloat16
    expected = oracle_logits(module, prompts[0], tokens[0], BUSHY[0])
    error = (output.logits[0].float() - expected).abs().mean() / expected.abs().mean()
    assert error < 0.05


def test_layer_ranges_taps_and_headless_passes() -> None:
    model = LeanModel.from_hf(make_model("qwen3"))
    prompts = prompts_of((7, 3))
    caches = [model.new_cache(2, CAPACITY) for _ in range(2)]
    for cache in caches:
        length = prefill(model, cache, prompts, chunk=8)
    tokens = random_tokens(*BUSHY.shape)
    plan = layout(BUSHY, length, CAPACITY)
    whole = model.forward(tokens, plan, caches[0], PassOptions(taps=(2, 0)))
    lower = model.forward(tokens, plan, caches[1], PassOptions(layers=(0, 1)))
    assert lower.logits is None
    assert whole.logits is not None
    assert whole.taps is not None
    upper = model.forward(tokens, plan, caches[1], PassOptions(layers=(1, 3), hidden=lower.hidden))
    assert upper.logits is not None
    torch.testing.assert_close(upper.logits, whole.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(whole.taps, torch.cat([upper.hidden, lower.hidden], -1), atol=1e-5, rtol=1e-5)
    headless = model.forward(tokens, plan, caches[1], PassOptions(head=False))
    assert headless.logits is None
    torch.testing.assert_close(model.logits(headless.hidden), whole.logits, atol=1e-5, rtol=1e-5)
    for one, other in zip(caches[0].keys, caches[1].keys, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_nodes_may_be_run_one_by_one() -> None:
    model = LeanModel.from_hf(make_model("mistral-window"))
    prompts = prompts_of((11, 6))
    caches = [model.new_cache(2, CAPACITY) for _ in range(2)]
    for cache in caches:
        length = prefill(model, cache, prompts, chunk=32)
    tokens = random_tokens(*BUSHY.shape)
    plan = layout(BUSHY, length, CAPACITY)
    whole = model.forward(tokens, plan, caches[0]).logits
    parts = [model.forward(tokens[:, i : i + 1], plan.nodes(i, i + 1), caches[1]).logits for i in range(BUSHY.shape[1])]
    assert whole is not None
    torch.testing.assert_close(torch.cat([part for part in parts if part is not None], 1), whole, atol=1e-4, rtol=1e-4)


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
        results.append(run_tree(model, cache, random_tokens(*BUSHY.shape), BUSHY, length)[0].logits)
    assert results[0] is not None
    assert results[1] is not None
    torch.testing.assert_close(results[0], results[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fixed_width_gives_the_same_bits_for_a_chain_and_for_plain_decoding(dtype: torch.dtype) -> None:
    module = make_model("llama", hidden_size=64, intermediate_size=128, head_dim=16).to(dtype)
    model = LeanModel.from_hf(module)
    width, capacity = 8, 512
    tokens = random_tokens(1, 40)
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
    tokens, plan = random_tokens(1, 9), layout(BUSHY[:1], torch.tensor([0]), CAPACITY)
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


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_act": "relu2"}, "activation"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope type 'dynamic'"),
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
    ],
)
def test_supports_names_the_reason(change: dict[str, Any], reason: str) -> None:
    config = make_model("llama").config
    assert lean.supports(config, torch.float32, CPU) is None
    for key, value in change.items():
        setattr(config, key, value)
    said = lean.supports(config, torch.float32, CPU)
    assert said is not None
    assert reason in said
