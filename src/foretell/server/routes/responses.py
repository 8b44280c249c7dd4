"""``POST /v1/responses``: the newer form of a conversation, over the same engine. Nothing is stored."""

from collections.abc import AsyncIterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from foretell.engine.request.result import Completion
from foretell.engine.request.row import Piece
from foretell.engine.structured.thoughts import Thinking
from foretell.server.answer import Answer, by_choice, read
from foretell.server.errors import ApiError, bad
from foretell.server.job import finish
from foretell.server.protocol.responses import CustomTool, ResponsesRequest, SingleTool, as_chat, flat_tools
from foretell.server.routes.chat import ChatPlan, answer_of, plan_of
from foretell.server.stream import KEEP_ALIVE, event
from foretell.server.texts.reading import TextReading
from foretell.server.texts.tools import CallDelta, ContentDelta, ToolUse

Events = list[dict[str, Any]]


async def responses(request: Request) -> Response:
    """Go on with items."""
    body, backend = await read(request, ResponsesRequest)
    _check(body)
    try:
        plan = await plan_of(request, backend, as_chat(body))
    except ApiError as error:
        if error.param is not None and error.param.startswith("messages"):  # which this route has not
            error.message, error.param = error.message.removeprefix(f"{error.param}: "), "input"
        raise
    answer, failed = answer_of(request, backend, body, plan, "response", "resp"), _Numbered()
    formats = [
        f"tools.{name}.format" for name, _, one in flat_tools(body) if isinstance(one, CustomTool) and one.format
    ]
    parts = _events(answer, body, plan, failed), _whole(answer, body, plan)
    return await answer.reply(*parts, (*plan.without_effect, *formats), failed=failed.event)


def _check(body: ResponsesRequest) -> None:
    """Refuse what would be ignored. Raises ApiError 400."""
    limits = {count for count in (body.max_output_tokens, body.max_tokens) if count is not None}
    if len(limits) > 1:
        raise bad("max_tokens and max_output_tokens are one setting: give it once", "max_output_tokens")
    if body.top_logprobs and not body.wants_logprobs:
        raise bad("top_logprobs: only where include has 'message.output_text.logprobs'", "top_logprobs")


async def _whole(answer: Answer, body: ResponsesRequest, plan: ChatPlan) -> dict[str, Any]:
    await finish(answer.job)
    (completion,) = answer.job.whole()
    output = ResponseOutput(plan.thinking, plan.calls, flat_tools(body))
    shown = answer.shown(completion.pieces, completion) if body.wants_logprobs else ()
    output.push(completion.pieces, completion.text, answer.backend.texts.chat_logprobs(shown)["content"], completion)
    return {**_envelope(answer, body, completion, output.items), **answer.figures([completion])}


async def _events(answer: Answer, body: ResponsesRequest, plan: ChatPlan, failed: "_Numbered") -> AsyncIterator[bytes]:
    output, job = ResponseOutput(plan.thinking, plan.calls, flat_tools(body)), answer.job
    begun = _envelope(answer, body, None, [])
    yield failed.send([{"type": f"response.{what}", "response": begun} for what in ("created", "in_progress")])
    while not job.is_done:
        made: Events = []
        for one in by_choice(await job.news(answer.backend.options.keepalive_s)).values():
            shown = answer.shown(one.pieces, one.completion) if body.wants_logprobs else ()
            scores = answer.backend.texts.chat_logprobs(shown)["content"]
            made += output.push(one.pieces, one.text, scores, one.completion)
        yield failed.send(made) if made else KEEP_ALIVE
    (completion,) = job.whole()
    whole = {**_envelope(answer, body, completion, output.items), **answer.figures([completion])}
    yield failed.send([{"type": f"response.{whole['status']}", "response": whole}])


def _status(completion: Completion) -> str:
    return "completed" if completion.finish_reason == "stop" else "incomplete"


