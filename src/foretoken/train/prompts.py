"""Check training prompts: conversations must suit the chat template, and prompts must be short enough to be
answered."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from foretoken.core.errors import ConfigError, PromptError
from foretoken.engine.engine import Engine


def chat_ids(messages: list[Any], engine: Engine, where: str) -> list[int]:
    """Token ids of a conversation in the chat template. An assistant's last message is left out: the target writes it.

    where: file and line, for messages. Raises ConfigError where a message has no role or content, or the template refuses.
    """
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
    try:
        return engine.chat_prompt(messages)
    except (TemplateError, TypeError) as error:
        raise ConfigError(
            f"{where}: the target's chat template refuses these messages ({error}): mend or drop the line"
        ) from None


def check_room(
    prompts: Sequence[Sequence[int]],
    names: Sequence[str],
    file: Path | str,
    engine: Engine,
    max_new_tokens: int | None,
    max_length: int | None,
) -> None:
    """Refuse prompts that are all too long, before any is answered. names: of each prompt, for messages.

    max_new_tokens is how long answers may be, max_length where training cuts texts; None: no limit. Raises PromptError.
    """
    spec, limits = engine.model.spec, {}
    if max_new_tokens is not None:
        why = f"the context of {spec.name!r}, {spec.max_positions}, less max_new_tokens = {max_new_tokens}"
        limits[why] = spec.max_positions - max_new_tokens
    if max_length is not None:
        limits[f"max_length = {max_length}, where training cuts texts, less one token of an answer"] = max_length - 1
    if not limits or not prompts:
        return
    why, most = min(limits.items(), key=lambda item: item[1])
    if min(map(len, prompts)) > most:
        index = min(range(len(prompts)), key=lambda index: len(prompts[index]))
        raise PromptError(
            f"data {str(file)!r}: all {len(prompts)} prompts are too long: the shortest, {names[index]}, has "
            f"{len(prompts[index])} tokens, and at most {max(0, most)} can be used ({why}): shorten the "
            "prompts, or change that limit"
        )
