"""Calls in gpt-oss's form (harmony): each is a message of its own, and its head names the function.

``<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>``; the name may stand before the
channel, as it does in the template's own. The output is held to a grammar from its first token on: thoughts and what is
said on the way are free texts, heads are those of the form, arguments are held to their tool's schema. One call ends a
turn.
"""

from collections.abc import Sequence
from typing import Any

from foretell.engine.request.calls import in_channels
from foretell.engine.structured.constraint import Constraints

MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
CONSTRAIN = "<|constrain|>"
MOST_SAID = 8
"""Messages before the last one: a model that is not certain would begin another for as long as it may."""


def can_call(template: str, tokenizer: Any) -> bool:
    """Whether calls can come so: the template shows them, and each mark is a token."""
    if not in_channels(template):
        return False
    return all(len(tokenizer.encode(mark, add_special_tokens=False)) == 1 for mark in MARKS)


def grammar_of(constraints: Constraints, calls: Sequence[tuple[str, str]], text: str | None, *, must: bool) -> str:
    """A Lark grammar of a whole output after ``<|start|>assistant``. calls: names of functions, and terms of what their
    arguments are; text: a term of what an answer without a call must be; must: a call comes."""
    start, channel, message, end = (constraints.token(mark) for mark in MARKS)
    free = constraints.free_tokens(*MARKS, CONSTRAIN)
    constrain = f"{constraints.token(CONSTRAIN)}?" if constraints.has_token(CONSTRAIN) else ""
    heads, rules = [f"call_{index}" for index in range(len(calls))], []
    for head, (name, term) in zip(heads, calls, strict=True):
        to = f"to=functions.{name}"
        rules.append(f'{head}: ({channel} "commentary {to}" | " {to}" {channel} "commentary") kind? {message} {term}')
    last = [] if must else [f'{channel} "final" {message} {"text" if text is None else "answer"}']
    return "\n".join(
        [
            f"start: said{{0,{MOST_SAID}}} ({' | '.join([*last, *heads])})",
            f'said: {channel} ("analysis" | "commentary") {message} text {end} {start} "assistant"',
            f'kind: " " {constrain} "json"',
            f"text: {f'(TEXT | {free})*' if free else 'TEXT?'}",
            *([] if text is None or must else [f"answer: {text}"]),
            *rules,
            "TEXT: /(.|\\n)+/",
        ]
    )
