"""Native hybrids in the engine: trees of every shape by every drafter and verifier give plain decoding's tokens."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from foretell import Engine, Request, SamplingParams
from foretell.draft.base import Method
from foretell.draft.shapes import parse_shape
from foretell.draft.suffix import Suffix
from foretell.engine.event import StepEvent
from foretell.learn.adapters import LearnedMethod
from foretell.methods.draft_model.drafter import DraftModel
from foretell.methods.eagle.drafter import Eagle1, Eagle3
from foretell.methods.hybrid.drafter import Hybrid
from foretell.methods.kangaroo.drafter import Kangaroo
from foretell.model.llama.run.native import NativeModel, supports
from tests.engine.test_recurrent import (
    NUMBERS,
    asked,
    check_conversation,
    check_service,
    expected_of,
    keep_states,
    same,
)
from tests.engine.traffic import Traffic
from tests.methods.eagle.eagles import EAGLE1, EAGLE3, random_head
from tests.methods.kangaroo.test_head import random_head as kangaroo_head
from tests.model.llama.family import make_model
from tests.model.llama.hybrid import CASES, KINDS, hybrid_config, native_hybrid
from tests.model.tiny import VOCAB
from tests.stress import MINUTES

REASON = supports(hybrid_config("lfm2"), torch.float32, torch.device("cpu"))
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.filterwarnings("ignore"),  # transformers tells which kernels are not installed
]
SHAPES = ("chain", "sequoia/size=9", "dyspec/size=9", "opt_tree/size=9", "static/branching=3x2x1")
FEW = ("qwen3_5", "lfm2", "falcon_h1-norm")
PROMPTS = 200
VERIFIERS = ("exact", "coupled", "traversal", "rejection", "block", "greedy_block")


def attention() -> NativeModel:
    """A model without mixers, to guess."""
    return NativeModel.from_hf(make_model("llama"))


def near(case: str) -> NativeModel:
    """The target's own weights in int8: a hybrid whose guesses are often right."""
    return native_hybrid(case, weights="int8")


def ways(model: NativeModel, case: str) -> Iterator[tuple[dict[str, Any], Method | None]]:
    """Every drafter, over trees where it grows them: of hybrids, attention, texts, heads, the target's own layers."""
    for shape in SHAPES:
        yield {"method": "draft_model", "shape": shape}, DraftModel(near(case))
    yield {"method": "draft_model", "shape": "opt_tree/size=9"}, DraftModel(attention())
    for shape in ("chain", "opt_tree/size=7"):
        second = Hybrid(Suffix(), DraftModel(near(case)), shape=parse_shape(shape, 3), discount=0.85)
        yield {"method": "hybrid", "second": "draft_model", "second_tokens": 3, "second_shape": shape}, second
    yield {"method": "suffix"}, None
    yield {"method": "ngram"}, None
    yield {"method": "suffix", "shape": "opt_tree/size=7"}, None
    yield {"method": "prediction"}, None
    if model.spec.hidden_size == 32:  # of the heads
        yield {"method": "eagle3", "shape": "eagle2/size=12"}, Eagle3(random_head(EAGLE3), model)
        last = replace(EAGLE1, tap_layer=model.spec.num_layers - 1)
        yield {"method": "eagle1"}, Eagle1(random_head(last), model)
        yield {"method": "kangaroo"}, Kangaroo(kangaroo_head(), model)


def run(model: NativeModel, way: tuple[dict[str, Any], Method | None], **options: Any) -> Engine:
    config, method = way
    settings = {"num_speculative_tokens": 4, **config}
    return Engine(model, speculative=settings, method=method, drafter_errors="raise", **options)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("case", FEW)
def test_every_drafter_gives_plain_tokens(case: str, temperature: float) -> None:
    model, requests = native_hybrid(case), asked(4, temperature, most=9)
    expected, accepted = expected_of(model, requests), 0
    for number, way in enumerate(ways(model, case)):
        engine, first = run(model, way), number % 2
        accepted += same(engine, requests[first : first + 3], 3 - 2 * first, expected[first : first + 3])
    assert accepted > 20, "guesses that are never kept prove little"


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("case", CASES)
def test_every_family(case: str, temperature: float) -> None:
    """At length (``tests.stress``) 200 prompts of each family, else four; in ragged batches and alone."""
    model, count = native_hybrid(case), PROMPTS if MINUTES else 4
    requests = asked(count, temperature, most=24 if MINUTES else 12)
    expected, accepted = expected_of(model, requests), 0
    for number, way in enumerate(ways(model, case)):
        accepted += same(run(model, way), requests, (8, 3, 1)[number % 3], expected)
    assert accepted > count


