"""Tool calls: OpenAI's tools into a prompt and a grammar, and the text that comes back into OpenAI's calls.

The form is Qwen's and Hermes': ``<tool_call>``, a line with ``{"name": ..., "arguments": {...}}``, ``</tool_call>``. What
is generated is held to it, arguments by the tool's own JSON schema, so a call is malformed only where a limit cut it off.

::

    use = ToolUse.of(body["tools"], body.get("tool_choice"), body.get("parallel_tool_calls", True))
    if knows_tools(template): text = tokenizer.apply_chat_template(messages, tools=use.rendered, ...)
    else: text = tokenizer.apply_chat_template(messages_with_tools(messages, use.rendered), ...)
    constraint = use.constraint(constraints)                      # None for "none"
    stream = ToolCallStream(only_calls=use.only_calls)            # where use.calls: push(piece.text), in the end finish()
"""

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Literal

from foretell.core.errors import ConfigError
from foretell.engine.request.calls import CLOSE, OPEN
from foretell.engine.structured.constraint import CULPRIT_S, Constraint, Constraints, json_options
from foretell.engine.structured.enforceable import Reduced
from foretell.server.logs import log
from foretell.server.texts.bare_calls import Tools, call_of, may_begin, takes_nothing
from foretell.server.texts.channels import grammar_of

