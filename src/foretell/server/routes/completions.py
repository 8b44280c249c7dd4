"""``POST /v1/completions``."""

import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from foretell.engine.request.result import Completion, StepTrace
from foretell.engine.request.row import Piece, Submission
from foretell.server.answer import Answer, by_choice, in_compiler, in_worker, read
from foretell.server.backend import Backend
from foretell.server.errors import bad
from foretell.server.job import finish
from foretell.server.protocol.requests import AnyPrompt, CompletionRequest
from foretell.server.routes.infill import filling, gap_of
from foretell.server.sampling import MakeProcessor, allowed, submissions
from foretell.server.stream import KEEP_ALIVE, event, while_connected
from foretell.server.texts.formats import format_processor, wanted_format

DEFAULT_MAX_TOKENS = 16  # as OpenAI's


async def completions(request: Request) -> Response:
    """Go on with texts."""
    body, backend = await read(request, CompletionRequest)
    processor: MakeProcessor | None = None
    left_out: tuple[str, ...] = ()
    if (format := wanted_format(body)) is not None:
        wanted = format
        compiling = in_compiler(backend, lambda: format_processor(backend, wanted))
        processor, left_out = await while_connected(request.receive, compiling)
    if body.suffix:
        one = body
        body = await while_connected(request.receive, in_worker(backend, lambda: filling(backend, one, "suffix")))
    made, echoes = await while_connected(request.receive, in_worker(backend, lambda: _plan(backend, body, processor)))
    most = _max_tokens(backend, body)
    answer = Answer(backend, body, made, request=request, kind="text_completion", prefix="cmpl", max_tokens=most)
    return await answer.reply(_events(answer, body, echoes), _whole(answer, body, echoes), left_out)


