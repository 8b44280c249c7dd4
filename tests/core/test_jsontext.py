"""JSON that anybody wrote."""

import json
from pathlib import Path

import pytest

from foretell.core.errors import ConfigError
from foretell.core.journal import read_journal
from foretell.core.jsontext import JSONDecodeError, parse_json
from foretell.core.prompts import entries

DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (DEEP, "nested too deeply"),
        (DEEP + "]" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("1" * 5000, "4300 digits"),
        (b'"\xff"', "not UTF-8"),
        ("{", "Expecting property name"),
    ],
)
def test_every_error_is_of_one_kind_and_one_line(text: str | bytes, says: str) -> None:
    with pytest.raises(JSONDecodeError, match=says) as caught:
        parse_json(text)
    assert len(str(caught.value)) < 200


def test_what_is_right_is_read() -> None:
    assert parse_json('{"a": [1, null]}') == json.loads('{"a": [1, null]}')


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_prompts_and_journals_name_the_place(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{name}, line 1: not JSON \(brackets"):
        entries(DEEP, name, suffix=Path(name).suffix)
    (tmp_path / "journal").write_text(DEEP)
    with pytest.raises(ConfigError, match="was not written by this version"):
        read_journal(tmp_path / "journal")
