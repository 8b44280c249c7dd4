"""NativeModel's own promise: bits that do not depend on the pass. test_implementations.py has it against transformers."""

import itertools
import mmap
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretell.core.errors import ModelError
from foretell.core.tree import layout
from foretell.kernels import build, cpu
from foretell.kernels.functions import dram_read_bandwidth, huge_pages
from foretell.kernels.native import library, openmp_runtime
from foretell.model.llama.run import native
from foretell.model.llama.run.lean import LeanModel
from foretell.model.llama.run.native import NativeModel
from foretell.model.target import PassOptions
from tests.model.llama.family import (
    BUSHY,
    CAPACITY,
    FAMILY,
    VOCABULARY,
    chain,
    make_model,
    oracle_logits,
    prefill,
    prompts_of,
    run_tree,
    tokens_of,
)

CPU = torch.device("cpu")
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
REASON = native.supports(make_model("llama").config, torch.float32, CPU)
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
DTYPES = [torch.float32, torch.bfloat16]
QUICK = (("llama", 0), ("mistral-window", 5), ("gemma2", 0), ("gemma2", 300), ("gemma3", 300))
"""Kinds of attention: whole, in windows, with bounded scores, in turn."""


def native_of(kind: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> tuple[Any, NativeModel]:
    module = make_model(kind, **overrides).to(dtype)
    reason = native.supports(module.config, dtype, CPU)
    if reason is not None:
        pytest.skip(reason)
    return module, NativeModel.from_hf(module)


def logits_of(model: Any, tokens: Tensor, parent: Tensor, length: Tensor, cache: Any, span: int = CAPACITY) -> Tensor:
    logits = model.forward(tokens, layout(parent, length, CAPACITY, span=span), cache).logits
    assert logits is not None
    return logits


def test_move_and_keep_do_what_the_plain_cache_does() -> None:
    _, model = native_of("llama")
    cache = model.new_cache(3, 16)
    for memory in (*cache.keys, *cache.values):
        memory.copy_(torch.randn_like(memory))
    before = [memory.clone() for memory in (*cache.keys, *cache.values)]
    src, dst = torch.tensor([[3, 5, 4], [1, 1, 2], [7, 9, 8]]), torch.tensor([[4, 3, 5], [1, 1, 2], [6, 7, 8]])
    cache.move(src, dst)
    for now, was in zip((*cache.keys, *cache.values), before, strict=True):
        for row in range(3):
            was[row][:, dst[row]] = was[row][:, src[row]].clone()
        assert torch.equal(now, was)
    cache.keep(torch.tensor([2, 0]))
    tokens, length = tokens_of(2, 1), torch.tensor([3, 2])
    logits_of(model, tokens, chain(2, 1), length, cache, span=16)
    assert not torch.equal(cache.keys[0][0, :, 3], before[0][2][:, 3])
    assert torch.equal(cache.keys[0][1, :, 3], before[0][0][:, 3])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "kind",
    [
        "qwen3-tied", "llama-mha-bias", "mistral-window", "llama", "gemma2", "gemma3-linear-rope", "olmo2", "granite",
        "qwen3moe", "qwen2moe", "gptoss", "deepseek3", "hunyuan_v1_dense",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in (
            "qwen3moe-dense-between", "granitemoe", "cohere", "stablelm", "starcoder2-window", "ernie4_5_moe",
        )),
    ],
)  # fmt: skip
def test_bits_do_not_depend_on_width_tree_batch_slot_span_or_threads(kind: str, dtype: torch.dtype) -> None:
    """One text of 34 tokens, decoded one by one; then in every other way that comes to the same."""
    # 48 and 72: K with a tail; the head dimension of the others here is hidden / heads
    own = ("llama", "qwen2moe", "granitemoe", "cohere", "stablelm", "starcoder2-window", "ernie4_5_moe")
    sizes = {} if kind in own else {"hidden_size": 96, "intermediate_size": 200}
    _, model = native_of(kind, dtype, **sizes)
    torch.set_num_threads(2)
    text = tokens_of(1, 34, seed=3)
    cache = model.new_cache(1, CAPACITY)
    steps = [logits_of(model, text[:, i : i + 1], chain(1, 1), torch.tensor([i]), cache) for i in range(34)]
    plain = torch.cat(steps, 1)[0]  # [34, V]
    keys = [memory[:, :, :34].clone() for memory in (*cache.keys, *cache.values)]

    for width in (2, 3, 4, 5, 6, 7, 8, 9, 11, 16, 34):  # chains of every width, spans and prefill at once
        cache, seen = model.new_cache(1, CAPACITY), []
        for start in range(0, 34, width):
            part = text[:, start : start + width]
            span = min(CAPACITY, start + width + 5)
            seen.append(logits_of(model, part, chain(*part.shape), torch.tensor([start]), cache, span=span))
        assert torch.equal(torch.cat(seen, 1)[0], plain), width
        for one, other in zip((*cache.keys, *cache.values), keys, strict=True):
            assert torch.equal(one[:, :, :34], other)

    # The text as a side branch of a tree of 16, its nodes anywhere; batched with other rows; then moved and read on.
    parent = torch.tensor([[-1, 0, 0, 2, 2, 1, 3, 6, 6, 8, 4, 9, 11, 11, 13, 0]])
    path = [0, 2, 3, 6, 8, 9, 11, 13, 14]
    batch = model.new_cache(3, CAPACITY)
    prompts = [text[0, :10].tolist(), tokens_of(21, seed=5).tolist(), text[0, :17].tolist()]
    length = prefill(model, batch, prompts, chunk=7)
    tokens = tokens_of(3, 16, seed=6)
    for row in (0, 2):
        tokens[row, path] = text[0, len(prompts[row]) : len(prompts[row]) + len(path)]
    logits = logits_of(model, tokens, parent.expand(3, -1), length, batch)
    for row in (0, 2):
        start = len(prompts[row])
        assert torch.equal(logits[row, path], plain[start : start + len(path)]), row
    dst = length[:, None] + torch.arange(len(path))
    batch.move(length[:, None] + torch.tensor([path]), dst)
    length = length + len(path)
    after = logits_of(model, text[:, 19:20].expand(3, 1), chain(3, 1), length, batch)
    assert torch.equal(after[0, 0], plain[19])

    torch.set_num_threads(1)
    cache = model.new_cache(1, CAPACITY)
    assert torch.equal(logits_of(model, text, chain(1, 34), torch.tensor([0]), cache)[0], plain)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("llama", {"num_attention_heads": 6}),
        ("mistral-window", {"sliding_window": 131, "head_dim": 80}),
        ("gptoss", {"sliding_window": 131}),
        ("deepseek2", {}),
        pytest.param("gemma2", {"head_dim": 96}, marks=pytest.mark.slow),
        pytest.param("llama-mha-bias", {"head_dim": 128}, marks=pytest.mark.slow),
    ],
)
def test_texts_of_several_segments_give_the_same_bits_in_any_pass(
    kind: str, sizes: dict[str, Any], dtype: torch.dtype
) -> None:
    """Positions beside multiples of 256, where attention begins a new state: chains, trees, batches, threads."""
    module, model = native_of(kind, dtype, **sizes, max_position_embeddings=1024)
    length, capacity, marks = 530, 544, (250, 506)
    text = tokens_of(1, length, seed=3)

    def read(tokens: Tensor, parent: Tensor, start: list[int], cache: Any) -> Tensor:
        logits = model.forward(tokens, layout(parent, torch.tensor(start), capacity), cache).logits
        assert logits is not None
        return logits

    cache = model.new_cache(1, capacity)
    parts = [read(text[:, start : start + 106], chain(1, 106), [start], cache) for start in range(0, length, 106)]
    whole = torch.cat(parts, 1)[0]
    if dtype == torch.float32:
        twin = LeanModel.from_hf(module)
        plan = layout(chain(1, length), torch.tensor([0]), capacity)
        expected = twin.forward(text, plan, twin.new_cache(1, capacity)).logits
        torch.testing.assert_close(whole, expected[0], atol=1e-4, rtol=1e-4)
    for width, threads in ((1, 1), (2, 2), (3, 3), (16, 2)):  # beside both marks, behind the same keys and values
        torch.set_num_threads(threads)
        for mark in marks:
            for start in range(mark, mark + 16, width):
                count = min(width, mark + 16 - start)
                seen = read(text[:, start : start + count], chain(1, count), [start], cache)
                assert torch.equal(seen[0], whole[start : start + count]), (width, start)

    batch = model.new_cache(2, capacity)  # a side branch across a mark, and rows of two lengths
    for start in range(0, 509, 127):
        count = min(127, 509 - start)
        read(text[:, start : start + count].expand(2, -1), chain(2, count), [start] * 2, batch)
    parent = torch.tensor([[-1, 0, 0, 2, 1, 3, 5, 5, 6, 8]]).expand(2, -1)
    path, starts = [0, 2, 3, 5, 6, 8, 9], [508, 253]
    tokens = tokens_of(2, 10, seed=6)
    for row, start in enumerate(starts):
        tokens[row, path] = text[0, start : start + len(path)]
    branches = read(tokens, parent, starts, batch)
    for row, start in enumerate(starts):
        assert torch.equal(branches[row, path], whole[start : start + len(path)]), start


