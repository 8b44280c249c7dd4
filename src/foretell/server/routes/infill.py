"""``POST /infill``: llama.cpp's route, which editors ask as one types.

Of a keystroke only the line that is being written is new: other files stand first, and that line behind the suffix. Its
last word is written anew (see ``Begun``). What fills a gap mostly stands around it, so guesses are made in every step, by
what only looks it up: a head would read the text first.
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
from foretell.engine.request.row import Submission
from foretell.server.answer import Answer, by_choice, in_worker, read
from foretell.server.backend import Backend
from foretell.server.errors import ApiError, bad
from foretell.server.protocol.requests import ExtraFile, InfillRequest
from foretell.server.protocol.sampling import Sampling, Speculative
from foretell.server.sampling import MakeProcessor, allowed, submissions
from foretell.server.stream import KEEP_ALIVE, event, while_connected
from foretell.server.texts.fill import Begun

NEAR = 512
"""Tokens of the suffix that are read, and a third of those of the prefix: with llama.cpp's default batch its numbers."""
SUFFIX = "suffix"
WORD = re.compile(r" ?\w*\Z", re.ASCII)
Body = TypeVar("Body", bound=Sampling)


@dataclass(frozen=True)
class Gap:
    """A request that has been checked."""

    body: InfillRequest  # with this route's defaults
    submissions: list[Submission]
    max_tokens: int | None
    begun: str  # with which the output begins, and which is no part of the answer
    left_out: tuple[str, ...]


async def infill(request: Request) -> Response:
    """Fill a gap."""
    body, backend = await read(request, InfillRequest)
    gap = await while_connected(request.receive, in_worker(backend, lambda: _plan(backend, body)))
    answer = Answer(
        backend, gap.body, gap.submissions, request=request, kind="infill", prefix="infill", max_tokens=gap.max_tokens
    )
    unread = [name for name in ("samplers", "t_max_prompt_ms") if getattr(body, name)]
    return await answer.reply(_events(answer, gap), _whole(answer, gap), (*unread, *gap.left_out))


def filling(backend: Backend, body: Body, param: str) -> Body:
    """A request whose text the tokens around gaps end, too. Slow, as it reads the vocabulary. Raises ApiError 400."""
    if backend.fill.prefix is None:
        raise bad(
            f"{param}: {backend.name!r} was not taught to fill gaps, as its tokenizer has no tokens for a prefix and a "
            "suffix: serve a model that has them, such as Qwen2.5-Coder",
            param,
        )
    ends = () if body.ignore_eos else backend.fill.ends
    return body.model_copy(update={"stop_token_ids": [*(body.stop_token_ids or ()), *ends]})


def gap_of(backend: Backend, before: Sequence[int], after: str) -> list[int]:
    """The prompt of a gap between tokens and a text that ``filling`` has checked. Slow. Raises ApiError 400."""
    return backend.fill.prompt(backend.encode("", "prompt"), before, backend.encode_content(after, "suffix"), ())


