"""Training prompts as token ids: in the chat template where they are conversations, and short enough to be answered."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foretell.core.errors import ConfigError, PromptError
from foretell.core.prompts import PromptEntry, conversation
from foretell.engine.engine import Engine
from foretell.engine.request.conversation import template_of
from foretell.engine.request.request import token_ids


def chat_ids(messages: list[Any], engine: Engine, where: str) -> list[int]:
    """Token ids of a conversation in the chat template.

    where: file and line, for messages. Raises ConfigError where the template refuses.
    """
    try:
        return engine.chat_prompt(messages)
    except PromptError as error:
        raise ConfigError(f"{where}: {error}, or drop the line") from None


def entry_ids(entry: PromptEntry, engine: Engine, *, as_message: bool) -> list[int]:
    """Token ids of one prompt of a file, in the chat template where it is a conversation.

    as_message: a text of which its line does not say what it is (``format``) is a message too. Raises ConfigError,
    PromptError.
    """
    asked = conversation(entry)
    if asked.messages:
        return chat_ids(list(asked.messages), engine, entry.where)
    is_message = asked.format == "chat" or (as_message and asked.is_bare)
    if is_message and template_of(engine.tokenizer):
        return chat_ids([{"role": "user", "content": asked.texts[0]}], engine, entry.where)
    return text_ids(asked.texts[0], engine)


def text_ids(text: str, engine: Engine) -> list[int]:
    """Token ids of a text as it is. Raises ConfigError without a tokenizer."""
    if engine.tokenizer is None:
        raise ConfigError("prompts are texts, and this target has no tokenizer: give a file of responses")
    return token_ids(text, engine.tokenizer)


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