BLANK = r"/[ \t\r\n]{1,16}/"
"""White space between calls and after the last one. Where it may be, the model may end; it is bounded, as an uncertain
model may write blanks until its limit."""
LIKELY = len("<tool")
"""Characters of an opener that a limit cut off, from which it is taken for one where a text might go on otherwise."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_PARTS = [
    r"\s*", r"\{", r"\s*", *'"name"', r"\s*", ":", r"\s*", '"', f"(?P<name>{_NAME.pattern})", '(?P<end>")',
    r"\s*", ",", r"\s*", *'"arguments"', r"\s*", ":", r"\s*",
]  # fmt: skip
_HEAD = re.compile("".join(_PARTS) + r"(?=\{)")
_BEGUN = re.compile("".join(f"(?:{part}" for part in _PARTS) + ")?" * len(_PARTS))
"""The beginning of what ``_HEAD`` matches."""


# -- the request ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CallableTool:
    """One function that the model may call."""

    name: str
    parameters: Mapping[str, Any]  # JSON schema of an object
    strict: bool  # refuse a schema that cannot be enforced whole, instead of enforcing what can be
    given: Mapping[str, Any]  # as the request had it: what templates render

    @classmethod
    def of(cls, given: Any) -> "CallableTool":
        """Read {"type": "function", "function": {"name", "description", "parameters", "strict"}}. Raises ConfigError."""
        function = given.get("function") if isinstance(given, Mapping) else None
        if not isinstance(given, Mapping) or given.get("type") != "function" or not isinstance(function, Mapping):
            raise ConfigError(f'a tool must be {{"type": "function", "function": {{...}}}}; got {_short(given)}')
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(f"tool name {_short(name)} must be 1 to 64 of letters, digits, '_', '-' and '.'")
        parameters = {} if parameters is None else parameters
        if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
            raise ConfigError(f"tool {name!r}: parameters must be a JSON schema of an object; got {_short(parameters)}")
        if takes_nothing(parameters):
            parameters = {"properties": {}, "additionalProperties": False}
        return cls(name, {**parameters, "type": "object"}, function.get("strict") is True, given)

    def reduced(self, constraints: Constraints) -> Reduced:
        """Its parameters without what no grammar holds. Raises ConfigError."""
        try:
            return constraints.reduced(self.parameters, strict=self.strict)
        except ConfigError as error:
            raise ConfigError(f"tool {self.name!r}: {error}") from None


@dataclass(frozen=True)
class ToolUse:
    """Which tools a request may, must or must not use."""

    tools: tuple[CallableTool, ...]  # those that may be called: for a named choice, that one
    mode: Literal["none", "auto", "required", "named"]
    parallel: bool  # more than one call
    rendered: tuple[Mapping[str, Any], ...]  # those that the prompt lists; none where none may be called
    bare: bool = False  # an answer that is a call but for its marks is one, too
    channels: bool = False  # calls are gpt-oss's (``channels.py``)

    @classmethod
    def of(cls, tools: Any = None, tool_choice: Any = None, parallel_tool_calls: bool | None = None) -> "ToolUse":
        """Read the request's fields; None is what OpenAI's API takes by default. Raises ConfigError."""
        if tools is not None and (isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence)):
            raise ConfigError(f"tools must be a list; got {_short(tools)}")
        known = tuple(CallableTool.of(given) for given in tools or ())
        names = [tool.name for tool in known]
        if len(set(names)) < len(names):
            raise ConfigError(f"tool names must differ; got {', '.join(names)}")
        parallel = True if parallel_tool_calls is None else bool(parallel_tool_calls)
        rendered = tuple(tool.given for tool in known)
        if tool_choice is None:
            tool_choice = "auto" if known else "none"
        if tool_choice == "none" or (tool_choice == "auto" and not known):
            return cls((), "none", parallel, ())
        if not known:
            raise ConfigError(f"tool_choice = {_short(tool_choice)} needs tools; none were given")
        if tool_choice in ("auto", "required"):
            return cls(known, tool_choice, parallel, rendered)
        if isinstance(tool_choice, Mapping) and tool_choice.get("type") == "allowed_tools":
            allowed, mode = _allowed(tool_choice.get("allowed_tools"), known)
            return cls(allowed, mode, parallel, rendered)
        function = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
        if not isinstance(function, Mapping) or tool_choice.get("type") != "function":
            raise ConfigError(
                f'tool_choice = {_short(tool_choice)} must be "none", "auto", "required", '
                '{"type": "function", "function": {"name": ...}} or {"type": "allowed_tools", "allowed_tools": {...}}'
            )
        named = tuple(tool for tool in known if tool.name == function.get("name"))
        if not named:
            raise ConfigError(f"tool_choice names {_short(function.get('name'))}; the tools are {', '.join(names)}")
        return cls(named, "named", parallel, rendered)

    @property
    def calls(self) -> bool:
        """Whether calls may come: whether the output must go through a ``ToolCallStream``."""
        return self.mode != "none"

    def constraint(self, constraints: Constraints, text: str | None = None) -> Constraint | None:
        """The constraint of the output; None for "none". Raises ConfigError for a schema, naming its tool.

        "auto": free text up to an opener, then calls to the end. "required": calls only. Named: that one call. After any
        call, and the white space after it, the output may end. text: a Lark term of what an answer without calls must be;
        the output is then either it or calls.
        """
        if not self.calls:
            return None

        def made_of(parts: Sequence[Reduced], fewer: Callable[[], Constraint] | None = None) -> Constraint:
            named = (f"{tool.name}.{one}" for tool, part in zip(self.tools, parts, strict=True) for one in part[1])
            lark = self._lark(constraints, text, [part[0] for part in parts])
            return constraints.grammar(lark, left_out=tuple(named), fewer=fewer)

        def fewer() -> Constraint:
            end = monotonic() + CULPRIT_S
            return made_of([
                one if monotonic() > end else constraints.enforceable(tool.parameters, strict=tool.strict)
                for tool, one in zip(self.tools, known, strict=True)
            ])  # fmt: skip

        known = [tool.reduced(constraints) for tool in self.tools]
        try:
            return made_of(known, fewer)
        except ConfigError as error:
            found = constraints.culprit((tool.name, tool.parameters, tool.strict) for tool in self.tools)
            if found is not None:
                raise ConfigError(f"tool {found[0]!r}: {found[1]}") from error
            raise

    @property
    def bare_tools(self) -> Tools | None:
        """Those of which an answer may be a call without marks."""
        return {tool.name: tool.parameters for tool in self.tools} if self.bare and self.mode == "auto" else None

    @property
    def only_calls(self) -> bool:
        """Whether the output has no text outside calls."""
        return self.mode in ("required", "named")

    def _lark(self, constraints: Constraints, text: str | None, schemas: Sequence[Mapping[str, Any]]) -> str:
        """schemas: of the tools' arguments, without what no grammar holds."""
        if self.channels:
            terms = [
                (tool.name, f"%json {json.dumps(_with_options(tool, parameters))}")
                for tool, parameters in zip(self.tools, schemas, strict=True)
            ]
            return grammar_of(constraints, terms, text, must=self.only_calls)
        opener, closer = (constraints.marker(text) for text in (OPEN, CLOSE))
        rules = [f"body: {' | '.join(f'tool_{index}' for index in range(len(self.tools)))}"]
        for index, (tool, parameters) in enumerate(zip(self.tools, schemas, strict=True)):
            schema = json.dumps(_with_options(tool, parameters))
            head = json.dumps(f'\n{{"name": {json.dumps(tool.name)}, "arguments": ')
            rules.append(f'tool_{index}: {head} %json {schema} "}}\\n" {closer}')
        more = f"(BLANK? {opener} body)*" if self.parallel and self.mode != "named" else ""
        more, rules = f"{more} BLANK?", [*rules, f"BLANK: {BLANK}"]
        if self.mode != "auto":
            return "\n".join([f"start: {opener} body {more}", *rules])
        if text is not None:
            return "\n".join([f"start: {opener} body {more} | answer", f"answer: {text}", *rules])
        # Text holds no spelled opener. Where the opener is spelled it ends the text lazily: the moment it is complete.
        free = constraints.free_tokens(OPEN)
        piece = f"(TEXT | {free})" if free else "TEXT"
        spelled = opener == json.dumps(OPEN)
        return "\n".join(
            [
                f"start: {piece}* (opened body {more})?",
                f"opened[lazy]: /(.|\\n)*{OPEN}/" if spelled else f"opened: {opener}",
                f"TEXT: /(.|\\n)+/ & ~/(.|\\n)*{OPEN}(.|\\n)*/",
                *rules,
            ]
        )


