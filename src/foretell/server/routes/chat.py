"""``POST /v1/chat/completions``."""

import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from foretell.core.errors import ConfigError, ForetellError
from foretell.core.params import LogitsProcessor, SamplingParams
from foretell.engine.prefix import shared
from foretell.engine.request.result import Completion
from foretell.engine.request.row import Submission
from foretell.engine.structured.format import OutputFormat
from foretell.engine.structured.thinking import ThinkingProcessor, of_answer
from foretell.engine.structured.thoughts import Thinking, Thoughts, ThoughtState, reads
from foretell.server.answer import Answer, as_given, by_choice, in_compiler, in_worker, read
from foretell.server.backend import Backend
from foretell.server.errors import ApiError, bad, of_engine
from foretell.server.job import finish
from foretell.server.logs import log
from foretell.server.protocol.messages import AssistantTurn, Message
from foretell.server.protocol.requests import ChatRequest, with_tools
from foretell.server.protocol.sampling import Sampling
from foretell.server.sampling import MakeProcessor, allowed, submissions
from foretell.server.stream import KEEP_ALIVE, event, while_connected
from foretell.server.texts.channels import can_call
from foretell.server.texts.formats import format_processor, term_of, wanted_format
from foretell.server.texts.reading import Delta, TextReading, whole
from foretell.server.texts.tools import CallDelta, ContentDelta, ToolUse
from foretell.server.texts.turns import cut_changing, form_of, text_of, turns

OBJECT = "chat.completion"
LEAST_AHEAD = 16  # tokens that are worth reading ahead
NEXT = "A turn that is not known yet"
TURNS: TypeAdapter[list[Message]] = TypeAdapter(list[Message])
NAME, MOST_UNREAD = re.compile(r"\w{1,64}", re.ASCII), 16  # of a template's values, as a header names them


@dataclass(frozen=True)
class ChatPlan:
    """A request that has been checked, and its tokens."""

    submissions: list[Submission]
    num_predicted: int
    max_tokens: int | None  # as it was given
    calls: ToolUse | None  # the tools that the output may call; None: none
    thinking: Thinking | None = None  # how the output thinks; None: not at all, or it is not told apart
    without_effect: tuple[str, ...] = ()  # what the model's template does not read, or no grammar enforces
    after: Callable[[Submission, Completion], None] | None = None  # see ``ServerJob``


async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    asked, backend = await read(request, ChatRequest)
    body = with_tools(asked)
    plan = await plan_of(request, backend, body)
    kind = OBJECT + ".chunk" if body.stream else OBJECT
    answer = answer_of(request, backend, body, plan, kind, "chatcmpl")
    return await answer.reply(_events(answer, body, plan), _whole(answer, body, plan), plan.without_effect)


def answer_of(request: Request, backend: Backend, body: Sampling, plan: ChatPlan, kind: str, prefix: str) -> Answer:
    """The answer to a conversation. body: as it was asked for; kind, prefix: see ``Answer``. Raises ApiError."""
    return Answer(
        backend, body, plan.submissions, request=request, kind=kind, prefix=prefix, num_predicted=plan.num_predicted,
        max_tokens=plan.max_tokens, thinking=plan.thinking, after=plan.after,
    )  # fmt: skip


async def plan_of(request: Request, backend: Backend, body: ChatRequest) -> ChatPlan:
    """All checks of a conversation, its grammar and its tokens, while the client is there. Raises ApiError 400."""
    constrained: Constrained = (None, None, ())
    format = wanted_format(body)
    if body.tools is not None or body.tool_choice is not None or format is not None:
        compiling = in_compiler(backend, lambda: _constrained(backend, body, format))
        constrained = await while_connected(request.receive, compiling)
    return await while_connected(request.receive, in_worker(backend, lambda: _plan(backend, body, *constrained)))


def prompt_of(backend: Backend, body: ChatRequest) -> list[int]:
    """The tokens of a conversation as a prompt. Slow, as it reads texts. Raises ApiError 400."""
    try:
        return _prompted(backend, body, _tools(backend, body), None)[0]
    except ConfigError as error:
        raise of_engine(error, "tools") from None


