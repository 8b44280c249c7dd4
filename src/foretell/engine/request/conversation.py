"""A conversation as a model reads it: the chat template that is used, turns that suit it, and its tokens."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from foretell.checkpoints.templates import as_parts, roles_of_parts
from foretell.core.errors import ConfigError, PromptError
from foretell.engine.request.calls import (
    arguments_text,
    functions_of,
    messages_with_tools,
    with_arguments,
    with_functions,
)
from foretell.engine.request.markers import Hidden, Markers
from foretell.engine.request.request import check_text
from foretell.engine.request.text import Tokenizer, known_of
from foretell.model.target import ModelSpec

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


Tools = Sequence[Mapping[str, Any]]
SYSTEM = ("system", "developer")
JOINED = (*SYSTEM, "user", "assistant")
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""The names by which templates read an earlier thought."""


@dataclass(frozen=True)
class Rendered:
    """A conversation's text."""

    text: str
    hidden: Hidden
    tokenizer: Tokenizer
    marked: str  # the text with its hidden markers

    def ids(self, until: str = "") -> list[int]:
        """Its token ids; of those before a text of the last turn (until) what any letter there leaves as it is, none where
        the text is not found. Raises PromptError where this tokenizer cannot read a marker as text."""
        check_text(self.text)
        if not until:
            return self.hidden.ids(self.tokenizer, self.marked)
        begun = self.marked[: self.marked.rfind(until) + 1]
        return self.hidden.ids(self.tokenizer, begun)[:-1]  # the last has the text's first letter


def template_of(tokenizer: Tokenizer | None, *, tools: bool = False) -> str | None:
    """The source of the chat template for a conversation with or without tools, by transformers' rule: of several ones
    ``tool_use`` with tools, if there is one, else ``default``. None where there is none."""
    found = getattr(tokenizer, "chat_template", None)
    if isinstance(found, Mapping):
        found = found.get("tool_use" if tools and "tool_use" in found else "default")
    return found if isinstance(found, str) and hasattr(tokenizer, "apply_chat_template") else None


def is_instruct(tokenizer: Tokenizer | None, eos_token_ids: Iterable[int]) -> bool:
    """Whether a model was taught conversations: its template ends the assistant's turn with a token that ends its output.
    Base models often come with a template of markers that they have never seen."""
    if tokenizer is None or template_of(tokenizer) is None:
        return False
    said = "whatsaidit"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": said}]
    try:
        closing = render(turns, tokenizer, "", generate=False).text.rpartition(said)[2]
    except (ConfigError, PromptError):
        return False
    ends = (tokenizer.decode([token]).strip() for token in eos_token_ids)
    return any(end and end in closing for end in ends)


def takes_messages(
    spec: ModelSpec,
    tokenizer: Tokenizer | None,
    are_bare: Sequence[bool],
    *,
    raw: bool = False,
    notice: Callable[[str], None] = lambda line: None,
) -> bool:
    """Whether texts of which their file does not say what they are go into the chat template: an instruct model ends its
    answer to a bare text at once. All that reads prompts asks here.

    are_bare: of each prompt, whether it is such a text; raw: never; notice: called with a line that says so, where they go
    there."""
    count = sum(are_bare)
    if raw or not count or not is_instruct(tokenizer, spec.eos_token_ids):
        return False
    template = f"into the chat template of {spec.display_name!r}, an instruct model"
    if len(are_bare) == 1:
        notice(f"the prompt goes {template}; --raw keeps it as it is")
    else:
        how = '--raw, or "format": "text" in a line, keeps them as they are'
        notice(f"{count} of {len(are_bare)} prompts go {template}; {how}")
    return True


