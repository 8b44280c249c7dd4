"""LeanModel and NativeModel against the unmodified transformers module."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from foretell.core.errors import ConfigError
from foretell.core.tree import layout
from foretell.model.llama.run import lean, native
from foretell.model.llama.run.lean import LeanModel
from foretell.model.llama.run.native import NativeModel
from foretell.model.target import PassOptions
from tests.model.llama.family import (
    BUSHY,
    CAPACITY,
    FAMILY,
    chain,
    make_model,
    oracle_logits,
    path_tokens,
    prefill,
    prompts_of,
    run_tree,
    tokens_of,
    valid,
)

CPU = torch.device("cpu")
MODULES = {"lean": lean, "native": native}
both = pytest.mark.parametrize("implementation", MODULES)


def made(implementation: str, kind: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """(module, model) of a kind."""
    module = make_model(kind).to(dtype)
    reason = MODULES[implementation].supports(module.config, dtype, CPU)
    if reason is not None:
        pytest.skip(reason)
    return module, (LeanModel if implementation == "lean" else NativeModel).from_hf(module)


def same_bits(one: Tensor, other: Tensor) -> None:
    assert torch.equal(one, other)


def near(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", FAMILY)
@both
def test_equals_the_module_on_trees_ragged_rows_and_after_moves(implementation: str, kind: str) -> None:
    module, model = made(implementation, kind)
    prompts, tokens = prompts_of((13, 5)), tokens_of(*BUSHY.shape)
    cache = model.new_cache(2, CAPACITY)
    length = prefill(model, cache, prompts, chunk=6)
    for parent in (BUSHY, BUSHY.flip(0)):
        logits = run_tree(model, cache, tokens, parent, length)[0].logits
        for row in range(2):
            expected = oracle_logits(module, prompts[row], tokens[row], parent[row])
            near(logits[row][valid(parent)[row]], expected[valid(parent)[row]])
        assert torch.isfinite(logits).all()
        # Commit a side branch in row 0 (nodes 0, 1, 4, 7) and a leading one in row 1 (nodes 0, 1): ragged, and it moves KV.
        count, dst = torch.tensor([4, 2]), length[:, None] + torch.arange(4)
        src = length[:, None] + torch.tensor([[0, 1, 4, 7], [0, 1, 0, 0]])
        cache.move(torch.where(torch.arange(4) < count[:, None], src, dst), dst)
        prompts = [
            text + path_tokens(tokens[row], parent[row], end)
            for row, (text, end) in enumerate(zip(prompts, (7, 1), strict=True))
        ]
        tokens, length = tokens_of(*BUSHY.shape, seed=9), length + count


@pytest.mark.parametrize("fault", ["position", "mask"])
@both
def test_control_a_wrong_plan_is_seen(implementation: str, fault: str) -> None:
    module, model = made(implementation, "llama")
    prompts, tokens, cache = prompts_of((9,)), tokens_of(1, 9), model.new_cache(1, CAPACITY)
    plan = layout(BUSHY[:1], prefill(model, cache, prompts, chunk=16), CAPACITY)
    wrong = {"positions": plan.slots} if fault == "position" else {"ancestry": plan.ancestry.roll(1, 1)}
    logits = model.forward(tokens, replace(plan, **wrong), cache).logits
    assert (logits[0] - oracle_logits(module, prompts[0], tokens[0], BUSHY[0])).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("implementation", "kind"),
    [
        *(("lean", kind) for kind in ("llama", "mistral-window", "qwen3-tied", "minicpm3")),
        *(("native", kind) for kind in ("llama", "mistral-window", "qwen3-tied", "qwen2", "gemma", "gemma2", "gemma3",
                                        "granite", "olmo2", "smollm3", "qwen3moe", "minicpm3")),
    ],
)  # fmt: skip
def test_bfloat16_is_near_the_float32_module(implementation: str, kind: str) -> None:
    module, model = made(implementation, kind, torch.bfloat16)
    prompts, tokens, cache = prompts_of((9,)), tokens_of(1, 9), model.new_cache(1, CAPACITY)
    logits = run_tree(model, cache, tokens, BUSHY[:1], prefill(model, cache, prompts, chunk=16))[0].logits
    assert logits.dtype == (torch.bfloat16 if implementation == "lean" else torch.float32)
    expected = oracle_logits(module.float(), prompts[0], tokens[0], BUSHY[0])
    error = (logits[0].float() - expected).abs().mean() / expected.abs().mean()
    assert error < (0.05 if implementation == "lean" else 0.03)


@pytest.mark.parametrize(
    ("implementation", "kind", "dtype", "equal"),
    [
        ("lean", "qwen3", torch.float32, near), ("lean", "mistral-window", torch.float32, near),
        ("native", "qwen3", torch.float32, same_bits), ("native", "qwen3", torch.bfloat16, same_bits),
    ],
)  # fmt: skip
def test_layer_ranges_taps_headless_passes_and_single_nodes(
    implementation: str, kind: str, dtype: torch.dtype, equal: Callable[[Tensor, Tensor], None]
) -> None:
    _, model = made(implementation, kind, dtype)
    caches = [model.new_cache(2, CAPACITY) for _ in range(2)]
    for cache in caches:
        length = prefill(model, cache, prompts_of((7, 3)), chunk=8)
    tokens, plan = tokens_of(*BUSHY.shape), layout(BUSHY, length, CAPACITY)
    whole = model.forward(tokens, plan, caches[0], PassOptions(taps=(2, 0)))
    lower = model.forward(tokens, plan, caches[1], PassOptions(layers=(0, 1)))
    assert lower.logits is None
    kept = lower.hidden.clone()
    upper = model.forward(tokens, plan, caches[1], PassOptions(layers=(1, 3), hidden=lower.hidden))
    equal(upper.logits, whole.logits)
    assert torch.equal(lower.hidden, kept), "what is handed in is not written to"
    equal(whole.taps, torch.cat([upper.hidden, lower.hidden], -1))
    headless = model.forward(tokens, plan, caches[1], PassOptions(head=False))
    assert headless.logits is None
    equal(model.logits(headless.hidden), whole.logits)
    equal(model.logits(headless.hidden[:, 3:4]), whole.logits[:, 3:4])
    for one, other in zip(caches[0].keys, caches[1].keys, strict=True):
        equal(one, other)
    one_by_one = [model.forward(tokens[:, i : i + 1], plan.nodes(i, i + 1), caches[1]).logits for i in range(9)]
    equal(torch.cat(one_by_one, 1), whole.logits)


@pytest.mark.parametrize(
    ("implementation", "dtype", "device", "change", "reason"),
    [
        ("lean", torch.float32, "cpu", {"hidden_act": "relu2"}, "activation"),
        ("lean", torch.float32, "cpu",
         {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope type 'dynamic'"),
        ("lean", torch.float32, "cpu", {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ("lean", torch.float32, "cpu", {"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ("native", torch.float16, "cpu", {}, "float16"),
        ("native", torch.float32, "meta", {}, "meta"),
        ("native", torch.float32, "cpu", {"hidden_act": "relu"}, "activation"),
        ("native", torch.float32, "cpu", {"head_dim": 24}, "head dimension 24"),
    ],
)  # fmt: skip
def test_supports_names_the_reason(
    implementation: str, dtype: torch.dtype, device: str, change: dict[str, Any], reason: str
) -> None:
    config = make_model("llama").config
    assert lean.supports(config, torch.float32, CPU) is None
    for key, value in change.items():
        setattr(config, key, value)
    assert reason in (MODULES[implementation].supports(config, dtype, torch.device(device)) or "")


def test_layers_above_the_first_need_hidden_states() -> None:
    _, model = made("native", "qwen3")
    plan = layout(chain(1, 1), torch.tensor([0]), CAPACITY)
    with pytest.raises(ConfigError, match="hidden must be given"):
        model.forward(tokens_of(1, 1), plan, model.new_cache(1, CAPACITY), PassOptions(layers=(1, 3)))
