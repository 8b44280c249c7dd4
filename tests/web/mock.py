"""A server that streams what foretell's would, without a model: the same text always, guessed well and less well.

Words in the prompt choose what goes wrong: ``[busy]`` 429, ``[refused]`` 400, ``[lost]`` cut off, ``[slow]`` no end soon,
``[burst]`` as fast as it goes, ``[full]`` until the context is full, ``[other]`` another text without speculation,
``[markup]`` a text that is html, ``[chunks]`` no word of tokens, ``[guessed]`` an accepted guess is the end, ``[tail]`` the
last steps guess nothing, ``[mute]`` none does, ``[think]`` a thought before the text of a chat.
Run this file to look at the page by hand.
"""

import asyncio
import json
import re
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse

from foretell import web
from foretell.engine.structured.parts import PartStream
from foretell.engine.structured.thoughts import Thinking, family_named

TEXT = """    if n <= 0:
        return []
    numbers = [0, 1]
    while len(numbers) < n:
        numbers.append(numbers[-1] + numbers[-2])
    return numbers[:n]


def test_fibonacci():
    assert fibonacci(1) == [0]
    assert fibonacci(6) == [0, 1, 1, 2, 3, 5]
"""
THOUGHT = "The user wants Fibonacci numbers.\n\nTwo seeds, 0 and 1, then sums. I write a test, too."
MARKUP = "a <img src=x onerror=\"document.title='owned'\"> & <script>document.title='owned'</script> b <b>c</b>\n" * 2
WORDS = {"thought": "reasoning_content", "answer": "content"}
ACCEPTED = (2, 4, 0, 3, 1, 4, 2)  # guesses accepted, step by step
DEPTH = 4
METRICS = """# HELP foretell:speedup Tokens a second now, against speculation off.
# TYPE foretell:speedup gauge
foretell:speedup{model_name="mock"} 1.87
foretell:speedup_possible{model_name="mock"} 3.5
foretell:speedup_lost_guesses{model_name="mock"} 1.0
foretell:speedup_lost_shape{model_name="mock"} 0.0
foretell:speedup_lost_time{model_name="mock"} 0.5
foretell:speedup_lost_width{model_name="mock"} 0.13
foretell:num_requests_running 1
foretell:num_requests_waiting{model_name="mock"} 0
foretell:planned_guesses{concurrency="1",context="256",method="eagle3",model_name="mock"} 3
foretell:planned_guesses{concurrency="8",context="256",method="eagle3",model_name="mock"} 0
foretell:planned_guesses{concurrency="1",context="8192",method="eagle3",model_name="mock"} 1
foretell:planned_guesses{concurrency="8",context="8192",method="eagle3",model_name="mock"} 0
foretell:planned_speedup{concurrency="1",context="256",method="eagle3",model_name="mock"} 1.5
foretell:planned_speedup{concurrency="8",context="256",method="eagle3",model_name="mock"} 1.0
foretell:planned_speedup{concurrency="1",context="8192",method="eagle3",model_name="mock"} 1.234
foretell:planned_speedup{concurrency="8",context="8192",method="eagle3",model_name="mock"} 1.0
"""


def _runner(text: str, p: float, q: float | None, time: float | None) -> dict[str, Any]:
    return {
        "token": token_id(text),
        "text": text,
        "p": p,
        "q": q,
        "time_p": time,
        "time_q": None if q is None else time,
    }


