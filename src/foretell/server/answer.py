"""Common parts of both completion routes: read a request, run its job, and assemble the answer."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any, TypeVar
from urllib.parse import quote
from uuid import uuid4

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from structlog.contextvars import bind_contextvars

from foretell import __version__
from foretell.core.errors import ConfigError
from foretell.engine.request.result import Completion, StepTrace, Update
from foretell.engine.request.row import Piece, Submission
from foretell.engine.structured.thoughts import Thinking
from foretell.server.backend import LATEST, Backend
from foretell.server.entries import Entry
from foretell.server.errors import ApiError, bad, parse
from foretell.server.job import ServerJob
from foretell.server.models import Models
from foretell.server.protocol.sampling import Sampling
from foretell.server.security import RELEASED, TAKEN, TENANT
from foretell.server.stream import DONE, EventStream, JsonReply, event, while_connected
from foretell.server.texts.reading import AnswerPieces
from foretell.server.unsupported import Taken
from foretell.server.usage import metrics, usage

Body = TypeVar("Body", bound=Sampling)
AnyBody = TypeVar("AnyBody", bound=BaseModel)
Result = TypeVar("Result")
WITHOUT_EFFECT = "x-foretell-without-effect"
"""Header of an answer: parts of the request that change nothing, since the model's template does not read them or a grammar
cannot hold the text to them."""
MOST_LETTERS, MOST_OF_PART = 2_000, 256  # a header is short; its letters are ASCII
JSON_TYPE = re.compile(r"application/(json|[\w.+-]+\+json)\s*(;.*)?", re.IGNORECASE | re.ASCII)


async def read_json(request: Request, kind: type[AnyBody]) -> AnyBody:
    """A body of JSON. Raises ApiError 400 and 415."""
    # A page of another site cannot send this type without a CORS preflight, so it cannot use a local server. Browsers send
    # one of these headers with whatever a page posts, and Ollama's clients neither.
    is_bare = request.url.path.startswith("/api/") and not {"origin", "sec-fetch-site"} & set(request.headers)
    if not is_bare and not JSON_TYPE.fullmatch(request.headers.get("content-type", "")):
        raise ApiError(415, "send JSON, with 'Content-Type: application/json'", code="unsupported_media_type")
    taken = Taken(strict=request.app.state.options.strict_fields)
    body = parse(kind, await request.body(), taken)
    if named := effect_headers([*taken.names]):
        request.scope[TAKEN].update(named)
        bind_contextvars(without_effect=named[WITHOUT_EFFECT])
    return body


async def backend_of(request: Request, name: str | None, keep_alive_s: float | None = None) -> Backend:
    """The model of a request until its answer has ended, loaded where a server has several. name: None and "": the default.
    keep_alive_s: as ``Models.take``. Raises ApiError 404, and where it cannot be loaded."""
    models: Models | None = request.app.state.models
    if models is None:
        backend: Backend = request.app.state.backend
        tagged = {each.removesuffix(LATEST) for each in backend.names} if request.url.path.startswith("/api/") else ()
        if name and name.removesuffix(LATEST) not in tagged:  # of Ollama's clients, which may add it or leave it out
            backend.check_model(name)
        return backend

    async def taken() -> Entry:
        entry = await models.take(name, keep_alive_s)
        request.scope[RELEASED].append(partial(models.release, entry))
        return entry

    entry = await while_connected(request.receive, taken())
    bind_contextvars(model=entry.name)
    assert entry.backend is not None
    return entry.backend


async def read(request: Request, kind: type[Body]) -> tuple[Body, Backend]:
    """The request's body, and its model. Raises ApiError 400, 404 and 415, and as ``backend_of``."""
    body = await read_json(request, kind)
    backend = await backend_of(request, body.model)
    told = body.stream_options if body.stream else None
    if told is not None and told.continuous_usage_stats and not told.include_usage:
        raise bad("continuous_usage_stats: only where include_usage is true", "stream_options")
    return body, backend


async def in_worker(backend: Backend, work: Callable[[], Result]) -> Result:
    """work's result, from the thread that reads texts."""
    return await asyncio.get_running_loop().run_in_executor(backend.worker, work)


async def in_compiler(backend: Backend, work: Callable[[], Result]) -> Result:
    """work's result, from the thread that compiles grammars."""
    with suppress(ConfigError):  # work raises it again, and names the field
        await in_worker(backend, lambda: backend.constraints)  # reads the tokenizer, which that thread alone does
    return await asyncio.get_running_loop().run_in_executor(backend.compiler, work)


