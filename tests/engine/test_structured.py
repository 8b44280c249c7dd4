"""Answers held to a schema, a regular expression, a grammar or a choice, and log probabilities, by SamplingParams:
the same tokens alone, in batches, streams and services, with every method and tree."""

import json
import queue
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from foretell import Completion, ConfigError, Engine, ModelError, Request, SamplingParams, Service, ServiceOptions
from foretell.engine.request.result import Update
from foretell.engine.request.row import Submission
from foretell.engine.structured.format import Formats

pytest.importorskip("llguidance")

PROMPT = "A person:\n"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
LOOKS_AHEAD = {"type": "string", "maxLength": 4, "pattern": "(?=a)a"}
FORMATS: dict[str, dict[str, Any]] = {
    "schema": {"json_schema": SCHEMA},
    "schema as text": {"json_schema": json.dumps(SCHEMA), "temperature": 0.0},
    "regex": {"regex": "[ab]{3,9}c"},
    "lark": {"grammar": 'start: ("hi" | "ho") " you"'},
    "gbnf": {"grammar": 'root ::= ("hi" | "ho") " you"'},
    "choice": {"choice": ["yes, sir", "yes, madam", "no"]},
    "free": {"max_new_tokens": 20},
}
METHODS: dict[str, dict[str, Any]] = {
    "chain": {"method": "draft_model", "num_speculative_tokens": 4},
    "tree": {"method": "draft_model", "num_speculative_tokens": 3, "shape": "eagle2"},
    "ngram": {"method": "ngram", "num_speculative_tokens": 3},
    "suffix": {"method": "suffix", "num_speculative_tokens": 3},
}


@pytest.fixture(scope="module")
def plain() -> Engine:
    return Engine.load("bundled")


def asked(**changes: Any) -> list[Request]:
    shared = {"max_new_tokens": 60, "logprobs": 2, "temperature": 1.0}
    return [
        Request(PROMPT, SamplingParams(**{**shared, "seed": seed, **given, **changes}))
        for seed, given in enumerate(FORMATS.values())
    ]


@pytest.fixture(scope="module")
def expected(plain: Engine) -> list[Completion]:
    return [plain.generate(request.prompt, request.params) for request in asked()]


def close(one: Completion, other: Completion) -> bool:
    """The same text, with the same log probabilities but for rounding in passes of other widths."""
    assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)
    assert len(one.pieces) == one.num_tokens > 0
    for mine, its in zip(one.pieces, other.pieces, strict=True):
        assert mine.logprob == pytest.approx(its.logprob, abs=1e-3)
        assert [value for _, value in mine.top_logprobs] == pytest.approx(
            [value for _, value in its.top_logprobs], abs=1e-3
        )
        assert len(mine.top_logprobs) == 2
    return True


def test_plain_texts_are_of_their_formats(expected: list[Completion]) -> None:
    made = dict(zip(FORMATS, expected, strict=True))
    for name in ("schema", "schema as text"):
        found = json.loads(made[name].text)
        assert set(found) == {"name", "age"}
        assert 0 <= found["age"] <= 99
    assert re.fullmatch("[ab]{3,9}c", made["regex"].text)
    assert {made["lark"].text, made["gbnf"].text} <= {"hi you", "ho you"}
    assert made["choice"].text in FORMATS["choice"]["choice"]
    assert all(one.finish_reason == "stop" for name, one in made.items() if name != "free")
    assert all(one.left_out == () for one in expected)


@pytest.mark.parametrize("method", METHODS)
def test_the_same_tokens_and_log_probabilities_however_they_are_guessed(
    plain: Engine, expected: list[Completion], method: str
) -> None:
    engine = plain.with_method(METHODS[method])
    made = engine.generate_batch(asked(), batch_size=3)
    assert all(close(one, other) for one, other in zip(made, expected, strict=True))
    stream = engine.stream(PROMPT, asked()[0].params)
    pieces = list(stream)
    assert all(piece.logprob is not None for piece in pieces)
    assert pieces == stream.completion.pieces
    assert close(stream.completion, expected[0])


