"""``POST /v1/messages``: a conversation in Anthropic's form, over the same plan and the same jobs as OpenAI's."""

import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from foretell.engine.request.result import Completion
from foretell.engine.request.row import Piece
from foretell.server.answer import Answer, by_choice, in_worker, read
from foretell.server.errors import ApiError
from foretell.server.job import finish
from foretell.server.protocol.anthropic import MessagesRequest, as_chat
from foretell.server.routes.chat import ChatPlan, answer_of, plan_of, prompt_of
from foretell.server.stream import JsonReply, event, while_connected
from foretell.server.texts.reading import TextReading, ThoughtDelta
from foretell.server.texts.tools import CallDelta, arguments_of

Events = list[dict[str, Any]]


async def messages(request: Request) -> Response:
    """Go on with a conversation."""
    body, backend = await read(request, MessagesRequest)
    plan = await _without_places(plan_of(request, backend, as_chat(body)))
    answer = answer_of(request, backend, body, plan, "message", "msg")
    parts = _events(answer, body, plan), _whole(answer, body, plan)
    return await answer.reply(*parts, plan.without_effect, failed=_failed)


async def count_tokens(request: Request) -> Response:
    """How many tokens a conversation has as a prompt."""
    body, backend = await read(request, MessagesRequest)
    chat = as_chat(body)
    counting = in_worker(backend, lambda: len(prompt_of(backend, chat)))
    return JsonReply({"input_tokens": await _without_places(while_connected(request.receive, counting))})


async def _without_places(work: Any) -> Any:
    """work's result. Errors do not name places of the messages as this server numbers them."""
    try:
        return await work
    except ApiError as error:
        if error.param is not None and error.param.startswith("messages."):
            error.message, error.param = error.message.removeprefix(f"{error.param}: "), "messages"
        raise


async def _whole(answer: Answer, body: MessagesRequest, plan: ChatPlan) -> dict[str, Any]:
    await finish(answer.job)
    (completion,) = answer.job.whole()
    blocks = Blocks(TextReading(plan.thinking, plan.calls, new_call_id), shows=_shows(body))
    blocks.push(completion.pieces, completion.text, completion)
    made = {**_envelope(answer, blocks.content, _usage(answer, completion)), **_ending(answer, completion, blocks)}
    return {**made, **(answer.figures([completion]) if body.include_metrics else {})}


async def _events(answer: Answer, body: MessagesRequest, plan: ChatPlan) -> AsyncIterator[bytes]:
    """message_start; of each block its start, its deltas and its stop; message_delta with the end; message_stop."""
    blocks, job = Blocks(TextReading(plan.thinking, plan.calls, new_call_id), shows=_shows(body)), answer.job
    prompt = len(job.submissions[0].prompt_ids)
    begun = {"input_tokens": prompt, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 0}
    message = {**_envelope(answer, [], begun), "stop_reason": None, "stop_sequence": None}
    yield _sent([{"type": "message_start", "message": message}, {"type": "ping"}])
    while not job.is_done:
        made: Events = []
        for one in by_choice(await job.news(answer.backend.options.keepalive_s)).values():
            made += blocks.push(one.pieces, one.text, one.completion)
        yield _sent(made or [{"type": "ping"}])
    (completion,) = job.whole()
    last = {"type": "message_delta", "delta": _ending(answer, completion, blocks), "usage": _usage(answer, completion)}
    if body.include_metrics:
        last |= answer.figures([completion])
    yield _sent([last, {"type": "message_stop"}])


def _sent(events: Events) -> bytes:
    """Events in Anthropic's form: each has its type as the event's name."""
    return b"".join(event(one, one["type"]) for one in events)


def _failed(error: ApiError) -> bytes:
    return _sent([error.body_for("/v1/messages")])


def _envelope(answer: Answer, content: Sequence[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
    named = {"id": answer.id.replace("-", "_"), "type": "message", "role": "assistant", "model": answer.model}
    return {**named, "content": list(content), "usage": usage}


def _ending(answer: Answer, completion: Completion, blocks: "Blocks") -> dict[str, Any]:
    stop = answer.stop_text(completion)
    reason = "end_turn" if stop is None else "stop_sequence"
    if completion.finish_reason != "stop":
        reason = "model_context_window_exceeded" if answer.is_full(completion) else "max_tokens"
    elif blocks.num_calls:
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": stop if reason == "stop_sequence" else None}


def _usage(answer: Answer, completion: Completion) -> dict[str, Any]:
    """Tokens; those of the prompt that were found in the prefix store are not among the input's."""
    return {
        "input_tokens": completion.num_prompt_tokens - completion.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": completion.num_cached_tokens,
        "output_tokens": completion.num_tokens,
        "output_tokens_details": {"thinking_tokens": answer.num_thought([completion])},
    }


def _shows(body: MessagesRequest) -> bool:
    return body.thinking is None or body.thinking.display != "omitted"


def new_call_id() -> str:
    """``toolu_`` and 24 random characters."""
    return f"toolu_{secrets.token_hex(12)}"


@dataclass
class Blocks:
    """The blocks of one answer as its text comes, and the events that tell of them."""

    reading: TextReading
    shows: bool = True  # thoughts; else their blocks are empty
    content: Events = field(default_factory=list)

    def __post_init__(self) -> None:
        """Nothing is open yet."""
        self._open: dict[str, Any] | None = None
        self._arguments = ""  # of the call that is open

    @property
    def num_calls(self) -> int:
        """Calls begun so far."""
        return self.reading.num_calls

    def push(self, pieces: Sequence[Piece], text: str, done: Completion | None = None) -> Events:
        """The events of further tokens and text. done: with the last of them."""
        made: Events = []
        for delta in self.reading.push(pieces, text, done):
            if isinstance(delta, CallDelta):
                made += self._call(delta)
                continue
            kind = "thinking" if isinstance(delta, ThoughtDelta) else "text"
            if self._open is None or self._open["type"] != kind:
                made += self._begin({"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})})
            assert self._open is not None
            if kind == "text" or self.shows:
                self._open[kind] += delta.text
                made.append(self._delta({"type": f"{kind}_delta", kind: delta.text}))
        return made if done is None else made + self._close()

    def _call(self, delta: CallDelta) -> Events:
        if delta.id is not None:
            return self._begin({"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}})
        self._arguments += delta.arguments
        return [self._delta({"type": "input_json_delta", "partial_json": delta.arguments})]

    def _begin(self, block: dict[str, Any]) -> Events:
        made = self._close()
        self.content.append(block)
        self._open, self._arguments = block, ""
        return [*made, {"type": "content_block_start", "index": len(self.content) - 1, "content_block": dict(block)}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}

    def _close(self) -> Events:
        if self._open is None:
            return []
        if self._open["type"] == "tool_use":
            self._open["input"] = arguments_of(self._arguments)
        self._open = None
        return [{"type": "content_block_stop", "index": len(self.content) - 1}]
