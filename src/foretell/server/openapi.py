"""The OpenAPI document of the routes, made from the models that validate requests."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from foretell.server.options import ServerOptions
from foretell.server.protocol import ollama, requests as bodies
from foretell.server.protocol.anthropic import MessagesRequest
from foretell.server.protocol.responses import ResponsesRequest
from foretell.server.replies.anthropic import MessageEvent
from foretell.server.replies.common import ErrorReply
from foretell.server.replies.completions import ChatChunk, InfillReply, TextReply
from foretell.server.replies.responses import ResponseEvent

REF = "#/components/schemas/{model}"
ERRORS = {
    400: "An invalid request: what is wrong, and with which field.",
    401: "No API key, or one that is not known.",
    404: "No such model, or no such path.",
    405: "Not with this method.",
    408: "The body did not arrive in time, or nothing was written in time.",
    413: "The body is too large.",
    415: "The body's content type is not JSON.",
    429: "The queue is full; Retry-After says when to try again.",
    500: "An internal error.",
    503: "The server is starting, stopping, recovering from an error, or has failed: the message says which.",
}
OLLAMA = (
    ollama.OllamaChatRequest, ollama.GenerateRequest, ollama.ShowRequest, ollama.PullRequest, ollama.EmbedRequest,
    ollama.OldEmbedRequest,
)  # fmt: skip
NAMING = (
    bodies.ChatRequest, bodies.CompletionRequest, ResponsesRequest, MessagesRequest, bodies.ExplainRequest,
    bodies.TokenizeRequest, bodies.DetokenizeRequest, bodies.EmbeddingRequest, bodies.InfillRequest,
)  # fmt: skip
POSTED, GOT = (400, 401, 404, 405, 408, 413, 415, 429, 500, 503), (400, 401, 404, 405, 500)
DESCRIPTION = (
    "OpenAI's API over a speculative decoder, with Anthropic's messages and Ollama's chats. Fields that are not described "
    "are refused where they would change the text: those of other servers, unless their value changes nothing, and names "
    "that are near a described one. What tells of the client, of billing, tracing and caching, tools that a provider's "
    "server would run, and what nobody knows is taken; the answer's header x-foretell-without-effect names it. "
    "/chat/completions, /completions and /models are answered "
    "without /v1 as well, and HEAD where GET is. Beyond OpenAI's: sampling as "
    "vLLM's users know it (top_k, min_p, ...), `speculative` for how a request is guessed for, `provenance` and `trace` "
    "for where its tokens came from, and `metrics.speculative_decoding` in responses."
)


def errors(*codes: int, form: type[BaseModel] = ErrorReply) -> dict[int | str, dict[str, Any]]:
    """Responses of a route, in the form of its errors."""
    return {code: {"model": form, "description": ERRORS[code]} for code in codes}


def request_body(kind: type[BaseModel]) -> dict[str, Any]:
    """``openapi_extra`` of a route that reads its body itself."""
    schema = {"$ref": REF.format(model=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def stream_of(kind: type[BaseModel]) -> dict[str, Any]:
    """The content of a stream, described by one of its events."""
    data = {
        "type": "string",
        "description": f"JSON of a {kind.__name__}, or of an ErrorReply where the rest failed; at last '[DONE]'.",
        # No contentSchema: the last event is no JSON.
        "x-json-schema": {"anyOf": [{"$ref": REF.format(model=name)} for name in (kind.__name__, "ErrorReply")]},
    }
    event = {"type": "object", "properties": {"data": data}, "required": ["data"], "description": "One event."}
    return {"text/event-stream": {"schema": event}}


def lines_of(kind: type[BaseModel]) -> dict[str, Any]:
    """The content of a stream of lines, described by one of them."""
    return {
        "application/x-ndjson": {"schema": {"type": "string", "description": f"Lines, each JSON of a {kind.__name__}."}}
    }


def install(app: FastAPI, options: ServerOptions, names: Sequence[str] | None) -> None:
    """Give the app its document. names: of models, where there are no others; None: any, or they come and go."""
    made: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not made:
            made.update(_document(app, options, names))
        return made

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI, options: ServerOptions, names: Sequence[str] | None) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, description=DESCRIPTION, routes=app.routes)
    schemas: dict[str, Any] = document["components"]["schemas"]
    posted = (*NAMING, bodies.LearnerRequest, *OLLAMA)
    sent = (ChatChunk, TextReply, ResponseEvent, MessageEvent, InfillReply)
    for mode, kinds in (("validation", posted), ("serialization", sent)):
        _, found = models_json_schema([(kind, mode) for kind in kinds], ref_template=REF)  # type: ignore[misc]
        for name, schema in found["$defs"].items():
            schemas.setdefault(name, schema)
    for unused in ("HTTPValidationError", "ValidationError"):  # what the framework would send: it never does
        schemas.pop(unused, None)
    for kind in NAMING:
        # Only these names are served: any other is a 404.
        if names is not None:
            schemas[kind.__name__]["properties"]["model"]["enum"] = [*names, "", None]
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _mend(operation, path=path, needs_key=bool(options.api_keys))
    if options.api_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document


def _mend(operation: dict[str, Any], *, path: str, needs_key: bool) -> None:
    from foretell.server.security import OPEN

    responses: dict[str, Any] = operation["responses"]
    responses.pop("422", None)
    if needs_key and path not in OPEN:
        operation["security"] = [{"key": []}]
    identity = {
        "x-request-id": {"schema": {"type": "string"}, "description": "Names this request in the server's log."}
    }
    for code, response in responses.items():
        headers: Mapping[str, Any] = {**identity, **response.get("headers", {})}
        if code == "429":
            headers = {**headers, "retry-after": {"schema": {"type": "string"}, "description": "Seconds."}}
        response["headers"] = dict(headers)