def _with_options(tool: CallableTool, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**parameters, "x-guidance": json_options(strict=tool.strict, compact=False)}


def _allowed(given: Any, known: Sequence[CallableTool]) -> tuple[tuple[CallableTool, ...], Literal["auto", "required"]]:
    """(the tools that may be called, how) of a tool_choice "allowed_tools". Raises ConfigError."""
    listed = given.get("tools") if isinstance(given, Mapping) else None
    mode = given.get("mode") if isinstance(given, Mapping) else None
    if mode not in ("auto", "required") or not isinstance(listed, Sequence) or not listed:
        raise ConfigError(f'allowed_tools = {_short(given)} must have a mode, "auto" or "required", and tools')
    names = [one.get("function", {}).get("name") if isinstance(one, Mapping) else None for one in listed]
    missing = [name for name in names if name not in {tool.name for tool in known}]
    if missing:
        told = ", ".join(tool.name for tool in known)
        raise ConfigError(f"allowed_tools names {_short(missing[0])}; the tools are {told}")
    return tuple(tool for tool in known if tool.name in names), mode


def _short(given: Any) -> str:
    text = repr(given)
    return text if len(text) <= 80 else text[:77] + "..."


# -- the output ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ContentDelta:
    """A piece of text outside calls."""

    text: str


