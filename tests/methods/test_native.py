"""Heads through the native kernels against their torch modules: the same proposals, batch after batch, in every shape.

Rows join and leave on the way. All trees of a run are compared, so one wrong guess, position or cached key would show.
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch

from foretell import Engine, Request, SamplingParams
from foretell.core.tree import TokenTree, chain_parent, layout
from foretell.draft.base import Method
from foretell.heads.draft_vocabulary import draft_vocabulary
from foretell.heads.head import Head
from foretell.heads.native import beside
from foretell.kernels import build
from foretell.methods.acceptance.head import AcceptanceHead, AcceptanceHeadConfig, predicted, speed_up
from foretell.methods.dflash.drafter import DFlash
from foretell.methods.dflash.head import DFlashHead, DFlashHeadConfig
from foretell.methods.eagle.drafter import Eagle1, Eagle3
from foretell.methods.kangaroo.drafter import Kangaroo, NativeAdapter
from foretell.methods.kangaroo.head import KangarooHead
from foretell.methods.medusa.drafter import MOST_HEADS, Medusa, NativeMedusa
from foretell.methods.medusa.head import MedusaHead
from foretell.model.hf.adapter import TransformersModel
from foretell.model.llama.run import native
from foretell.model.llama.run.native import NativeModel
from tests.methods.eagle.eagles import EAGLE1, EAGLE3, random_head, same_trees
from tests.model.tiny import VOCAB, tiny_module

CPU = torch.device("cpu")
REASON = native.supports(tiny_module("llama", head_dim=16).config, torch.float32, CPU)
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@lru_cache
def target(dtype: torch.dtype = torch.float32) -> NativeModel:
    return NativeModel.from_hf(tiny_module("llama", head_dim=16, dtype=dtype))


def stirred(head: Any, seed: int = 3) -> Any:
    """As if trained: no block the identity, no matrix zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return head.eval()


def medusa(**options: Any) -> MedusaHead:
    made: MedusaHead = stirred(MedusaHead.fresh(target(), num_heads=3, num_layers=2, **options))
    return made


def flash(**options: Any) -> DFlashHead:
    config = DFlashHeadConfig(
        hidden_size=32, vocab_size=VOCAB, intermediate_size=40, num_heads=4, num_kv_heads=2, head_dim=16, num_layers=2,
        block_size=5, layer_ids=(0, 2), mask_token_id=3, rope_theta=100.0,
    )  # fmt: skip
    config = replace(config, **options)
    size = config.draft_vocab_size
    some = None if size is None else draft_vocabulary((torch.arange(VOCAB) * 7) % 11, size)
    made: DFlashHead = stirred(DFlashHead.fresh(config, model=target(), vocabulary=some))
    return made


def kangaroo() -> KangarooHead:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        head = KangarooHead.fresh(target(), exit_layer=2, head_dim=16, num_heads=4, num_kv_heads=2)
    made: KangarooHead = stirred(head)
    return made


METHODS: dict[str, Callable[[NativeModel], Any]] = {
    "eagle1": lambda model: Eagle1(random_head(replace(EAGLE1, head_dim=16)), model),  # type: ignore[arg-type]
    "eagle3": lambda model: Eagle3(random_head(replace(EAGLE3, head_dim=16)), model),  # type: ignore[arg-type]
    "medusa": lambda model: Medusa(medusa(), model),
    "medusa-reduced": lambda model: Medusa(medusa(draft_vocab=torch.arange(0, VOCAB, 2)), model),
    "medusa-shared": lambda model: Medusa(medusa(own_lm_head=False), model),
    "dflash": lambda model: DFlash(flash(), model),
    "dflash-causal": lambda model: DFlash(flash(causal=True), model),
    "dspark": lambda model: DFlash(flash(sample_from_anchor=True, markov_rank=8, confidence=True), model),
    "dflash-reduced": lambda model: DFlash(flash(draft_vocab_size=29), model),
    "dspark-reduced": lambda model: DFlash(
        flash(sample_from_anchor=True, markov_rank=8, confidence=True, draft_vocab_size=29), model
    ),
    "dflash-windows": lambda model: DFlash(flash(windows=(6, 0)), model),
    "kangaroo": lambda model: Kangaroo(kangaroo(), model),
}


def twin(method: Any) -> Method:
    """The same method through its torch module."""
    method.native = None
    if isinstance(method, Medusa):
        method.stacked = method.head.stacked()
    return method