@pytest.mark.parametrize(
    ("kind", "window"),
    [
        pytest.param(kind, window, marks=[] if (kind, window) in QUICK else pytest.mark.slow)
        for kind in FAMILY
        for window in (0, 5, 300)
    ],
)
def test_logits_beyond_one_segment_are_those_of_transformers(kind: str, window: int) -> None:
    """Bits that are alike in every pass may all be wrong: bounded scores, windows and sinks of texts of three segments, of
    a batch whose trees stand on both sides of a mark, against the module itself. window: 0: as the kind has it."""
    sizes = {"sliding_window": window} if window else {}
    if window and not getattr(make_model(kind).config, "sliding_window", None):
        pytest.skip("it has no windows")
    module, model = native_of(kind, torch.float32, **sizes, max_position_embeddings=1024)
    lengths, capacity = (530, 254, 511), 640
    if model.spec.max_positions < capacity:
        pytest.skip("its context is shorter")
    prompts = prompts_of(lengths)
    cache = model.new_cache(3, capacity)
    length = prefill(model, cache, prompts, chunk=160)
    parent = torch.tensor([[-1, 0, 0, 2, 1, 3, 5, 5, 6, 8]]).expand(3, -1)
    tokens = tokens_of(3, 10, seed=6)
    found = model.forward(tokens, layout(parent, length, capacity), cache).logits
    assert found is not None
    for row, path in itertools.product(range(3), ([0, 2, 3, 5, 6, 8, 9], [0, 1, 4], [0, 2, 3, 5, 7])):
        with torch.no_grad():
            expected = module(torch.tensor([prompts[row] + tokens[row, path].tolist()])).logits[0, -len(path) :]
        torch.testing.assert_close(found[row, path], expected, atol=3e-4, rtol=3e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [("llama", {"num_attention_heads": 6}), ("mistral-window", {"sliding_window": 131, "head_dim": 80})],
)
def test_nodes_of_random_trees_have_the_bits_of_their_paths(
    kind: str, sizes: dict[str, Any], dtype: torch.dtype
) -> None:
    """2 to 50 nodes behind texts of up to three segments, beside each path read node by node."""
    _, model = native_of(kind, dtype, **sizes, max_position_embeddings=1024)
    capacity, generator = 640, torch.Generator().manual_seed(7)
    cache = model.new_cache(1, capacity)

    def read(tokens: Tensor, parent: Tensor, start: int) -> Tensor:
        logits = model.forward(tokens, layout(parent, torch.tensor([start]), capacity), cache).logits
        assert logits is not None
        return logits[0]

    text = tokens_of(1, 560, seed=3)
    for start in range(0, 560, 112):
        read(text[:, start : start + 112], chain(1, 112), start)
    sizes_at = ((553, 2), (509, 4), (402, 9), (255, 16), (131, 24), (20, 50))
    for start, nodes in sizes_at:  # each leaves the slots before it as they are
        tokens = torch.randint(0, VOCABULARY, (1, nodes), generator=generator)
        above = [int(torch.randint(max(0, i - 4), i, (), generator=generator)) for i in range(1, nodes)]
        parent = torch.tensor([-1, *above])
        alone: dict[int, Tensor] = {}
        for leaf in {*range(nodes)} - {*above}:
            path = [leaf]
            while path[0]:
                path.insert(0, int(parent[path[0]]))
            for depth, node in enumerate(path):
                alone[node] = read(tokens[:, node : node + 1], chain(1, 1), start + depth)[0]
        assert torch.equal(read(tokens, parent[None], start), torch.stack([alone[i] for i in range(nodes)])), (
            start,
            nodes,
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_longer_than_a_chunk_give_the_same_bits_at_any_width(dtype: torch.dtype) -> None:
    """Sums of 2,100 products, the last four behind whole lines: of several rows they are made in chunks."""
    module, model = native_of("llama", dtype, intermediate_size=2100)
    text = tokens_of(1, 26, seed=3)
    made = []
    for width in (1, 2, 3, 4, 5, 6, 7, 8, 13, 26):
        cache = model.new_cache(1, CAPACITY)
        parts = [
            logits_of(
                model, text[:, start : start + width], chain(1, min(width, 26 - start)), torch.tensor([start]), cache
            )
            for start in range(0, 26, width)
        ]
        made.append(torch.cat(parts, 1))
    for logits in made[1:]:
        assert torch.equal(logits, made[0])
    error = (made[0] - module.float()(text).logits).abs().max()
    assert error < (1e-4 if dtype == torch.float32 else 0.06)


def variants() -> list[str]:
    """The variants of the native kernel that this CPU can run, but for its own: each is compiled first."""
    try:
        best, *others = build.variants_of("native")
    except build.BuildError:
        return []
    asked = [name for name in ("avx512_bf16",) if set(build.VARIANTS[name].needs) <= cpu.cpu_flags()]
    return list(dict.fromkeys(name for name in (*asked, *others) if name != best))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", variants())
def test_every_variant_gives_the_same_bits_at_any_width(
    variant: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without what a CPU may lack, so that a text does not depend on the machine; sums are the only risk. AMX has
    an order of bf16 sums of its own: the variant without is compared."""
    if dtype == torch.bfloat16:
        monkeypatch.setenv("FORETELL_AMX", "0")
    if build.variant_of("native") == variant:
        pytest.skip("it is the best one without AMX")
    wide = {"hidden_size": 96, "intermediate_size": 200}
    kinds = (
        ("llama", {}),
        ("qwen3-tied", wide),
        ("gemma2", wide),
        ("olmo2", wide),
        ("granite", {}),
        ("qwen2moe", {}),
        ("gptoss", wide),
        ("deepseek3", wide),
    )
    for kind, sizes in kinds:
        module, best = native_of(kind, dtype, **sizes)
        monkeypatch.setenv("FORETELL_ISA", variant)
        assert build.variant_of("native") == variant
        other = NativeModel.from_hf(module)
        monkeypatch.delenv("FORETELL_ISA")
        assert other.native.forward is not best.native.forward
        text = tokens_of(2, 40, seed=3)
        cache = best.new_cache(2, CAPACITY)
        wanted = logits_of(best, text, chain(2, 40), torch.tensor([0, 5]), cache)
        for width in (1, 2, 3, 4, 5, 6, 7, 8, 13, 40):
            cache, seen = other.new_cache(2, CAPACITY), []
            for start in range(0, 40, width):
                part = text[:, start : start + width]
                seen.append(logits_of(other, part, chain(*part.shape), start + torch.tensor([0, 5]), cache))
            assert torch.equal(torch.cat(seen, 1), wanted), (kind, width)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", variants())
def test_every_variant_gives_the_same_bits_at_every_head_dimension(
    variant: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype == torch.bfloat16:
        monkeypatch.setenv("FORETELL_AMX", "0")
    if build.variant_of("native") == variant:
        pytest.skip("it is the best one without AMX")
    for dim in native.HEAD_DIMS:
        module, best = native_of("llama", dtype, head_dim=dim)
        monkeypatch.setenv("FORETELL_ISA", variant)
        other = NativeModel.from_hf(module)
        monkeypatch.delenv("FORETELL_ISA")
        text = tokens_of(2, 20, seed=3)
        made = [
            logits_of(model, text, chain(2, 20), torch.tensor([0, 5]), model.new_cache(2, CAPACITY))
            for model in (best, other)
        ]
        assert torch.equal(*made), dim


@pytest.mark.parametrize("kind", ["gemma2", "granite"])
def test_drafters_get_scaled_embeddings_and_finished_logits(kind: str) -> None:
    module, model = native_of(kind)
    tokens = tokens_of(2, 5)
    cache = model.new_cache(2, CAPACITY)
    output = model.forward(tokens, layout(chain(2, 5), torch.zeros(2, dtype=torch.int64), CAPACITY), cache)
    assert torch.equal(model.logits(output.hidden), output.logits)
    normed = model.normed(output.hidden)
    torch.testing.assert_close(model.head(normed), output.logits)
    torch.testing.assert_close(model.head(normed.requires_grad_()).detach(), output.logits, atol=1e-5, rtol=1e-5)
    seen: list[Tensor] = []
    hook = module.model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    module(tokens, use_cache=False)
    hook.remove()
    torch.testing.assert_close(model.embed(tokens), seen[0])


def test_control_other_bits_are_seen() -> None:
    _, model = native_of("qwen3-tied")
    text = tokens_of(1, 12)
    plain = logits_of(model, text, chain(1, 12), torch.tensor([0]), model.new_cache(1, CAPACITY))
    cache = model.new_cache(1, CAPACITY)
    logits_of(model, text[:, :6], chain(1, 6), torch.tensor([0]), cache)
    cache.keys[0][0, 0, 2, 3] *= 1 + 1e-6
    other = logits_of(model, text[:, 6:], chain(1, 6), torch.tensor([6]), cache)
    assert not torch.equal(other, plain[:, 6:])


@pytest.mark.parametrize("dim", native.HEAD_DIMS)
def test_every_head_dimension_in_bfloat16_is_near_the_float32_module(dim: int) -> None:
    """Dimensions that no vector of 32 divides too: what is read behind their last whole one differs between variants."""
    module, model = native_of("llama", torch.bfloat16, head_dim=dim)
    cache = model.new_cache(1, CAPACITY)
    tokens = tokens_of(1, 9)
    logits = run_tree(model, cache, tokens, BUSHY[:1], prefill(model, cache, prompts_of((9,)), chunk=16))[0].logits
    expected = oracle_logits(module.float(), prompts_of((9,))[0], tokens[0], BUSHY[0])
    assert (logits[0] - expected).abs().mean() / expected.abs().mean() < 0.06


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("llama", "layers.1.self_attn.q_proj"), ("gemma2", "layers.1.self_attn.k_proj"), ("gemma2", "layers.2.mlp.gate_p"),
        ("gemma2", "model.norm"), ("olmo2", "q_norm"), ("qwen3moe", "layers.2.mlp.gate.weight"),
        ("mixtral-window", "layers.2.mlp.gate.weight"), ("qwen2moe", "shared_expert_gate"),
        ("glm4moe", "layers.2.mlp.gate.weight"),
    ],
)  # fmt: skip
def test_not_a_number_is_not_made_one(kind: str, part: str) -> None:
    """Limits, caps and softmax over what is NaN: every logit that is NaN in the module is here too."""
    module = make_model(kind, hidden_size=64)
    with torch.no_grad():
        next(weight for name, weight in module.named_parameters() if part in name).view(-1)[-5] = float("nan")
    tokens, model = tokens_of(1, 8), NativeModel.from_hf(module)
    logits = logits_of(model, tokens, chain(1, 8), torch.tensor([0]), model.new_cache(1, CAPACITY))
    expected = module(tokens, use_cache=False).logits.isnan()
    assert expected.any()
    assert torch.equal(logits.isnan(), expected)


@pytest.mark.parametrize("fault", ["token", "slot", "position"])
def test_what_is_out_of_range_is_refused(fault: str) -> None:
    _, model = native_of("llama")
    cache = model.new_cache(1, 8)
    tokens, plan = tokens_of(1, 4), layout(chain(1, 4), torch.tensor([2]), 8)
    if fault == "token":
        tokens[0, 1] = VOCABULARY
    if fault == "slot":
        plan = layout(chain(1, 4), torch.tensor([5]), 8)
    if fault == "position":
        plan = replace(plan, positions=plan.positions + 9)
    with pytest.raises(RuntimeError, match=fault):
        model.forward(tokens, plan, cache)


def test_tokens_and_states_are_those_of_the_plan() -> None:
    """C takes the plan's number of them, wherever that leads."""
    _, model = native_of("llama")
    plan, cache = layout(chain(2, 3), torch.zeros(2, dtype=torch.int64), CAPACITY), model.new_cache(2, CAPACITY)
    for tokens in (tokens_of(2, 0), tokens_of(2, 2), tokens_of(2, 3).int()):
        with pytest.raises(AssertionError):
            model.forward(tokens, plan, cache)
    with pytest.raises(AssertionError):
        model.forward(tokens_of(2, 3), plan, cache, PassOptions(layers=(1, 3), hidden=torch.zeros(2, 2, 48)))


@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen2"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_loaded_model_equals_a_shared_one(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    module, shared = native_of(kind, dtype)
    module.save_pretrained(tmp_path)
    loaded = NativeModel.load(tmp_path, dtype=dtype, name="x")
    assert (loaded.spec.name, loaded.spec.implementation, loaded.spec.dtype) == ("x", "native", dtype)
    assert loaded.spec == replace(shared.spec, name="x")
    tokens, plan = tokens_of(1, 9), layout(BUSHY[:1], torch.tensor([0]), CAPACITY)
    results = [model.forward(tokens, plan, model.new_cache(1, CAPACITY)).logits for model in (loaded, shared)]
    assert results[0] is not None
    assert results[1] is not None
    assert torch.equal(results[0], results[1])
    other = NativeModel.load(tmp_path, dtype=torch.float32)  # converted where the checkpoint has another dtype
    assert other.forward(tokens, plan, other.new_cache(1, CAPACITY)).logits is not None


def test_a_module_is_shared_and_not_copied() -> None:
    module, model = native_of("llama")
    tokens, plan = tokens_of(1, 1), layout(chain(1, 1), torch.tensor([0]), CAPACITY)
    before = model.forward(tokens, plan, model.new_cache(1, CAPACITY)).logits
    with torch.no_grad():
        module.lm_head.weight.mul_(2.0)
    after = model.forward(tokens, plan, model.new_cache(1, CAPACITY)).logits
    assert torch.equal(after, before * 2)


def test_one_openmp_runtime_is_loaded() -> None:
    library()
    with open("/proc/self/maps") as maps:
        loaded = {line.split()[-1] for line in maps if "libgomp" in line or "libiomp" in line}
    assert loaded == {str(openmp_runtime())}


def test_it_can_be_disabled_and_says_why() -> None:
    code = (
        "import sys; from foretell.kernels.native import library; lib, reason = library(); "
        "sys.exit(0 if lib is None and 'FORETELL_NATIVE' in reason else 1)"
    )
    environment = {**os.environ, "FORETELL_NATIVE": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def test_a_module_of_another_head_dimension_is_refused() -> None:
    """What ``supports`` tells, also of a model in memory: attention would read behind its rows."""
    with pytest.raises(ModelError, match="head dimension 24; implemented"):
        NativeModel.from_hf(make_model("llama", head_dim=24))


def test_bandwidth_is_a_rate_of_memory() -> None:
    assert 1e8 < dram_read_bandwidth(1 << 26, repeats=2) < 1e13
    assert 1e8 < dram_read_bandwidth(1 << 26, repeats=2, huge=True) < 1e13


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux says what pages a mapping may have")
def test_weights_may_lie_in_huge_pages() -> None:
    """What is asked for, not what is granted: that depends on free memory. Shared mappings are asked for in vain."""
    if not hasattr(mmap, "MADV_HUGEPAGE") or "[never]" in THP.read_text():
        pytest.skip("this system has no huge pages to give")
    memory = huge_pages(5 << 20)
    assert memory.shape == (5 << 20,)
    assert memory.data_ptr() % (2 << 20) == 0
    assert not memory.any()
    begin, found = memory.data_ptr(), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+)", line)
        if head is not None:
            found = int(head[1], 16) <= begin < int(head[2], 16)
            assert not found or head[3] == "rw-p"
        elif found and line.startswith("VmFlags:"):
            assert "hg" in line.split()
            return
    raise AssertionError("the mapping was not found")


def test_memory_is_given_where_a_system_knows_no_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAP_PRIVATE", "MAP_ANONYMOUS", "MADV_HUGEPAGE"):
        monkeypatch.delattr(mmap, name, raising=False)
    assert huge_pages(100).tolist() == [0] * 100


def test_small_passes_take_the_measured_threads_and_large_ones_all(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = native_of("llama")
    asked: list[int] = []
    monkeypatch.setattr(native, "fewest_threads", lambda run, most, *_: asked.append(most) or run(1) or 1)
    torch.set_num_threads(2)
    assert [model._threads(rows) for rows in (1, 8, 9, 1)] == [1, 1, 2, 1]
    assert asked == [2]  # once for each number that torch has
    torch.set_num_threads(1)
    assert model._threads(1) == 1
    assert asked == [2]


def test_the_scratch_is_enough_for_every_pass_whatever_came_before() -> None:
    """Of 32 rows every thread keeps a copy, of 33 there is one: the pass over fewer rows needs more."""
    _, model = native_of("llama")
    for capacity in (CAPACITY, 16):
        cache = model.new_cache(1, capacity)
        for rows, threads in ((33, 1), (33, 8), (32, 8), (40, 2), (33, 64), (32, 64), (1, 256)):
            start = model._scratch_address(1, rows, threads, cache)
            end = model._scratch.data_ptr() + model._scratch.numel()
            assert start % 64 == 0
            assert start + model.native.scratch(model.address, cache.address, 1, rows, threads) <= end, (rows, threads)
