"""A key in the wrong place is refused by an error that names the right one."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from foretell import METHODS, Engine, Request, SamplingParams, ServiceOptions
from foretell.core import builtin
from foretell.core.errors import ConfigError
from foretell.core.places import OTHERS, PLACES, tells_places
from foretell.engine.request.row import Submission
from tests.engine.harness import ToyTokenizer, table


def names(kind: Any) -> set[str]:
    return {item.name for item in dataclasses.fields(kind)}


def test_every_option_has_one_place() -> None:
    """A new field of any of these must be told here, too."""
    told = [key for keys in PLACES.values() for key in keys]
    assert len(told) == len(set(told))
    assert not set(told) & OTHERS.keys()
    sampling, request, load, method, service, batch = map(set, PLACES.values())
    assert sampling == names(SamplingParams)
    assert request == names(Request) - {"prompt", "params"}
    assert load == set(inspect.signature(Engine.load).parameters) - {"speculative", "lora"}  # which requests have, too
    assert method == {"method"} | {key for name in builtin.CONFIGS for key in METHODS[name].key_names()}
    assert service == names(ServiceOptions) - {"speculation"}
    assert batch == {"batch_size"}


@pytest.fixture(scope="module")
def toy() -> Engine:
    return Engine(table(1), ToyTokenizer())


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda e: e.generate("ab", dtype="bfloat16"), r"unknown key 'dtype' .*belongs in Engine.load\(dtype=...\)"),
        (lambda e: e.stream("ab", device="cpu"), r"belongs in Engine.load\(device=...\)"),
        (lambda e: e.generate("ab", speculative="ngram"), r"belongs in a Request: .*speculative=..."),
        (lambda e: e.generate_batch(["ab"], prediction="a"), r"belongs in a Request: .*prediction=..."),
        (lambda e: e.completions(["ab"], num_speculative_tokens=2), "belongs in the method's configuration"),
        (lambda e: e.generate("ab", batch_size=2), r"belongs in generate_batch"),
        (lambda e: e.generate("ab", max_num_seqs=2), r"belongs in ServiceOptions"),
        (lambda e: e.generate("ab", max_tokens=2), "it is called max_new_tokens"),
        (lambda e: e.generate("ab", guided_json={}), "json_schema"),
        (lambda e: e.generate("ab", prompt_logprobs=1), "Engine.score"),
        (lambda e: e.generate("ab", temprature=2), "did you mean 'temperature'"),
        (
            lambda e: Engine.load(temperature=1),
            r"in Engine.load\(...\); it belongs in each request, in its SamplingParams",
        ),
        (lambda e: Engine.load(num_speculative_tokens=3), "belongs in the method's configuration"),
        (lambda e: Engine.load(dtpe="float32"), "did you mean 'dtype'"),
        (lambda e: Engine(e.model, temperature=1), r"in Engine\(...\); it belongs in each request"),
        (lambda e: Engine(e.model, dtype="float32"), r"Engine.load\(dtype=...\)"),
        (lambda e: e.with_method("none", temperature=1), "belongs in each request"),
        (lambda e: e.with_method({"method": "ngram", "temperature": 0}), "belongs in each request"),
        (lambda e: e.with_method({"method": "ngram", "dtype": "x"}), r"belongs in Engine.load\(dtype=...\)"),
        (
            lambda e: Request("ab", temperature=1),
            r"in Request\(...\); it belongs in each request, in its SamplingParams",
        ),
        (lambda e: SamplingParams(max_tokens=1), "it is called max_new_tokens"),
        (lambda e: SamplingParams(prediction="a"), "belongs in a Request"),
        (lambda e: ServiceOptions(temperature=1), "belongs in each request"),
        (lambda e: Submission("a", [1], num_logprobs=1), "it is called logprobs"),
    ],
)
def test_a_key_in_the_wrong_place_is_told_its_own(toy: Engine, call: Callable[[Any], object], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        call(toy)
    assert "known:" not in str(caught.value)


def test_a_key_of_another_method_is_not_sent_where_it_stands() -> None:
    with pytest.raises(ConfigError, match="unknown key 'model' for method 'ngram'; known: "):
        Engine.load(speculative={"method": "ngram", "model": "x"})


def test_what_is_known_is_passed_on() -> None:
    @tells_places
    def add(one: int, *, two: int = 2) -> int:
        return one + two

    assert (add(1), add(1, two=3), add(one=4)) == (3, 4, 6)
    assert list(inspect.signature(add).parameters) == ["one", "two"]
    with pytest.raises(TypeError, match="missing"):
        add()
