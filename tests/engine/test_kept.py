"""What was read stays known, however a request ends: the next that begins so takes it from the prefix store."""

from typing import Any

import pytest
import torch

from foretell import Engine, Request, SamplingParams
from foretell.draft.base import Method
from foretell.engine import beginnings
from foretell.engine.prefix import BLOCK, PrefixStore
from foretell.methods import features
from foretell.methods.eagle.drafter import Eagle1, Eagle3
from foretell.model.llama.run.lean import LeanModel
from tests.engine.harness import ToyTokenizer
from tests.engine.test_scheduling_rules import Stage
from tests.methods.eagle.eagles import EAGLE1, EAGLE3, random_head
from tests.model.tiny import VOCAB, tiny_module

TOKENIZER = ToyTokenizer([b"%d " % token for token in range(VOCAB)], special=())
LONG = [1 + index % 6 for index in range(150)]


def cut_while_reading(ending: str) -> Stage:
    """A request beside one that decodes, so that its prompt comes in small pieces, ends before it has been read."""
    stage = Stage(prefixes=PrefixStore(1 << 20), max_rows=2)
    stage.submit("first", [5, 4], max_new_tokens=90, ignore_eos=True)
    stage.tick()
    stage.loop._seconds_per_token = 1.0  # the smallest pieces
    stage.submit("long", LONG, max_new_tokens=4, ignore_eos=True, timeout_s=1.5 if ending == "timeout" else None)
    stage.tick()
    if ending == "cancelled":
        stage.loop.cancel("long")
    return stage


@pytest.mark.parametrize("ending", ["cancelled", "timeout"])
def test_of_a_prompt_what_was_read_is_kept(ending: str) -> None:
    stage = cut_while_reading(ending)
    stage.finish()
    assert stage.completion("long").finish_reason == ending
    assert not stage.completion("long").token_ids
    stage.submit("again", LONG, max_new_tokens=4, ignore_eos=True)
    stage.finish()
    again = stage.completion("again")
    assert BLOCK <= again.num_cached_tokens < len(LONG) - 1
    assert again.token_ids == alone(again, LONG)


def alone(completion: Any, prompt: list[int]) -> list[int]:
    """What a loop that has read nothing before writes."""
    stage = Stage()
    params = SamplingParams(seed=completion.seed, max_new_tokens=completion.num_tokens, ignore_eos=True)
    return stage.engine.generate(prompt, params).token_ids


def test_who_is_preempted_goes_on_from_what_it_had() -> None:
    stage = Stage(prefixes=PrefixStore(1 << 20), max_rows=2, kv_tokens=200)
    for name, prompt in (("first", LONG[:60]), ("later", LONG[10:70])):
        stage.submit(name, prompt, max_new_tokens=60, ignore_eos=True)
        stage.tick()
    stage.finish()
    later, store = stage.completion("later"), stage.loop.batch.prefixes
    assert later.num_preemptions > 0
    assert store.num_hits > 60, "its prompt, and some of its own tokens"
    assert later.token_ids == alone(later, LONG[10:70])


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_answers_are_kept_with_the_hidden_states_that_a_head_reads(kind: str, batch_size: int) -> None:
    model = LeanModel.from_hf(tiny_module("llama"))
    config = EAGLE3 if kind == "eagle3" else EAGLE1
    method: Method = (Eagle3 if kind == "eagle3" else Eagle1)(random_head(config), model)  # type: ignore[arg-type]
    speculative = {"method": "draft_model", "num_speculative_tokens": 3}

    def made(**options: Any) -> Engine:
        return Engine(model, TOKENIZER, speculative=speculative, method=method, **options)

    engine, fresh = made(prefix_memory_gib=0.05), made()
    params = SamplingParams(max_new_tokens=40, ignore_eos=True, temperature=0.8, seed=3)
    asked = [Request([2 + row, *range(3, 40)], params) for row in range(3)]
    for turn in range(3):
        found = engine.generate_batch(asked, batch_size=batch_size)
        expected = fresh.generate_batch(asked, batch_size=batch_size)
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]
        for request, one in zip(asked, found, strict=True):
            assert one.num_cached_tokens == (len(request.prompt) - 4 if turn else 0), (
                "all but the turn and what was pending"
            )
        asked = [
            Request([*one.prompt, *made_.token_ids, 7, 8, 9], params) for one, made_ in zip(asked, found, strict=True)
        ]