def _explained() -> dict[str, Any]:
    """Two steps: of two guesses the first was kept; nothing was guessed."""
    guesses = [
        {"node": 1, "parent": 0, "text": " a", "how": "coupled", "p": 0.9, "q": 0.5, "reach": 0.6, "kept": True},
        {"node": 2, "parent": 1, "text": "<b>", "how": "coupled", "p": 0.1, "q": 0.6, "reach": 0.1, "kept": False},
    ]
    places = [
        {
            "node": 0, "after": " return", "winner": " a", "was_guessed": True, "guesses": [" a"], "accept": None,
            "guess_tokens": [token_id(" a")], "winner_token": token_id(" a"),
            "runners": [_runner(" a", 0.9, 0.5, 0.2), _runner(" b", 0.1, 0.5, 1.7)],
        },
        {
            "node": 1, "after": " a", "winner": "\n", "was_guessed": False, "guesses": ["<b>"], "accept": None,
            "guess_tokens": [token_id("<b>")], "winner_token": token_id("\n"),
            "runners": [_runner("\n", 0.7, 0.1, 0.3), _runner("<b>", 0.1, 0.6, 0.9), _runner(" +", 0.0, None, None)],
        },
    ]  # fmt: skip
    words = {
        "before": ["A token is a word."], "guess": ["The drafter guesses."], "check": ["The target checks."],
        "verdicts": ["kept: a", "dropped: b"], "kept": "1 of 2 guesses were kept:", "result": ["The same text."],
    }  # fmt: skip
    step = {
        "number": 1, "text": "def add(a, b):\n    return", "method": "draft_model", "verifier": "coupled", "exact": True,
        "is_race": True, "temperature": 0.7, "guesses": guesses, "places": places, "num_kept": 1,
        "emitted": [" a", "\n"], "stop_uniform": 0.5, "seconds_draft": 0.001, "seconds_target": 0.002,
        "seconds_rest": 0.001, "words": words,
    }  # fmt: skip
    alone = {
        "guesses": [], "places": [{**places[1], "node": 0, "guesses": []}], "num_kept": 0, "emitted": ["\n"],
        "number": 2, "words": {**words, "verdicts": ["There is no guess here."]},
    }  # fmt: skip
    return {
        "object": "foretell.explanation", "model": "mock", "seed": 7, "chosen": 0, "steps": [step, {**step, **alone}],
    }  # fmt: skip


@dataclass
class Mock:
    """A running mock: where it is, what it was asked, and how it behaves."""

    url: str = ""
    key: str | None = None  # asked of every request, where set
    bodies: list[dict[str, Any]] = field(default_factory=list)
    explained: list[dict[str, Any]] = field(default_factory=list)  # bodies of /v1/foretell/explain
    cancelled: int = 0  # streams that the client closed
    has_metrics: bool = True
    knows_speedup: bool = True
    plain_reason: str | None = None  # told where nothing was guessed
    method: str = "draft_model"  # of the server
    models_after_s: float = 0.0  # how long /v1/models takes
    methods: tuple[str, ...] = ("draft_model", "ngram", "suffix")
    num_cached: int = 0  # tokens of the prompt that were known before, where nothing is guessed
    template: str = ""  # for chats
    can: tuple[str, ...] = ("completion",)  # as /api/show says it
    more: list[dict[str, Any]] = field(default_factory=list)  # of /v1/models, beside the one
    tells_no_bonus: bool = False  # where a guess ends the text, as foretell's server does


def cut(text: str) -> list[str]:
    """Tokens of a text: words with the blanks before them, signs, line ends; marks of thoughts, a full stop with what
    follows."""
    return re.findall(r"</?think>|\.\n\n| *\w+| *[^\w\s]|\n| +", text)


def think() -> PartStream:
    """What the server cuts texts with."""
    family = family_named("think")
    return PartStream(Thinking(SimpleNamespace(family=family, hidden={}), "before"))  # type: ignore[arg-type]


def token_id(token: str) -> int:
    return sum(ord(character) * 31**place for place, character in enumerate(token)) % 32000


def spread(*seed: object) -> float:
    """A number in (0, 1) that depends on nothing but its arguments."""
    return (token_id(repr(seed)) % 997 + 1) / 999


