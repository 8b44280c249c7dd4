"""The server's routes, put together."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Match

from foretell import __version__
from foretell.server.backend import Backend
from foretell.server.errors import ApiError
from foretell.server.models import Models
from foretell.server.openapi import GOT, POSTED, errors, install, lines_of, request_body, stream_of
from foretell.server.options import ServerOptions
from foretell.server.protocol import ollama as asked, requests as bodies
from foretell.server.protocol.anthropic import MessagesRequest
from foretell.server.protocol.responses import ResponsesRequest
from foretell.server.replies import ollama as told
from foretell.server.replies.about import LearnerReply, ModelList, ModelReply, Props, Status, VersionReply
from foretell.server.replies.anthropic import MessageError, MessageEvent, MessageReply, TokenCount
from foretell.server.replies.common import ErrorReply
from foretell.server.replies.completions import ChatChunk, ChatReply, InfillReply, TextReply
from foretell.server.replies.explain import ExplainReply
from foretell.server.replies.responses import ResponseEvent, ResponseReply
from foretell.server.replies.tokens import EmbeddingsReply, TextOfTokens, TokensReply
from foretell.server.routes import learner, models, ollama
from foretell.server.routes.anthropic import count_tokens, messages
from foretell.server.routes.chat import chat_completions
from foretell.server.routes.completions import completions
from foretell.server.routes.embeddings import embeddings
from foretell.server.routes.explain import explain
from foretell.server.routes.infill import infill
from foretell.server.routes.responses import responses
from foretell.server.routes.tokenize import detokenize, tokenize
from foretell.server.security import REQUEST_ID, Gate

if TYPE_CHECKING:
    from foretell.service.service import Service

HIDDEN: dict[str, Any] = {"include_in_schema": False, "operation_id": None}
ALSO_BARE = ("/v1/chat/", "/v1/completions", "/v1/responses", "/v1/models")
ANSWER = "An answer."  # of lines of JSON
FORMS: dict[str, type[BaseModel]] = {"/v1/messages": MessageError, "/api/": told.OllamaError}
"""Of errors, by what a path begins with."""
_Post = tuple[str, Callable[..., Any], str, type[BaseModel], type[BaseModel], type[BaseModel] | None, str]


def build_app(service: "Service | Models", options: ServerOptions | None = None) -> FastAPI:
    """The ASGI app over a service, or over several models, which the caller starts (before or after), drains and closes.

    Several apps may share a service. Everything that is sent is described in ``/openapi.json``. options: of ``Models``
    its own.
    """
    models = service if isinstance(service, Models) else None
    options = options or (ServerOptions() if models is None else models.options)
    backend = Backend(service, options) if not isinstance(service, Models) else None

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if models is not None:
            models.begin()
        yield
        if backend is not None:
            backend.close()

    app = FastAPI(
        title="foretell",
        version=__version__,
        docs_url=None,  # it would load its scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.state.backend, app.state.models, app.state.served, app.state.options = backend, models, service, options
    app.add_middleware(Gate, options=options)
    if options.allowed_origins:  # outside the gate: a browser's preflight has no key, and errors are read too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),
            expose_headers=(REQUEST_ID, "retry-after"),
        )
    app.add_exception_handler(HTTPException, _http_error)
    app.router.routes += _routes().routes
    install(app, options, None if backend is None or backend.takes_any else backend.names)
    return app


@cache
def _routes() -> APIRouter:
    """The routes of every app: a request says which app it came to, and to describe them takes most of an app's start."""
    router = APIRouter()
    # Path, answer, name in the document, request, reply; events of a stream, and what they are.
    rows: tuple[_Post, ...] = (
        ("/v1/chat/completions", chat_completions, "create_chat_completion", bodies.ChatRequest, ChatReply, ChatChunk,
         "A reply."),
        ("/v1/completions", completions, "create_completion", bodies.CompletionRequest, TextReply, TextReply,
         "Completions."),
        ("/v1/responses", responses, "create_response", ResponsesRequest, ResponseReply, ResponseEvent, "A response."),
        ("/v1/messages", messages, "create_message", MessagesRequest, MessageReply, MessageEvent, "A message."),
        ("/v1/messages/count_tokens", count_tokens, "count_tokens", MessagesRequest, TokenCount, None, ""),
        ("/infill", infill, "fill_gap", bodies.InfillRequest, InfillReply, InfillReply, "A text."),
        ("/tokenize", tokenize, "tokenize", bodies.TokenizeRequest, TokensReply, None, ""),
        ("/detokenize", detokenize, "detokenize", bodies.DetokenizeRequest, TextOfTokens, None, ""),
        ("/v1/embeddings", embeddings, "embeddings", bodies.EmbeddingRequest, EmbeddingsReply, None, ""),
        ("/v1/foretell/learner", learner.post_learner, "tell_learner", bodies.LearnerRequest, LearnerReply, None, ""),
        ("/v1/foretell/explain", explain, "explain_steps", bodies.ExplainRequest, ExplainReply, None, ""),
        ("/api/chat", ollama.chat, "ollama_chat", asked.OllamaChatRequest, told.OllamaChatLine, told.OllamaChatLine,
         ANSWER),
        ("/api/generate", ollama.generate, "ollama_generate", asked.GenerateRequest, told.OllamaTextLine,
         told.OllamaTextLine, ANSWER),
        ("/api/pull", ollama.pull, "ollama_pull", asked.PullRequest, told.OllamaStatus, told.OllamaStatus, ANSWER),
        ("/api/show", ollama.show, "ollama_show", asked.ShowRequest, told.OllamaShown, None, ""),
        ("/api/embed", ollama.embed, "ollama_embed", asked.EmbedRequest, told.OllamaVectors, None, ""),
        ("/api/embeddings", ollama.embed, "ollama_embeddings", asked.OldEmbedRequest, told.OllamaVector, None, ""),
    )  # fmt: skip
    for path, answer, name, body, reply, events, what in rows:
        made: dict[str, Any] = {"model": reply}
        if events is not None:
            made |= {"content": (lines_of if what == ANSWER else stream_of)(events), "description": what}
        form = next((form for start, form in FORMS.items() if path.startswith(start)), ErrorReply)
        about = {"openapi_extra": request_body(body), "responses": {200: made, **errors(*POSTED, form=form)}}
        _add(router, path, answer, methods=["POST"], operation_id=name, **about)
    theirs = {200: {"model": told.OllamaModels}, **errors(*GOT, form=told.OllamaError)}
    for each in ("tags", "ps"):
        _add(router, f"/api/{each}", ollama.tags, operation_id=f"ollama_{each}", responses=theirs)
    their_version = {200: {"model": VersionReply}, **errors(400, 405, 500, form=told.OllamaError)}
    _add(router, "/api/version", ollama.version, operation_id="ollama_version", responses=their_version)
    named = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    got, probe, told_to_all = errors(*GOT), errors(400, 405, 500, 503), errors(400, 405, 500)
    _add(router, "/v1/models", models.list_models, responses={200: {"model": ModelList}, **got})
    one = {200: {"model": ModelReply}, **got}
    _add(router, "/v1/models/{model:path}", models.get_model, responses=one, openapi_extra={"parameters": [named]})
    _add(router, "/props", models.props, responses={200: {"model": Props}, **got})
    _add(router, "/favicon.ico", models.icon, include_in_schema=False)
    _add(router, "/v1/foretell/learner", learner.get_learner, responses={200: {"model": LearnerReply}, **got})
    _add(router, "/health", models.health, responses={200: {"model": Status}, **probe})
    for alias in ("/ping", "/v1/health"):  # vLLM's and SageMaker's, llama.cpp's
        _add(router, alias, models.health, include_in_schema=False)
    _add(router, "/ready", models.ready, responses={200: {"model": Status}, **probe})
    _add(router, "/version", models.version, responses={200: {"model": VersionReply}, **told_to_all})
    kept = errors(400, 401, 405, 500)
    _add(router, "/metrics", models.metrics, response_class=PlainTextResponse, responses=kept)
    _add(router, "/", models.page, response_class=HTMLResponse, responses=told_to_all)
    return router


def _add(router: APIRouter, path: str, answer: Callable[..., Any], **about: Any) -> None:
    """A route, and of some the same without /v1: for clients whose address has no path, as llama.cpp and MLX-LM have
    them."""
    router.add_api_route(path, answer, response_model=None, **about)
    if path.startswith(ALSO_BARE):
        router.add_api_route(path.removeprefix("/v1"), answer, response_model=None, **{**about, **HIDDEN})


async def _http_error(request: Request, error: Exception) -> Response:
    """Errors of the framework (unknown path or method) in the format of all errors."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return ApiError(404, f"there is nothing at {request.url.path[:200]}", code="not_found").response(
            request.url.path
        )
    text = f"{request.method} is not for this path" if error.status_code == 405 else str(error.detail)
    code = "method_not_allowed" if error.status_code == 405 else None
    headers = dict(error.headers or {})
    if "Allow" in headers:  # of the first route of this path alone
        fits = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
        methods = {method for route in fits for method in getattr(route, "methods", None) or ()}
        headers["Allow"] = ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))
    return ApiError(error.status_code, text, code=code, headers=headers).response(request.url.path)
