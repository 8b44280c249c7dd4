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
from foretell.server.protocol import ollama as asked
from foretell.server.protocol.anthropic import MessagesRequest
from foretell.server.protocol.infill import InfillRequest
from foretell.server.protocol.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    ExplainRequest,
    LearnerRequest,
    TokenizeRequest,
)
from foretell.server.protocol.responses import ResponsesRequest
from foretell.server.replies import ollama as told
from foretell.server.replies.about import LearnerReply, ModelList, ModelReply, Props, Status, VersionReply
from foretell.server.replies.anthropic import MessageError, MessageEvent, MessageReply, TokenCount
from foretell.server.replies.completions import ChatChunk, ChatReply, TextReply
from foretell.server.replies.explain import ExplainReply
from foretell.server.replies.infill import InfillReply
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
    _both(
        router,
        "/v1/chat/completions",
        chat_completions,
        methods=["POST"],
        operation_id="create_chat_completion",
        openapi_extra=request_body(ChatRequest),
        responses={
            200: {"model": ChatReply, "content": stream_of(ChatChunk), "description": "A reply."},
            **errors(*POSTED),
        },
    )
    _both(
        router,
        "/v1/completions",
        completions,
        methods=["POST"],
        operation_id="create_completion",
        openapi_extra=request_body(CompletionRequest),
        responses={
            200: {"model": TextReply, "content": stream_of(TextReply), "description": "Completions."},
            **errors(*POSTED),
        },
    )
    _both(
        router,
        "/v1/responses",
        responses,
        methods=["POST"],
        operation_id="create_response",
        openapi_extra=request_body(ResponsesRequest),
        responses={
            200: {"model": ResponseReply, "content": stream_of(ResponseEvent), "description": "A response."},
            **errors(*POSTED),
        },
    )
    fault = errors(*POSTED, form=MessageError)
    router.add_api_route(
        "/v1/messages", messages, response_model=None, methods=["POST"], operation_id="create_message",
        openapi_extra=request_body(MessagesRequest),
        responses={
            200: {"model": MessageReply, "content": stream_of(MessageEvent), "description": "A message."}, **fault,
        },
    )  # fmt: skip
    router.add_api_route(
        "/v1/messages/count_tokens", count_tokens, response_model=None, methods=["POST"], operation_id="count_tokens",
        openapi_extra=request_body(MessagesRequest), responses={200: {"model": TokenCount}, **fault},
    )  # fmt: skip
    filled = {"model": InfillReply, "content": stream_of(InfillReply), "description": "A text."}
    router.post(
        "/infill",
        response_model=None,
        operation_id="fill_gap",
        openapi_extra=request_body(InfillRequest),
        responses={200: filled, **errors(*POSTED)},
    )(infill)
    _add_ollama(router)
    _both(router, "/v1/models", models.list_models, responses={200: {"model": ModelList}, **errors(*GOT)})
    _both(
        router,
        "/v1/models/{model:path}",
        models.get_model,
        responses={200: {"model": ModelReply}, **errors(*GOT)},
        openapi_extra={
            "parameters": [
                {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            ]
        },
    )
    for path, answer, body, reply in (
        ("/tokenize", tokenize, TokenizeRequest, TokensReply),
        ("/detokenize", detokenize, DetokenizeRequest, TextOfTokens),
        ("/v1/embeddings", embeddings, EmbeddingRequest, EmbeddingsReply),
    ):
        router.add_api_route(
            path, answer, response_model=None, methods=["POST"], operation_id=answer.__name__,
            openapi_extra=request_body(body), responses={200: {"model": reply}, **errors(*POSTED)},
        )  # fmt: skip
    router.add_api_route("/props", models.props, response_model=None, responses={200: {"model": Props}, **errors(*GOT)})
    router.add_api_route("/favicon.ico", models.icon, response_model=None, include_in_schema=False)
    router.add_api_route(
        "/v1/foretell/learner", learner.get_learner, response_model=None,
        responses={200: {"model": LearnerReply}, **errors(*GOT)},
    )  # fmt: skip
    router.add_api_route(
        "/v1/foretell/learner", learner.post_learner, response_model=None, methods=["POST"],
        operation_id="tell_learner", openapi_extra=request_body(LearnerRequest),
        responses={200: {"model": LearnerReply}, **errors(*POSTED)},
    )  # fmt: skip
    router.add_api_route(
        "/v1/foretell/explain", explain, response_model=None, methods=["POST"], operation_id="explain_steps",
        openapi_extra=request_body(ExplainRequest), responses={200: {"model": ExplainReply}, **errors(*POSTED)},
    )  # fmt: skip
    probe = errors(400, 405, 500, 503)
    router.get("/health", response_model=None, responses={200: {"model": Status}, **probe})(models.health)
    for alias in ("/ping", "/v1/health"):  # vLLM's and SageMaker's, llama.cpp's
        router.get(alias, response_model=None, include_in_schema=False)(models.health)
    router.get("/ready", response_model=None, responses={200: {"model": Status}, **probe})(models.ready)
    router.get("/version", response_model=None, responses={200: {"model": VersionReply}, **errors(400, 405, 500)})(
        models.version
    )
    router.get("/metrics", response_model=None, response_class=PlainTextResponse, responses=errors(400, 401, 405, 500))(
        models.metrics
    )
    router.get("/", response_model=None, response_class=HTMLResponse, responses=errors(400, 405, 500))(models.page)
    return router


def _add_ollama(router: APIRouter) -> None:
    fault, got = errors(*POSTED, form=told.OllamaError), errors(*GOT, form=told.OllamaError)
    routes: tuple[tuple[str, Callable[..., Any], type[BaseModel], type[BaseModel], bool], ...] = (
        ("chat", ollama.chat, asked.OllamaChatRequest, told.OllamaChatLine, True),
        ("generate", ollama.generate, asked.GenerateRequest, told.OllamaTextLine, True),
        ("pull", ollama.pull, asked.PullRequest, told.OllamaStatus, True),
        ("show", ollama.show, asked.ShowRequest, told.OllamaShown, False),
        ("embed", ollama.embed, asked.EmbedRequest, told.OllamaVectors, False),
        ("embeddings", ollama.embed, asked.OldEmbedRequest, told.OllamaVector, False),
    )
    for name, answer, body, line, has_lines in routes:
        streamed = {"content": lines_of(line), "description": "An answer."} if has_lines else {}
        router.add_api_route(
            f"/api/{name}", answer, response_model=None, methods=["POST"], operation_id=f"ollama_{name}",
            openapi_extra=request_body(body), responses={200: {"model": line, **streamed}, **fault},
        )  # fmt: skip
    for path in ("/api/tags", "/api/ps"):
        router.add_api_route(
            path, ollama.tags, response_model=None, operation_id=path[1:].replace("api/", "ollama_"),
            responses={200: {"model": told.OllamaModels}, **got},
        )  # fmt: skip
    router.add_api_route(
        "/api/version", ollama.version, response_model=None, operation_id="ollama_version",
        responses={200: {"model": VersionReply}, **errors(400, 405, 500, form=told.OllamaError)},
    )  # fmt: skip


def _both(router: APIRouter, path: str, answer: Callable[..., Any], **about: Any) -> None:
    """A route, and the same without /v1: for clients whose address has no path, as llama.cpp and MLX-LM have them."""
    router.add_api_route(path, answer, response_model=None, **about)
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