def _envelope(
    answer: Answer, body: ResponsesRequest, completion: Completion | None, output: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """The response's object: its settings as they were taken. completion: None while it is written."""
    status = "in_progress" if completion is None else _status(completion)
    why = None
    if completion is not None and status == "incomplete":
        why = {"reason": "timeout" if completion.finish_reason == "timeout" else "max_output_tokens"}
    params = answer.job.submissions[0].params
    given = body.model_dump(exclude_none=True, by_alias=True)
    return {
        "id": answer.id.replace("-", "_"),
        "object": "response",
        "created_at": answer.created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": why,
        "instructions": body.instructions,
        "max_output_tokens": answer.max_tokens,
        "metadata": body.metadata or {},
        "model": answer.model,
        "output": list(output),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
        "seed": params.seed,
        "store": False,
        "temperature": params.temperature,
        "text": {"format": given.get("text", {}).get("format", {"type": "text"})},
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": given.get("tools", []),
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None if completion is None else _usage(completion, answer.num_thought([completion])),
        "user": body.user,
    }


def _usage(completion: Completion, num_thought: int) -> dict[str, Any]:
    return {
        "input_tokens": completion.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": completion.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": completion.num_tokens,
        "output_tokens_details": {"reasoning_tokens": num_thought},
        "total_tokens": completion.num_prompt_tokens + completion.num_tokens,
    }


class _Numbered:
    """Numbers the events of one stream, the error that may end it among them."""

    def __init__(self) -> None:
        self._number = 0

    def send(self, events: Events) -> bytes:
        """Events with their numbers, in OpenAI's form: each has its type as the event's name."""
        out = []
        for one in events:
            data = {**one, "sequence_number": self._number}
            self._number += 1
            out.append(event(data, one["type"]))
        return b"".join(out)

    def event(self, error: ApiError) -> bytes:
        """The last event of a stream that failed."""
        return self.send([{"type": "error", "code": error.code, "message": error.message, "param": error.param}])


@dataclass
class ResponseOutput:
    """The items of one answer as its text comes, and the events that tell of them."""

    thinking: Thinking | None  # how the text thinks; None: not at all
    calls: ToolUse | None  # the tools that the text may call; None: none
    tools: Sequence[tuple[str, str | None, SingleTool]] = ()  # see ``flat_tools``
    items: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Nothing is open yet."""
        self._reader = TextReading(self.thinking, self.calls)
        self._open: dict[str, Any] | None = None
        self._scores: list[dict[str, Any]] = []  # of text that is held back
        self._written = ""  # the arguments of a call that takes a text

    def push(
        self, pieces: Sequence[Piece], text: str, scores: Sequence[dict[str, Any]] = (), done: Completion | None = None
    ) -> Events:
        """Further tokens and text, and the log probabilities of those that are the answer's. done: with the last of them.
        An answer without any item gets an empty message."""
        self._scores += scores
        made: Events = []
        for delta in self._reader.push(pieces, text, done):
            if isinstance(delta, CallDelta):
                made += self._call(delta)
            else:
                made += self._text(delta.text) if isinstance(delta, ContentDelta) else self._thought(delta.text)
        if done is None:
            return made
        made += [] if self.items else self._message()
        return made + self._close(_status(done))

    @property
    def _at(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self.items) - 1}

    def _begin(self, item: dict[str, Any]) -> Events:
        made = self._close("completed")
        self.items.append(item)
        self._open = item
        return [
            *made,
            {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": deepcopy(item)},
        ]

    def _message(self) -> Events:
        item = _new("message", "msg", role="assistant", content=[])
        made = self._begin(item)
        part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item["content"] = [part]
        return [*made, {"type": "response.content_part.added", **self._at, "content_index": 0, "part": deepcopy(part)}]

    def _text(self, text: str) -> Events:
        made = [] if self._open is not None and self._open["type"] == "message" else self._message()
        assert self._open is not None
        part, scores = self._open["content"][0], self._scores
        self._scores = []
        part["text"] += text
        part["logprobs"] += scores
        told = {"type": "response.output_text.delta", **self._at, "content_index": 0, "delta": text, "logprobs": scores}
        return [*made, told]

    def _thought(self, text: str) -> Events:
        made: Events = []
        if self._open is None or self._open["type"] != "reasoning":
            item = _new("reasoning", "rs", summary=[], content=[])
            made = self._begin(item)
            item["content"] = [{"type": "reasoning_text", "text": ""}]
        assert self._open is not None
        self._open["content"][0]["text"] += text
        return [*made, {"type": "response.reasoning_text.delta", **self._at, "content_index": 0, "delta": text}]

    def _call(self, delta: CallDelta) -> Events:
        if delta.id is not None:
            known = ((space, tool) for name, space, tool in self.tools if name == delta.name)
            space, tool = next(known, (None, None))
            self._written, is_text = "", isinstance(tool, CustomTool)
            kind, prefix, field = (
                ("custom_tool_call", "ctc", "input") if is_text else ("function_call", "fc", "arguments")
            )
            named = {} if space is None else {"namespace": space}
            name = delta.name if tool is None else tool.name
            return self._begin(_new(kind, prefix, call_id=delta.id, name=name, **named, **{field: ""}))
        assert self._open is not None
        if self._open["type"] == "custom_tool_call":  # its text is sent whole: these are pieces of JSON
            self._written += delta.arguments
            return []
        self._open["arguments"] += delta.arguments
        return [{"type": "response.function_call_arguments.delta", **self._at, "delta": delta.arguments}]

    def _close(self, status: str) -> Events:
        item = self._open
        if item is None:
            return []
        at = self._at
        made: Events = []
        if item["type"] == "message":
            part, place = item["content"][0], {**at, "content_index": 0}
            part["logprobs"] += self._scores
            self._scores = []
            told = {"text": part["text"], "logprobs": part["logprobs"]}
            made.append({"type": "response.output_text.done", **place, **told})
            made.append({"type": "response.content_part.done", **place, "part": deepcopy(part)})
        elif item["type"] == "reasoning":
            told = {"content_index": 0, "text": item["content"][0]["text"]}
            made.append({"type": "response.reasoning_text.done", **at, **told})
        elif item["type"] == "custom_tool_call":
            item["input"] = _input_of(self._written)
            made.append({"type": "response.custom_tool_call_input.delta", **at, "delta": item["input"]})
            made.append({"type": "response.custom_tool_call_input.done", **at, "input": item["input"]})
        else:
            told = {"name": item["name"], "arguments": item["arguments"]}
            made.append({"type": "response.function_call_arguments.done", **at, **told})
        item["status"], self._open = status, None
        made.append({"type": "response.output_item.done", "output_index": at["output_index"], "item": deepcopy(item)})
        return made


def _new(kind: str, prefix: str, **more: Any) -> dict[str, Any]:
    """An item that has just begun."""
    return {"id": f"{prefix}_{uuid4().hex}", "type": kind, "status": "in_progress", **more}


def _input_of(arguments: str) -> str:
    """The text that a call has, or as much of it as a limit has left."""
    try:
        return str(from_json(arguments, allow_partial="trailing-strings").get("input", ""))
    except ValueError:  # nothing but a blank
        return ""
