"""Whether a template has written what the messages say: some leave a role's text, a call or a result out silently."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from foretell.engine.request.calls import arguments_text, functions_of, with_functions

Messages = Sequence[Mapping[str, Any]]
SURE = 16
"""Characters of a text that a template does not write by itself."""
_WORD = re.compile("zq([a-p]+)qz")


def untold(turns: Messages, text: str, write: Callable[[Messages], str]) -> str | None:
    """What of the turns a template has left out of its text, in words; None where all is there.

    A text that stands there as it is, in its turn, has not been lost. Where one does not (it is short, changed, or a
    thought of another turn was cut from it), the template is asked once more, with a word of its own in the place of each
    text. What is thought may be left out. write: renders turns as the text was rendered.
    """
    if not all(isinstance(turn, Mapping) for turn in turns):
        return None
    at = 0
    for said in _texts(turns):
        at = text.find(said, at) if len(said) >= SURE else -1
        if at < 0:
            break
        at += len(said)
    else:
        return None
    asked = _Asked()
    try:
        tried = write([asked.turn(turn) for turn in turns]).lower()
    except Exception:  # by what it reads of the texts, which it took
        return None
    found = set(_WORD.findall(tried))
    return next((what for word, what in asked.words.items() if word not in found or _is_python(tried, word)), None)


def _texts(turns: Messages) -> Iterator[str]:
    for turn in turns:
        content = turn.get("content")
        texts = [content] if isinstance(content, str) else [part["text"] for part in _parts(content)]
        yield from (text.strip() for text in texts if text.strip())
        yield from (arguments_text(function.get("arguments")) for function in functions_of(turn))


def _parts(content: Any) -> list[Mapping[str, Any]]:
    """The parts of a content that are texts."""
    listed = content if isinstance(content, list | tuple) else ()
    return [part for part in listed if isinstance(part, Mapping) and isinstance(part.get("text"), str)]


def _is_python(text: str, word: str) -> bool:
    """Whether a template has written an object as Python does, and not as JSON: it takes arguments as a text."""
    return f"'zq{word}qz': " in text


class _Asked:
    """Turns with a word in the place of each text, and what each stands for."""

    def __init__(self) -> None:
        self.words: dict[str, str] = {}

    def turn(self, turn: Mapping[str, Any]) -> Mapping[str, Any]:
        """The turn with words."""
        content, role = turn.get("content"), turn.get("role")
        made = dict(turn)
        if isinstance(content, str):
            made["content"] = self._word(content, f"the text of the {role}")
        elif parts := _parts(content):
            texts = [{**part, "text": self._word(part["text"], f"the text of the {role}")} for part in parts]
            made["content"] = [texts.pop(0) if part in parts else part for part in turn["content"]]
        if not functions_of(turn):
            return made
        return {**made, "tool_calls": with_functions(turn["tool_calls"], self._called)}

    def _called(self, function: Mapping[str, Any]) -> Mapping[str, Any]:
        given, what = function.get("arguments"), f"a call of {function['name']!r:.80}"
        name = self._word(function["name"], what)
        if arguments_text(given) == "{}":
            return {**function, "name": name}
        words = {self._word("a", what): self._word("a", what)}
        return {**function, "name": name, "arguments": arguments_text(words) if isinstance(given, str) else words}

    def _word(self, text: str, what: str) -> str:
        """A word in the place of a text, unless that is blank."""
        if not text.strip():
            return text
        word = "".join(chr(ord("a") + int(digit, 16)) for digit in f"{len(self.words):x}")
        self.words[word] = f"{what}, {text[:40]!r}" if what.startswith("the text") else what
        return f"zq{word}qz"
