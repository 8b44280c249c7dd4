"""``POST /infill``: llama.cpp's route, which editors ask as one types.

The line that is being written stands behind the suffix, so that of a prompt all but that line is known from the keystroke
before. Its last word is written anew: see ``Begun``.
"""

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from foretell.engine.request.result import Completion
from foretell.engine.request.submission import Submission
from foretell.server.answer import Answer, by_choice, effect_headers, in_worker, read
from foretell.server.backend import Backend
from foretell.server.errors import ApiError, bad
from foretell.server.protocol.infill import ExtraFile, InfillRequest
from foretell.server.protocol.sampling import Sampling, Speculative
from foretell.server.sampling import MakeProcessor, allowed, submissions
from foretell.server.stream import KEEP_ALIVE, EventStream, JsonReply, event, while_connected
from foretell.server.texts.fill import FILE, REPOSITORY, Begun, FillTokens

NEAR = 2048
"""Tokens of the prefix and the suffix that are read, three of the one to one of the other: llama.cpp's default batch."""
WORD = re.compile(r" ?\w*\Z", re.ASCII)


@dataclass(frozen=True)
class Gap:
    """A request that has been checked."""

    body: InfillRequest  # with what it left out
    submissions: list[Submission]
    max_tokens: int | None
    begun: str  # text that the output begins with, which is no part of the answer
    left_out: tuple[str, ...]


async def infill(request: Request) -> Response:
    """Fill a gap."""
    backend: Backend = request.app.state.backend
    body = await read(request, InfillRequest, backend)
    gap = await while_connected(request.receive, in_worker(backend, lambda: _plan(backend, body)))
    answer = Answer(
        backend, gap.body, gap.submissions, request=request, kind="infill", prefix="infill", max_tokens=gap.max_tokens
    )
    unread = [name for name in ("samplers", "t_max_prompt_ms") if getattr(body, name)]
    headers = effect_headers((*unread, *gap.left_out))
    if body.stream:
        return EventStream(answer.job, _events(answer, body, gap), headers=headers)
    try:
        return JsonReply(await while_connected(request.receive, _whole(answer, body, gap)), headers=headers)
    finally:
        answer.job.close()


Body = TypeVar("Body", bound=Sampling)


def filling(backend: Backend, body: Body, param: str) -> tuple[FillTokens, Body]:
    """(the model's tokens, a request that ends at them, too). Slow, as it reads the vocabulary. Raises ApiError 400."""
    tokens = backend.fill.tokens
    if tokens is None:
        raise bad(
            f"{param}: {backend.name!r} was not taught to fill gaps, as its tokenizer has no tokens for a prefix and a "
            "suffix: serve a model that has them, such as Qwen2.5-Coder",
            param,
        )
    ends = [*(body.stop_token_ids or ()), *(() if body.ignore_eos else tokens.ends)]
    return tokens, body.model_copy(update={"stop_token_ids": ends})


