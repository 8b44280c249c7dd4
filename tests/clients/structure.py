"""What is kept of a recorded session: names of fields, roles, kinds and lengths; texts are generated anew.

A fixture has ``texts``, the lengths of the distinct texts (or, of one that is like an earlier one, ``[which, characters of
its beginning, new characters, characters of its end]``); ``parts``, the distinct values of fields and of lists, in which
``~3`` stands for the fourth text; and ``conversations``, of each its turns: the request's path, its body by numbers of
parts, the characters of the prompt that a server made of it (``prompt``), how many of these are equal, from the beginning
on, to the turn before (``as_before``) and to that turn of the first conversation (``as_first``).
"""

import json
import random
import re
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

KEPT = frozenset({"type", "role", "tool_choice", "status", "format", "summary", "effort", "$schema", "include"})
"""Fields whose values are words of the API, not texts."""
MAPS = frozenset({"properties", "$defs", "patternProperties"})
"""Fields whose own fields are named by the program."""


@dataclass(frozen=True)
class Sent:
    """One request: its path, its body, and the prompt that the server made of it."""

    path: str
    body: dict[str, Any]
    prompt: str


def equal(one: str, other: str) -> int:
    """How many characters two texts have in common from the beginning on."""
    most = min(len(one), len(other))
    return next((at for at in range(most) if one[at] != other[at]), most)


@dataclass
class _Texts:
    """Distinct texts and parts, in the order in which they come."""

    texts: dict[str, int] = field(default_factory=dict)
    forms: list[Any] = field(default_factory=list)
    first: dict[str, str] = field(default_factory=dict)  # by the place where it was
    parts: dict[str, int] = field(default_factory=dict)

    def text(self, text: str, place: str) -> str:
        if text not in self.texts:
            base = self.first.setdefault(place, text)
            same = equal(base, text)
            end = min(equal(base[::-1], text[::-1]), len(text) - same, len(base) - same)
            like = base != text and same + end >= len(text) / 2
            self.texts[text] = len(self.forms)
            self.forms.append([self.texts[base], same, len(text) - same - end, end] if like else len(text))
        return f"~{self.texts[text]}"

    def value(self, given: Any, place: str, key: str = "", *, named: bool = False) -> Any:
        if isinstance(given, dict):
            return {
                (self.text(name, f"{place}.*") if named else name): self.value(
                    one, f"{place}.{name}", name, named=name in MAPS and not named
                )
                for name, one in given.items()
            }
        if isinstance(given, list):
            return [self.value(one, f"{place}.{at}", key) for at, one in enumerate(given)]
        if isinstance(given, str) and not (
            key in KEPT and re.fullmatch(r"[\w.]{1,40}|https?://json-schema.org/.*", given)
        ):
            return self.text(given, place)
        return given

    def part(self, given: Any, place: str, key: str) -> int:
        made = json.dumps(self.value(given, place, key), separators=(",", ":"))
        return self.parts.setdefault(made, len(self.parts))


def fixture(client: str, version: str, conversations: Sequence[Sequence[Sent]]) -> dict[str, Any]:
    """The structure of recorded conversations."""
    found, made = _Texts(), []
    for sents in conversations:
        turns: list[Any] = []
        for at, sent in enumerate(sents):
            body = {
                name: [found.part(one, f"{name}.{place}", name) for place, one in enumerate(value)]
                if isinstance(value, list)
                else found.part(value, name, name)
                for name, value in sent.body.items()
            }
            turn = {"path": sent.path, "body": body, "prompt": len(sent.prompt)}
            if at:
                turn["as_before"] = equal(sents[at - 1].prompt, sent.prompt)
            if made and at < len(conversations[0]):
                turn["as_first"] = equal(conversations[0][at].prompt, sent.prompt)
            turns.append(turn)
        made.append(turns)
    parts = [json.loads(part) for part in found.parts]
    return {"client": client, "version": version, "texts": found.forms, "parts": parts, "conversations": made}


def table(client: str, version: str, conversations: Sequence[Sequence[Sent]]) -> Iterator[str]:
    """Lines: the client, the turn, the characters of the prompt, those equal to the turn before and to the first
    conversation."""
    for name, turns in enumerate(fixture(client, version, conversations)["conversations"]):
        for at, turn in enumerate(turns):
            yield (
                f"| {client} | {version} | {'ABC'[name]}{at + 1} | {turn['prompt']} | {turn.get('as_before', '')} | "
                + (f"{turn.get('as_first', '')} |")
            )


def generated(forms: Sequence[Any]) -> list[str]:
    """Texts of these lengths: words of letters, in which nothing is anyone's."""
    made: list[str] = []
    for number, form in enumerate(forms):
        base, begin, new, end = form if isinstance(form, list) else (None, 0, form, 0)
        draw = random.Random(number)
        letters = draw.choices(string.ascii_lowercase + "     ", k=new)
        if new:
            letters[0] = string.ascii_letters[number % 52]
        text = "".join(letters).replace("  ", " a")
        before = "" if base is None else made[base]
        made.append(before[:begin] + text + (before[len(before) - end :] if end else ""))
    return made


def bodies(given: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The requests of a fixture's conversations, with generated texts."""
    texts = generated(given["texts"])

    def put(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {put(name) if name.startswith("~") else name: put(one, name) for name, one in value.items()}
        if isinstance(value, list):
            return [put(one, key) for one in value]
        if isinstance(value, str) and value.startswith("~"):
            text = texts[int(value[1:])]
            name = key in ("name", "model") or key.endswith("id")
            text = re.sub(r"\W", "_", text) if name else text
            return json.dumps({"a": text[9:]}) if key == "arguments" else text  # a call's are JSON
        return value

    def whole(body: dict[str, Any]) -> dict[str, Any]:
        parts = given["parts"]
        return {
            name: [put(parts[one], name) for one in at] if isinstance(at, list) else put(parts[at], name)
            for name, at in body.items()
        }

    return [[whole(turn["body"]) for turn in turns] for turns in given["conversations"]]