def _plan(
    backend: Backend, body: CompletionRequest, processor: MakeProcessor | None
) -> tuple[list[Submission], list[str]]:
    """(submissions, the echoed prompt of each). Raises ApiError 400."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise bad("best_of must equal n: only as many completions as are returned are made", "best_of")
    given, prompts = prompts_of(backend, body.prompt, "prompt", num_each=body.n or 1)
    if body.prompt_logprobs is not None and (body.stream or (body.echo and body.logprobs is not None)):
        other = "stream" if body.stream else "echo with logprobs"
        raise bad(f"prompt_logprobs and {other} exclude each other: drop one of them", "prompt_logprobs")
    if body.suffix:
        before = [backend.encode_content(one, "prompt") if isinstance(one, str) else one for one in given]
        prompts = [gap_of(backend, one, body.suffix) for one in before]
    echoes = [""] * len(prompts)
    if body.echo:
        echoes = [_echo(backend, one) for one in given]
    made = submissions(
        backend,
        body,
        prompts,
        max_tokens=_max_tokens(backend, body),
        logprobs=body.logprobs if body.logprobs is not None else 0 if body.provenance else None,
        num_prompt_logprobs=body.logprobs if body.echo else body.prompt_logprobs,
        processor=allowed(backend, body, processor),
    )
    return made, [echo for echo in echoes for _ in range(body.n or 1)]


Given = str | Sequence[int]


def prompts_of(
    backend: Backend, asked: AnyPrompt, field: str, *, num_each: int = 1
) -> tuple[list[Given], list[list[int]]]:
    """(the texts or ids of a field, the ids of each), of each of which num_each answers are made. Slow, as it reads texts.
    Raises ApiError 400."""
    given: list[Given]
    if isinstance(asked, str):
        given = [asked]
    elif isinstance(asked[0], int):
        given = [[token for token in asked if isinstance(token, int)]]
    else:
        given = [one for one in asked if not isinstance(one, int)]
    if len(given) * num_each > backend.options.max_choices:
        most = backend.options.max_choices
        raise bad(f"{len(given)} prompts with n = {num_each}: this server makes at most {most} completions a request")
    prompts = [backend.encode(one, field) if isinstance(one, str) else list(one) for one in given]
    for at, ids in enumerate(prompts):
        if not ids and field == "prompt":
            ids = prompts[at] = backend.beginning
        if not ids:
            raise bad(f"{field}: the prompt is empty: at least one token is needed", field, "invalid_prompt")
        beyond = [token for token in ids if token >= backend.vocab_size]
        if beyond:
            raise bad(f"{field}: token id {beyond[0]} is not one of 0 to {backend.vocab_size - 1}", field)
    return given, prompts


def _max_tokens(backend: Backend, body: CompletionRequest) -> int:
    """As it was given; else a number that nothing given contradicts."""
    if body.max_tokens is not None:
        return body.max_tokens
    return min(max(DEFAULT_MAX_TOKENS, body.min_tokens or 0), backend.options.max_tokens_limit or sys.maxsize)


def _echo(backend: Backend, prompt: str | Sequence[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    if backend.tokenizer is None:
        raise bad("echo: this model has no tokenizer, so token ids have no text", "echo")
    return str(backend.tokenizer.decode(list(prompt)))


async def _whole(answer: Answer, body: CompletionRequest, echoes: Sequence[str]) -> dict[str, Any]:
    """The answer of a request without stream."""
    traces = await finish(answer.job)
    done = answer.job.whole()
    choices = []
    for index, (completion, echo) in enumerate(zip(done, echoes, strict=True)):
        text, pieces, prompt = echo + completion.text, completion.pieces, completion.prompt_pieces
        choice = _choice(answer, body, index, text, pieces, traces[index], completion, echo, prompt)
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = answer.backend.texts.prompt_logprobs(prompt)
        choices.append({**choice, **answer.prompt_ids(index), **answer.ending(completion)})
    return {**answer.envelope(choices), "usage": answer.usage(done), **answer.figures(done)}


async def _events(answer: Answer, body: CompletionRequest, echoes: Sequence[str]) -> AsyncIterator[bytes]:
    """The answer of a request with stream: per choice its text, the end with the last of it; then the usage."""
    job = answer.job
    begun, named = set[int](), set[int]()
    num_ended = 0
    while not job.is_done:
        out = []
        for index, one in by_choice(await job.news(answer.backend.options.keepalive_s)).items():
            pieces, text, traces, completion = one.pieces, one.text, one.traces, one.completion
            answer.count(index, pieces)
            if index not in begun:
                begun.add(index)
                text = echoes[index] + text
            shown = one.prompt or _shown(answer, body, pieces, completion) if body.logprobs is not None else ()
            told = pieces and (body.provenance or body.return_token_ids)
            if not (text or shown or completion or told or (traces and body.trace)):
                continue
            choice = _choice(answer, body, index, text, pieces, traces, completion, echoes[index], one.prompt)
            if index not in named:
                named.add(index)
                choice |= answer.prompt_ids(index)
            data = answer.chunk(choice if shown else {**choice, "logprobs": None})
            if completion is not None:
                choice = data["choices"][0]
                choice.update(answer.ending(completion))
                num_ended += 1
                if num_ended == len(echoes) and not answer.wants_usage:
                    data.update(answer.figures(job.whole()))
            out.append(event(data))
        yield b"".join(out) or KEEP_ALIVE
    yield answer.closing()


def _choice(
    answer: Answer,
    body: CompletionRequest,
    index: int,
    text: str,
    pieces: Sequence[Piece],
    traces: Sequence[StepTrace],
    completion: Completion | None,
    echo: str,
    prompt: Sequence[Piece],
) -> dict[str, Any]:
    """A choice that has not ended. echo: the text before the output. prompt: pieces of the prompt, to come first."""
    logprobs = None
    if body.logprobs is not None:
        texts = answer.backend.texts
        logprobs = texts.text_logprobs(_shown(answer, body, pieces, completion), len(echo))
        if prompt and body.echo:
            before = texts.text_logprobs(prompt, 0, echo=echo)
            logprobs = {name: value + logprobs[name] for name, value in before.items()}
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None, **answer.extras(pieces, traces)}


def _shown(
    answer: Answer, body: CompletionRequest, pieces: Sequence[Piece], completion: Completion | None
) -> Sequence[Piece]:
    """The pieces that have log probabilities. After an echoed prompt these are all, the end token among them: programs
    that score texts (lm-eval's local-completions) drop as many from the end as were written."""
    return pieces if body.echo else answer.shown(pieces, completion)
