"""Questions as the messages that are decoded: a later one is put after the target's own answer to the one before."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from foretell.bench.suite import Item
from foretell.bench.trace import DecodedRun
from foretell.core.errors import ConfigError, PromptError
from foretell.engine.engine import Engine
from foretell.engine.request.conversation import takes_messages, template_of
from foretell.engine.request.request import check_text, token_ids

if TYPE_CHECKING:
    pass


class Script:
    """The messages of questions, in their order. One for each turn; ``questions[i]`` is the question of message i."""

    def __init__(self, engine: Engine, items: Sequence[Item]) -> None:
        """Raises ConfigError where no question fits the context."""
        self._engine = engine
        self.messages: list[Item] = []
        self.questions: list[int] = []
        for number, item in enumerate(with_forms(engine, items)):
            self.questions += [number] * (1 + len(item.later))
            self.messages.append(item)
            self.messages += [
                replace(item, prompt=text, prediction=None, later=(), check=None, turn=turn)
                for turn, text in enumerate(item.later, 2)
            ]
        encoded = {i: encode_item(engine, item) for i, item in enumerate(self.messages) if item.turn == 1}
        room = engine.model.spec.max_positions
        self.first = {i: ids for i, ids in encoded.items() if len(ids) < room}
        """Token ids of first messages that fit the context."""
        if not self.first:
            raise ConfigError(f"none of {len(items)} prompts fits the context of {room} tokens")
        self.fitting = [i for i, item in enumerate(self.messages) if i - item.turn + 1 in self.first]
        """Messages of questions whose first one fits."""
        self.too_long: set[int] = set()
        """Later messages that turned out not to fit, with the answer before them."""

    def prompt(
        self, index: int, plain: Mapping[tuple[float, int], Sequence[DecodedRun]], temperature: float
    ) -> list[int] | None:
        """Token ids of message ``index``. plain: the runs of plain decoding so far, by (temperature, message), those of
        the messages before it included. None where it doesn't fit the context."""
        if index in self.first:
            return self.first[index]
        begin = index - self.messages[index].turn + 1
        if any((temperature, before) not in plain for before in range(begin, index)):  # one of them did not fit
            ids = None
        else:
            answers = [answer_text(self._engine, plain[temperature, i][0].token_ids) for i in range(begin, index)]
            texts = [item.prompt for item in self.messages[begin : index + 1]]
            ids = encode_turns(self._engine, self.messages[index].format, texts, answers)
        if ids is None or len(ids) >= self._engine.model.spec.max_positions:
            self.too_long.add(index)
            return None
        return ids


def with_forms(
    engine: Engine, items: Sequence[Item], *, raw: bool = False, notice: Callable[[str], None] = lambda line: None
) -> list[Item]:
    """The questions, none of them bare: messages for an instruct model, texts for any other. raw, notice: of
    ``takes_messages``."""
    are_bare = [item.is_bare for item in items]
    form = "chat" if takes_messages(engine.model.spec, engine.tokenizer, are_bare, raw=raw, notice=notice) else "text"
    return [replace(item, format=form, is_bare=False) if item.is_bare else item for item in items]


def encode_item(engine: Engine, item: Item) -> list[int]:
    """A first message's tokens: as a message where it is one and the tokenizer has a chat template, else as it is. A
    function to be completed is then given as code alone. Raises PromptError."""
    (item,) = with_forms(engine, [item])
    check = item.check
    try:
        if check is not None and check.given and not _has_template(engine):
            return encode_turns(engine, "text", [check.given], [])
        if item.messages and _has_template(engine):
            return engine.chat_prompt(item.messages)
        return encode_turns(engine, item.format, [item.prompt], [])
    except PromptError as error:
        raise PromptError(f"question {item.question_id} of the suite: {error}") from None


def encode_turns(engine: Engine, form: str, texts: Sequence[str], answers: Sequence[str]) -> list[int]:
    """A conversation's tokens, one text more than answers. Without a template they stand after each other, with an empty
    line between."""
    for text in texts:
        check_text(text)  # here, so that an error counts the characters of the text, not of the template
    if form == "chat" and _has_template(engine):
        messages = [{"role": "user", "content": texts[0]}]
        for answer, text in zip(answers, texts[1:], strict=True):
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": text}]
        return engine.chat_prompt(messages)
    if engine.tokenizer is None:
        raise ConfigError("a suite is text: the engine needs a tokenizer")
    parts = [part for pair in zip(texts, answers, strict=False) for part in pair]
    return token_ids("\n\n".join([*parts, texts[-1]]), engine.tokenizer)


def answer_text(engine: Engine, token_ids: Sequence[int]) -> str:
    """An answer as text, without special tokens."""
    return "" if engine.tokenizer is None else engine.tokenizer.decode(token_ids, skip_special_tokens=True)


def _has_template(engine: Engine) -> bool:
    return template_of(engine.tokenizer) is not None
