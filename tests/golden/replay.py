"""Replays requests that are written down as plain data: groups of requests, each with its tokens.

A group is a dict with these keys.

- ``id``: its name.
- ``world``: ``table`` (table models, float64) or ``bundled`` (the bundled models, float32).
- ``speculative``: the configuration of the engine, as ``--speculative-config`` takes it.
- ``door``: ``generate``, ``stream``, ``batch:N`` (``generate_batch`` with ``batch_size=N``) or ``service``.
- ``width``: of the engine; 0 where it is left out.
- ``requests``: ``prompt`` (text or token ids), ``params`` (fields of SamplingParams), and where needed ``prediction``
  and, through a service, ``speculative``. With ``tokens``, the token ids that it gave, alone and in company.

Only names that the package exports are used, and two test doubles (a table model and a tokenizer), so that the file of
tokens outlives changes of the layout.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from foretell import Engine, Request, SamplingParams, Service, ServiceOptions, Submission
from tests.engine.harness import restless, started, table_engine
from tests.service.test_service import Mailbox

Processor = Callable[[Tensor, Tensor], Tensor]
Group = dict[str, Any]


@cache
def bundled() -> Engine:
    """The bundled target, loaded once."""
    return Engine.load("bundled", dtype="float32")


def engine_of(group: Group, speculative: dict[str, Any]) -> Engine:
    """A fresh engine: nothing is kept from one group to the next."""
    width = group.get("width", 0)
    if group["world"] == "table":
        return table_engine(speculative, blur=0.3, width=width, num_layers=2)
    return Engine(bundled().model, bundled().tokenizer, speculative=speculative, width=width)


def params_of(request: dict[str, Any], jitter: Processor | None) -> SamplingParams:
    """Plain data to SamplingParams; jitter, where given, comes after the request's own processor."""
    fields = dict(request["params"])
    own: Processor | None = restless if fields.pop("restless", False) else None
    for name in ("stop", "stop_token_ids", "banned_token_ids"):
        if name in fields:
            fields[name] = tuple(fields[name])
    if "logit_bias" in fields:
        fields["logit_bias"] = {int(token): bias for token, bias in fields["logit_bias"].items()}
    if jitter is None:
        return SamplingParams(**fields, logits_processor=own)
    shake = jitter

    def both(ids: Tensor, logits: Tensor) -> Tensor:
        return shake(ids, logits if own is None else own(ids, logits))

    return SamplingParams(**fields, logits_processor=both)


def jitter(amplitude: float, number: int) -> Processor:
    """Logits moved by at most amplitude, by a pure function of (ids, number): what rounding could do, and more."""

    def shake(ids: Tensor, logits: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(hash((number, *ids.tolist())) % (1 << 62))
        noise = torch.rand(logits.shape, generator=generator, dtype=torch.float64) * 2 - 1
        return logits + (amplitude * noise).to(logits.dtype)

    return shake


def replay(group: Group, shake: Processor | None = None) -> list[list[int]]:
    """The token ids of every request of a group, through its door."""
    asked = [Request(one["prompt"], params_of(one, shake), one.get("prediction")) for one in group["requests"]]
    engine = engine_of(group, group["speculative"])
    door, _, size = group["door"].partition(":")
    if door == "batch":
        return [completion.token_ids for completion in engine.generate_batch(asked, batch_size=int(size))]
    if door == "generate":
        return [engine.generate(one.prompt, one.params, prediction=one.prediction).token_ids for one in asked]
    if door == "stream":
        streams = [engine.stream(one.prompt, one.params, prediction=one.prediction) for one in asked]
        return [[piece.token_id for piece in stream] for stream in streams]
    assert door == "service", door
    return serve(engine, group, asked)


def alone(group: Group, shake: Processor | None = None) -> list[list[int]]:
    """The token ids of every request of a group, each by an engine of its own."""
    found = []
    for one in group["requests"]:
        engine = engine_of(group, one.get("speculative", group["speculative"]))
        completion = engine.generate(one["prompt"], params_of(one, shake), prediction=one.get("prediction"))
        found.append(completion.token_ids)
    return found


def serve(engine: Engine, group: Group, asked: Sequence[Request]) -> list[list[int]]:
    """All at once to a service of four rows that always guesses."""
    service = Service(engine, ServiceOptions(max_num_seqs=4, max_model_len=400, speculation="on", kv_memory_gib=0.05))
    box = Mailbox()
    with started(service):
        for number, (one, request) in enumerate(zip(group["requests"], asked, strict=True)):
            ids = request.prompt
            if isinstance(ids, str):
                ids = engine.tokenizer.encode(ids)
            guess = request.prediction or ()
            assert not isinstance(guess, str)
            way = service.method(one.get("speculative"))
            service.submit(Submission(str(number), ids, request.params, guess, speculative=way), box.hear)
        return [box.last(str(number), 120).completion.token_ids for number in range(len(asked))]