@dataclass(frozen=True)
class CallDelta:
    """A piece of call ``index``: the first one has id and name, those that follow pieces of the arguments' text."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""

    def as_openai(self) -> dict[str, Any]:
        """An entry of ``delta.tool_calls``."""
        function = {"arguments": self.arguments} if self.name is None else {"name": self.name, "arguments": ""}
        first = {} if self.id is None else {"id": self.id, "type": "function"}
        return {"index": self.index, **first, "function": function}


@dataclass
class WrittenCall:
    """A whole call; one that a limit cut off has the beginning of its arguments."""

    id: str
    name: str
    arguments: str  # JSON text, exactly as it was generated

    def as_openai(self) -> dict[str, Any]:
        """An entry of ``message.tool_calls``."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def arguments_of(text: str) -> Any:
    """A call's arguments as an object; an empty one where a limit cut them off, as the end of the reply tells."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {}


def new_call_id() -> str:
    """``call_`` and 24 random characters."""
    return f"call_{secrets.token_hex(12)}"


class ToolCallStream:
    """Reads a text as it comes; the deltas joined are the same however it was cut into pieces.

    White space around calls belongs to the form and is dropped. Text that starts like a call but is not one (only in
    unconstrained texts) is returned as content, unchanged. A call that was cut off is the form's as well: without its name
    it is nothing, with its name a call with as much of its arguments as there is.
    """

    def __init__(
        self, new_id: Callable[[], str] = new_call_id, *, only_calls: bool = False, bare: Tools | None = None
    ) -> None:
        """new_id makes the calls' ids. only_calls: there is no text outside calls. bare: tools of which a whole answer may
        be a call without marks; it is held back as long as it may."""
        self._new_id, self._only_calls, self._bare_tools = new_id, only_calls, bare or {}
        self._rest = ""
        self._blanks = ""  # before the opener that was read last
        self._follows_call = False  # nothing but blanks since a call
        self._read: Callable[[list[ContentDelta | CallDelta], bool], bool] = self._bare if bare else self._content
        self._depth, self._quoted, self._escaped = 0, False, False
        # Calls begun so far; "tool_calls" is the finish_reason where the text ended by itself and this is not 0.
        self.num_calls = 0

    def push(self, text: str) -> list[ContentDelta | CallDelta]:
        """The deltas that a further piece of text completes."""
        return self._drain(text, final=False)

    def finish(self, *, cut: bool = False) -> list[ContentDelta | CallDelta]:
        """The end of the text: the deltas that were held back. cut: a limit ended it."""
        if self._read == self._bare and (cut or call_of(self._rest, self._bare_tools) is None):
            self._read = self._content
        if self._read == self._content:
            size = _begun(self._rest)
            if size and (self._only_calls or self._follows_call or (cut and size >= LIKELY)):
                self._rest = self._rest[:-size].rstrip()
        return self._drain("", final=True)

    def _drain(self, text: str, *, final: bool) -> list[ContentDelta | CallDelta]:
        self._rest += text
        made: list[ContentDelta | CallDelta] = []
        while self._read(made, final):
            pass
        return made

    # Each reader consumes what it can of the rest and returns whether another one (or itself) may continue.

    def _bare(self, made: list[ContentDelta | CallDelta], final: bool) -> bool:
        if not final and may_begin(self._rest, self._bare_tools):
            return False
        call = call_of(self._rest, self._bare_tools) if final else None
        self._read = self._content
        if call is None:
            return True
        log("a call without marks", tool=call[0])
        self._begin(made, call[0])
        made.append(CallDelta(self.num_calls - 1, arguments=call[1]))
        self._rest = ""
        return False

    def _content(self, made: list[ContentDelta | CallDelta], final: bool) -> bool:
        at = self._rest.find(OPEN)
        if at >= 0:
            text = self._rest[:at].rstrip()
            self._blanks, self._rest, self._read = self._rest[len(text) : at], self._rest[at + len(OPEN) :], self._head
        else:
            end = len(self._rest) if final else len(self._rest) - _held(self._rest)
            text, self._rest = self._rest[:end], self._rest[end:]
            if final and self._follows_call:
                text = text.rstrip()
        if text:
            self._follows_call = False
            made.append(ContentDelta(text))
        return at >= 0

    def _head(self, made: list[ContentDelta | CallDelta], final: bool) -> bool:
        found = _HEAD.match(self._rest)
        if found:
            self._begin(made, found["name"])
            self._rest, self._read = self._rest[found.end() :], self._arguments
            self._depth, self._quoted, self._escaped = 0, False, False
            return True
        end = self._rest.find(CLOSE)
        if end < 0 and not final:
            return False
        if end < 0 and (begun := _BEGUN.fullmatch(self._rest)):
            if begun["end"]:
                self._begin(made, begun["name"])
            self._rest = ""
            return False
        end = len(self._rest) if end < 0 else end + len(CLOSE)
        made.append(ContentDelta(self._blanks + OPEN + self._rest[:end]))
        self._rest, self._read, self._follows_call = self._rest[end:], self._content, False
        return True

    def _begin(self, made: list[ContentDelta | CallDelta], name: str) -> None:
        made.append(CallDelta(self.num_calls, self._new_id(), name))
        self.num_calls += 1

    def _arguments(self, made: list[ContentDelta | CallDelta], final: bool) -> bool:
        end = len(self._rest)
        for place, character in enumerate(self._rest):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = character == "\\", character != '"'
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    end, self._read = place + 1, self._tail
                    break
        if end:
            made.append(CallDelta(self.num_calls - 1, arguments=self._rest[:end]))
        self._rest = self._rest[end:]
        return self._read == self._tail

    def _tail(self, made: list[ContentDelta | CallDelta], final: bool) -> bool:
        end = self._rest.find(CLOSE)
        if end < 0:
            return False
        self._rest, self._read, self._follows_call = self._rest[end + len(CLOSE) :], self._content, True
        return True


def _begun(text: str) -> int:
    """Length of the longest end of the text that is the beginning of an opener."""
    return next((size for size in range(len(OPEN) - 1, 0, -1) if text.endswith(OPEN[:size])), 0)


def _held(text: str) -> int:
    """Length of the longest end of the text that may be white space before an opener, or the beginning of one."""
    return len(text) - len(text[: len(text) - _begun(text)].rstrip())
