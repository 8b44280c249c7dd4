"""Drafts that read the ends of a text alone: the twins' numbers, one function of the text, and no other text."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from foretell import ConfigError, Engine, Request, SamplingParams, speculative_config
from foretell.core.tree import DrawMode, chain_parent, layout
from foretell.methods.dflash.drafter import DFlash
from foretell.methods.draft_model.drafter import DraftModel
from foretell.methods.eagle.drafter import Eagle3
from foretell.model.hf.adapter import TransformersModel
from foretell.model.llama.run import native
from foretell.model.llama.run.lean import LeanModel
from foretell.model.llama.run.native import NativeModel
from foretell.model.target import CausalModel
from foretell.model.windows import UNBOUNDED, DraftWindow
from tests.methods.decoding import Decoding, prompts
from tests.methods.eagle.eagles import random_head, same_trees
from tests.methods.eagle.test_drafter import CONFIGS, decoded
from tests.methods.eagle.test_native import Levels, distance
from tests.methods.test_native import flash, requests, run, target, twin
from tests.model.llama.family import make_model
from tests.model.tiny import VOCAB, tiny_module

CPU = torch.device("cpu")
REASON = native.supports(tiny_module("llama", head_dim=16).config, torch.float32, CPU)
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
LIMIT = DraftWindow(4, 2)


def limited(head: Any, limit: DraftWindow = LIMIT) -> Any:
    head.limit(limit)
    return head


METHODS = {
    "draft_model": lambda model: DraftModel(model.limited(LIMIT)),
    "eagle3": lambda model: Eagle3(limited(random_head(replace(CONFIGS["eagle3"], head_dim=16))), model),
    "eagle1-layers": lambda model: Eagle3(limited(random_head(replace(CONFIGS["eagle3-layers"], head_dim=16))), model),
    "dflash": lambda model: DFlash(limited(flash()), model),
    "dflash-windows": lambda model: DFlash(limited(flash(windows=(5, 0))), model),
}


def read(model: CausalModel, ids: Tensor, widths: list[int]) -> Tensor:
    """[B, n, V] of texts read in passes of these widths."""
    cache, out, at = model.new_cache(len(ids), ids.shape[1]), [], 0
    for width in widths:
        parent = chain_parent(width, CPU).expand(len(ids), -1)
        plan = layout(parent, torch.full((len(ids),), at), ids.shape[1])
        out.append(model.forward(ids[:, at : at + width], plan, cache).logits)
        at += width
    return torch.cat([each for each in out if each is not None], 1)


@pytest.mark.parametrize(
    ("kind", "limit"),
    [
        ("llama", DraftWindow(150, 250)),
        ("gemma2", DraftWindow(150, 250)),
        ("gemma2", DraftWindow(400, 1)),
        ("mistral", DraftWindow(20, 3)),
        ("gpt_oss", DraftWindow(150, 250)),
    ],
)
def test_sinks_of_texts_of_several_segments_are_the_twins(kind: str, limit: DraftWindow) -> None:
    """Attention is cut at multiples of 256 positions: many sinks or few, and windows across marks."""
    more = {} if kind == "llama" else {"sliding_window": 270}
    module = tiny_module(kind, head_dim=16, max_position_embeddings=1024, **more)
    ids = torch.randint(0, VOCAB, (2, 540), generator=torch.Generator().manual_seed(1))
    fast, slow = (of.from_hf(module).limited(limit) for of in (NativeModel, LeanModel))
    found = read(fast, ids, [540])
    assert torch.equal(read(fast, ids, [250, 1, 1, 7, 256, 25]), found)
    torch.testing.assert_close(read(slow, ids, [540]), found, rtol=1e-3, atol=1e-4)
    whole = read(NativeModel.from_hf(module), ids, [540])
    assert torch.equal(whole[:, : limit.size], found[:, : limit.size])
    assert not torch.allclose(whole[:, -1], found[:, -1])


@pytest.mark.parametrize("kind", ["llama", "gemma2", "mistral", "gpt_oss", "deepseek_v3"])
def test_a_draft_model_is_its_twin(kind: str) -> None:
    """Gemma's own windows are narrower in one layer and none in the other; sinks behind segments, and within one."""
    more = {} if kind == "llama" else {"sliding_window": 30}
    if kind == "deepseek_v3":
        more = dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 16)
    module = tiny_module(kind, head_dim=16, **more)
    ids = torch.randint(0, VOCAB, (1, 60), generator=torch.Generator().manual_seed(1))
    whole = NativeModel.from_hf(module)
    limit = DraftWindow(20, 3)
    fast = whole.limited(limit)
    found, all_of_it = read(fast, ids, [60]), read(whole, ids, [60])
    assert torch.equal(read(fast, ids, [1] * 60), found)
    assert torch.equal(read(fast, ids, [11, 7, 42]), found)
    torch.testing.assert_close(read(LeanModel.from_hf(module).limited(limit), ids, [60]), found, rtol=1e-4, atol=1e-5)
    assert torch.equal(found[:, :20], all_of_it[:, :20])
    assert float((found - all_of_it)[:, 30:].abs().min(0).values.max()) > 1e-3
    assert fast.spec.max_positions == UNBOUNDED