def render(
    messages: Messages,
    tokenizer: Tokenizer | None,
    name: str,
    *,
    tools: Tools | None = None,
    compose: Callable[[Messages, Tools], Messages] | None = None,
    extra: Mapping[str, Any] | None = None,
    generate: bool = True,
    goes_on: bool = False,
    parse_special: bool = False,
) -> Rendered:
    """A conversation by the chat template of the model of that name.

    tools: for the template, or for ``compose``, which makes plain turns of messages and tools; extra: further values of
    the template; generate: with the beginning of a reply; goes_on: ending in the middle of the last message;
    parse_special: markers in contents count as tokens. A template that reads texts as lists of parts gets lists. Where it
    refuses the turns, or leaves out what one of them says, it gets them in another form: neighbours of one role joined, the
    system's text in the user's, a call beside a text as a turn of its own, calls and results as texts.

    Raises ConfigError without a template, PromptError where no form is taken with all that the messages say.
    """
    source = template_of(tokenizer, tools=tools is not None and compose is None)
    if source is None or tokenizer is None:
        named = getattr(tokenizer, "chat_template", None)
        several = f" for these messages ({', '.join(map(repr, named))} alone)" if isinstance(named, Mapping) else ""
        raise ConfigError(f"{name!r} has no chat template{several}: give the prompt as plain text")
    if isinstance(messages, str | Mapping):
        raise PromptError(f"messages = {messages!r:.80} must be a list of objects with 'role' and 'content'")
    messages = [_alike(turn, source, calls_as_text=compose is not None) for turn in messages]
    hidden = Hidden(None if parse_special else Markers.of(tokenizer, source), messages, tools, extra)
    try:
        given = {**({"continue_final_message": True} if goes_on else {}), **hidden.hide(dict(extra or {}))}
        listed = hidden.hide(tools)
        turns: Messages = [
            hidden.hide(turn, of_assistant=isinstance(turn, Mapping) and turn.get("role") == "assistant")
            for turn in messages
        ]
    except RecursionError:
        raise PromptError("the messages, or their tools, are nested too deeply: mend them") from None
    template: Any = tokenizer.apply_chat_template  # type: ignore[attr-defined]
    in_parts = _roles_of_parts(tokenizer, source)
    forms = _forms(turns, listed) if compose is None else iter([(compose(turns, listed or ()), None)])
    refusal: Exception = ValueError("it takes none")
    for form, told in forms:

        def write(turns: Messages, told: Tools | None = told) -> str:
            options = {} if told is None else {"tools": told}
            taken = [as_parts(turn, in_parts) if isinstance(turn, Mapping) else turn for turn in turns]
            return str(template(taken, tokenize=False, add_generation_prompt=generate, **options, **given))

        for fitting in _fits(form):
            try:
                text = write(fitting)
                if (lost := untold(fitting, text, write)) is None:
                    return Rendered(hidden.shown(text), hidden, tokenizer, text)
                refusal = PromptError(f"it leaves out {hidden.shown(lost)}")
            except Exception as error:  # templates raise their own errors, and any other by what they read
                refusal = error
    advice = "say that in a message of the user, or leave it out" if isinstance(refusal, PromptError) else "mend them"
    raise PromptError(
        f"the chat template of {name!r} refuses these messages ({str(refusal) or type(refusal).__name__}): {advice}"
    ) from refusal


def content_ids(text: str, tokenizer: Tokenizer, *, parse_special: bool = False) -> list[int]:
    """Token ids of a text as the assistant's turn would have them. Raises PromptError."""
    hidden = Hidden(None if parse_special else Markers.of(tokenizer, template_of(tokenizer) or ""), text)
    return hidden.ids(tokenizer, hidden.hide(text, of_assistant=True))


def _alike(turn: Mapping[str, Any], source: str, *, calls_as_text: bool) -> Mapping[str, Any]:
    """A turn in the one form that all doors give it: a content of texts is a text, arguments are by one rule
    (``arguments_in``), and a developer is the system to templates that do not know the role. Raises PromptError."""
    if not isinstance(turn, Mapping):
        return turn
    made = with_arguments(turn, as_text=calls_as_text)
    if turn.get("role") == "developer" and "developer" not in source:
        made = {**made, "role": "system"}
    content = turn.get("content")
    if not isinstance(content, list | tuple) or not all(isinstance(part, Mapping) for part in content):
        return made
    kinds = [part.get("type", "text") for part in content]
    strange = next((kind for kind in kinds if kind not in ("text", "thinking")), None)
    if strange is not None:
        raise PromptError(f"a part of type {strange!r:.40} is not read: give texts, {{'type': 'text', 'text': ...}}")
    if "thinking" in kinds or not all(isinstance(part.get("text"), str) for part in content):
        return made
    return {**made, "content": "".join(part["text"] for part in content)}


