"""Recurrent and hybrid models in the engine: every drafter of lines and trees gives plain decoding's tokens, alone, in
ragged batches, with preemption, and with prefixes taken up at their states."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import foretell.model.recurrent as memory
from foretell import Completion, Engine, Request, SamplingParams, Service, ServiceOptions
from foretell.core.errors import ConfigError
from foretell.draft.base import Method
from foretell.draft.none import NoMethod, NoneConfig
from foretell.draft.shapes import parse_shape
from foretell.draft.suffix import Suffix
from foretell.engine import planning
from foretell.engine.calibrate import Bench, Calibration
from foretell.engine.speculation import Speculation
from foretell.methods.draft_model.config import DraftModelConfig
from foretell.methods.draft_model.drafter import DraftModel
from foretell.methods.eagle.drafter import Eagle1, Eagle3
from foretell.methods.hybrid.drafter import Hybrid
from foretell.methods.kangaroo.drafter import Kangaroo
from foretell.model.hf.adapter import TransformersModel
from foretell.model.hf.recurrent import rewind
from foretell.model.target import CausalModel
from foretell.service.memory import bytes_per_row, bytes_per_token, kv_budget
from tests.engine.harness import ToyTokenizer, started
from tests.engine.test_planning import planted
from tests.engine.traffic import Traffic
from tests.methods.eagle.eagles import EAGLE1, EAGLE3, random_head
from tests.methods.kangaroo.test_head import random_head as kangaroo_head
from tests.model.recurrent import FAMILIES, family_model, family_module
from tests.model.tiny import VOCAB, tiny_module
from tests.service.test_service import answers
from tests.stress import MINUTES

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers tells which kernels are not installed
NUMBERS = ToyTokenizer([f"w{i} ".encode() for i in range(VOCAB)], special=(2,))
FEW = ("qwen3_next", "mamba2", "jamba", "lfm2")  # delta nets with experts, no attention, token by token, convolutions
PROMPTS = 200


def build(family: str) -> TransformersModel:
    return TransformersModel(family_module(family), name=family)


@pytest.fixture(scope="module", params=FEW)
def target(request: pytest.FixtureRequest) -> TransformersModel:
    return build(request.param)


def asked(count: int, temperature: float, seed: int = 0, most: int = 24) -> list[Request]:
    """Ragged prompts, every third repetitive."""
    rng, found = random.Random(seed), []
    for number in range(count):
        prompt = [rng.randrange(3, VOCAB) for _ in range(rng.choice((1, 2, 5, 9, 17, 40)))]
        if number % 3 == 0:
            prompt = (prompt[:5] * 6)[:25]
        params = SamplingParams(
            max_new_tokens=rng.randint(1, most), temperature=temperature, seed=number, ignore_eos=True
        )
        found.append(Request(prompt, params, [rng.randrange(VOCAB) for _ in range(12)]))
    return found


def drafters(model: TransformersModel) -> Iterator[tuple[dict[str, Any], Method | None]]:
    """Every way of guessing a line: found, drafted by an attention model and by a recurrent one, by heads, by the target's
    own layers."""
    for name in ("ngram", "suffix", "prediction"):
        yield {"method": name}, None
    for draft in (tiny_module("llama"), family_module("falcon_h1")):
        yield {"method": "draft_model"}, DraftModel(TransformersModel(draft))
    yield {"method": "draft_model", "shape": "adaptive/threshold=0.1"}, DraftModel(model)
    if model.spec.num_layers == 4:
        yield {"method": "eagle3"}, Eagle3(random_head(EAGLE3), model)
        yield {"method": "eagle1"}, Eagle1(random_head(EAGLE1), model)
        yield {"method": "kangaroo"}, Kangaroo(kangaroo_head(), model)


def tree_drafters(model: TransformersModel) -> Iterator[tuple[dict[str, Any], Method | None]]:
    """Every way of growing a tree: by an attention model, by a recurrent one (the target itself, so that side branches are
    kept), behind suffix, by the target's own layers, by heads."""
    near, other = DraftModel(model), DraftModel(TransformersModel(tiny_module("llama")))
    for shape, draft in (
        ("sequoia", near),
        ("dyspec/size=6", near),
        ("opt_tree/size=6", near),
        ("eagle2/size=6", other),
    ):
        yield {"method": "draft_model", "shape": shape}, draft
    yield {"method": "suffix", "shape": "opt_tree/size=6"}, None
    second = Hybrid(Suffix(), near, shape=parse_shape("opt_tree/size=6", 3), discount=0.9)
    yield {"method": "hybrid", "second": "draft_model", "model": "m", "second_shape": "opt_tree/size=6"}, second
    if model.spec.num_layers == 4:
        yield {"method": "eagle3", "shape": "opt_tree/size=6"}, Eagle3(random_head(EAGLE3), model)
        yield {"method": "kangaroo", "shape": "static/branching=2x2x1"}, Kangaroo(kangaroo_head(), model)


