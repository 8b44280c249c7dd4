"""Prompts to measure on: the bundled suite, and files in Spec-Bench's question format.

One JSON object a line: ``question_id``, ``category``, ``turns`` (the first is used; further turns would depend on the
answer to it), and where there are any ``format`` ("text" to continue, "chat" to put into the chat template),
``prediction`` (a guess of the output) and ``reference`` (not read here). Spec-Bench's questions have no ``format``: they
are messages, so the chat template is used wherever the tokenizer has one.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.core.errors import ConfigError, nearest


@dataclass(frozen=True)
class Item:
    """One prompt."""

    question_id: int | str
    category: str
    prompt: str
    format: str = "chat"  # "text" or "chat"
    prediction: str | None = None


def load_suite(name: str | Path = "bundled") -> list[Item]:
    """The prompts of a JSONL file, or of the bundled suite. Raises ConfigError that names the line."""
    if str(name) == "bundled":
        from foretoken import bundled

        name = bundled.path("suite")
    path = Path(name)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        expected = "expected 'bundled' or a JSONL file"
        raise ConfigError(f"suite {str(name)!r} cannot be read: {error.strerror}; {expected}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"suite {str(name)!r} is not UTF-8 text (byte {error.start})") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    items = [_item(line, number, f"suite {str(name)!r}, line {number}") for number, line in numbered]
    if not items:
        raise ConfigError(f"suite {str(name)!r} is empty")
    return items


def _item(line: str, number: int, where: str) -> Item:
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON ({error.msg})") from None
    turns = record.get("turns") if isinstance(record, dict) else None
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0]:
        raise ConfigError(f"{where}: expected an object with 'turns': a list of texts, the prompt first")
    form, prediction = record.get("format", "chat"), record.get("prediction")
    if form not in ("text", "chat"):
        raise ConfigError(f"{where}: format = {form!r} must be 'text' or 'chat'")
    if prediction is not None and not isinstance(prediction, str):
        raise ConfigError(f"{where}: prediction must be a text")
    return Item(
        record.get("question_id", number), str(record.get("category", "all")), turns[0], form, prediction or None
    )


def select(items: Sequence[Item], *, categories: Sequence[str] | None = None, limit: int | None = None) -> list[Item]:
    """The first ``limit`` items of each category asked for, in the suite's order. Raises ConfigError."""
    known = list(dict.fromkeys(item.category for item in items))
    for category in categories or ():
        if category not in known:
            raise ConfigError(f"unknown category {category!r}{nearest(category, known)}")
    if limit is not None and limit < 1:
        raise ConfigError(f"limit = {limit} must be at least 1")
    taken: dict[str, int] = {}
    chosen = []
    for item in items:
        if categories and item.category not in categories:
            continue
        taken[item.category] = taken.get(item.category, 0) + 1
        if limit is None or taken[item.category] <= limit:
            chosen.append(item)
    return chosen
