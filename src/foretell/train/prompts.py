"""Check training prompts: conversations must suit the chat template, and prompts must be short enough to be
answered."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foretell.core.errors import ConfigError, PromptError
from foretell.engine.engine import Engine


def chat_ids(messages: list[Any], engine: Engine, where: str) -> list[int]:
    """Token ids of a conversation in the chat template.

    where: file and line, for messages. Raises ConfigError where the template refuses.
    """
    try:
        return engine.chat_prompt(messages)
    except PromptError as error:
        raise ConfigError(f"{where}: {error}, or drop the line") from None


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