def expected_of(model: CausalModel, requests: list[Request]) -> list[list[int]]:
    plain = Engine(model, speculative="none")
    return [plain.generate(one.prompt, one.params).token_ids for one in requests]


def same(engine: Engine, requests: list[Request], batch_size: int, expected: list[list[int]]) -> int:
    """Guesses that were accepted."""
    found = engine.generate_batch(requests, batch_size=batch_size)
    assert [one.token_ids for one in found] == expected, engine.speculative
    return sum(one.num_accepted_tokens for one in found)


def keep_states(monkeypatch: pytest.MonkeyPatch, spacing: int) -> None:
    """States of prompts are kept every so many tokens."""
    monkeypatch.setattr(memory, "MIN_SPACING", spacing)
    monkeypatch.setattr(memory, "MAX_SPACING", spacing)


def check_service(engine: Engine, requests: list[Request], **options: Any) -> list[Completion]:
    """A service of three rows gives plain decoding's tokens."""
    service = Service(engine, ServiceOptions(max_num_seqs=3, kv_memory_gib=0.05, **options))
    with started(service):
        found = answers(service, requests)
    assert [one.token_ids for one in found] == expected_of(engine.model, requests)
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_drafter_gives_plain_tokens(target: TransformersModel, temperature: float) -> None:
    requests = asked(8, temperature, most=18)
    expected = expected_of(target, requests)
    accepted = 0
    for number, (config, method) in enumerate(drafters(target)):
        engine = Engine(target, speculative={"num_speculative_tokens": 4, **config}, method=method)
        accepted += same(engine, requests[number::2], 5, expected[number::2])
        accepted += same(engine, requests[number : number + 2], 1, expected[number : number + 2])
    assert accepted > 20


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_tree_gives_plain_tokens(target: TransformersModel, temperature: float) -> None:
    requests = asked(5, temperature, seed=6, most=14)
    expected = expected_of(target, requests)
    accepted = 0
    for number, (config, method) in enumerate(tree_drafters(target)):
        engine = Engine(target, speculative={"num_speculative_tokens": 4, **config}, method=method)
        some = slice(number % 2, None, 2)
        accepted += same(engine, requests[some], 1 if number % 3 == 2 else 3, expected[some])
    assert accepted > 20


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str) -> None:
    """At length (``tests.stress``) 200 prompts of each family, else four."""
    model, accepted, most = build(family), 0, PROMPTS // 2 if MINUTES else 2
    requests = [one for temperature in (0.0, 1.0) for one in asked(most, temperature, most=24 if MINUTES else 16)]
    expected = expected_of(model, requests)
    for config, method in (*drafters(model), *(() if model.spec.chains_only else tree_drafters(model))):
        engine = Engine(model, speculative={"num_speculative_tokens": 4, **config}, method=method)
        accepted += same(engine, requests, 8, expected)
    assert accepted > 20, "guesses that are never kept prove little"