def test_one_batch_may_guess_in_several_ways(plain: Engine, expected: list[Completion]) -> None:
    ways = ["none", "chain", "tree", "ngram"]
    requests = [
        Request(request.prompt, request.params, speculative=METHODS.get(ways[number % len(ways)], "none"))
        for number, request in enumerate(asked())
    ]
    engine = plain.with_method("none")
    made = dict(engine.completions(requests))
    assert all(close(made[number], other) for number, other in enumerate(expected))


def test_rejection_writes_another_text_of_the_format(plain: Engine) -> None:
    engine = plain.with_method({**METHODS["chain"], "verify": "rejection"})
    for seed in range(3):
        text = engine.generate(PROMPT, json_schema=SCHEMA, seed=seed, max_new_tokens=80).text
        assert set(json.loads(text)) == {"name", "age"}


def test_log_probabilities_are_of_the_model_before_temperature_and_format(plain: Engine) -> None:
    (scored,) = plain.score([PROMPT + "no"], num_logprobs=2)
    made = plain.generate(PROMPT, choice=["no"], temperature=0.3, logprobs=2)
    tokens = [piece.token_id for piece in made.pieces][:-1]
    tail = scored[-len(tokens) :]
    assert [piece.token_id for piece in tail] == tokens
    for mine, its in zip(made.pieces[: len(tail)], tail, strict=True):
        assert mine.logprob == pytest.approx(its.logprob, abs=1e-3)
        assert [token for token, _ in mine.top_logprobs] == [token for token, _ in its.top_logprobs]


def test_without_logprobs_pieces_have_none(plain: Engine) -> None:
    engine = plain.with_method(METHODS["chain"])
    assert all(piece.logprob is None for piece in engine.generate(PROMPT, max_new_tokens=5).pieces)
    own = engine.generate(PROMPT, max_new_tokens=5, logprobs=0).pieces
    assert all(piece.logprob is not None and piece.top_logprobs == () for piece in own)


@pytest.fixture(scope="module")
def service(plain: Engine) -> Iterator[Service]:
    made = Service(plain.with_method(METHODS["chain"]), ServiceOptions(speculation="on", max_num_seqs=4))
    made.start()
    yield made
    made.close()


def ended(service: Service, params: SamplingParams, name: str = "a") -> Update:
    """The last update of a request to a service."""
    box: queue.Queue[Update] = queue.Queue()
    ids = service.engine.make_row(0, Request(PROMPT)).prompt_ids
    service.submit(Submission(name, ids, params), box.put)
    while not (update := box.get(timeout=60)).is_last:
        assert all(piece.logprob is not None for piece in update.pieces)
    return update


def test_a_service_writes_the_same(service: Service, expected: list[Completion]) -> None:
    for request, other in zip(asked(), expected, strict=True):
        completion = ended(service, request.params).completion
        assert completion is not None
        assert close(completion, other)