def steps(
    tokens: list[str], *, guesses: int, ends_guessed: bool, plain_from: int = 10**9
) -> Iterator[tuple[list[tuple[str, str]], dict[str, Any]]]:
    """(token, source) pairs and the trace of each step; ``guesses`` 0 is plain decoding."""
    at, number, pending, asked = 0, 0, "\n", guesses
    while at < len(tokens):
        guesses = asked if at < plain_from else 0
        right = tokens[at : at + guesses]
        kept = min(ACCEPTED[number % len(ACCEPTED)], len(right), max(0, len(tokens) - at - 1))
        texts, parent, probability = [pending], [-1], [1.0]
        for depth in range(guesses):
            above = depth  # the chain of node 1, 2, ...: node 0 is the pending token
            texts.append(right[depth] if depth < kept else f" maybe{number % 10}")
            parent.append(above)
            probability.append(0.55 + 0.44 * spread(number, depth) if depth < kept else 0.4 * spread(number, depth))
        for above in (0, 0, 1)[: 3 if guesses else 0]:  # rivals beside the chain
            texts.append(f" x{above}{len(texts)}")
            parent.append(above)
            probability.append(0.2 * spread(number, len(texts)))
        sources = ["draft:draft_model"] * kept + ["bonus" if guesses else "plain"]
        emitted = tokens[at : at + kept + 1]
        if ends_guessed and guesses and at + kept + 1 == len(tokens):
            texts[kept + 1], sources[-1] = (
                tokens[-1],
                sources[0],
            )  # the path ends before it, and it is told as the bonus
        yield (
            list(zip(emitted, sources, strict=True)),
            {
                "tokens": texts,
                "token_ids": [token_id(text) for text in texts],
                "parent": parent,
                "probability": probability,
                "path": list(range(kept + 1)),
                "bonus": token_id(emitted[-1]),
            },
        )
        at, number, pending = at + len(emitted), number + 1, emitted[-1]


EXPLAINED = _explained()


def error(status: int, message: str, **headers: str) -> JSONResponse:
    body = {"error": {"message": message, "type": "mock", "param": None, "code": None}}
    return JSONResponse(body, status, {name.replace("_", "-"): value for name, value in headers.items()})


def make_app(mock: Mock) -> FastAPI:
    app = FastAPI()

    @app.middleware("http")
    async def keys(request: Request, go_on: Any) -> Response:
        given = request.headers.get("authorization")
        if mock.key and request.url.path != "/" and given != f"Bearer {mock.key}":
            return error(401, "invalid API key")
        return await go_on(request)

    @app.get("/")
    async def page() -> HTMLResponse:
        return HTMLResponse(web.page(), headers={"Content-Security-Policy": web.csp()})

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        speculative = {"method": mock.method, "num_speculative_tokens": DEPTH, "shape": "chain", "verify": "coupled"}
        await asyncio.sleep(mock.models_after_s)
        one = {"id": "mock", "object": "model", "speculative": speculative, "methods": mock.methods}
        return {"object": "list", "data": [one, *mock.more]}

    @app.post("/api/show")
    async def show(request: Request) -> dict[str, Any]:
        told = {"template": mock.template, "capabilities": mock.can}
        name = (await request.json())["model"]
        return told | next((one.get("show", {}) for one in mock.more if one["id"] == name), {})

    @app.get("/metrics")
    async def metrics() -> Response:
        lines = METRICS.splitlines(keepends=True)
        told = METRICS if mock.knows_speedup else "".join(line for line in lines if ":speedup" not in line)
        return PlainTextResponse(told) if mock.has_metrics else error(404, "no metrics")

    @app.post("/v1/foretell/explain")
    async def explain(request: Request) -> Response:
        body = await request.json()
        mock.explained.append(body)
        if "[busy]" in body["prompt"]:
            return error(429, "another step is being explained", Retry_After="1")
        return JSONResponse(EXPLAINED)

    @app.post("/v1/chat/completions")
    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        body = await request.json()
        mock.bodies.append(body)
        is_chat = request.url.path.endswith("chat/completions")
        prompt = body["messages"][0]["content"] if is_chat else body["prompt"]
        if "[busy]" in prompt:
            return error(429, "the queue is full", Retry_After="7")
        if "[refused]" in prompt:
            return error(400, "method 'eagle3' is not loaded")
        return StreamingResponse(stream(mock, body, prompt, is_chat), media_type="text/event-stream")

    return app