def test_hidden_states_that_are_kept_are_those_of_the_text() -> None:
    """What is found again is what reading the whole text would have tapped: of rows that accept different numbers."""
    model = LeanModel.from_hf(tiny_module("llama"))
    method = Eagle3(random_head(EAGLE3), model)
    engines = [
        Engine(model, TOKENIZER, speculative={"method": "draft_model"}, method=method, prefix_memory_gib=0.05)
        for _ in range(2)
    ]
    params = SamplingParams(max_new_tokens=30, ignore_eos=True, temperature=0.5, seed=1)
    asked = [Request([2 + row, *range(3, 40)], params) for row in range(4)]
    answers = engines[0].generate_batch(asked, batch_size=4)
    for request, answer in zip(asked, answers, strict=True):
        text = [*request.prompt, *answer.token_ids]
        engines[1].generate(text, SamplingParams(max_new_tokens=2, ignore_eos=True))
        stores = [engine._prefixes for engine in engines]
        found = [store.held(text[:-1], method.prompt_taps, (None, None)) for store in stores if store is not None]
        assert all(one is not None and one[1] == len(text) - 1 for one in found)
        kept, read = (one[0].whole().taps for one in found if one is not None)
        assert torch.allclose(kept, read[:, : kept.shape[1]], atol=1e-4)


def test_who_comes_ends_what_is_read_ahead_at_once() -> None:
    stage = Stage(prefixes=PrefixStore(1 << 20))
    stage.submit("ahead", LONG, max_new_tokens=1, prepares=True)
    stage.submit("asked", LONG, max_new_tokens=4)
    assert set(stage.loop.jobs) == {"asked"}
    assert stage.loop.recorder.num_submitted == 1
    stage.finish()
    stage.submit("ahead of nobody", LONG[::-1], max_new_tokens=1, prepares=True)
    stage.finish()
    assert not stage.completion("ahead of nobody").token_ids
    assert sum(stage.loop.recorder.num_finished.values()) == 1
    stage.submit("asked then", LONG[::-1], max_new_tokens=4)
    stage.finish()
    assert stage.completion("asked then").num_cached_tokens == len(LONG) - 1


@pytest.mark.parametrize("reuse", [True, False])
def test_prompts_that_begin_alike_and_come_at_once_are_read_once(reuse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system text of agents that begin together. Others are not held up, nor those whose own part is long."""
    monkeypatch.setattr(beginnings, "PIECE", 16)
    stage = Stage(prefixes=PrefixStore(1 << 20) if reuse else None, max_rows=6, kv_tokens=2000)
    texts = {name: [*LONG[:96], 7 + number, *LONG[: 4 * number]] for number, name in enumerate("abc")}
    texts |= {"other": LONG[50:80], "apart": [*LONG[:16], *LONG[::-1][:120]]}
    stage.loop._seconds_per_token = 1.0  # small pieces: they are read for some rounds
    for name, text in texts.items():
        stage.submit(name, text, max_new_tokens=6, ignore_eos=True)
    stage.tick()
    assert stage.running() == ({"a", "other", "apart"} if reuse else set(texts))
    stage.finish()
    for name, text in texts.items():
        done = stage.completion(name)
        assert done.token_ids == alone(done, text)
        assert (done.num_cached_tokens >= 96) == (reuse and name in "bc"), name


def test_whose_beginning_ends_early_is_not_waited_for_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beginnings, "PIECE", 16)
    stage = Stage(prefixes=PrefixStore(1 << 20), max_rows=4)
    stage.loop._seconds_per_token = 1.0
    for name in "ab":
        stage.submit(name, [*LONG, len(name)], max_new_tokens=6, ignore_eos=True)
    stage.tick()
    stage.loop.cancel("a")
    stage.finish()
    assert stage.completion("b").num_cached_tokens >= BLOCK, "what the other had read"
    assert stage.completion("b").num_tokens == 6


def test_of_long_answers_no_hidden_states_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "MOST_KEPT_BYTES", 20 * 3 * 32 * 4)  # of 20 positions
    model = LeanModel.from_hf(tiny_module("llama"))
    method = Eagle3(random_head(EAGLE3), model)
    engine = Engine(model, TOKENIZER, speculative={"method": "draft_model"}, method=method, prefix_memory_gib=0.05)
    for count, kept in ((12, 12), (30, 0)):
        prompt = [count, *range(3, 40)]
        made = engine.generate(prompt, SamplingParams(max_new_tokens=count, ignore_eos=True, seed=count))
        again = engine.generate([*prompt, *made.token_ids, 5], SamplingParams(max_new_tokens=2, ignore_eos=True))
        assert again.num_cached_tokens == len(prompt) - 1 + kept