def _plan(backend: Backend, body: InfillRequest) -> Gap:
    """All checks, and the prompt. Raises ApiError 400."""
    tokens, body = filling(backend, body, "input_prefix")
    given = {count for count in (body.max_tokens, body.n_predict) if count is not None}
    if len(given) > 1:
        raise bad("max_tokens and n_predict are one setting: give it once", "n_predict")
    most = given.pop() if given else -1
    lines, newline, last = (body.input_prefix + (body.prompt or "")).rpartition("\n")
    match = WORD.search(last)
    begun = match.group() if match is not None and most else ""
    prefix = backend.encode_content(lines + newline, "input_prefix")
    line = backend.encode_content(last[: len(last) - len(begun)], "prompt")
    suffix = backend.encode_content(body.input_suffix, "input_suffix")
    left_out = []
    if len(suffix) > NEAR // 4:
        left_out.append(f"input_suffix.after-{NEAR // 4}-tokens")
        suffix = suffix[: NEAR // 4]
    if (beyond := len(prefix) - 3 * NEAR // 4) > 0:
        step = NEAR // 4  # in steps, so that it begins at one place for many keystrokes
        cut = -(-beyond // step) * step
        left_out.append(f"input_prefix.first-{cut}-tokens")
        prefix = prefix[cut:]
    room = backend.max_model_len - NEAR - 2 * max(0, most)
    extra, fewer = _extra(backend, tokens, body.input_extra or (), room)
    prompt = tokens.around([*backend.encode("", "input_prefix"), *extra], prefix, suffix, line)
    processor: MakeProcessor | None = None
    if begun:
        most += len(backend.encode_content(begun, "prompt")) if most > 0 else 0
        processor = lambda num_prompt: Begun(begun, backend.fill.spelled, num_prompt)  # noqa: E731
    limit = None if most < 0 else most
    if body.temperature is None:
        body = body.model_copy(update={"temperature": 0.0})
    if body.speculative is None and body.num_draft_tokens is None:  # what fills a gap mostly stands around it
        body = body.model_copy(update={"speculative": Speculative(always=True)})
    made = submissions(
        backend, body, [prompt], max_tokens=limit, logprobs=None, processor=allowed(backend, body, processor)
    )
    return Gap(body, made, limit, begun, (*left_out, *fewer))


def _extra(
    backend: Backend, tokens: FillTokens, files: Sequence[ExtraFile], room: int
) -> tuple[list[int], tuple[str, ...]]:
    """(the last of these files that have room, as tokens; what is left out)."""
    if not files:
        return [], ()
    parts: list[list[int]] = []
    for file in reversed(files):
        text = backend.encode_content(f"{file.filename or FILE}\n{file.text}\n", "input_extra")
        parts.insert(0, [tokens.file, *text] if tokens.file is not None else text)
        if (room := room - len(parts[0])) < 0:
            parts.pop(0)
            break
    first, last = list[int](), list[int]()
    if tokens.repository is not None:
        first = [tokens.repository, *backend.encode_content(f"{REPOSITORY}\n", "input_extra")]
    if tokens.file is not None:
        last = [tokens.file, *backend.encode_content(f"{FILE}\n", "input_extra")]
    gone = len(files) - len(parts)
    return [*first, *(token for part in parts for token in part), *last], (f"input_extra.first-{gone}",) if gone else ()


def kept(text: str, num_indent: int) -> tuple[str, bool]:
    """(a text up to a line that is indented by less, whether there is one). The first line is the cursor's own."""
    at = 0
    while (at := text.find("\n", at)) >= 0:
        line = text[at + 1 :].partition("\n")[0]
        if (bare := line.lstrip(" \t")) and len(line) - len(bare) < num_indent:
            return text[:at], True
        at += 1
    return text, False


async def _pieces(answer: Answer, body: InfillRequest, gap: Gap) -> AsyncIterator[str | dict[str, Any]]:
    """Pieces of the text as they come, "" where none came for a while; at last the other fields of the answer."""
    job, text, sent, num_tokens = answer.job, "", 0, 0
    limit_s, first = (body.t_max_predict_ms or 0) / 1000, 0.0
    done: Completion | None = None
    is_cut = False
    while not (job.is_done or is_cut):
        for one in by_choice(await job.news(answer.backend.options.keepalive_s)).values():
            text, done, num_tokens = text + one.text, one.completion, num_tokens + len(one.pieces)
            first = first or (perf_counter() if one.pieces else 0.0)
        shown, is_cut = kept(text[len(gap.begun) :], body.n_indent or 0)
        is_cut |= bool(limit_s and first and perf_counter() - first > limit_s and "\n" in shown and done is None)
        if is_cut:
            done = await _cancelled(answer)
        elif done is None:  # blanks may begin a line that ends the text
            shown = shown.rstrip(" \t\n")
        yield shown[sent:]
        sent = max(sent, len(shown))
    now = perf_counter()
    yield _end(answer, gap, done, is_cut, num_tokens, (first or now) - job.arrived, now - (first or now))


async def _cancelled(answer: Answer) -> Completion | None:
    """What is known of a text that is ended here."""
    answer.backend.service.cancel(answer.job.submissions[0].request_id)
    with suppress(ApiError):  # which a cancelled text is elsewhere
        while not answer.job.is_done:
            await answer.job.news()
    return answer.job.completions[0]


def _end(
    answer: Answer, gap: Gap, done: Completion | None, is_cut: bool, num_tokens: int, prompt_s: float, text_s: float
) -> dict[str, Any]:
    """All but the text. done: None where nothing is known of it."""
    submission = answer.job.submissions[0]
    num_prompt, num_cached = len(submission.prompt_ids), 0 if done is None else done.num_cached_tokens
    is_end = done is not None and done.finish_reason == "stop" and not is_cut
    stop = answer.stop_text(done) if done is not None and is_end else None

    def timed(name: str, count: int, seconds: float) -> dict[str, Any]:
        each = {"per_token_ms": 1e3 * seconds / max(1, count), "per_second": count / seconds if seconds else 0.0}
        return {f"{name}_n": count, f"{name}_ms": 1e3 * seconds, **{f"{name}_{key}": one for key, one in each.items()}}

    return {
        "model": answer.model,
        "seed": submission.params.seed,
        "stop_type": "word" if stop is not None else "eos" if is_end else "limit",
        "stopping_word": stop or "",
        "tokens_predicted": num_tokens,
        "tokens_evaluated": num_prompt,
        "tokens_cached": num_cached,
        "truncated": bool(gap.left_out),
        "timings": {
            **timed("prompt", num_prompt - num_cached, prompt_s),
            **timed("predicted", num_tokens, text_s),
            "draft_n": 0 if done is None else done.num_draft_tokens,
            "draft_n_accepted": 0 if done is None else done.num_accepted_tokens,
        },
    }


def _chosen(made: dict[str, Any], names: Sequence[str] | None) -> dict[str, Any]:
    """These fields alone. None: all."""
    if names is None:
        return made
    found = dict[str, Any]()
    for name in names:
        value: Any = made
        for part in name.split("/"):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            found[name] = value
    return found


async def _whole(answer: Answer, body: InfillRequest, gap: Gap) -> dict[str, Any]:
    """The answer of a request without stream."""
    text, rest = "", dict[str, Any]()
    async for piece in _pieces(answer, body, gap):
        if isinstance(piece, str):
            text += piece
        else:
            rest = piece
    return _chosen({"content": text, "stop": True, **rest}, body.response_fields)


async def _events(answer: Answer, body: InfillRequest, gap: Gap) -> AsyncIterator[bytes]:
    """The answer of a request with stream."""
    async for piece in _pieces(answer, body, gap):
        if isinstance(piece, dict):
            yield event(_chosen({"content": "", "stop": True, **piece}, body.response_fields))
        else:
            yield event({"content": piece, "stop": False}) if piece else KEEP_ALIVE
