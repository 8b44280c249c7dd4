"""Files of prompts, as every command reads them.

Plain text: a prompt a line. JSON lines, or a JSON list: each entry a text, or an object with ``prompt`` (a text to go on
with), ``messages`` (a conversation to answer) or ``turns`` (messages of the user, the first one the prompt); ``format``
says where a text is a message ("chat") and where not ("text"). A text or ``prompt`` without it is bare: what it is depends
on the model (``engine.request.conversation.takes_messages``). The content says which it is; only a file named ``.txt``
whose first line is no JSON may begin with a brace, a bracket or a quote.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretell.core.errors import ConfigError
from foretell.core.jsontext import JSONDecodeError, parse_json

EXPECTED = "expected a text, or an object with 'prompt' (a text), 'messages' (a list) or 'turns' (a list of texts)"


@dataclass(frozen=True)
class PromptEntry:
    """One prompt of a file."""

    where: str  # file and line, for messages
    number: int  # of its line, or of its place in a JSON list
    record: Mapping[str, Any] = field(default_factory=dict)  # the object that it was; empty for a text alone


@dataclass(frozen=True)
class Conversation:
    """What an entry asks for: ``texts`` (the prompt, and further messages of the user), or ``messages``."""

    texts: tuple[str, ...]
    format: str  # of texts: "text" or "chat"
    messages: tuple[Mapping[str, Any], ...] = ()  # whole, where the entry has several messages
    is_bare: bool = False  # a text, and the entry does not say whether it is a message


def is_plain(text: str, suffix: str = "") -> bool:
    """Whether a file's content is prompts as plain lines. suffix: of its name, e.g. ".txt"."""
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    if not first.startswith(("{", "[", '"')):
        return True
    if suffix != ".txt":
        return False
    try:
        return not isinstance(parse_json(first), dict | list | str)
    except JSONDecodeError:
        return True


def entries(text: str, name: str, *, suffix: str = "") -> list[PromptEntry]:
    """The prompts of a file's content. name: as messages call it; suffix: of its name. Raises ConfigError with the line."""
    if not text.strip():
        raise ConfigError(f"{name} is empty: expected prompts, a line each, or JSON")
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if is_plain(text, suffix):
        return [
            PromptEntry(f"{name}, line {number}", number, {"prompt": line.rstrip("\r"), "format": "text"})
            for number, line in lines
        ]
    if text.lstrip().startswith("[") or suffix == ".json":
        try:
            whole = parse_json(text)
        except JSONDecodeError as error:
            if suffix == ".json" and not _begins_json_lines(lines):
                raise ConfigError(f"{name}, line {error.lineno}: not JSON ({error.msg})") from None
        else:
            listed = whole if isinstance(whole, list) else [whole]
            return [_entry(item, f"{name}, entry {place}", place) for place, item in enumerate(listed, 1)]
    return [_entry(_parsed(line, f"{name}, line {number}"), f"{name}, line {number}", number) for number, line in lines]


def _begins_json_lines(lines: list[tuple[int, str]]) -> bool:
    try:
        parse_json(lines[0][1])
    except JSONDecodeError:
        return False
    return len(lines) > 1


def conversation(entry: PromptEntry) -> Conversation:
    """What an entry asks for. Raises ConfigError that names the line."""
    record, where = entry.record, entry.where
    messages, turns, prompt = record.get("messages"), record.get("turns"), record.get("prompt")
    form = record.get("format", "text" if messages is None and turns is None else "chat")
    if form not in ("text", "chat"):
        raise ConfigError(f"{where}: format = {form!r} must be 'text' or 'chat'")
    if messages is not None:
        return _of_messages(messages, where)
    texts = [prompt] if turns is None else turns
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise ConfigError(f"{where}: {EXPECTED}")
    return Conversation(tuple(texts), form, is_bare=turns is None and "format" not in record)


def read_text(file: Path | str, name: str) -> str:
    """A UTF-8 file, a mark of byte order left out. Raises ConfigError."""
    try:
        return Path(file).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}; expected a file of prompts") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} cannot be read: not UTF-8 text (byte {error.start})") from None


def _of_messages(messages: Any, where: str) -> Conversation:
    """A conversation; an assistant's last message is left out: the target writes it."""
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{where}: 'messages' must be a list of objects with 'role' and 'content'")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ConfigError(
                f"{where}: message {number} must be an object with 'role' and 'content', not {message!r:.60}"
            )
        content = message.get("content")
        calls_tools = content is None and bool(message.get("tool_calls"))
        if not isinstance(content, str) and not calls_tools:
            found = "has none" if content is None else f"has {content!r:.60}"
            raise ConfigError(
                f"{where}: message {number} ({message['role']}) {found}: expected 'content', a text: add it, or drop "
                "the line"
            )
    if messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise ConfigError(f"{where}: expected a message before the assistant's: there is nothing to answer")
    text = "\n\n".join(message.get("content") or "" for message in messages)
    return Conversation((text,), "chat", tuple(messages))


def _entry(item: Any, where: str, number: int) -> PromptEntry:
    if isinstance(item, str):
        item = {"prompt": item}
    if not isinstance(item, dict):
        raise ConfigError(f"{where}: {EXPECTED}")
    return PromptEntry(where, number, item)


def _parsed(line: str, where: str) -> Any:
    try:
        return parse_json(line)
    except JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON ({error.msg})") from None
