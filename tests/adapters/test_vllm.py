"""``adapters/vllm.py`` without vLLM: a runner that holds a batch as vLLM's does, and checks guesses as it does."""

import sys
from collections.abc import Iterator, Sequence
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from foretell import ConfigError
from foretell.adapters import vllm as adapter
from foretell.adapters.vllm import MAX_PARKED, MAX_PARKED_TOKENS, PREDICTION, Guesser, Proposer, config_of, worker_class

K, LENGTH, VOCAB = 4, 64, 50


def config(most: int = K, length: int = LENGTH, **options: Any) -> Any:
    model = SimpleNamespace(max_model_len=length, get_vocab_size=lambda: VOCAB)
    speculative = SimpleNamespace(num_speculative_tokens=most)
    return SimpleNamespace(model_config=model, speculative_config=speculative, additional_config=options)


class Runner:
    """Rows of a batch. Each request has a script: what its model writes after its prompt."""

    def __init__(self, proposer: Proposer, *, bound: bool = False) -> None:
        self.drafter = proposer
        self.requests: dict[str, Any] = {}
        self.scripts: dict[str, list[int]] = {}
        self.texts: dict[str, list[int]] = {}
        self.guesses: dict[str, list[int]] = {}
        self.input_batch = SimpleNamespace(req_ids=[])
        self.num_drafted = self.num_accepted = 0
        if bound:
            proposer.bind(self)

    def add(self, name: str, prompt: Sequence[int], script: Sequence[int], prediction: Any = None) -> None:
        extra = {} if prediction is None else {PREDICTION: prediction}
        self.requests[name] = SimpleNamespace(
            sampling_params=SimpleNamespace(extra_args=extra or None), num_prompt_tokens=len(prompt)
        )
        self.scripts[name], self.texts[name], self.guesses[name] = list(script), list(prompt), []

    def step(self, names: Sequence[str], reading: Sequence[str] = ()) -> dict[str, list[int]]:
        """One step of these requests, in this order; those of ``reading`` have their prompts read. Returns the guesses."""
        self.input_batch.req_ids = list(names)
        sampled: list[list[int]] = []
        for name in names:
            new: list[int] = []
            if name not in reading:
                done = len(self.texts[name]) - self.requests[name].num_prompt_tokens
                wanted, guesses = self.scripts[name][done:], self.guesses[name]
                while len(new) < len(guesses) and new == guesses[: len(new)] and guesses[len(new)] == wanted[len(new)]:
                    new.append(guesses[len(new)])
                self.num_drafted, self.num_accepted = self.num_drafted + len(guesses), self.num_accepted + len(new)
                new.append(wanted[len(new)])
                self.texts[name] += new
            sampled.append(new)
        tokens = np.full((len(names), LENGTH), 7, np.int32)  # what lies behind a text's end must not be read
        for row, name in enumerate(names):
            tokens[row, : len(self.texts[name])] = self.texts[name]
        lengths = np.array([len(self.texts[name]) for name in names], np.int32)
        found = self.drafter.propose(sampled, lengths, tokens, slot_mappings=None)
        assert len(found) == len(names)
        self.guesses = {**self.guesses, **dict(zip(names, found, strict=True))}
        assert all(type(token) is int for one in found for token in one)
        return dict(zip(names, found, strict=True))


def test_a_text_that_repeats_is_guessed() -> None:
    runner = Runner(Proposer(config()))
    runner.add("a", [1, 2, 3, 4, 1, 2], [3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 9, 9, 9])
    assert runner.step(["a"]) == {"a": [4, 1, 2]}, "a match of three tokens is followed for three"
    assert runner.step(["a"]) == {"a": [4, 1, 2, 3]}
    assert runner.num_accepted == 3
    assert runner.texts["a"][6:] == [3, 4, 1, 2, 3]


def test_who_reads_a_prompt_gets_no_guess() -> None:
    runner = Runner(Proposer(config()))
    runner.add("a", [1, 2, 1, 2], [1, 2, 1, 2, 1])
    runner.add("b", [1, 2, 1, 2], [1, 2, 1, 2, 1])
    assert runner.step(["a", "b"], reading=["b"]) == {"a": [2, 1, 2], "b": []}
    assert runner.step(["a", "b"])["b"] == [2, 1, 2]


