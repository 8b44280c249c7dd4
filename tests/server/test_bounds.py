"""Every number that a request may give has a bound: in the OpenAPI document, and in one clear error."""

import dataclasses
import typing
from typing import Any

import pytest
from pydantic import ValidationError

from foretell import speculative_config
from foretell.core.errors import ConfigError
from foretell.core.settings import field_kinds
from foretell.draft.config import SHARED
from foretell.draft.shapes import SHAPES, parse_shape
from foretell.engine.config import METHODS
from foretell.server.protocol.requests import ChatRequest, CompletionRequest
from foretell.server.protocol.sampling import Speculative
from foretell.server.sampling import RESERVED
from foretell.verify import VERIFIERS, parse_verifier
from tests.server.conftest import Serve

LIMITS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}


def numbers(schema: Any, at: str = "") -> dict[str, dict[str, Any]]:
    """Every number of a JSON schema, by its place."""
    found: dict[str, dict[str, Any]] = {}
    if isinstance(schema, dict):
        if schema.get("type") in ("integer", "number"):
            found[at] = schema
        for key, part in schema.items():
            found |= numbers(part, f"{at}/{key}")
    elif isinstance(schema, list):
        for index, part in enumerate(schema):
            found |= numbers(part, f"{at}/{index}")
    return found


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_every_number_of_the_document_has_two_bounds(kind: Any) -> None:
    found = numbers(kind.model_json_schema())
    assert len(found) > 20
    free = [place for place, schema in found.items() if len(LIMITS & schema.keys()) < 2]
    assert free == []


def options(kind: Any) -> list[str]:
    """Names of the fields of a dataclass that hold numbers."""
    kinds = field_kinds(kind)
    return [name for name, given in kinds.items() if {int, float} & {given, *typing.get_args(given)}]


METHOD_NUMBERS = [
    (name, key)
    for name, kind in METHODS.items()
    if kind.capabilities.by_request
    for key in options(kind)
    if key not in RESERVED
]


@pytest.mark.parametrize(("method", "key"), METHOD_NUMBERS)
def test_numbers_of_methods_are_refused_alike_by_document_and_method(method: str, key: str) -> None:
    """A lookup of 10 ** 9 tokens froze the engine for 200 s."""
    kind = field_kinds(METHODS[method])[key]
    with pytest.raises(ConfigError):
        speculative_config({"method": method, key: kind(10**9)})
    field = Speculative.model_fields[key]
    limits = {name: getattr(item, name) for item in field.metadata for name in ("ge", "le") if hasattr(item, name)}
    assert set(limits) == {"ge", "le"}
    with pytest.raises(ValidationError):
        Speculative.model_validate({key: kind(10**9)})
    for name, step in (("ge", -1), ("le", 1)):
        with pytest.raises(ConfigError):
            speculative_config({"method": method, key: kind(limits[name] + step)})


def test_the_methods_without_weights_are_all_here() -> None:
    assert {method for method, _ in METHOD_NUMBERS} >= {"ngram", "suffix", "prediction"}
    assert {key for _, key in METHOD_NUMBERS} - SHARED


THRESHOLDS = {"opt_tree": {"threshold"}, "adaptive": {"threshold"}, "typical": {"delta"}}
"""Compared with alone: infinity has a meaning, and no value costs more than another."""


@pytest.mark.parametrize("shape", [*SHAPES])
def test_numbers_of_shapes_are_bounded(shape: str) -> None:
    for key in set(options(type(SHAPES[shape]))) - THRESHOLDS.get(shape, set()):
        with pytest.raises(ConfigError):
            parse_shape(f"{shape}/{key}=1000000000", 5)


@pytest.mark.parametrize("rule", [*VERIFIERS])
def test_numbers_of_verifiers_are_bounded(rule: str) -> None:
    spec = {field.name for field in dataclasses.fields(VERIFIERS[rule]) if field.metadata.get("spec", True)}
    for key in set(options(type(VERIFIERS[rule]))) & spec - THRESHOLDS.get(rule, set()):
        with pytest.raises(ConfigError):
            parse_verifier(f"{rule}/{key}=1000000000")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"speculative": {"method": "ngram", "prompt_lookup_max": 10**9}}, "less than or equal to 64"),
        ({"speculative": {"method": "ngram", "prompt_lookup_min": 9, "prompt_lookup_max": 8}}, "1 <= min <= max"),
        ({"speculative": {"method": "suffix", "suffix_decoding_min_token_prob": 2}}, "less than or equal to 1"),
        ({"logit_bias": {str(token): 1.0 for token in range(1025)}}, "at most 1024"),
        ({"prediction": {"type": "content", "content": "x" * 5000}}, "the prediction has 5000 tokens"),
    ],
)
def test_beyond_a_bound_is_one_clear_error(serve: Serve, change: dict[str, Any], said: str) -> None:
    client = serve()
    answer = client.post(
        "/v1/chat/completions", json={"model": "fake", "messages": [{"role": "user", "content": "a"}], **change}
    )
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]
