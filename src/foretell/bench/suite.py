"""Questions to measure on, as files have them (``core.prompts``); ``named.read_suite`` finds them by name.

An entry of a file is a text, ``prompt`` or ``messages``, or one of three forms. Ours and Spec-Bench's:
``question_id``, ``category``, ``turns`` (messages of the user; a later one follows the model's own answer), and where
there are any ``format`` ("text" to continue, "chat" to put into the chat template), ``prediction`` (a guess of the
output), ``reference`` (which, for word problems, ends in the right number), ``unknown`` (true: nobody knows the answer, and
to say so is right) and ``level`` (how hard it is). GSM8K's: ``question``, ``answer`` ("... #### 42"). HumanEval's:
``task_id``, ``prompt``, ``test``, ``entry_point``. Their lines without ``format`` are messages, so the chat template
is used wherever the tokenizer has one; a bare text goes there on an instruct model alone (``script.with_forms``).
"""

import gzip
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretell.bench.answers import AnswerCheck, number_check, python_check
from foretell.core import prompts
from foretell.core.errors import ConfigError, nearest, require

NUMBER_CATEGORIES = ("math_reasoning", "gsm8k")
"""Categories whose ``reference`` ends in the right number, with or without MARK. MT-bench's ``math`` is none: its
references are essays."""
BUNDLED = {"bundled": "suite", "abstention": "abstention"}
"""Suites that come with the package, and what ``bundled.path`` calls them."""
MARK = "####"
"""What GSM8K puts before the right number."""
SOLVE = "\nThink step by step, and end with a line that has #### and the number alone."
COMPLETE = "Complete this Python function. Answer with the whole function in one code block.\n\n```python\n{}```"


@dataclass(frozen=True)
class Item:
    """One question: its first message, and those that follow the answers to it."""

    question_id: int | str
    category: str
    prompt: str
    format: str = "chat"  # "text" or "chat"
    prediction: str | None = None
    later: tuple[str, ...] = ()  # further messages of the user, each after the model's own answer to the one before
    task: str = ""  # the part of a suite that reports sum up; empty: the category
    level: str = ""  # how hard it is, where a suite says so; right answers are counted by it as well
    check: AnswerCheck | None = None  # how an answer to the first message is judged
    messages: tuple[Mapping[str, Any], ...] = ()  # the whole conversation, where it is more than ``prompt``
    turn: int = 1  # of a message of a question; runs are of one message each
    is_bare: bool = False  # a text whose line does not say whether it is a message; ``with_forms`` decides

    @property
    def group(self) -> str:
        """What reports sum up."""
        return self.task or self.category


@dataclass(frozen=True)
class Suite:
    """Questions, and what is to be said of them."""

    name: str
    items: list[Item]
    notes: list[str] = field(default_factory=list)  # e.g. that a file has other counts than the suite it is named after


def read_file(path: Path, name: str, known: Sequence[str], *, is_json: bool = False) -> list[Item]:
    """The questions of a file, packed by gzip where it ends in .gz. For messages: its name, and the suites that are known
    by name. is_json: refuse plain text. Raises ConfigError that names the line."""
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
        text = data.decode("utf-8-sig")
    except (gzip.BadGzipFile, EOFError) as error:
        raise ConfigError(f"suite {name!r} is not a whole gzip file: {error}") from None
    except OSError as error:
        what = f"suite {name!r} cannot be read: {error.strerror}"
        raise ConfigError(f"{what}; expected a suite by name or a file of prompts{nearest(name, known)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"suite {name!r} is not UTF-8 text (byte {error.start})") from None
    if is_json and prompts.is_plain(text):
        raise ConfigError(f"suite {name!r}, line 1: not JSON")
    suffix = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    return [_item(entry) for entry in prompts.entries(text, f"suite {name!r}", suffix=suffix)]


def _item(entry: prompts.PromptEntry) -> Item:
    record, number, where = entry.record, entry.number, entry.where
    if not {"turns", "messages"} & record.keys():
        if all(isinstance(record.get(key), str) for key in ("question", "answer")):
            return _gsm8k(record, number, where)
        if all(isinstance(record.get(key), str) for key in ("task_id", "prompt", "test", "entry_point")):
            return _humaneval(record)
    asked = prompts.conversation(entry)
    prediction = record.get("prediction")
    if prediction is not None and not isinstance(prediction, str):
        raise ConfigError(f"{where}: prediction must be a text")
    category = str(record.get("category", "all"))
    return Item(
        record.get("question_id", number), category, asked.texts[0], asked.format, prediction or None, asked.texts[1:],
        level=str(record.get("level", "")), check=_check(record, category, asked.texts[0]), messages=asked.messages,
        is_bare=asked.is_bare,
    )  # fmt: skip


def _check(record: Mapping[str, Any], category: str, text: str) -> AnswerCheck | None:
    """The right number of a word problem with a reference, the tests that a line brings, or that nobody knows. text: the
    first message."""
    if record.get("unknown") is True:
        return AnswerCheck("unknown", "")
    if isinstance(record.get("test"), str) and isinstance(record.get("entry_point"), str):
        return python_check(record["test"], record["entry_point"], text)
    reference = record.get("reference")
    if isinstance(reference, list):
        reference = next((text for text in reference if isinstance(text, str)), None)
    if not isinstance(reference, str) or not (category in NUMBER_CATEGORIES or MARK in reference):
        return None
    return number_check(reference)


def _gsm8k(record: Mapping[str, Any], number: int, where: str) -> Item:
    check = number_check(record["answer"])
    if check is None:
        raise ConfigError(f"{where}: the answer has no number: {record['answer'][-40:]!r}")
    return Item(record.get("question_id", number), "gsm8k", record["question"] + SOLVE, check=check)


def _humaneval(record: Mapping[str, Any]) -> Item:
    check = python_check(record["test"], record["entry_point"], record["prompt"])
    return Item(record["task_id"], "humaneval", COMPLETE.format(record["prompt"]), check=check)


def select(items: Sequence[Item], *, categories: Sequence[str] | None = None, limit: int | None = None) -> list[Item]:
    """The first ``limit`` items of each category asked for, in the suite's order; the name of a task, such as Spec-Bench's
    mt_bench, stands for its categories. Raises ConfigError."""
    known = list(dict.fromkeys([*(item.category for item in items), *(item.group for item in items)]))
    for category in categories or ():
        if category not in known:
            raise ConfigError(f"unknown category {category!r}{nearest(category, known)}")
    require(limit is None or limit >= 1, "limit", limit, "at least 1")
    taken: dict[str, int] = {}
    chosen = []
    for item in items:
        if categories and item.category not in categories and item.group not in categories:
            continue
        taken[item.category] = taken.get(item.category, 0) + 1
        if limit is None or taken[item.category] <= limit:
            chosen.append(item)
    return chosen