def _plan(
    backend: Backend, body: ChatRequest, use: ToolUse | None, processor: MakeProcessor | None, left_out: tuple[str, ...]
) -> ChatPlan:
    """All checks of the request, and its tokens. Raises ApiError 400."""
    if body.top_logprobs is not None and not body.logprobs:
        raise bad("top_logprobs: only where logprobs is true", "top_logprobs")
    given = [count for count in (body.max_completion_tokens, body.max_tokens) if count is not None]
    if len(set(given)) > 1:
        raise bad("max_tokens and max_completion_tokens are one setting: give it once", "max_completion_tokens")
    if body.prompt_logprobs is not None and body.stream:
        raise bad("prompt_logprobs and stream exclude each other: drop one of them", "prompt_logprobs")
    prompt, thinking, processor, unread = _prompted(backend, body, use, allowed(backend, body, processor))
    prediction = None
    if body.prediction is not None:
        prediction = backend.encode_content(text_of(body.prediction.content), "prediction")
        if len(prediction) > backend.max_model_len:
            raise bad(
                f"the prediction has {len(prediction)} tokens; no output here has more than {backend.max_model_len}: "
                "shorten it",
                "prediction",
            )
    made = submissions(
        backend,
        body,
        [prompt],
        max_tokens=given[0] if given else None,
        logprobs=(body.top_logprobs or 0) if body.logprobs else 0 if body.provenance else None,
        num_prompt_logprobs=body.prompt_logprobs,
        prediction=prediction,
        processor=processor,
        thinking=thinking,
    )
    calls = use if use is not None and use.calls else None
    after = None if body.continue_final_message else partial(_prepare, backend, body, calls, thinking)
    return ChatPlan(
        made, len(prediction or ()), given[0] if given else None, calls, thinking, (*unread, *left_out), after
    )


def _prepare(
    backend: Backend,
    body: ChatRequest,
    use: ToolUse | None,
    thinking: Thinking | None,
    asked: Submission,
    done: Completion,
) -> None:
    """Have the engine read, while the client runs its tool or its user thinks, what every next prompt of a conversation
    begins with: templates write an answer otherwise than the model did, close it, and leave thoughts out. Certain is what
    stands before the next turn's text."""
    reader = TextReading(thinking, use)
    thought, content, calls = whole(reader.push(done.pieces, done.text, done))
    said: dict[str, Any] = {"role": "assistant", "content": content}
    if thought and any(isinstance(one, AssistantTurn) and one.reasoning_content for one in body.messages):
        said["reasoning_content"] = thought
    if calls:
        said["tool_calls"] = [call.as_openai() for call in calls]
    tells = [{"role": "tool", "tool_call_id": call.id} for call in calls] or [{"role": "user"}]
    then = [{**one, "content": "" if at else NEXT} for at, one in enumerate(tells)]
    try:
        more = TURNS.validate_python([said, *then], strict=False)
        asked_next = body.model_copy(update={"messages": [*body.messages, *more]})
        certain = _prompted(backend, asked_next, use, None, until=NEXT)[0]
        if len(certain) - shared(certain, [*asked.prompt_ids, *done.token_ids[:-1]]) >= LEAST_AHEAD:
            backend.service.prepare(
                replace(
                    asked, request_id=f"prepare-{asked.request_id}", prompt_ids=certain, prediction_ids=(), trace=False,
                    params=SamplingParams(max_new_tokens=1), watch=None, num_prompt_logprobs=None, timeout_s=None,
                )
            )  # fmt: skip
    except (ApiError, ForetellError, ValidationError):
        log("nothing is prepared", level="debug")


def _prompted(
    backend: Backend, body: ChatRequest, use: ToolUse | None, processor: MakeProcessor | None, until: str = ""
) -> tuple[list[int], Thinking | None, MakeProcessor | None, tuple[str, ...]]:
    """(the prompt's tokens, how its output thinks, its processor, what has no effect). until: see ``Rendered.ids``. Raises
    ApiError 400."""
    in_channels = use is not None and use.channels and use.calls
    form = form_of(backend, body.messages, use.rendered if use is not None else (), channels=in_channels)
    thoughts = backend.thoughts(form.template)
    effort, budget, unread = _effort(form.template, body, thoughts)
    if body.verbosity is not None and reads(form.template, "verbosity"):
        effort["verbosity"] = body.verbosity
    elif body.verbosity not in (None, "medium"):
        unread += ("verbosity",)
    values, goes_on = body.chat_template_kwargs or {}, body.continue_final_message is True
    said = turns(body.messages, form)
    if not backend.options.keep_changing_lines and (name := cut_changing(said)):
        unread += (f"messages.0.{name}",)
    how: dict[str, Any] = {"tools": form.tools, "compose": form.compose, "goes_on": goes_on, "until": until}
    text, prompt = backend.encode_chat(said, generate=_opens_reply(body), extra={**effort, **values}, **how)
    unread += tuple(_unread(form.template, values))
    if thoughts is None:
        return prompt, None, processor, unread
    start = thoughts.start_of(text, continued=text_of(body.messages[-1].content or "") if goes_on else None)
    if start == "answer" and thoughts.family.is_bare:
        return prompt, None, processor, unread
    make = processor
    thinking = None if body.separate_reasoning is False else Thinking(thoughts, start)
    least = body.min_tokens or 0
    stops = body.stop_token_ids or () if least and of_answer("stop_token_ids", thinking) is not None else ()

    if use is not None and use.only_calls and in_channels:  # a thought's end is followed by a call's head
        thoughts = copy(thoughts)
        thoughts.closer = thoughts.closer[:1]

    def minded(num_prompt: int) -> LogitsProcessor:
        held: Any = None if make is None else make(0)
        ends = sorted(backend.eos_token_ids)
        return ThinkingProcessor(thoughts, num_prompt, start, budget, held, ends, stops, least, whole=in_channels)

    if make is not None:
        thoughts.overrunning(ThoughtState("thought"))  # sorts the vocabulary here, and not on the engine's thread
    if budget is not None or make is not None or stops:
        processor = minded
    return prompt, thinking, processor, unread


