"""What users type: methods, keys, verifiers and values; each mistake is one ConfigError that names the nearest."""

import json
from typing import Any

import pytest

from foretell import METHODS, VERIFIERS, ConfigError, Engine, SamplingParams, speculative_config
from foretell.core.params import MAX_SEED, fresh_seed
from foretell.draft.ngram import NgramConfig
from foretell.draft.none import NoneConfig
from foretell.draft.prediction import PredictionConfig
from foretell.methods.draft_model.config import DraftModelConfig
from foretell.methods.draft_model.drafter import DraftModel
from foretell.service.choices import Choices
from tests.engine.harness import ToyTokenizer, draft_engine, table


def test_the_forms_of_a_configuration() -> None:
    assert speculative_config(None) == NoneConfig()
    assert speculative_config("ngram") == NgramConfig()
    assert speculative_config({"method": "ngram", "prompt_lookup_max": 7}) == NgramConfig(prompt_lookup_max=7)
    assert speculative_config('{"method": "prediction"}') == PredictionConfig()
    assert speculative_config({"model": "dir"}) == DraftModelConfig(model="dir"), "a model alone means draft_model"
    assert speculative_config({"method": "draft_model", "model": None}) == DraftModelConfig()
    assert speculative_config({"verify": "exact"}) == NoneConfig(verify="exact")
    config = NgramConfig(num_speculative_tokens=3)
    assert speculative_config(config) is config


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("verify", VERIFIERS)
def test_resolved_reads_back(method: str, verify: str) -> None:
    config = METHODS[method](num_speculative_tokens=4, verify=verify, shape="chain")
    assert speculative_config(config.resolved()) == config
    assert speculative_config(json.dumps(config.resolved())) == config
    assert config.verifier.name == verify


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("ngrams", "did you mean 'ngram'"),
        ("draft-model", "did you mean 'draft_model'"),
        ("frobnicate", "known: dflash, draft_model, eagle1"),
        ({"method": "predicton"}, "did you mean 'prediction'"),
        ({"method": 3}, "method = 3 is not a method"),
        ({"method": "ngram", "num_speculative_token": 3}, "did you mean 'num_speculative_tokens'"),
        ({"method": "ngram", "prompt_lookup_mx": 3}, "did you mean 'prompt_lookup_max'"),
        ({"method": "ngram", "model": "x"}, "unknown key 'model' for method 'ngram'"),
        ({"method": "none", "prompt_lookup_max": 2}, "unknown key"),
        ({"method": "ngram", "verify": "couple"}, "did you mean 'coupled'"),
        ({"method": "ngram", "verify": "zzz"}, "known: block, coupled, exact"),
        ({"method": "ngram", "verify": "typical/epsilom=1"}, "did you mean 'epsilon'"),
        ({"method": "ngram", "num_speculative_tokens": "5"}, "must be a whole number"),
        ({"method": "ngram", "num_speculative_tokens": 2.5}, "must be a whole number"),
        ({"method": "ngram", "num_speculative_tokens": True}, "must be a whole number"),
        ({"method": "ngram", "num_speculative_tokens": None}, "must be a whole number"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "between 1 and 64"),
        ({"method": "ngram", "num_speculative_tokens": 65}, "between 1 and 64"),
        ({"method": "draft_model", "model": 3}, "must be a text"),
        ({"method": "ngram", "verify": 3}, "must be a text"),
        ({"method": "ngram", "prompt_lookup_min": 6, "prompt_lookup_max": 5}, "expected 1 <= min <= max"),
        ({"method": "ngram", "prompt_lookup_min": 0}, "expected 1 <= min <= max"),
        ({"method": "suffix", "shape": "static"}, "cannot grow the shape 'static'"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": "0.5"}, "must be a number"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": True}, "must be a number"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 2}, "min_token_prob = 2.0 must be between 0 and 1"),
        ({"method": "suffix", "suffix_decoding_mn_token_prob": 1}, "did you mean 'suffix_decoding_min_token_prob'"),
        ({"method": "suffix", "draws": "iid"}, "draws from no distribution"),
        ('{"method": "ngram"', "is not JSON"),
        ("", "is not a method"),
        ("[1, 2]", "is not a method"),
    ],
)
def test_mistakes(given: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        speculative_config(given)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_width_must_hold_the_guesses() -> None:
    with pytest.raises(ConfigError, match="at least 9"):
        draft_engine(table(), table(), 8, width=8)
    with pytest.raises(ConfigError, match="width = -1"):
        Engine(table(), width=-1)
    assert draft_engine(table(), table(), 7, width=8).width == 8
    assert Engine(table(), width=1).generate([1], max_new_tokens=3, ignore_eos=True).num_tokens == 3


def test_sampling_options_by_name() -> None:
    engine = Engine(table())
    with pytest.raises(ConfigError, match="did you mean 'temperature'"):
        engine.generate([1], temprature=0.5)
    with pytest.raises(ConfigError, match="temperature = -1"):
        engine.generate([1], temperature=-1)
    with pytest.raises(ConfigError, match="temperature = -1"):
        engine.stream([1], temperature=-1)
    with pytest.raises(ConfigError, match=r"temperature = '0\.5' must be a number"):
        engine.generate([1], temperature="0.5")
    with pytest.raises(ConfigError, match="stop = 3 must be a list of texts"):
        engine.generate([1], stop=3)
    params = SamplingParams(max_new_tokens=4, seed=1)
    assert engine.generate([1], params, max_new_tokens=2).num_tokens == 2
    assert params.max_new_tokens == 4


@pytest.mark.parametrize(
    ("given", "lowest", "largest"),
    [
        ({"method": "ngram", "prompt_lookup_max": 1}, 1, 1),
        ({"method": "ngram", "prompt_lookup_max": 3}, 2, 3),
        ({"method": "ngram", "prompt_lookup_min": 6}, 6, 6),
    ],
)
def test_the_end_of_a_range_that_nobody_gave_yields(given: Any, lowest: int, largest: int) -> None:
    config = speculative_config(given)
    ((low, high),) = config.ranges
    assert (getattr(config, low), getattr(config, high)) == (lowest, largest)
    key = next(key for key in given if key != "method")
    off, default = Engine(table(1), None), speculative_config(given["method"])
    for started in (given["method"], None):  # a request of a service that was started with the method, or without
        chosen = Choices(off.with_method(started), (), off=False).method(given)
        assert (getattr(chosen, low), getattr(chosen, high)) == (lowest, largest)
    both = {**given, low: getattr(default, low), high: getattr(default, high), key: given[key]}
    if getattr(default, low) > given[key] or getattr(default, high) < given[key]:
        with pytest.raises(ConfigError):  # two ends that were given contradict each other
            speculative_config(both)


def test_more_tokens_at_least_than_are_written_by_default() -> None:
    engine = Engine(table(1), None)
    made = engine.generate([1, 2], min_new_tokens=140, temperature=0.0)
    assert made.num_tokens >= 140
    with pytest.raises(ConfigError, match="min_new_tokens"):
        engine.generate([1, 2], min_new_tokens=140, max_new_tokens=130)


@pytest.mark.parametrize("bits", [0, 1])
def test_a_drawn_seed_is_a_number_that_javascript_has(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    """The largest and the smallest that the system's source of random numbers may give."""
    monkeypatch.setattr("secrets.randbits", lambda size: bits * ((1 << size) - 1))
    engine = Engine(table(1), None)
    drawn = [fresh_seed(), engine.generate([1], max_new_tokens=1).seed]
    assert drawn == [bits * MAX_SEED] * 2
    assert MAX_SEED == 2**53 - 1


def test_batch_size_must_be_positive() -> None:
    for size in (0, -3):
        with pytest.raises(ConfigError, match="batch_size"):
            Engine(table()).generate_batch([[1]], batch_size=size)
    assert Engine(table()).generate_batch([]) == []


def test_with_method_shares_what_is_loaded() -> None:
    engine = draft_engine(table(), table(blur=0.2), 3)
    longer = engine.with_method({"method": "draft_model", "num_speculative_tokens": 6})
    assert longer.method is engine.method
    assert longer.speculative.num_speculative_tokens == 6
    plain = engine.with_method(None)
    assert plain.method.name == "none"
    assert plain.model is engine.model
    assert plain.tokenizer is engine.tokenizer
    given = DraftModel(table(seed=5))
    assert plain.with_method("draft_model", method=given).method is given
    ngram = engine.with_method({"method": "ngram", "prompt_lookup_min": 1})
    other = ngram.with_method({"method": "ngram", "prompt_lookup_min": 2})
    assert other.method is not ngram.method, "another n-gram range is another method"


def test_resolved_says_what_runs() -> None:
    found = draft_engine(table(name="toy"), table(), 3, verify="rejection", width=4).resolved()
    assert found["target"] == "toy"
    assert found["dtype"] == "float64"
    assert found["width"] == 4
    assert found["exact"] is True
    assert found["speculative"] == {
        "method": "draft_model", "num_speculative_tokens": 3, "verify": "rejection", "shape": "chain",
        "draws": "auto", "judge": None, "model": None, "draft_weights": "least", "vocabulary": "auto",
        "acceptance": None, "draft_vocab_size": 0, "draft_window": -1,
    }  # fmt: skip


def test_a_text_needs_a_tokenizer() -> None:
    with pytest.raises(ConfigError, match="give token ids"):
        Engine(table()).generate("a")
    engine = Engine(table(), ToyTokenizer())
    assert engine.generate("the end", max_new_tokens=1).num_prompt_tokens == 3
    with pytest.raises(ConfigError, match="no chat template"):
        engine.chat_prompt([{"role": "user", "content": "a"}])
