"""Ollama's routes: ``/api/chat``, ``/api/generate``, and what its clients ask of a server and its model.

Answers are lines of JSON. They are made by the same plans and jobs as OpenAI's.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from hashlib import sha256
from time import perf_counter, time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from foretell import __version__
from foretell.engine.request.result import Completion
from foretell.engine.request.row import Piece
from foretell.server.answer import Answer, backend_of, by_choice, in_worker, read_json
from foretell.server.backend import Backend
from foretell.server.entries import About, Entry, about, about_files
from foretell.server.errors import ApiError, bad
from foretell.server.job import finish
from foretell.server.models import Models
from foretell.server.protocol import ollama as protocol
from foretell.server.protocol.ollama import Asked, as_chat, keep_alive_of, of_prompt
from foretell.server.protocol.requests import ChatRequest
from foretell.server.routes.chat import ChatPlan, answer_of, plan_of
from foretell.server.routes.embeddings import vectors
from foretell.server.routes.infill import filling, gap_of
from foretell.server.sampling import submissions
from foretell.server.stream import JsonReply, as_json, time_text, while_connected
from foretell.server.texts.reading import TextReading, ThoughtDelta, whole
from foretell.server.texts.tools import CallDelta, ContentDelta, WrittenCall, arguments_of

LINES = "application/x-ndjson"
FOREVER_S = 100 * 365 * 86400


async def chat(request: Request) -> Response:
    """Answer a conversation."""
    body = await read_json(request, protocol.OllamaChatRequest)
    if not body.messages:
        return await _loaded(request, body, {"message": {"role": "assistant", "content": ""}})
    backend = await backend_of(request, body.model, keep_alive_of(body))
    asked = as_chat(body)
    return await _answered(request, backend, asked, await plan_of(request, backend, asked), is_chat=True)


async def generate(request: Request) -> Response:
    """Answer a prompt, or go on with it."""
    body = await read_json(request, protocol.GenerateRequest)
    if not (body.prompt or body.suffix):
        return await _loaded(request, body, {"response": ""})
    backend = await backend_of(request, body.model, keep_alive_of(body))
    asked = of_prompt(body)
    if not (body.raw or body.suffix):
        return await _answered(request, backend, asked, await plan_of(request, backend, asked), is_chat=False)
    if body.system or body.think or body.format:
        raise bad("raw or suffix: no template is used, and system, think and format belong to one: give one of the two")
    asked, plan = await while_connected(request.receive, in_worker(backend, lambda: _raw(backend, asked, body)))
    return await _answered(request, backend, asked, plan, is_chat=False)


async def tags(request: Request) -> Response:
    """The models that are served, and adapters: of ``/api/ps`` those in memory, of one model with its adapters all."""
    models: Models | None = request.app.state.models
    if models is None:
        backend: Backend = request.app.state.backend
        return JsonReply({"models": [_served(backend, name) for name in backend.names]})
    if request.url.path.endswith("ps"):
        return JsonReply({"models": [_entry(models, one, expires=True) for one in models.loaded]})
    return JsonReply({"models": [_entry(models, one) for one in await models.all()]})


async def show(request: Request) -> Response:
    """What the model is, and what it can do; of several none is loaded for that."""
    body = await read_json(request, protocol.ShowRequest)
    models: Models | None = request.app.state.models
    backend: Backend | None
    if models is None:
        backend = await backend_of(request, body.model or body.name)
        told, model = about(backend), _served(backend, backend.served(body.model or body.name)[0])
    else:
        entry = await models.entry(body.model or body.name)
        backend = entry.backend
        told, model = await asyncio.to_thread(about_files, entry), _entry(models, entry)
        model["details"] |= {"family": told.architecture, "families": [told.architecture]}
    fills = told.fills if backend is None else await in_worker(backend, lambda: backend.fill.prefix is not None)
    kinds = {"completion": True, "insert": fills, "tools": told.template, "thinking": told.thinks}
    can = [kind for kind, has in kinds.items() if has]
    sizes = {"context_length": told.context, "embedding_length": told.hidden_size, "block_count": told.num_layers}
    known = {f"{told.architecture}.{key}": size for key, size in sizes.items() if size is not None}
    info = {"general.architecture": told.architecture, **known}
    shown = {"modelfile": "", "parameters": "", "template": told.template, "model_info": info}
    model = {key: model[key] for key in ("details", "modified_at")}
    return JsonReply({**shown, **model, "capabilities": can})


async def pull(request: Request) -> Response:
    """A model that is served is there; no other is fetched."""
    body = await read_json(request, protocol.PullRequest)
    if (models := request.app.state.models) is None:
        await backend_of(request, body.model or body.name)
    else:
        await models.entry(body.model or body.name)
    if body.stream is False:
        return JsonReply({"status": "success"})
    lines = [as_json({"status": one}) + b"\n" for one in ("pulling manifest", "success")]
    return Response(b"".join(lines), media_type=LINES)


async def embed(request: Request) -> Response:
    """Texts as vectors; in the older form, /api/embeddings, a text."""
    is_old, begun = request.url.path.endswith("s"), perf_counter()
    body: Any = await read_json(request, protocol.OldEmbedRequest if is_old else protocol.EmbedRequest)
    backend = await backend_of(request, body.model, keep_alive_of(body))
    given = {"input": body.prompt} if is_old else {"input": body.input, "dimensions": body.dimensions}
    made = await vectors(request, backend, given, body.model)
    found = [one["embedding"] for one in made["data"]]
    if is_old:
        return JsonReply({"embedding": found[0]})
    times = {"total_duration": round((perf_counter() - begun) * 1e9), "load_duration": 0}
    read = made["usage"]["prompt_tokens"]
    return JsonReply({"model": made["model"], "embeddings": found, **times, "prompt_eval_count": read})


async def version(request: Request) -> Response:
    """Which foretell this is."""
    return JsonReply({"version": __version__})


def _model(name: str, created: int, told: About, *, parent: str = "") -> dict[str, Any]:
    """A model without when it is unloaded."""
    family, known = told.architecture, {} if told.context is None else {"context_length": told.context}
    details = {"parent_model": parent, "format": told.format, "family": family, "families": [family]}
    return {
        "name": name,
        "model": name,
        "modified_at": time_text(created),
        "size": told.size,
        "size_vram": told.size_vram,
        **known,
        "digest": sha256(name.encode()).hexdigest(),
        "details": {**details, "parameter_size": "", "quantization_level": told.quantisation},
    }


def _served(backend: Backend, name: str) -> dict[str, Any]:
    parent = "" if backend.served(name)[1] is None else backend.name
    made = _model(name, backend.created, about(backend), parent=parent)
    return {**made, "expires_at": time_text(backend.created + FOREVER_S)}


def _entry(models: Models, entry: Entry, *, expires: bool = False) -> dict[str, Any]:
    made = _model(entry.name, models.created, entry.told())
    return {**made, "expires_at": time_text(time() + min(entry.seconds_left, FOREVER_S))} if expires else made


async def _loaded(request: Request, body: Asked, empty: dict[str, Any]) -> Response:
    """A request without a text asks that the model be loaded, or unloaded; the only one stays."""
    keep_alive, models = keep_alive_of(body), request.app.state.models
    if models is not None and keep_alive == 0:
        entry = await models.entry(body.model)
        models.expire(entry)
        name = entry.name
    else:
        name = (await backend_of(request, body.model, keep_alive)).served(body.model)[0]
    reason = "unload" if keep_alive == 0 else "load"
    made = {"model": name, "created_at": time_text(), **empty, "done": True, "done_reason": reason}
    return JsonReply(made, media_type=LINES if body.stream is not False else None)


def _raw(backend: Backend, asked: ChatRequest, body: protocol.GenerateRequest) -> tuple[ChatRequest, ChatPlan]:
    """A text to go on with as it is, or a gap in it to fill. Raises ApiError 400."""
    if body.suffix:
        asked = filling(backend, asked, "suffix")
        ids = gap_of(backend, backend.encode_content(body.prompt or "", "prompt"), body.suffix)
    else:
        ids = backend.encode(body.prompt or "", "prompt")
    if not ids:
        raise bad("prompt: the prompt is empty: at least one token is needed", "prompt", "invalid_prompt")
    scores = (asked.top_logprobs or 0) if asked.logprobs else None
    made = submissions(backend, asked, [ids], max_tokens=asked.max_tokens, logprobs=scores)
    return asked, ChatPlan(made, 0, asked.max_tokens, None)


async def _answered(
    request: Request, backend: Backend, asked: ChatRequest, plan: ChatPlan, *, is_chat: bool
) -> Response:
    answer = answer_of(request, backend, asked, plan, "", "ollama")
    reading = TextReading(plan.thinking, plan.calls)
    parts = _lines(answer, reading, is_chat=is_chat), _whole(answer, reading, is_chat=is_chat)
    return await answer.reply(*parts, plan.without_effect, failed=_failed, media_type=LINES)


async def _whole(answer: Answer, reading: TextReading, *, is_chat: bool) -> dict[str, Any]:
    await finish(answer.job)
    (completion,) = answer.job.whole()
    thought, content, calls = whole(reading.push(completion.pieces, completion.text, completion))
    made = _piece(answer, content or "", thought, calls, is_chat=is_chat)
    return {**made, **_scores(answer, completion.pieces, completion), **_ending(answer, completion)}


async def _lines(answer: Answer, reading: TextReading, *, is_chat: bool) -> AsyncIterator[bytes]:
    """A line a piece; a call is one when it is whole; the last line has the figures."""
    job, calls = answer.job, list[WrittenCall]()
    while not job.is_done:
        out = []
        for one in by_choice(await job.news(answer.backend.options.keepalive_s)).values():
            for delta in reading.push(one.pieces, one.text, one.completion):
                if isinstance(delta, CallDelta):
                    if delta.id is not None and delta.name is not None:
                        out += [_piece(answer, "", "", calls, is_chat=is_chat)] if calls else []
                        calls = [WrittenCall(delta.id, delta.name, "")]
                    calls[-1].arguments += delta.arguments
                else:
                    content = delta.text if isinstance(delta, ContentDelta) else ""
                    thought = delta.text if isinstance(delta, ThoughtDelta) else ""
                    out.append(_piece(answer, content, thought, [], is_chat=is_chat))
            if one.completion is not None:
                out += [_piece(answer, "", "", calls, is_chat=is_chat)] if calls else []
            if scores := _scores(answer, one.pieces, one.completion):
                out = out or [_piece(answer, "", "", [], is_chat=is_chat)]
                out[0] |= scores
        if out:
            yield b"".join(as_json({**line, "done": False}) + b"\n" for line in out)
    (completion,) = job.whole()
    yield as_json({**_piece(answer, "", "", [], is_chat=is_chat), **_ending(answer, completion)}) + b"\n"


def _failed(error: ApiError) -> bytes:
    return as_json(error.body_for("/api/")) + b"\n"


def _piece(
    answer: Answer, content: str, thought: str, calls: Sequence[WrittenCall], *, is_chat: bool
) -> dict[str, Any]:
    made: dict[str, Any] = {"model": answer.model, "created_at": time_text()}
    told = {"thinking": thought} if thought else {}
    if not is_chat:
        return {**made, "response": content, **told}
    message: dict[str, Any] = {"role": "assistant", "content": content, **told}
    if calls:
        message["tool_calls"] = [
            {"id": one.id, "function": {"index": at, "name": one.name, "arguments": arguments_of(one.arguments)}}
            for at, one in enumerate(calls)
        ]
    return {**made, "message": message}


def _scores(answer: Answer, pieces: Sequence[Piece], completion: Completion | None) -> dict[str, Any]:
    """Log probabilities of the answer's tokens among these, where they are asked for."""
    if not getattr(answer.body, "logprobs", None):
        return {}
    found = answer.backend.texts.chat_logprobs(answer.shown(pieces, completion))["content"]
    return {"logprobs": found} if found else {}


def _ending(answer: Answer, completion: Completion) -> dict[str, Any]:
    """How it ended, and the figures: times are in nanoseconds."""
    return {
        "done": True,
        "done_reason": "stop" if completion.finish_reason == "stop" else "length",
        "total_duration": round((perf_counter() - answer.job.arrived) * 1e9),
        "load_duration": 0,
        "prompt_eval_count": completion.num_prompt_tokens,
        "prompt_eval_duration": round(completion.seconds_prefill * 1e9),
        "eval_count": completion.num_tokens,
        "eval_duration": round(completion.seconds_decode * 1e9),
    }