def test_what_cannot_be_enforced_is_refused_or_named(plain: Engine, service: Service) -> None:
    with pytest.raises(ConfigError, match=r"(?s)json_schema: .*look-around.*lenient_schema=True"):
        plain.generate(PROMPT, json_schema=LOOKS_AHEAD)
    with pytest.raises(ConfigError, match="lenient_schema=True"):
        service.submit(Submission("x", [1], SamplingParams(json_schema={"not": {}})), print)
    params = SamplingParams(json_schema=LOOKS_AHEAD, lenient_schema=True, max_new_tokens=20, seed=3, logprobs=0)
    made = plain.generate(PROMPT, params)
    assert made.left_out == ("pattern",)
    assert isinstance(json.loads(made.text), str)
    assert plain.generate_batch([Request(PROMPT, params), PROMPT][:1])[0].left_out == ("pattern",)
    completion = ended(service, params).completion
    assert (completion.text, completion.left_out) == (made.text, ("pattern",))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"regex": "a", "choice": ["b"]}, "regex and choice both say what the text must look like: give one"),
        ({"json_schema": True, "grammar": 'start: "a"'}, "json_schema and grammar both"),
        ({"json_schema": "{"}, "json_schema: the text is not JSON"),
        ({"json_schema": "[1]"}, "json_schema: a JSON schema is an object, true or false"),
        ({"json_schema": [1]}, r"json_schema = \[1\] must be a JSON schema"),
        ({"json_schema": SamplingParams}, r"give Model.model_json_schema\(\)"),
        ({"json_schema": {"type": "nonsense"}}, "json_schema: .*nonsense"),
        ({"regex": "("}, "(?s)regex: .*unclosed group"),
        ({"regex": 3}, "regex = 3 must be a text"),
        ({"grammar": "start: x"}, "grammar: .*unknown name"),
        ({"grammar": "root ::= x"}, "grammar: "),
        ({"choice": []}, "choice = .* at least one text"),
        ({"choice": [1]}, "choice = .* must be a list of texts"),
        ({"lenient_schema": True}, "lenient_schema is of json_schema, which was not given"),
        ({"logprobs": -1}, "logprobs = -1 must be at least 0"),
        ({"logprobs": True}, "logprobs = True must be a whole number"),
        ({"logprobs": 1.5}, "logprobs = 1.5 must be a whole number"),
    ],
)
def test_what_is_no_format_is_refused_before_anything_is_decoded(plain: Engine, given: Any, says: str) -> None:
    before = plain.recorder.num_submitted
    for call in (plain.generate, plain.stream, lambda prompt, **more: plain.completions([prompt], **more)):
        with pytest.raises(ConfigError, match=says):
            call(PROMPT, **given)
    assert plain.recorder.num_submitted == before


def test_a_processor_of_the_callers_own_comes_first(plain: Engine) -> None:
    seen = []

    def no_b(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        seen.append(len(ids))
        return logits.index_fill(0, torch.tensor(barred), -torch.inf)

    tokenizer: Any = plain.tokenizer
    barred = [token for text, token in tokenizer.get_vocab().items() if "b" in text]
    engine = plain.with_method(METHODS["tree"])
    for seed in range(3):
        made = engine.generate(PROMPT, regex="[ab]{6}", logits_processor=no_b, seed=seed)
        assert made.text == "aaaaaa"
    assert seen


def test_a_processor_that_permits_nothing_ends_nothing_silently(plain: Engine, service: Service) -> None:
    def nothing(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return torch.full_like(logits, -torch.inf)

    def nothing_after_one(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return logits if len(ids) == num_prompt else nothing(ids, logits)

    num_prompt = len(plain.make_row(0, Request(PROMPT)).prompt_ids)
    for processor, regex in ((nothing, "[ab]{6}"), (nothing_after_one, "a")):
        with pytest.raises(ModelError, match="no token is possible"):
            plain.generate(PROMPT, regex=regex, logits_processor=processor)
    update = ended(service, SamplingParams(regex="[ab]{6}", logits_processor=nothing))
    assert "no token is possible" in str(update.error)


def test_the_time_of_a_callers_processor_is_not_the_grammars(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        sum(range(6_000_000))
        return logits

    monkeypatch.setattr("foretell.service.processors.REQUEST_S", 0.04)
    update = ended(service, SamplingParams(regex="a", logits_processor=slow, logprobs=0))
    assert update.completion.text == "a"


def test_without_llguidance_the_extra_is_named(plain: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.delitem(sys.modules, "foretell.engine.structured.constraint", raising=False)
    fresh = Engine(plain.model, plain.tokenizer)
    with pytest.raises(ConfigError, match=r'json_schema: .*llguidance.*pip install "foretell\[serve\]"'):
        fresh.generate(PROMPT, json_schema=SCHEMA)
    assert fresh.generate(PROMPT, max_new_tokens=2, logprobs=1).num_tokens == 2


def test_an_engine_without_a_tokenizer_knows_no_texts(plain: Engine) -> None:
    with pytest.raises(ConfigError, match="regex: an engine without a tokenizer knows no texts"):
        Engine(plain.model).generate([1, 2], regex="a")


def test_engines_of_one_target_read_its_vocabulary_once(plain: Engine) -> None:
    assert plain.with_method("ngram").formats is plain.formats
    assert isinstance(plain.formats, Formats)
    assert plain.formats.constraints is plain.formats.constraints
