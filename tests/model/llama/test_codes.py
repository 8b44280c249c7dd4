"""Keys and values in int8: ``slots.h`` against its twin in torch, and every promise of the native decoder with them."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from foretell import Engine, Request, SamplingParams
from foretell.engine.prefix import PrefixStore
from foretell.methods.draft_model.drafter import DraftModel
from foretell.model.cache import SCALE_BYTES, KVCache, from_codes, spread_of, to_codes
from foretell.model.llama.run.lean import LeanModel
from foretell.model.llama.run.native import NativeModel
from tests.engine.integrity import check_prefixes
from tests.model.llama import test_native as plain_tests
from tests.model.llama.family import BUSHY, CAPACITY, chain, make_model, prefill, prompts_of, tokens_of, valid
from tests.model.llama.hybrid import native_hybrid
from tests.model.llama.test_native import DTYPES, logits_of, variants

pytestmark = plain_tests.pytestmark
OTHER = NativeModel.from_hf


@pytest.fixture
def coded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native models hold keys and values in int8."""
    monkeypatch.setattr(NativeModel, "from_hf", partial(OTHER, kv="int8"))


def test_codes_are_near_and_their_scale_is_in_the_slot() -> None:
    x = torch.randn(3, 5, 48) * torch.logspace(-6, 6, 5)[:, None]
    x[0, 0] = 0.0
    slots = to_codes(x)
    assert (slots.shape, slots.dtype) == ((3, 5, 48 + SCALE_BYTES), torch.int8)
    error = (from_codes(slots, torch.float32) - x).abs()
    largest = x.abs().amax(-1, keepdim=True)
    assert (error <= largest / 253).all()
    assert (slots[..., :48].abs().amax(-1) == 127 * (largest[..., 0] > 0)).all()
    assert not from_codes(to_codes(torch.tensor([1.0, float("nan")])), torch.float32).isfinite().any()


@pytest.mark.parametrize(
    "kind", ["llama", "gemma2", "qwen3-tied", "mistral-window", "olmo2", "llama-mha-bias", "gptoss", "minicpm3"]
)
def test_equals_the_twin_on_trees_ragged_rows_and_after_moves(kind: str) -> None:
    """Logits in float32, and codes."""
    module = make_model(kind)
    models = (
        NativeModel.from_hf(module, kv="int8"), LeanModel.from_hf(module, kv="int8"), NativeModel.from_hf(module),
    )  # fmt: skip
    caches = [model.new_cache(2, CAPACITY) for model in models]
    length = torch.tensor([13, 5])
    for model, cache in zip(models, caches, strict=True):
        prefill(model, cache, prompts_of((13, 5)), chunk=6)
    for step in range(2):
        parent, tokens = BUSHY if step == 0 else BUSHY.flip(0), tokens_of(*BUSHY.shape, seed=9 * step)
        found, twin, unrounded = (
            logits_of(model, tokens, parent, length, cache)[valid(parent)]
            for model, cache in zip(models, caches, strict=True)
        )
        error, rounding = (found - twin).abs().max(), (found - unrounded).abs().max()
        assert error < 2e-3
        assert rounding > 20 * error  # the test could tell
        src = length[:, None] + torch.tensor([[0, 1, 4, 7], [0, 1, 2, 3]])
        for cache in caches:
            cache.move(src, length[:, None] + torch.arange(4))
        length = length + torch.tensor([4, 2])
    for memory, theirs in zip((*caches[0].keys, *caches[0].values), (*caches[1].keys, *caches[1].values), strict=True):
        for row, count in enumerate(length.tolist() if memory.numel() else ()):
            apart = (memory[row, :, :count].int() - theirs[row, :, :count].int())[..., :-SCALE_BYTES].abs()
            assert apart.max() <= 1  # a tie
            assert (apart == 0).float().mean() > 0.99


def test_biases_of_keys_are_evened_out_before_they_are_rounded() -> None:
    """One number a hundred times as large as the others of its head: rounded as they are, the others would be lost."""
    module, tokens = make_model("llama-mha-bias"), tokens_of(1, 24)
    biases = [layer.self_attn.k_proj.bias for layer in module.model.layers]
    with torch.no_grad():
        for bias in biases:
            bias.view(-1, 16)[:, 1] = 100.0
    models = NativeModel.from_hf(module), NativeModel.from_hf(module, kv="int8")
    caches = [model.new_cache(1, CAPACITY) for model in models]
    for model, cache in zip(models, caches, strict=True):
        logits_of(model, tokens, chain(1, 24), torch.tensor([0]), cache)
    keys, found = caches[0].keys[0][0, :, :24], from_codes(caches[1].keys[0][0, :, :24], torch.float32)
    spread = spread_of(biases[0], len(keys))
    others = [number for number in range(16) if number not in (1, 9)]  # a rotated pair
    error = (found * spread[:, None] - keys).abs()[..., others].max()
    lost = (from_codes(to_codes(keys), torch.float32) - keys).abs()[..., others].max()
    assert error < 0.02
    assert lost > 10 * error