def requests(*, plain: bool) -> list[Request]:
    """Ragged prompts that end at different times; plain: only temperatures differ."""
    generator = torch.Generator().manual_seed(9)
    texts = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in (2, 9, 4, 13, 6)]
    params = [
        SamplingParams(max_new_tokens=12, seed=1, ignore_eos=True),
        SamplingParams(max_new_tokens=7, seed=2, temperature=0.0, ignore_eos=True),
        SamplingParams(max_new_tokens=10, seed=3, presence_penalty=0.0 if plain else 1.0, ignore_eos=True),
        SamplingParams(max_new_tokens=12, seed=4, temperature=0.7, top_k=0 if plain else 7, ignore_eos=True),
        SamplingParams(max_new_tokens=9, seed=5, temperature=1.3, ignore_eos=True),
    ]
    return [Request(text, one) for text, one in zip(texts, params, strict=True)]


def run(method: Method, shape: str, verify: str, *, plain: bool) -> tuple[list[TokenTree], list[list[int]]]:
    """Every tree proposed, and the texts."""
    trees: list[TokenTree] = []
    config = {"method": "draft_model", "num_speculative_tokens": 4, "verify": verify, "shape": shape}
    engine = Engine(target(), None, speculative=config, method=method)
    engine.observers.append(lambda event: trees.append(event.evidence.tree))
    completions = engine.generate_batch(requests(plain=plain), batch_size=3)
    return trees, [one.token_ids for one in completions]