def test_sinks_before_far_windows_on_any_number_of_threads() -> None:
    """Segments between sinks and window are passed over; some nodes of a pass have sinks, and some none."""
    model = target().limited(DraftWindow(290, 4))
    ids = torch.randint(0, VOCAB, (1, 700), generator=torch.Generator().manual_seed(2))
    found = read(model, ids, [700])
    twin_model = LeanModel.from_hf(tiny_module("llama", head_dim=16)).limited(DraftWindow(290, 4))
    torch.testing.assert_close(read(twin_model, ids, [700]), found, rtol=1e-4, atol=1e-5)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        model._threads_for[threads] = threads  # of small passes too, whatever is faster here
        assert torch.equal(read(model, ids, [690, *[1] * 10]), found)


def test_no_distance_grows_with_the_text() -> None:
    """What is seen alone matters: the same tokens at other positions, behind the same sinks, give the same logits."""
    model = LeanModel.from_hf(tiny_module("llama", head_dim=16, num_hidden_layers=1)).limited(DraftWindow(5, 2))
    ids = torch.randint(0, VOCAB, (1, 40), generator=torch.Generator().manual_seed(3))
    more = torch.cat((ids[:, :2], ids[:, 10:20], ids), 1)
    torch.testing.assert_close(read(model, more, [52])[:, 24:], read(model, ids, [40])[:, 12:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["eagle1", "eagle3-layers"])
@pytest.mark.parametrize("lengths", [(12,), (5, 1, 12, 2)], ids=["one", "ragged"])
def test_a_head_is_its_twin(name: str, lengths: tuple[int, ...]) -> None:
    model = target()
    head = limited(random_head(replace(CONFIGS[name], head_dim=16)))
    found = decoded(head, model, lengths, drafter_class=Levels)
    assert distance(found, decoded(head, model, lengths)) < 2e-5
    whole = decoded(random_head(replace(CONFIGS[name], head_dim=16)), model, lengths, drafter_class=Levels)
    assert found.drafter.passes[0].text == whole.drafter.passes[0].text
    assert found.drafter.passes[0].text != found.drafter.passes[-1].text


def test_a_guess_is_a_function_of_the_text_before_it() -> None:
    """In a chain, in a tree, alone, beside others, and whatever was read in earlier steps: bit for bit."""
    model, head = target(), limited(random_head(replace(CONFIGS["eagle3"], head_dim=16)))
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], Tensor] = {}
    common = 0
    asked = prompts((9, 14, 5))
    for rows, shapes in (
        (asked, ("static/branching=3x2x1", "chain", "eagle2/size=8/width=3")),
        *((([one],), ("chain", "static/branching=2x2")) for one in asked),
    ):
        texts = rows[0] if rows is not asked else rows
        decoding = Decoding(model, head, [list(each) for each in texts], Levels)
        with torch.inference_mode():
            for shape in shapes:
                decoding.step(shape, DrawMode.FIXED, most=0)
        again = Decoding(model, head, [list(ids) for ids in decoding.context.history.ids], Levels)
        with torch.inference_mode():
            again.step("chain", DrawMode.FIXED)
            decoding.step("static/branching=2x1x1", DrawMode.FIXED)
        for one in (*decoding.drafter.passes, *again.drafter.passes):
            key = tuple(one.text), tuple(one.path)
            common += key in found
            assert torch.equal(found.setdefault(key, one.logits), one.logits)
    assert common > 20