def effect_headers(parts: Sequence[str]) -> dict[str, str]:
    """Headers that name what has no effect, as URLs spell letters that are not ASCII; of very many the first, and how many
    more."""
    named, size = list[str](), 0
    for part in (quote(part, safe="/$.~-_")[:MOST_OF_PART] or '""' for part in parts):  # a name may be empty
        if (size := size + len(part) + 2) > MOST_LETTERS:
            named.append(f"and {len(parts) - len(named)} more")
            break
        named.append(part)
    return {WITHOUT_EFFECT: ", ".join(named)} if named else {}


class Answer:
    """One answer: its id, the requested extra fields, and the job that makes it."""

    def __init__(
        self,
        backend: Backend,
        body: Sampling,
        submissions: Sequence[Submission],
        *,
        request: Request,
        kind: str,
        prefix: str,
        max_tokens: int | None,
        num_predicted: int = 0,
        thinking: Thinking | None = None,
        after: Callable[[Submission, Completion], None] | None = None,
    ) -> None:
        """kind: the object's name in the API; prefix: of its id; max_tokens: as the client gave it; after: see
        ``ServerJob``. Raises ApiError where the job cannot be started."""
        self.max_tokens, self._receive = max_tokens, request.receive
        self.backend, self.body, self.kind, self.num_predicted = backend, body, kind, num_predicted
        self.thinking = thinking
        self.id, self.created = f"{prefix}-{uuid4().hex}", int(time.time())
        self._names_ids = bool(getattr(body, "return_token_ids", False))
        asked = body.stream_options
        self.wants_usage = bool(asked and asked.include_usage)
        self._counts = bool(self.wants_usage and asked and asked.continuous_usage_stats)
        self._answered = [AnswerPieces(thinking) for _ in submissions]
        self._written = [0] * len(submissions)  # tokens sent of each choice, where every chunk counts them
        arrived = request.scope.get("foretell.arrived") or perf_counter()
        tenant = request.scope.get(TENANT)
        kept = body.store is not False
        self.model, lora = backend.served(body.model)
        submissions = [replace(submission, tenant=tenant, store=kept, lora=lora) for submission in submissions]
        self.job = ServerJob(backend, submissions, endpoint=request.url.path, stream=bool(body.stream), arrived=arrived)
        self.job.after = after
        self.job.start()

    async def reply(
        self,
        events: AsyncIterator[bytes],
        whole: Coroutine[Any, Any, dict[str, Any]],
        without_effect: Sequence[str] = (),
        **how: Any,
    ) -> Response:
        """A stream of events, or the whole, as the request asks. without_effect: parts of it; how: see ``EventStream``."""
        headers = effect_headers(without_effect)
        if self.body.stream:
            whole.close()  # it was not begun
            return EventStream(self.job, events, headers=headers, **how)
        try:
            return JsonReply(await while_connected(self._receive, whole), headers=headers)
        finally:
            self.job.close()

    def envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """The answer, or a chunk of it."""
        named = {"id": self.id, "object": self.kind, "created": self.created, "model": self.model}
        return {**named, "system_fingerprint": f"foretell-{__version__}", "choices": choices}

    def chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        """A chunk of a stream."""
        data = self.envelope([choice])
        if self.wants_usage:
            # As in OpenAI's API only the last chunk has usage, but where all were asked for it.
            data["usage"] = self._usage_so_far() if self._counts else None
        return data

    def count(self, index: int, pieces: Sequence[Piece]) -> None:
        """These pieces of a choice are sent now."""
        self._written[index] += len(pieces)

    def _usage_so_far(self) -> dict[str, Any]:
        prompt = sum(len(one.prompt_ids) for one in self.job.submissions[:: self.body.n or 1])
        written = sum(self._written)
        return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}

    def usage(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Tokens."""
        return usage(
            completions, num_choices=self.body.n or 1, num_predicted=self.num_predicted,
            num_thought=self.num_thought(completions),
        )  # fmt: skip

    def num_thought(self, completions: Sequence[Completion]) -> int:
        """Tokens of thoughts."""
        if self.thinking is None:
            return 0
        return sum(self.thinking.thoughts.count(one.token_ids, self.thinking.start) for one in completions)

    def figures(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """``metrics``, if requested."""
        asked = self.body.include_metrics
        wanted = self.backend.options.include_metrics if asked is None else asked
        return {"metrics": metrics(completions)} if wanted else {}

    def shown(self, pieces: Sequence[Piece], completion: Completion | None, index: int = 0) -> list[Piece]:
        """The further pieces of a choice that have log probabilities: all of the answer but the end token. completion:
        given where the last piece is among them."""
        # Not by its text: it has that of tokens before it, where a stop text or a character had begun.
        if completion is not None and completion.finish_reason == "stop" and pieces:
            pieces = pieces[:-1] if pieces[-1].token_id in self._end_ids else pieces
        return self._answered[index].push(pieces, last=completion is not None)

    def closing(self) -> bytes:
        """The last events of a stream: the usage, where asked for, and the end."""
        if not self.wants_usage:
            return DONE
        done = self.job.whole()
        return event({**self.envelope([]), "usage": self.usage(done), **self.figures(done)}) + DONE

    @property
    def _end_ids(self) -> set[int]:
        return {*(self.body.stop_token_ids or ()), *(() if self.body.ignore_eos else self.backend.eos_token_ids)}

    def extras(self, pieces: Sequence[Piece], traces: Sequence[StepTrace]) -> dict[str, Any]:
        """provenance, trace and token ids of a choice, if requested."""
        texts, found = self.backend.texts, dict[str, Any]()
        if self.body.provenance:
            found["provenance"] = texts.provenance(pieces)
        if self._names_ids:
            found["token_ids"] = [piece.token_id for piece in pieces]
        if self.body.trace:
            found["trace"] = [texts.tree(step) for step in traces]
        return found

    def prompt_ids(self, index: int) -> dict[str, Any]:
        """The ids of a choice's prompt, if requested."""
        if not self._names_ids:
            return {}
        return {"prompt_token_ids": list(self.job.submissions[index].prompt_ids)}

    def ending(self, completion: Completion, *, num_calls: int = 0) -> dict[str, Any]:
        """How a choice ended."""
        reason = completion.finish_reason
        why = dict[str, int | str]()
        if reason == "timeout":  # OpenAI has no word for it, and typed clients fail at words that it has not
            reason, why = "length", {"stop_reason": "timeout"}
        elif reason == "length" and self.is_full(completion):
            why = {"stop_reason": "context"}
        elif reason == "stop" and num_calls:
            reason = "tool_calls" if getattr(self.body, "functions", None) is None else "function_call"
        if completion.finish_reason == "stop" and (matched := self.matched(completion)) is not None:
            why = {"matched_stop": matched}
        return {"finish_reason": reason, **why, "seed": completion.seed}

    def matched(self, completion: Completion) -> int | str | None:
        """What ended a choice: an end token's id, or a stop text."""
        if completion.token_ids and completion.token_ids[-1] in self._end_ids:
            return completion.token_ids[-1]
        return self.stop_text(completion)

    def stop_text(self, completion: Completion) -> str | None:
        """The stop text that ended a choice, if one did."""
        params = self.job.submissions[0].params
        if completion.finish_reason != "stop" or not params.stop or completion.token_ids[-1] in self._end_ids:
            return None
        if len(params.stop) == 1:  # the text need not be decoded again
            return params.stop[0]
        tokenizer = self.backend.tokenizer
        rest = tokenizer.decode(completion.token_ids, skip_special_tokens=True)[len(completion.text) :]
        return next((stop for stop in params.stop if rest.startswith(stop)), params.stop[0])

    def is_full(self, completion: Completion) -> bool:
        """Whether the context ended the text, and not a limit that the client gave."""
        left = self.backend.max_model_len - completion.num_prompt_tokens - completion.num_tokens
        return left <= 0 and (self.max_tokens is None or completion.num_tokens < self.max_tokens)


@dataclass
class News:
    """The updates of one choice, combined."""

    prompt: list[Piece] = field(default_factory=list)  # of the prompt, where asked for
    pieces: list[Piece] = field(default_factory=list)
    text: str = ""  # text of these pieces, and text held back before
    traces: list[StepTrace] = field(default_factory=list)
    completion: Completion | None = None  # where it has ended


def by_choice(news: Sequence[tuple[int, Update]]) -> dict[int, News]:
    """Combine the updates of each choice that has any."""
    found: dict[int, News] = {}
    for index, update in news:
        one = found.setdefault(index, News())
        one.prompt.extend(update.prompt_pieces)
        one.pieces.extend(update.pieces)
        one.text += "".join(piece.text for piece in update.pieces) + update.tail
        if update.trace is not None:
            one.traces.append(update.trace)
        if update.completion is not None:
            one.completion = update.completion
    return found


def as_given(model: BaseModel) -> dict[str, Any]:
    """A part of a request as the client wrote it, without what was null."""
    return model.model_dump(by_alias=True, exclude_none=True)