@pytest.mark.parametrize("verify", VERIFIERS)
def test_every_verifier_reads_trees_of_a_hybrid(verify: str) -> None:
    """Those that keep the text give plain decoding's; the others the greedy one, and run at a temperature."""
    case = "qwen3_5"
    model, requests = native_hybrid(case), asked(3, 0.0, most=9)
    shape = "chain" if verify in ("block", "greedy_block") else "static/branching=3x2x1"
    engine = run(model, ({"method": "draft_model", "shape": shape, "verify": verify}, DraftModel(near(case))))
    plain = Engine(model, speculative={"method": "none", "verify": verify})
    expected = [plain.generate(one.prompt, one.params).token_ids for one in requests]
    assert same(engine, requests, 3, expected) > 0
    sampled = asked(3, 1.0, most=9)
    found = engine.generate_batch(sampled, batch_size=3)
    assert [len(one.token_ids) for one in found] == [one.params.max_new_tokens for one in sampled]
    if verify in ("exact", "coupled"):
        again = [plain.generate(one.prompt, one.params).token_ids for one in sampled]
        assert [one.token_ids for one in found] == again


def test_random_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees and lines, arrivals, preemptions, cancellations, prefixes taken up at states kept every few tokens."""
    keep_states(monkeypatch, 8)
    preemptions = cached = 0
    for seed, case in enumerate(FEW):
        models = (native_hybrid(case), near("lfm2"))
        traffic = Traffic(seed, kv_tokens=192, max_new_tokens=(4, 30), models=models, tokenizer=NUMBERS)
        assert any(not one.config.proposal_shape.is_chain for one in traffic.choices)
        assert traffic.run(40) > 5
        preemptions += traffic.loop.recorder.num_preemptions
        cached += traffic.loop.recorder.num_cached_prompt_tokens
    assert min(preemptions, cached) > 0


@pytest.mark.slow
@pytest.mark.parametrize("case", KINDS)
def test_random_traffic_at_length(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_states(monkeypatch, 8)
    for seed in range(60 if MINUTES else 2):
        models = (native_hybrid(case), near(random.Random(seed).choice(FEW)))
        traffic = Traffic(seed, kv_tokens=192, max_new_tokens=(4, 30), models=models, tokenizer=NUMBERS)
        assert traffic.run(60) > 5


@pytest.mark.parametrize("case", FEW)
def test_prompts_of_every_length_in_one_batch(case: str) -> None:
    """Some that a pass commits at once, some of a token, some that end before others have."""
    model = native_hybrid(case, max_position_embeddings=2048)
    rng = random.Random(0)
    params = SamplingParams(max_new_tokens=4, temperature=1.0, seed=1, ignore_eos=True)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(count)] for count in (1, 620, 130, 2, 514, 129)]
    requests = [Request(prompt, params) for prompt in prompts]
    expected = expected_of(model, requests)
    way = {"method": "draft_model", "shape": "opt_tree/size=5"}, DraftModel(near(case))
    same(run(model, way), requests, 6, expected)
    same(run(model, ({"method": "ngram"}, None)), requests, 4, expected)


def test_a_fixed_width_of_more_nodes_than_a_prompts() -> None:
    """Its passes are as wide as those that commit a prompt at once; a guess is not committed so."""
    model, requests = native_hybrid("lfm2"), asked(3, 0.0, most=12)
    expected = expected_of(model, requests)
    way = {"method": "draft_model", "shape": "static/branching=2x1x1"}, DraftModel(near("lfm2"))
    assert same(run(model, way, width=160), requests, 3, expected) > 0


def test_a_conversation_is_taken_up_where_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    way = {"method": "draft_model", "shape": "opt_tree/size=7"}, DraftModel(near("qwen3_5"))
    check_conversation(monkeypatch, run(native_hybrid("qwen3_5"), way, prefix_memory_gib=0.01))


def test_weights_of_a_hybrid_draft_are_swapped_in_mid_text() -> None:
    """As ``--learn`` does it, between any two steps: each version reads the texts again in states of its own."""
    case = "qwen3_5"
    model, requests = native_hybrid(case), asked(3, 0.0, most=24)
    expected = expected_of(model, requests)
    versions = [DraftModel(near(case)), DraftModel(model), DraftModel(near(case))]
    method = LearnedMethod(versions[0])
    engine = run(model, ({"method": "draft_model", "shape": "static/branching=2x1x1"}, method))
    steps: list[int] = []

    def swap(_: StepEvent) -> None:
        steps.append(len(steps) + 1)
        method.serve(steps[-1], versions[steps[-1] % 3])

    engine.observers.append(swap)
    assert same(engine, requests, 2, expected) > 5
    assert len(steps) > 3


def test_a_service_serves_trees_of_a_hybrid() -> None:
    way = {"method": "draft_model", "shape": "static/branching=2x2x1"}, DraftModel(near("falcon_h1-norm"))
    engine = run(native_hybrid("falcon_h1-norm"), way, tokenizer=NUMBERS)
    check_service(engine, asked(5, 1.0, seed=2, most=12), speculation="on", max_model_len=128)