def test_rows_change_places_and_wait() -> None:
    runner = Runner(Proposer(config()))
    for name, base in (("a", 1), ("b", 11), ("c", 21)):
        runner.add(name, [base, base + 1, base + 2] * 2, [base, base + 1, base + 2] * 9)
    runner.step(["a", "b", "c"])
    texts = runner.drafter.guesser.texts
    before = {id(text) for found in texts.values() for text in found}
    runner.step(["c", "a", "b"])
    assert {id(text) for found in texts.values() for text in found} <= before
    runner.step(["c"])  # the others wait
    assert len(runner.drafter.guesser.parked) == 2
    told = runner.step(["b", "c", "a"])
    assert {id(text) for found in runner.drafter.guesser.texts.values() for text in found} == before
    assert told["a"] == [(token - 1) % 3 + 1 for token in range(told["a"][0], told["a"][0] + K)]
    assert all(10 * index < token < 10 * index + 4 for index, name in enumerate("abc") for token in told[name])


@pytest.mark.parametrize("cached", [0, 100])
def test_outputs_that_have_ended_are_guessed_from(cached: int) -> None:
    runner = Runner(Proposer(config(foretell={"suffix_decoding_max_cached_tokens": cached})))
    output = [31, 32, 33, 34, 35, 36]
    runner.add("a", [1], [*output, 9])
    for _ in range(6):
        runner.step(["a"])
    runner.add("b", [2], [31, 32, 33, 34, 35, 36, 9])
    runner.step(["b"])
    assert runner.guesses["b"] == ([32] if cached else [])
    assert runner.step(["b"])["b"] == ([34, 35, 36] if cached else [])


def test_what_waited_enters_the_library_once() -> None:
    runner = Runner(Proposer(config()))
    runner.add("a", [1], [5, 6, 7, 8, 9, 10, 11, 12])
    runner.add("b", [2], [3] * 40)
    for names in (["a", "b"], ["b"], ["a", "b"], ["a", "b"], ["b"]):
        runner.step(names)
    known = runner.drafter.guesser.library.automata[0]
    assert known.num_tokens == len(runner.texts["a"]) - 1


@pytest.mark.parametrize("length", [8, 9, 12])
def test_no_guess_passes_the_end_of_the_context(length: int) -> None:
    runner = Runner(Proposer(config(length=length)))
    runner.add("a", [1, 2, 1, 2, 1, 2], [1, 2, 1, 2, 1, 2])
    assert len(runner.step(["a"])["a"]) == min(K, length - 7 - 1)


def test_a_prediction_is_followed_and_found_again() -> None:
    runner = Runner(Proposer(config()), bound=True)
    written = [40, 41, 42, 43, 30, 44, 45, 46, 47, 9, 9, 9, 9]
    runner.add("a", [1, 2], written, [40, 41, 42, 43, 44, 45, 46, 47])
    assert runner.step(["a"])["a"] == [41, 42, 43, 44]
    assert runner.step(["a"])["a"] == [], "the output has left the prediction"
    assert runner.step(["a"])["a"] == [45, 46, 47]
    assert runner.num_accepted == 3


def test_predictions_are_read_once_and_belong_to_their_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(Proposer(config()), bound=True)
    read: list[str] = []
    whole = Proposer._prediction
    monkeypatch.setattr(
        Proposer, "_prediction", lambda self, given, name: (read.append(name), whole(self, given, name))[1]
    )
    for name, base in (("a", 10), ("b", 20), ("c", 30)):  # the prompts are the same, and the first tokens
        given = None if name == "c" else [5, *range(base, base + 9)]
        runner.add(name, [1, 2], [5, *range(base, base + 15)], given)
    assert runner.step(["a", "b", "c"]) == {"a": [10, 11, 12, 13], "b": [20, 21, 22, 23], "c": []}
    assert runner.step(["c", "b", "a"]) == {"a": [15, 16, 17, 18], "b": [25, 26, 27, 28], "c": []}
    assert runner.step(["b", "a"]) == {"a": [], "b": []}
    assert read == ["a", "b"]


def test_a_text_as_prediction_is_read_by_the_models_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("vllm.tokenizers")
    tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: [ord(one) - 97 for one in text])
    fake.cached_tokenizer_from_config = lambda _: tokenizer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.tokenizers", fake)
    runner = Runner(Proposer(config()), bound=True)
    runner.add("a", [9], [0, 1, 2, 3, 4, 5, 6], "abcdef")
    assert runner.step(["a"])["a"] == [1, 2, 3, 4]


@pytest.mark.parametrize("given", [5, [VOCAB], [-1], [1.5], ["a"], [True], {"a": 1}, "half a pair: \ud83d"])
def test_what_is_no_prediction_is_left_out_with_a_warning(given: Any, caplog: pytest.LogCaptureFixture) -> None:
    runner = Runner(Proposer(config()), bound=True)
    runner.add("a", [1, 2], [3, 4, 5], given)
    assert runner.step(["a"]) == {"a": []}
    assert PREDICTION in caplog.text