def _opens_reply(body: ChatRequest) -> bool:
    """Whether the template opens a reply of its own. Raises ApiError 400 where the last message cannot be continued."""
    if not body.continue_final_message:
        return body.add_generation_prompt is not False
    last = body.messages[-1]
    if body.add_generation_prompt:
        raise bad(
            "continue_final_message goes on with the last message and add_generation_prompt opens another: give one",
            "continue_final_message",
        )
    if not isinstance(last, AssistantTurn) or last.tool_calls or not text_of(last.content or ""):
        raise bad(
            "continue_final_message: the last message must be the assistant's, with a text and no calls",
            "continue_final_message",
        )
    return False


def _effort(
    template: str, body: ChatRequest, thoughts: Thoughts | None
) -> tuple[dict[str, Any], int | None, tuple[str, ...]]:
    """(the values of the template that say how much is thought, the budget, what has no effect). Thoughts that a template
    cannot turn off are ended as soon as they begin."""
    effort, thinks = body.reasoning_effort, body.enable_thinking
    if effort is not None and thinks is not None and thinks != (effort != "none"):
        raise bad(
            f"enable_thinking = {thinks} and reasoning_effort = {effort!r} contradict each other", "enable_thinking"
        )
    found = dict[str, Any]()
    if effort is not None and "reasoning_effort" in template:
        found["reasoning_effort"] = effort
    wanted = thinks if thinks is not None else None if effort is None else effort != "none"
    if wanted is not None:
        found |= {name: wanted for name in ("enable_thinking", "thinking") if reads(template, name)}
    budget, unread = body.thinking_budget, list[str]()
    if wanted is False and not found and thoughts is not None:
        budget = 0
    if effort not in (None, "none") and not found:
        unread.append("reasoning_effort")
    if thinks is True and not found and thoughts is None:
        unread.append("enable_thinking")
    if budget is not None and reads(template, "thinking_budget"):  # Seed's models read it, too
        found["thinking_budget"] = budget
    elif budget is not None and thoughts is None:
        unread.append("thinking_budget")
    return found, budget, tuple(unread)


def _unread(template: str, values: Mapping[str, Any]) -> Iterator[str]:
    """What the template does not read, at most a few, as they stand in a header."""
    names = [name for name in values if NAME.fullmatch(name) and name not in template]
    yield from (f"chat_template_kwargs.{name}" for name in names[:MOST_UNREAD])


Constrained = tuple[ToolUse | None, MakeProcessor | None, tuple[str, ...]]
"""The tools, the constraint of the output, and what of the request it does not enforce."""


def _tools(backend: Backend, body: ChatRequest) -> ToolUse | None:
    """The tools. Raises ConfigError."""
    if body.tools is None and body.tool_choice is None:
        return None
    if body.tools == [] and body.tool_choice == "required":
        raise ConfigError("a call must come, and there is no function to call: this server runs no tools itself")
    choice = body.tool_choice if isinstance(body.tool_choice, str | None) else as_given(body.tool_choice)
    use = ToolUse.of([as_given(tool) for tool in body.tools or ()], choice, body.parallel_tool_calls)
    template = backend.template(tools=True)
    is_whole = body.separate_reasoning is not False and not body.continue_final_message
    thoughts = backend.thoughts(template) if use.calls and is_whole else None
    is_channels = thoughts is not None and thoughts.family.name == "gpt-oss" and can_call(template, backend.tokenizer)
    return replace(use, channels=is_channels)


