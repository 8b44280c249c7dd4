"""Settings read from keywords, JSON and text: what is taken, what is refused, and in which words."""

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from foretell.core.errors import ConfigError
from foretell.core.params import SamplingParams
from foretell.core.settings import check_keys, checked, field_kinds, read, setting, value_of_json, value_of_text
from foretell.server.options import ServerOptions
from foretell.service.options import ServiceOptions
from foretell.train.config import TrainConfig


@dataclass(frozen=True)
class Settings:
    size: int = 1
    rate: float | None = 0.5
    deep: bool = False
    name: str | None = setting(None, "Which.")
    widths: tuple[int, ...] = (1,)
    stops: tuple[str, ...] = ()
    bias: Mapping[int, float] = setting(dict, "How much.")
    rule: Callable[[int], int] | None = None


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, {}),
        ({"size": 3, "rate": 2, "deep": True, "name": "x"}, {"size": 3, "rate": 2.0, "deep": True, "name": "x"}),
        ({"rate": None, "name": None}, {"rate": None, "name": None}),
        ({"widths": [4, 2], "stops": ["a"]}, {"widths": (4, 2), "stops": ("a",)}),
        ({"stops": "abc"}, {"stops": ("abc",)}),
        ({"bias": {3: 1}}, {"bias": {3: 1.0}}),
        ({"bias": {3: float("-inf")}}, {"bias": {3: float("-inf")}}),
        ({"rule": abs}, {"rule": abs}),
        ({"size": np.int64(3), "rate": np.float32(0.5)}, {"size": 3, "rate": 0.5}),
    ],
)
def test_what_is_taken(given: dict[str, Any], wanted: dict[str, Any]) -> None:
    found = checked(Settings, given, "here")
    assert found == wanted
    assert [type(value) for value in found.values()] == [type(value) for value in wanted.values()]
    assert read(Settings, given, "here") == Settings(**wanted)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"siz": 1}, "unknown key 'siz' in x.json; did you mean 'size'?"),
        ({"size": "3"}, "size = '3' must be a whole number"),
        ({"size": 3.0}, "size = 3.0 must be a whole number"),
        ({"size": True}, "size = True must be a whole number"),
        ({"size": None}, "size = None must be a whole number"),
        ({"rate": True}, "rate = True must be a number"),
        ({"rate": "0.5"}, "rate = '0.5' must be a number"),
        ({"deep": 1}, "deep = 1 must be true or false"),
        ({"name": 3}, "name = 3 must be a text"),
        ({"widths": "4x2"}, "widths = '4x2' must be a list of whole numbers"),
        ({"widths": [1.5]}, "widths = [1.5] must be a list of whole numbers"),
        ({"stops": 3}, "stops = 3 must be a list of texts"),
        ({"bias": {"a": 1.0}}, "must be token ids and numbers"),
    ],
)
def test_what_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(Settings, given, "in x.json")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "kind", "wanted"),
    [
        ("true", bool, True), ("12", int, 12), ("0.5", float, 0.5), ("1", float, 1.0), ("1", str, "1"),
        ("4x2x1", tuple[int, ...], (4, 2, 1)), ("0.5x1", tuple[float, ...], (0.5, 1.0)), ("7", int | None, 7),
    ],
)  # fmt: skip
def test_text(text: str, kind: Any, wanted: object) -> None:
    assert value_of_text(text, kind, "x") == wanted


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("maybe", bool, "true or false"), ("1.5", int, "a whole number"), ("nan", float, "a number"),
        ("", float, "a number"), ("4,2", tuple[int, ...], "joined by x, e.g. 4x2x1"),
        ("4x", tuple[int, ...], "joined by x"), ("1xnan", tuple[float, ...], "numbers joined by x, e.g. 0.6x0.2"),
    ],
)  # fmt: skip
def test_wrong_text(text: str, kind: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        value_of_text(text, kind, "width")
    assert f"width = {text!r} must be " in str(caught.value)
    assert said in str(caught.value)


def test_json_of_a_mapping() -> None:
    kind = field_kinds(SamplingParams)["logit_bias"]
    assert value_of_json('{"42": -5, "7": 0.5}', kind, "--logit-bias") == {42: -5.0, 7: 0.5}
    for wrong in ('{"a": 1}', '{"1": "2"}', '{"1": true}', "[1]", '{"1":'):
        with pytest.raises(ConfigError, match=r"--logit-bias .* must be token ids and numbers"):
            value_of_json(wrong, kind, "--logit-bias")


def test_every_setting_of_ours_is_of_a_known_kind() -> None:
    """Else it would be taken unchecked; those that are left are no texts, numbers or lists of them."""
    taken = {
        name
        for kind in (SamplingParams, ServiceOptions, ServerOptions, TrainConfig)
        for name, value in field_kinds(kind).items()
        if value_is_taken(value)
    }
    assert taken == {"json_schema", "logits_processor"}


def value_is_taken(kind: Any) -> bool:
    @dataclass
    class One:
        field: Any = None

    One.__dataclass_fields__["field"].type = kind
    odd = object()
    try:
        return bool(checked(One, {"field": odd}, "here")["field"] is odd)
    except ConfigError:
        return False


def test_keys() -> None:
    check_keys(["a"], ["a", "b"], "in x")
    with pytest.raises(ConfigError, match="unknown key 'c' in x; known: a, b"):
        check_keys(["c"], ["a", "b"], "in x")


def test_declaring_settings_imports_no_pydantic() -> None:
    code = "import sys, foretell.cli.app; print([m for m in ('pydantic', 'torch', 'structlog') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