@pytest.mark.parametrize("verify", ["coupled", "exact"])
@pytest.mark.parametrize("name", METHODS)
def test_no_text_changes(name: str, verify: str) -> None:
    """Ragged rows that end and join; every native guess is the twin's."""
    expected = Engine(target(), None, speculative={"method": "none"}).generate_batch(requests(plain=True), batch_size=3)
    made = METHODS[name](target())
    trees, texts = run(made, "chain", verify, plain=True)
    assert texts == [one.token_ids for one in expected]
    if name != "draft_model":
        assert made.native is not None
        others, _ = run(twin(METHODS[name](target())), "chain", verify, plain=True)
        same_trees(trees, others)
    assert run(METHODS[name](target()), "static/branching=2x2x1", "coupled", plain=True)[1] == texts


def test_bundled_drafts_by_their_key() -> None:
    """As a user gives it: alone, and behind suffix."""
    engine = Engine.load("bundled/target")
    asked = [
        Request(engine.tokenizer.encode(text), SamplingParams(max_new_tokens=24, temperature=heat, seed=3))
        for text, heat in (("def add(a, b):\n    return", 0.0), ("class Point:\n    def __init__(self, x, y):", 0.8))
    ]
    expected = [one.token_ids for one in engine.generate_batch(asked)]
    for keys in (
        {"method": "draft_model", "draft_vocab_size": 900}, {"method": "eagle3"}, {"method": "dflash"},
        {"method": "hybrid", "second": "eagle3"},
    ):  # fmt: skip
        found = engine.generate_batch([replace(one, speculative={**keys, "draft_window": 8}) for one in asked])
        assert [one.token_ids for one in found] == expected
        assert sum(one.num_accepted_tokens for one in found) > 0


def test_what_a_head_reads_by_its_key() -> None:
    """Unless it is set, a native head reads as much as its training's texts had; a draft model all."""

    def window(**keys: Any) -> Any:
        method = Engine.load("bundled/target", speculative=keys).method
        limit = method.model.inner.shape.limit if isinstance(method, DraftModel) else method.head.window
        return limit and limit.size

    assert [window(method="eagle3"), window(method="eagle3", draft_window=0)] == [1024, None]
    assert window(method="eagle3", draft_window=9) == 9
    draft = {"method": "draft_model", "draft_vocab_size": 900}
    assert [window(**draft), window(**draft, draft_window=9)] == [None, 9]


def test_a_windowed_head_goes_on_past_its_positions() -> None:
    head = random_head(replace(CONFIGS["eagle3"], head_dim=16))
    head.max_positions = 12
    assert Eagle3(limited(head, DraftWindow(9)), target()).max_positions == 12
    assert Eagle3(limited(head, DraftWindow(8)), target()).max_positions is None


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"method": "draft_model", "draft_window": -2}, "draft_window = -2 must be -1"),
        ({"method": "medusa", "draft_window": 8}, "unknown key 'draft_window'"),
    ],
)
def test_wrong_keys(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        speculative_config(keys)


def test_what_has_no_windows_is_refused() -> None:
    model = TransformersModel(tiny_module("llama"))
    with pytest.raises(ConfigError, match=r"draft_window = 4: implementation 'transformers' .* 'native'"):
        model.limited(LIMIT)


@pytest.mark.parametrize("kind", [LeanModel, NativeModel])
@pytest.mark.parametrize(("name", "said"), [("hunyuan_v1_dense", "are normed behind"), ("ministral3", "grow with")])
def test_queries_that_cannot_be_turned_back_are_refused(name: str, said: str, kind: Any) -> None:
    with pytest.raises(ConfigError, match=rf"queries of draft .* {said} their .*, for which there are no windows"):
        kind.from_hf(make_model(name)).limited(LIMIT)