@pytest.mark.parametrize("family", ["qwen3_next", "jamba"])
def test_random_traffic(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrivals, preemptions, cancellations, prefixes taken up at states kept every few tokens."""
    keep_states(monkeypatch, 8)
    models = (build(family), build("mamba2"))
    traffic = Traffic(3, kv_tokens=192, max_new_tokens=(4, 30), models=models, tokenizer=NUMBERS)
    assert traffic.run(60) > 5
    counters = traffic.loop.recorder
    assert counters.num_preemptions > 0
    assert counters.num_cached_prompt_tokens > 0


def check_conversation(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    """A turn goes on from the answer before it, and another text from what both begin with: with plain tokens."""
    keep_states(monkeypatch, 16)
    rng = random.Random(1)
    system = [rng.randrange(3, VOCAB) for _ in range(40)]
    params = SamplingParams(max_new_tokens=9, seed=3, ignore_eos=True)
    first = engine.generate([*system, 7, 8, 9], params)
    assert first.num_cached_tokens == 0
    other = engine.generate([*system, 11, 12], params)
    assert other.num_cached_tokens == 32, "the last state that is kept within what both begin with"
    turn = [*system, 7, 8, 9, *first.token_ids, 20, 21, 22]
    second = engine.generate(turn, params)
    assert second.num_cached_tokens > 43, "more than the prompt: the answer's own state was kept"
    texts = [Request(prompt, params) for prompt in ([*system, 7, 8, 9], [*system, 11, 12], turn)]
    assert [one.token_ids for one in (first, other, second)] == expected_of(engine.model, texts)


def test_a_conversation_is_taken_up_where_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(build("qwen3_5"), speculative={"method": "ngram"}, prefix_memory_gib=0.01)
    check_conversation(monkeypatch, engine)


def test_trees_are_refused_with_the_reason() -> None:
    hybrid, attention = family_model("mamba2/again"), TransformersModel(tiny_module("llama"))
    with pytest.raises(
        ConfigError, match=r"'opt_tree' branches, and mamba2/again keeps a recurrent state.*choose shape 'chain'"
    ):
        Engine(hybrid, speculative={"method": "suffix", "shape": "opt_tree"})
    config = {"method": "draft_model", "shape": "static/branching=2x1"}
    with pytest.raises(ConfigError, match="branches, and mamba2/again keeps"):
        Engine(attention, speculative=config, method=DraftModel(hybrid))
    service = Service(Engine(hybrid, NUMBERS, speculative="ngram"))
    with pytest.raises(ConfigError, match="branches, and mamba2/again keeps"):
        service._choices.method({"method": "suffix", "shape": "opt_tree/size=6"})


def test_memory_is_planned_for_states() -> None:
    hybrid, methods = build("mamba2"), [DraftModel(build("falcon_h1"))]
    own, drafts = hybrid.new_cache(0, 1).bytes_per_row, methods[0].bytes_per_row
    assert own > 0 < drafts
    assert bytes_per_row(hybrid, methods) == own + drafts
    assert bytes_per_token(hybrid, []) == 1
    gib = (2 * own + 5000) / 2**30
    assert kv_budget(hybrid, 10, given_gib=gib, row_tokens=100, max_rows=2, bytes_per_row=own) == 200
    with pytest.raises(ConfigError, match="KV memory"):
        kv_budget(hybrid, 10, given_gib=gib, row_tokens=100, max_rows=9, bytes_per_row=own)


def test_a_service_serves_a_hybrid() -> None:
    engine = Engine(build("qwen3_next"), NUMBERS, speculative="ngram")
    check_service(engine, asked(5, 1.0, seed=2), speculation="on", max_model_len=96)


def test_states_do_not_leak_between_rows() -> None:
    """A row of the pool that another request has used begins with nothing."""
    model = build("lfm2")
    pool = model.new_cache(2, 32)
    pool.clear()
    pool.open_rows(1)
    for tensors in pool.states.tensors:
        for states in tensors.values():
            states[:, 0] = 7.0
    pool.keep(torch.tensor([], dtype=torch.int64))
    pool.open_rows(1)
    assert all(not bool(states[:, 0].any()) for tensors in pool.states.tensors for states in tensors.values())


# -- auto -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cost table of this test alone."""
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path))
    monkeypatch.setattr(planning, "COST_TIME_LIMIT_S", 0.2)


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2"])
@pytest.mark.parametrize("draft", [0.001, 50.0], ids=["cheap", "dear"])
def test_auto_plans_for_a_hybrid(family: str, draft: float, monkeypatch: pytest.MonkeyPatch, own_cache: None) -> None:
    """Guesses where they pay and nowhere else; the tokens are plain decoding's, in ragged batches too."""
    planted(monkeypatch, draft)
    monkeypatch.setattr(Calibration, "kept", Calibration.table)
    model, requests = build(family), asked(4, 1.0, seed=4, most=16)
    expected = expected_of(model, requests)
    config = {"method": "draft_model", "num_speculative_tokens": 4}
    engine = Engine(model, speculative=config, method=DraftModel(model), speculation="auto")
    found = engine.generate_batch(requests, batch_size=3)
    assert [one.token_ids for one in found] == expected
    assert (sum(one.num_draft_tokens for one in found) > 0) == (draft < 1)


@pytest.mark.usefixtures("own_cache")
def test_costs_of_a_hybrid_have_the_reading_again_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured for ``auto`` are real steps: states are taken up at the last accepted token in them."""
    model, lags = build("qwen3_next"), []
    decide = rewind.Rewinding._decide

    def watched(self: Any, meta: Any) -> Any:
        made = decide(self, meta)
        lags.append(int(made.moved.max()) if made.moved.max() < 4 else 0)  # three guesses: fewer than all were accepted
        return made

    monkeypatch.setattr(rewind.Rewinding, "_decide", watched)
    config = DraftModelConfig(num_speculative_tokens=3)
    verifier = config.load_verifier(model)
    plain = Speculation(NoneConfig(), NoMethod(), NoneConfig().load_verifier(model))
    bench = Bench(model, plain, [Speculation(config, DraftModel(TransformersModel(tiny_module("llama"))), verifier)])
    measured = [bench.step("draft_model", 2, 3) for _ in range(3)]
    assert all(one.target > 0 and one.draft > 0 for one in measured)
    assert max(lags) > 0, "no guess was rejected: its cost is not in the table"
    lags.clear()
    bench.step("none", 1, 0)
    bench.step("none", 1, 0)
    assert max(lags) <= 1, "plain steps move on by a token"


def test_a_service_plans_for_a_hybrid(monkeypatch: pytest.MonkeyPatch, own_cache: None) -> None:
    """Continuous batching under the default mode, rows joining and leaving."""
    planted(monkeypatch, 0.001)
    monkeypatch.setattr(Calibration, "kept", Calibration.table)
    model, requests = build("lfm2"), asked(6, 1.0, seed=5)
    engine = Engine(model, NUMBERS, speculative={"method": "draft_model"}, method=DraftModel(model))
    found = check_service(engine, requests, max_model_len=96)
    assert sum(one.num_draft_tokens for one in found) > 0
