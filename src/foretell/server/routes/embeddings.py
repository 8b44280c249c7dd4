"""``POST /v1/embeddings``: a text's last hidden states, after the final norm, as one vector of length 1.

The model that is served was trained to go on with texts, not to compare them: the reply says how its states were pooled.
Texts are read one after the other, in passes of PREFILL_CHUNK tokens between which other requests decode.
"""

import asyncio
import base64
import threading
from collections.abc import Sequence
from typing import Any, Literal

import torch
from starlette.requests import Request
from starlette.responses import Response
from torch import Tensor
from torch.nn import functional as F

from foretell.core.errors import ServiceClosedError
from foretell.model.prefill import feed
from foretell.model.target import Target
from foretell.server.answer import backend_of, in_worker, read_json
from foretell.server.backend import Backend
from foretell.server.errors import bad, of_engine
from foretell.server.protocol.requests import EmbeddingRequest
from foretell.server.routes.completions import prompts_of
from foretell.server.stream import JsonReply, while_connected

Pooling = Literal["mean", "last"]


async def embeddings(request: Request) -> Response:
    """Read texts."""
    body = await read_json(request, EmbeddingRequest)
    backend = await backend_of(request, body.model)
    return JsonReply(await vectors(request, backend, body.model_dump(), body.model))


async def vectors(request: Request, backend: Backend, given: dict[str, Any], model: str | None) -> dict[str, Any]:
    """The reply to the fields of a request. model: its name, checked. Raises ApiError."""
    body = EmbeddingRequest.model_validate({**given, "model": None})
    size = backend.service.engine.model.spec.hidden_size
    if backend.service.state != "ready":
        raise of_engine(ServiceClosedError(backend.service.says))
    if body.dimensions not in (None, size):
        raise bad(f"dimensions: the hidden states of this model have {size} numbers: leave it out", "dimensions")
    return await while_connected(request.receive, _made(backend, body, model))


async def _made(backend: Backend, body: EmbeddingRequest, model: str | None) -> dict[str, Any]:
    texts = await in_worker(backend, lambda: prompts_of(backend, body.input, "input")[1])
    too_long = max(map(len, texts))
    if too_long > backend.max_model_len:
        raise bad(
            f"input: a text has {too_long} tokens; the context is of {backend.context}: shorten it", "input",
            "context_length_exceeded",
        )  # fmt: skip
    pooling: Pooling = body.pooling or "mean"
    data, (name, lora) = [], backend.served(model)
    async with backend.embedding:  # one text at a time: its keys and values are memory beside the rows'
        for index, ids in enumerate(texts):
            vector = await _read(backend, ids, pooling, lora)
            numbers: Any = vector.tolist()
            if body.encoding_format == "base64":
                numbers = base64.b64encode(vector.numpy().tobytes()).decode()
            data.append({"object": "embedding", "index": index, "embedding": numbers})
    read = sum(map(len, texts))
    usage = {"prompt_tokens": read, "total_tokens": read}
    return {"object": "list", "data": data, "model": name, "pooling": pooling, "usage": usage}


async def _read(backend: Backend, ids: Sequence[int], pooling: Pooling, lora: str | None) -> Tensor:
    """``embed`` in a thread. Where the client leaves, it ends after the pass that runs: no other begins beside it."""
    left = threading.Event()
    reading = asyncio.ensure_future(asyncio.to_thread(embed, backend, ids, pooling, left, lora))
    try:
        return await asyncio.shield(reading)
    except asyncio.CancelledError:
        left.set()
        await asyncio.gather(reading, return_exceptions=True)
        raise


class _LeftError(Exception):
    """Nobody waits for the vector any more."""


@torch.inference_mode()
def embed(
    backend: Backend, ids: Sequence[int], pooling: Pooling, left: threading.Event, lora: str | None = None
) -> Tensor:
    """[H] float32 on the CPU: the normed last hidden states of a text, pooled, as a vector of length 1. left: asked after
    each pass; where it is set, _LeftError is raised."""
    model = backend.service.engine.model
    target, last = Target(model, 1, len(ids)), model.spec.num_layers - 1
    target.cache.loras = [model.lora_of(lora or backend.service.engine.lora)]
    found: list[Tensor] = []

    def keep(start: list[int], counts: list[int], taps: Tensor) -> None:
        found.append(model.normed(taps[0, : counts[0]]).float().cpu())
        if left.is_set():
            raise _LeftError

    feed(target, [ids], [0], head=False, taps=(last,), on_chunk=keep)
    states = torch.cat(found)
    return F.normalize(states.mean(0) if pooling == "mean" else states[-1], dim=0)