def test_rotated_numbers_are_evened_out_beside_latent_vectors() -> None:
    """They are a hundred times as large: of one scale for all, vectors as they are would be lost."""
    module, tokens = make_model("minicpm3"), tokens_of(1, 24)
    with torch.no_grad():
        for layer in module.model.layers:
            layer.self_attn.kv_a_proj_with_mqa.weight[32:] *= 100.0
    models = NativeModel.from_hf(module), NativeModel.from_hf(module, kv="int8")
    caches = [model.new_cache(1, CAPACITY) for model in models]
    for model, cache in zip(models, caches, strict=True):
        logits_of(model, tokens, chain(1, 24), torch.tensor([0]), cache)
    keys, found = caches[0].keys[0][0, 0, :24], from_codes(caches[1].keys[0][0, 0, :24], torch.float32)
    lost = (from_codes(to_codes(keys), torch.float32) - keys)[:, :32].abs().max()
    assert (found - keys)[:, :32].abs().max() < 0.05
    assert lost > 0.5


@pytest.mark.usefixtures("coded")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen2moe", "deepseek3"])
def test_bits_do_not_depend_on_the_pass(kind: str, dtype: torch.dtype) -> None:
    plain_tests.test_bits_do_not_depend_on_width_tree_batch_slot_span_or_threads(kind, dtype)


@pytest.mark.usefixtures("coded")
@pytest.mark.parametrize("sizes", [{"num_attention_heads": 6}, {"head_dim": 80}])
def test_bits_of_several_segments(sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    kind = "mistral-window" if "head_dim" in sizes else "llama"
    more = {"sliding_window": 131} if "head_dim" in sizes else {}
    plain_tests.test_texts_of_several_segments_give_the_same_bits_in_any_pass(kind, {**sizes, **more}, torch.bfloat16)
    plain_tests.test_nodes_of_random_trees_have_the_bits_of_their_paths(kind, {**sizes, **more}, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.usefixtures("coded")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", variants())
def test_every_variant_gives_the_same_bits(variant: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    plain_tests.test_every_variant_gives_the_same_bits_at_any_width(variant, dtype, monkeypatch)
    plain_tests.test_every_variant_gives_the_same_bits_at_every_head_dimension(variant, dtype, monkeypatch)


@pytest.mark.parametrize(
    ("kind", "kv", "size"),
    [
        ("llama", "int8", 2 * 2 * (16 + SCALE_BYTES)),
        ("minicpm3", "int8", 48 + SCALE_BYTES),
        ("deepseek3", "auto", 4 * 48),
    ],
)
def test_all_that_moves_slots_carries_their_scales(kind: str, kv: str, size: int) -> None:
    """Kept and joined rows, prefixes and views go on as rows that were read so. size: bytes of a slot in a layer."""
    model = NativeModel.from_hf(make_model(kind), kv=kv)
    assert model.new_cache(1, 8).bytes_per_slot == 3 * size
    other = NativeModel.from_hf(make_model(kind), kv="auto" if kv == "int8" else "int8")
    assert model.spec.described != other.spec.described  # measured costs are its own
    prompts, tokens = prompts_of((20, 17, 9)), tokens_of(3, 4, seed=8)
    whole = model.new_cache(3, CAPACITY)
    length = prefill(model, whole, prompts, chunk=8)
    expected = logits_of(model, tokens, chain(3, 4), length, whole)

    def next_of(cache: KVCache, rows: list[int]) -> Tensor:
        return logits_of(model, tokens[rows], chain(len(rows), 4), length[rows], cache)

    whole.keep(torch.tensor([2, 0]), 20)
    assert torch.equal(next_of(whole, [2, 0]), expected[[2, 0]])
    alone = model.new_cache(1, CAPACITY)
    prefill(model, alone, prompts[1:2], chunk=8)
    whole.join(alone, 17)
    assert torch.equal(next_of(whole, [2, 0, 1]), expected[[2, 0, 1]])
    store = PrefixStore(1 << 20)
    store.add(prompts[0], whole.rows(1, 2), (), None)
    check_prefixes(store)
    found = store.find(prompts[0], ())
    fresh = model.new_cache(1, CAPACITY)
    found[0].copy_into(fresh, found[1])
    assert torch.equal(next_of(fresh, [0]), expected[[0]])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_text_is_that_of_plain_decoding(kind: str, temperature: float) -> None:
    """Chains and trees, ragged batches, and texts that begin with a known one; attention of a hybrid too."""
    if kind == "llama":
        module = make_model(kind)
        target, draft = NativeModel.from_hf(module, kv="int8"), NativeModel.from_hf(module)
    else:
        target, draft = native_hybrid(kind, kv="int8"), native_hybrid(kind)
    texts = [tokens_of(count, seed=count).tolist() for count in (19, 33, 5)]
    requests = [
        Request(text, SamplingParams(max_new_tokens=12, temperature=temperature, seed=seed, ignore_eos=True))
        for seed, text in enumerate([*texts, [*texts[1], 7]])
    ]
    plain = Engine(target, speculative="none")
    expected = [plain.generate(one.prompt, one.params).token_ids for one in requests]
    for shape in ("chain", "opt_tree/size=9"):
        config = {"method": "draft_model", "num_speculative_tokens": 4, "shape": shape}
        for batch_size in (1, 3):
            engine = Engine(
                target, speculative=config, method=DraftModel(draft), drafter_errors="raise", prefix_memory_gib=0.01
            )
            found = engine.generate_batch(requests, batch_size=batch_size)
            assert [one.token_ids for one in found] == expected, (shape, batch_size)
            assert sum(one.num_accepted_tokens for one in found) > 4
