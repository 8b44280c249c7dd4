"""``POST /v1/foretell/explain``: the first steps of a text, taken apart for people. The server's page draws them.

Its cost is bounded. It is a request among others: it waits in their queue and holds one row for at most MOST_TOKENS tokens.
What is done beyond decoding, MOST_STEPS times, is work on a few places of one row between two steps (``Watch``: some
milliseconds), and a server explains one request at a time: others get 429 meanwhile.
"""

from dataclasses import asdict, replace
from time import perf_counter
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from foretell.analysis.explain import ExplainedStep, Watch, chosen
from foretell.analysis.words import words
from foretell.server.answer import backend_of, in_worker, read_json
from foretell.server.backend import Backend
from foretell.server.errors import ApiError, bad
from foretell.server.job import ServerJob, finish
from foretell.server.protocol.requests import CompletionRequest, ExplainRequest
from foretell.server.sampling import submissions
from foretell.server.security import TENANT
from foretell.server.stream import JsonReply, while_connected

MOST_STEPS = 8
MOST_TOKENS = 64
"""As ``ExplainRequest.max_tokens`` says."""
TEXT = 400
"""Characters of the text before a step that are sent."""


async def explain(request: Request) -> Response:
    """Decode a little, and answer with its steps in figures and words."""
    body = await read_json(request, ExplainRequest)
    backend = await backend_of(request, body.model)
    if backend.is_explaining:
        raise ApiError(
            429, "another step is being explained: try again in a moment", code="rate_limit_exceeded",
            kind="rate_limit_error", headers={"retry-after": "1"},
        )  # fmt: skip
    backend.is_explaining = True
    try:
        return JsonReply(await while_connected(request.receive, _explained(request, backend, body)))
    finally:
        backend.is_explaining = False


async def _explained(request: Request, backend: Backend, body: ExplainRequest) -> dict[str, Any]:
    ids = await in_worker(backend, lambda: _ids(backend, body))
    if not ids:
        raise bad("prompt: the prompt is empty: at least one token is needed", "prompt", "invalid_prompt")
    limit = min(body.max_tokens or MOST_TOKENS, backend.options.max_tokens_limit or MOST_TOKENS)
    temperature = 0.7 if body.temperature is None else body.temperature
    as_asked = {"top_p": body.top_p, "seed": body.seed, "speculative": body.speculative}
    asked = CompletionRequest.model_validate({"prompt": ids[:1], "temperature": temperature, **as_asked})
    made = submissions(backend, asked, [ids], max_tokens=limit, logprobs=None)[0]
    service = backend.service
    if service.options.speculation == "off" or not (made.speculative or service.default).guesses:
        raise bad("nothing is guessed, so there is nothing to explain: name a method in speculative", "speculative")
    watch = Watch(backend.tokenizer, temperature, most=MOST_STEPS)
    tenant = request.scope.get(TENANT)
    name, lora = backend.served(body.model)
    made = replace(made, always=True, store=False, tenant=tenant, watch=watch, lora=lora)
    arrived = request.scope.get("foretell.arrived") or perf_counter()
    job = ServerJob(backend, [made], endpoint=request.url.path, stream=False, arrived=arrived)
    try:
        job.start()
        await finish(job)
        job.whole()
    finally:
        job.close()
    told = {"object": "foretell.explanation", "model": name, "seed": made.params.seed, "chosen": chosen(watch.steps)}
    return {**told, "steps": [_step(step) for step in watch.steps]}


def _ids(backend: Backend, body: ExplainRequest) -> list[int]:
    """The prompt's tokens. Raises ApiError 400."""
    if not body.chat:
        return backend.encode(body.prompt, "prompt")
    return backend.encode_chat([{"role": "user", "content": body.prompt}], "prompt")[1]


def _step(step: ExplainedStep) -> dict[str, Any]:
    return {**asdict(step), "text": step.text[-TEXT:], "is_race": step.is_race, "words": asdict(words(step))}