def _roles_of_parts(tokenizer: Tokenizer, source: str) -> frozenset[str]:
    """See ``roles_of_parts``; found once for each template."""
    known = known_of(_IN_PARTS, tokenizer)
    if source not in known:
        template: Any = tokenizer.apply_chat_template  # type: ignore[attr-defined]
        known[source] = roles_of_parts(lambda turns: str(template(turns, chat_template=source, tokenize=False)))
    return known[source]


_IN_PARTS: WeakKeyDictionary[Tokenizer, dict[str, frozenset[str]]] = WeakKeyDictionary()


def _forms(turns: Messages, tools: Tools | None) -> Iterator[tuple[Messages, Tools | None]]:
    """The turns and the tools as they are, and as templates take them that show no call in one of these ways: arguments as
    an object, beside a text, at all."""
    yield turns, tools
    if not all(isinstance(turn, Mapping) for turn in turns):
        return
    if any(functions_of(turn) for turn in turns):
        yield [with_arguments(turn, as_text=True) for turn in turns], tools
        apart = [half for turn in turns for half in _apart(turn)]
        if len(apart) > len(turns):
            yield apart, tools
            yield [with_arguments(turn, as_text=True) for turn in apart], tools
    elif not any(turn.get("role") == "tool" for turn in turns):
        return
    yield messages_with_tools(turns, tools or ()), None


def _apart(turn: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A turn; where it has a text and calls, the one and then the other."""
    content = turn.get("content")
    if not functions_of(turn) or not content or (isinstance(content, str) and not content.strip()):
        return [turn]
    calls = {key: value for key, value in turn.items() if key not in THOUGHTS}
    return [{key: value for key, value in turn.items() if key != "tool_calls"}, {**calls, "content": ""}]


def _fits(turns: Messages) -> Iterator[Messages]:
    """The turns as they are, and as templates take them that want one turn of each in change, the system's at the
    beginning alone, or none of it."""
    yield turns
    made: list[Messages] = [turns]
    if not all(isinstance(turn, Mapping) for turn in turns):
        return
    begun = next((at for at, turn in enumerate(turns) if turn.get("role") not in SYSTEM), len(turns))
    for kept in (len(turns), begun, 0):
        fitting = _joined([turn if at < kept else _of_user(turn) for at, turn in enumerate(turns)])
        if fitting not in made:
            made.append(fitting)
            yield fitting


def _of_user(turn: Mapping[str, Any]) -> Mapping[str, Any]:
    """A system's text as the user's."""
    if turn.get("role") not in SYSTEM or not isinstance(turn.get("content"), str):
        return turn
    return {"role": "user", "content": turn["content"]}


def _joined(turns: Messages) -> Messages:
    """Neighbouring texts of one role as one, with an empty line between."""
    groups: list[list[Mapping[str, Any]]] = []
    for turn in turns:
        if groups and turn.get("role") in JOINED and _same_but_text(groups[-1][-1], turn):
            groups[-1].append(turn)
        else:
            groups.append([turn])
    return [
        one[0]
        if len(one) == 1
        else {**one[0], "content": "\n\n".join(turn["content"] for turn in one if turn["content"])}
        for one in groups
    ]


def _same_but_text(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    rests = [{key: value for key, value in turn.items() if key != "content"} for turn in (one, other)]
    texts = isinstance(one.get("content"), str) and isinstance(other.get("content"), str)
    return texts and rests[0] == rests[1] and "tool_calls" not in rests[0]