async def stream(mock: Mock, body: dict[str, Any], prompt: str, is_chat: bool) -> AsyncIterator[str]:
    is_plain = (body.get("speculative") or {}).get("method") == "none"
    times = 20 if "[slow]" in prompt or "[burst]" in prompt else 1
    text = MARKUP if "[markup]" in prompt else TEXT * times
    thinks = is_chat and "[think]" in prompt
    reader = think() if thinks else None
    tokens = cut(f"<think>\n{THOUGHT}\n</think>\n\n{text}" if thinks else text)[: body["max_tokens"]]
    if is_plain and "[other]" in prompt:
        tokens[7] = " other"
    drafted = accepted = count = 0
    pause = 0.05 if "[slow]" in prompt else 0.0 if "[burst]" in prompt else 0.012

    def chunk(choices: list[dict[str, Any]], **more: Any) -> str:
        return f"data: {json.dumps({'id': 'mock', 'object': 'chunk', 'model': 'mock', 'choices': choices, **more})}\n\n"

    try:
        if is_chat:
            yield chunk([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
        plain_from = 0 if "[mute]" in prompt else 30 if "[tail]" in prompt else 10**9
        depth = 0 if is_plain else DEPTH
        made = steps(tokens, guesses=depth, ends_guessed="[guessed]" in prompt, plain_from=plain_from)
        for pieces, trace in made:
            await asyncio.sleep(pause)
            count += 1
            text = "".join(token for token, _ in pieces)
            choice: dict[str, Any] = {"index": 0, "finish_reason": None}
            deltas = [] if reader is None else reader.push([], text)
            deltas = [{WORDS[phase]: one} for phase, one in deltas] or [{"content": "" if reader else text}]
            choice |= {"delta": deltas[0]} if is_chat else {"text": text}
            if body.get("provenance") and "[chunks]" not in prompt:
                logprob = -3 * spread(count)
                choice["provenance"] = [
                    {"token": token, "token_id": token_id(token), "source": source, "logprob": logprob}
                    for token, source in pieces
                ]
            if mock.tells_no_bonus and not is_plain and pieces[-1][1] != "bonus":
                trace["path"], trace["bonus"] = list(range(len(trace["path"]) + 1)), None
            if body.get("trace") and "[chunks]" not in prompt:
                choice["trace"] = [trace]
            yield chunk([choice])
            for delta in deltas[1:]:  # the tokens came with the first one
                yield chunk([{"index": 0, "finish_reason": None, "delta": delta}])
            drafted += len(trace["tokens"]) - 1
            accepted += len(trace["path"]) - 1
            if "[lost]" in prompt and count == 3:
                raise ConnectionError("cut on purpose")
        end: dict[str, Any] = {"index": 0, "finish_reason": "length" if len(tokens) == body["max_tokens"] else "stop"}
        if "[full]" in prompt:
            end |= {"finish_reason": "length", "stop_reason": "context"}
        yield chunk([end | ({"delta": {}} if is_chat else {"text": ""})])
        figures = {
            "mean_acceptance_length": 1 + accepted / count,
            "draft_acceptance_rate": accepted / max(1, drafted),
            "num_draft_tokens": drafted,
            "num_accepted_draft_tokens": accepted,
            "plain_reason": None if drafted else mock.plain_reason,
        }
        usage: dict[str, Any] = {"prompt_tokens": 9, "completion_tokens": len(tokens), "total_tokens": 9 + len(tokens)}
        usage["prompt_tokens_details"] = {"cached_tokens": mock.num_cached if is_plain else 0}
        if reader is not None:
            num_thought = min(len(cut(THOUGHT)), len(tokens) - 2)  # beside the mark and the line end
            usage["completion_tokens_details"] = {"reasoning_tokens": num_thought}
        yield chunk([], usage=usage, metrics={"speculative_decoding": figures})
        yield "data: [DONE]\n\n"
    except (asyncio.CancelledError, GeneratorExit):
        mock.cancelled += 1
        raise


@contextmanager
def serve() -> Iterator[Mock]:
    """The mock on a free port of 127.0.0.1, until the block ends."""
    mock = Mock()
    listener = socket.create_server(("127.0.0.1", 0))
    mock.url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    config = uvicorn.Config(
        make_app(mock), log_config=None, log_level="critical", ws="none", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield mock
    finally:
        server.should_exit = True
        thread.join(10)


if __name__ == "__main__":
    with serve() as running:
        print(running.url, flush=True)
        threading.Event().wait()