@pytest.mark.parametrize(
    ("shape", "verify", "plain"),
    [
        ("chain", "rejection", True),
        ("eagle2/size=8/width=3", "coupled", False),
        *(
            pytest.param(shape, verify, plain, marks=pytest.mark.slow)
            for shape, verify, plain in (
                ("chain", "coupled", True), ("chain", "coupled", False), ("chain", "rejection", False),
                ("chain", "exact", True), ("static/branching=2x2x1", "coupled", True),
                ("eagle2/size=8/width=3", "coupled", True), ("dyspec/size=8/width=3", "rejection", False),
            )
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", METHODS)
def test_proposals_are_the_twins(name: str, shape: str, verify: str, plain: bool) -> None:
    fast = METHODS[name](target())
    if shape.partition("/")[0] not in fast.capabilities.shapes:
        shape = "static/branching=2x2x1"
    assert fast.native is not None
    assert fast.not_native is None
    trees, texts = run(fast, shape, verify, plain=plain)
    expected, told = run(twin(METHODS[name](target())), shape, verify, plain=plain)
    assert texts == told
    assert max(tree.num_nodes for tree in trees) >= 4
    same_trees(trees, expected)


@pytest.mark.parametrize("name", ["eagle1", "eagle3", "medusa-shared", "dspark", "kangaroo"])
def test_beside_a_target_that_scales_embeddings_and_caps_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a head shares with Gemma 2 it reads as Gemma 2 does."""
    module = tiny_module("gemma2", head_dim=16, final_logit_softcapping=0.5)
    model = NativeModel.from_hf(module)
    monkeypatch.setattr(sys.modules[__name__], "target", lambda: model)
    trees, texts = run(METHODS[name](model), "chain", "rejection", plain=True)
    expected, told = run(twin(METHODS[name](model)), "chain", "rejection", plain=True)
    assert texts == told
    same_trees(trees, expected)


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("name", ["eagle3", "medusa", "dspark", "kangaroo"])
def test_threads_do_not_change_a_bit(name: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are part of it: Kangaroo's were read by torch, whose sums have another order on two threads."""
    monkeypatch.setattr("foretell.engine.loop.thread_limit", nullcontext)  # beside other processes there would be fewer
    alone, _ = run(METHODS[name](target()), "chain", "rejection", plain=True)
    torch.set_num_threads(threads)
    trees, _ = run(METHODS[name](target()), "chain", "rejection", plain=True)
    for tree, other in zip(trees, alone, strict=True):
        assert torch.equal(tree.tokens, other.tokens)
        assert tree.q is None or (other.q is not None and torch.equal(tree.q, other.q))


def test_no_prompt_is_read_by_torch_beside_a_native_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether torch's sums depend on the number of threads is the machine's."""
    monkeypatch.setattr(KangarooHead, "remember", None)
    trees, _ = run(METHODS["kangaroo"](target()), "chain", "rejection", plain=True)
    assert all(bool(tree.valid[:, 1:].any()) for tree in trees[:3]), "a drafter that fails guesses nothing"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_prompt_is_remembered_as_it_is_read_node_by_node(dtype: torch.dtype) -> None:
    """Keys and values of Kangaroo's adapter: those of a pass, on every number of threads."""
    head = kangaroo().to(dtype)
    fast, _ = beside(NativeAdapter, head, target(dtype))
    hidden = torch.randn(2, 61, 32, generator=torch.Generator().manual_seed(8))
    slots = torch.arange(61).expand(2, 61)
    read = fast.new_cache(2, 64)
    parent = chain_parent(61, CPU).expand(2, 61)
    fast.step(hidden, layout(parent, torch.zeros(2, dtype=torch.int64), 64), read)
    made = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        cache = fast.new_cache(2, 64)
        fast.remember(hidden, slots, cache)
        made.append(torch.stack([cache.keys[0], cache.values[0]])[..., :61, :])
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0], made[2])
    close = {"rtol": 0.0, "atol": 5e-6} if dtype == torch.float32 else {"rtol": 1 / 64, "atol": 1 / 128}
    torch.testing.assert_close(made[0], torch.stack([read.keys[0], read.values[0]])[..., :61, :], **close)


@pytest.mark.parametrize("name", ["medusa", "dspark", "kangaroo"])
def test_a_head_that_differs_is_seen(name: str) -> None:
    """The comparison above would see a head that is another one by a fiftieth."""
    trees, _ = run(METHODS[name](target()), "chain", "rejection", plain=True)
    other = METHODS[name](target())
    with torch.no_grad():
        for parameter in other.head.parameters():
            parameter *= 1.02
    expected, _ = run(twin(other), "chain", "rejection", plain=True)
    apart = len(trees) != len(expected) or any(
        tree.tokens.shape != twin_tree.tokens.shape
        or not torch.equal(tree.tokens, twin_tree.tokens)
        or float((tree.q - twin_tree.q).abs().max()) > 1e-4
        for tree, twin_tree in zip(trees, expected, strict=False)
        if tree.q is not None and twin_tree.q is not None
    )
    assert apart


# -- parts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("options", [{}, {"draft_vocab": torch.arange(0, VOCAB, 3)}], ids=["whole", "reduced"])
def test_medusa_heads_of_many_rows(options: dict[str, Any], rows: int) -> None:
    head = medusa(**options)
    x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(1))
    expected = head.stacked()(x, 2)
    if head.token_map is not None:
        expected = torch.full((rows, 2, VOCAB), -torch.inf).index_copy(2, head.token_map, expected)
    torch.testing.assert_close(NativeMedusa(head, target())(x, 2), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("layers", [1, 3])
def test_acceptance_heads(layers: int, normalize: bool) -> None:
    config = AcceptanceHeadConfig(32, VOCAB, layers, normalize, "draft_model", reads_law=True)
    head = stirred(AcceptanceHead(config))
    generator = torch.Generator().manual_seed(1)
    hidden, law = torch.randn(2, 5, 32, generator=generator), torch.randn(2, 5, 4, generator=generator)
    with torch.no_grad():
        expected = predicted(head, hidden, law)
        assert speed_up(head, TransformersModel(tiny_module("llama"))).native is None
        assert speed_up(head, target()).native is not None
        found = predicted(head, hidden, law)
    assert found.shape == (2, 5)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    head.requires_grad_(requires_grad=True)
    assert head(hidden, law).requires_grad, "training goes through torch"


def test_too_many_heads_run_in_torch() -> None:
    head = MedusaHead.fresh(target(), num_heads=MOST_HEADS + 1, num_layers=1)
    assert str(MOST_HEADS) in str(Medusa(head, target()).not_native)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("weights", ["same", "int8"])
def test_bfloat16_and_rounded_heads_keep_the_text(name: str, weights: str) -> None:
    """Whatever a head's numbers are, the text under coupled draws is plain decoding's."""
    model = target(torch.bfloat16)
    made = METHODS[name](target())
    head: Head = made.head.to(torch.bfloat16)
    method = type(made)(head, model, weights=weights)
    assert method.native is not None
    asked = requests(plain=True)
    expected = Engine(model, None, speculative={"method": "none"}).generate_batch(asked, batch_size=3)
    config = {"method": "draft_model", "num_speculative_tokens": 4}
    found = Engine(model, None, speculative=config, method=method).generate_batch(asked, batch_size=3)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert sum(one.num_draft_tokens for one in found) > 20


def test_a_head_that_runs_by_torch_beside_a_native_target_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "_warned", [])
    for _ in range(2):
        made = Medusa(medusa(), target(torch.bfloat16))
        assert made.native is None
    reason = made.not_native
    assert reason == "its weights are torch.float32, and the target's torch.bfloat16"
    assert caplog.messages == [f"the drafter's head runs by torch, which is slower: {reason}"]
    caplog.clear()
    monkeypatch.setattr(build, "_warned", [])
    other = TransformersModel(tiny_module("llama", head_dim=16))  # of which its loading has spoken
    assert Medusa(medusa(), other).native is None
    assert caplog.messages == []