def _constrained(backend: Backend, body: ChatRequest, format: OutputFormat | None) -> Constrained:
    """The constraint of the output: tools, a format, or either of them."""
    use: ToolUse | None = None
    try:
        use = _tools(backend, body)
        if use is not None:
            use = replace(use, bare=not backend.options.marked_calls_only)
            # Calls that must come leave no text that a format could be of.
            beside = format if use.mode == "auto" else None
            text = None if beside is None else _term(backend, beside)
            constraint = use.constraint(backend.constraints, text) if use.calls else None
            if constraint is not None:
                left_out = [f"tools.{name}" for name in constraint.left_out]
                left_out += [] if beside is None else beside.left_out(backend.constraints)
                return use, constraint.processor, tuple(left_out)
    except ConfigError as error:
        raise of_engine(error, "tools") from None
    return use, *((None, ()) if format is None else format_processor(backend, format))


def _term(backend: Backend, format: OutputFormat) -> str:
    """See ``term_of``. Raises ApiError 400 that names the format's field."""
    try:
        return term_of(format.enforceable(backend.constraints) if format.kind == "json" else format)
    except ConfigError as error:
        raise of_engine(error, format.field) from None


async def _whole(answer: Answer, body: ChatRequest, plan: ChatPlan) -> dict[str, Any]:
    """The answer of a request without stream."""
    traces = await finish(answer.job)
    completions = answer.job.whole()
    choices = []
    for index, completion in enumerate(completions):
        reader = TextReading(plan.thinking, plan.calls)
        thought, content, found = whole(reader.push(completion.pieces, completion.text, completion))
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if thought:
            message["reasoning_content"] = thought
        if found:
            calls = [call.as_openai() for call in found]
            message |= {"tool_calls": calls} if body.functions is None else {"function_call": calls[0]["function"]}
        shown = answer.shown(completion.pieces, completion, index) if body.logprobs else ()
        choices.append(
            {
                "index": index,
                "message": message,
                "logprobs": answer.backend.texts.chat_logprobs(shown) if body.logprobs else None,
                **answer.ending(completion, num_calls=len(found)),
                **answer.extras(completion.pieces, traces[index]),
            }
        )
    made = {**answer.envelope(choices), **answer.prompt_ids(0)}
    if body.prompt_logprobs is not None:
        made["prompt_logprobs"] = answer.backend.texts.prompt_logprobs(completions[0].prompt_pieces)
    return {**made, "usage": answer.usage(completions), **answer.figures(completions)}


async def _events(answer: Answer, body: ChatRequest, plan: ChatPlan) -> AsyncIterator[bytes]:
    """The answer of a request with stream: per choice its role, its content and its finish reason; then the usage."""
    job, texts = answer.job, answer.backend.texts
    readers = [TextReading(plan.thinking, plan.calls) for _ in job.submissions]
    begun: set[int] = set()
    num_ended = 0

    def chunk(index: int, delta: dict[str, Any], first: Mapping[str, Any], **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        return event({**answer.chunk(choice), **first})

    while not job.is_done:
        out = []
        for index, one in by_choice(await job.news(answer.backend.options.keepalive_s)).items():
            pieces, text, traces, completion = one.pieces, one.text, one.traces, one.completion
            answer.count(index, pieces)
            if index not in begun:
                begun.add(index)
                first = answer.prompt_ids(0) if len(begun) == 1 else {}
                out.append(chunk(index, {"role": "assistant", "content": ""}, first))
            deltas = [
                _delta(delta, body.functions is not None) for delta in readers[index].push(pieces, text, completion)
            ]
            more = answer.extras(pieces, traces) if pieces or traces else {}
            if body.logprobs and (shown := answer.shown(pieces, completion, index)):
                more["logprobs"] = texts.chat_logprobs(shown)
            if more and not deltas:
                deltas = [{"content": ""}]
            for delta in deltas:
                out.append(chunk(index, delta, {}, **more))
                more = {}
            if completion is not None:
                ending = answer.ending(completion, num_calls=readers[index].num_calls)
                data = answer.chunk({"index": index, "delta": {}, "logprobs": None, **ending})
                num_ended += 1
                if num_ended == len(readers) and not answer.wants_usage:
                    data.update(answer.figures(job.whole()))
                out.append(event(data))
        yield b"".join(out) or KEEP_ALIVE
    yield answer.closing()


def _delta(one: Delta, is_old: bool) -> dict[str, Any]:
    """As it is sent. is_old: calls are function_call."""
    if isinstance(one, CallDelta):
        made = one.as_openai()
        return {"function_call": made["function"]} if is_old else {"tool_calls": [made]}
    return {"content" if isinstance(one, ContentDelta) else "reasoning_content": one.text}