def test_any_batch_gets_what_it_would_get_alone() -> None:
    """Guesses of a request do not depend on its row, nor on who else is in the batch (without a library)."""
    random = Random(3)
    options = {"foretell": {"suffix_decoding_max_cached_tokens": 0}}
    prompts = {name: [random.randrange(3) for _ in range(6)] for name in "abcdef"}
    scripts = {name: [random.randrange(3) for _ in range(40)] for name in "abcdef"}
    together = Runner(Proposer(config(**options)))
    apart = {name: Runner(Proposer(config(**options))) for name in "abcdef"}
    for runner in (together, *apart.values()):
        for name in "abcdef":
            runner.add(name, prompts[name], scripts[name])
    drafted = 0
    for _ in range(8):
        names = random.sample("abcdef", random.randint(1, 6))
        told = together.step(names)
        for name in names:
            assert apart[name].step([name])[name] == told[name]
            drafted += len(told[name])
    assert drafted > 20


def test_texts_that_are_set_aside_are_bounded() -> None:
    guesser = Guesser(config_of(config()))
    for index in range(MAX_PARKED + 9):
        tokens = np.array([index, index + 1], np.int32)
        guesser.step([(tokens, 1, None)], 64)
    assert len(guesser.parked) == MAX_PARKED
    long = MAX_PARKED_TOKENS // 4
    guesser = Guesser(config_of(config(foretell={"suffix_decoding_max_cached_tokens": 0})))
    for index in range(7):  # long prompts, of requests that end at once; automata of their first tokens alone
        tokens = np.full(long, index, np.int32)
        guesser.step([(tokens, 1, None)], 2 * long)
    assert len(guesser.parked) == 4
    kept = [text.suffix.text[0] for text in guesser.parked.values()]
    assert kept == [2, 3, 4, 5], "the oldest go first; the last is in the batch"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"foretell": {"suffix_decoding_min_token_prob": 2}}, "between 0"),
        ({"foretell": {"min_prob": 2}}, "suffix_decoding_min_token_prob"),
        ({"foretell": [1]}, "must be a mapping"),
    ],
)
def test_wrong_options_are_refused(options: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Proposer(config(**options))


def test_options_are_those_of_the_method() -> None:
    found = config_of(config(foretell={"suffix_decoding_min_token_prob": 0.5}))
    assert (found.num_speculative_tokens, found.options.min_token_prob) == (K, 0.5)
    assert config_of(config()).options.max_cached_tokens > 0


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM as far as the worker needs it."""
    workers = {"vllm.v1.worker.cpu_worker": "CPUWorker", "vllm.v1.worker.gpu_worker": "Worker"}

    def load_model(self: Any, *, load_dummy_weights: bool = False) -> None:
        self.model_runner = self.made()

    for name in ("vllm", "vllm.v1", "vllm.v1.worker", "vllm.platforms", *workers):
        module = ModuleType(name)
        if name in workers:
            setattr(module, workers[name], type(workers[name], (), {"load_model": load_model}))
        if name == "vllm.platforms":
            module.current_platform = SimpleNamespace(is_cpu=lambda: True)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    yield
    vars(adapter).pop("Worker", None)


@pytest.mark.parametrize(("cpu", "base"), [(True, "CPUWorker"), (False, "Worker")])
def test_the_worker_shows_requests_to_the_proposer(fake_vllm: None, cpu: bool, base: str) -> None:
    made = worker_class(SimpleNamespace(is_cpu=lambda: cpu))
    assert made.__bases__[0].__name__ == base
    worker: Any = made()
    runner = Runner(Proposer(config()))
    worker.made = lambda: runner
    worker.load_model(load_dummy_weights=False)
    runner.add("a", [1], [5, 6, 7, 8, 9], [5, 6, 7, 8])
    assert runner.step(["a"])["a"] == [6, 7, 8]


def test_the_worker_alone_is_refused(fake_vllm: None) -> None:
    worker: Any = adapter.Worker()
    assert adapter.Worker is type(worker)
    worker.made = lambda: SimpleNamespace(drafter=None)
    with pytest.raises(ConfigError, match="speculative-config"):
        worker.load_model()


def test_without_vllm_the_worker_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.platforms", None)
    with pytest.raises(ConfigError, match="not installed"):
        _ = adapter.Worker
    with pytest.raises(AttributeError):
        _ = adapter.Something