def _plan(backend: Backend, body: InfillRequest) -> Gap:
    """All checks, and the prompt. Raises ApiError 400."""
    body, left_out = filling(backend, body, "input_prefix"), list[str]()
    given = {count for count in (body.max_tokens, body.n_predict) if count is not None}
    if len(given) > 1:
        raise bad("max_tokens and n_predict are one setting: give it once", "n_predict")
    most = given.pop() if given else -1
    lines, newline, last = (body.input_prefix + body.prompt).rpartition("\n")
    begun = "" if most == 0 or (word := WORD.search(last)) is None else word.group()
    prefix = backend.encode_content(lines + newline, "input_prefix")
    line = backend.encode_content(last.removesuffix(begun), "prompt")
    suffix = backend.encode_content(body.input_suffix, "input_suffix")
    if len(suffix) > NEAR:
        left_out.append(f"input_suffix.after-{NEAR}-tokens")
        suffix = suffix[:NEAR]
    if (beyond := len(prefix) - 3 * NEAR) > 0:
        cut = -(-beyond // NEAR) * NEAR  # in steps, so that it begins at one place for many keystrokes
        left_out.append(f"input_prefix.first-{cut}-tokens")
        prefix = prefix[cut:]
    extra, num_gone = _extra(backend, body.input_extra, backend.max_model_len - 4 * NEAR - 2 * max(0, most))
    left_out += [f"input_extra.first-{num_gone}"] if num_gone else []
    prompt = backend.fill.prompt([*backend.encode("", "input_prefix"), *extra], prefix, suffix, line)
    processor: MakeProcessor | None = None
    if begun:
        most += len(backend.encode_content(begun, "prompt")) if most > 0 else 0
        processor = lambda num_prompt: Begun(begun, backend.fill, num_prompt)  # noqa: E731
    defaults: dict[str, Any] = {"temperature": body.temperature or 0.0}
    guesses = backend.service.options.speculation != "off" and SUFFIX in backend.service.methods
    if guesses and body.speculative is None and body.num_draft_tokens is None:
        defaults["speculative"] = Speculative.model_validate({"method": SUFFIX, "always": True})
    body, limit = body.model_copy(update=defaults), None if most < 0 else most
    made = submissions(
        backend, body, [prompt], max_tokens=limit, logprobs=None, processor=allowed(backend, body, processor)
    )
    return Gap(body, made, limit, begun, tuple(left_out))


def _extra(backend: Backend, files: Sequence[ExtraFile], room: int) -> tuple[list[int], int]:
    """(the last of these files, as many as have room, as tokens; how many have none)."""

    def marked(token: int | None, text: str) -> list[int]:
        return [*([] if token is None else [token]), *backend.encode_content(text, "input_extra")]

    parts = list[list[int]]()
    for file in reversed(files):
        part = marked(backend.fill.file, f"{file.filename}\n{file.text}\n")
        if (room := room - len(part)) < 0:
            break
        parts.insert(0, part)
    num_gone = len(files) - len(parts)
    if parts and backend.fill.repository is not None:
        parts.insert(0, marked(backend.fill.repository, "repository\n"))
    if parts and backend.fill.file is not None:
        parts.append(marked(backend.fill.file, "filename\n"))
    return [token for part in parts for token in part], num_gone


async def _pieces(answer: Answer, gap: Gap) -> AsyncIterator[dict[str, Any]]:
    """Pieces of the answer as they come, with no text where none came for a while; the last has its figures."""
    job, body, text, num_sent, num_tokens, first = answer.job, gap.body, "", 0, 0, 0.0
    done: Completion | None = None
    is_cut, dedent = False, re.compile(rf"\n[ \t]{{0,{body.n_indent - 1}}}[^ \t\n]") if body.n_indent else None
    while not (job.is_done or is_cut):
        for one in by_choice(await job.news(answer.backend.options.keepalive_s)).values():
            text, done, num_tokens = text + one.text, one.completion, num_tokens + len(one.pieces)
            first = first or (perf_counter() if one.pieces else 0.0)
        shown = text[len(gap.begun) :]
        is_late = 0 < body.t_max_predict_ms < 1e3 * (perf_counter() - (first or perf_counter())) and "\n" in shown
        if dedent is not None and (found := dedent.search(shown)) is not None:
            shown, is_cut = shown[: found.start()], True
        elif done is None and not is_late:
            shown = shown.rstrip(" \t\n")  # blanks may begin a line that ends the text
        if done is None and (is_cut := is_cut or is_late):
            answer.backend.service.cancel(job.submissions[0].request_id)
            with suppress(ApiError):  # as of any cancelled text
                while not job.is_done:
                    await job.news()
            done = job.completions[0]
        if not (job.is_done or is_cut):
            yield {"content": shown[num_sent:], "stop": False}
            num_sent = max(num_sent, len(shown))
    now, num_prompt = perf_counter(), len(job.submissions[0].prompt_ids)
    num_cached = 0 if done is None else done.num_cached_tokens
    stop = None if done is None or is_cut else answer.stop_text(done)
    is_end = done is not None and done.finish_reason == "stop" and not is_cut
    drafted = (0, 0) if done is None else (done.num_draft_tokens, done.num_accepted_tokens)
    timings: dict[str, float] = dict(zip(("draft_n", "draft_n_accepted"), drafted, strict=True))
    times = (
        ("prompt", num_prompt - num_cached, (first or now) - job.arrived),
        ("predicted", num_tokens, now - (first or now)),
    )
    for name, count, seconds in times:
        timings |= {f"{name}_n": count, f"{name}_ms": 1e3 * seconds}
        timings |= {f"{name}_per_token_ms": 1e3 * seconds / max(1, count), f"{name}_per_second": count / (seconds or 1)}
    how = "word" if stop is not None else "eos" if is_end else "limit"
    counts = {"tokens_predicted": num_tokens, "tokens_evaluated": num_prompt, "tokens_cached": num_cached}
    end = {"stop": True, "stop_type": how, "stopping_word": stop or "", "truncated": bool(gap.left_out)}
    end |= {"timings": timings, "generation_settings": {"n_ctx": answer.backend.max_model_len}}  # of llama.vscode's bar
    seed = job.submissions[0].params.seed
    yield {"content": shown[num_sent:], "model": answer.model, "seed": seed, **end, **counts}


async def _whole(answer: Answer, gap: Gap) -> dict[str, Any]:
    """The answer of a request without stream."""
    parts = [one async for one in _pieces(answer, gap)]
    made = {**parts[-1], "content": "".join(one["content"] for one in parts)}
    if (names := gap.body.response_fields) is None:
        return made
    flat = {**made, **{f"timings/{name}": value for name, value in made["timings"].items()}}
    return {name: flat[name] for name in names if name in flat}


async def _events(answer: Answer, gap: Gap) -> AsyncIterator[bytes]:
    """The answer of a request with stream."""
    async for piece in _pieces(answer, gap):
        yield event(piece) if piece["content"] or piece["stop"] else KEEP_ALIVE
