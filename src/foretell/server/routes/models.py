"""``/v1/models``, the probes, the figures and the page."""

from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from foretell import __version__, web
from foretell.server.backend import Backend
from foretell.server.errors import ApiError
from foretell.server.stream import JsonReply, time_text


def _model(backend: Backend, name: str) -> dict[str, Any]:
    speculative = backend.service.default.resolved()
    return {
        "id": name,
        "object": "model",
        "type": "model",  # as Anthropic's clients read it
        "display_name": name,
        "created_at": time_text(backend.created),
        "created": backend.created,
        "owned_by": "foretell",
        "root": backend.name,
        "parent": None if backend.served(name)[1] is None else backend.name,
        "max_model_len": backend.max_model_len,
        # Keys that name files on this machine are not sent to clients.
        "speculative": {
            key: value for key, value in speculative.items() if key not in ("model", "judge", "acceptance")
        },
        "methods": backend.service.methods,
        "resting": backend.service.resting,
    }


async def list_models(request: Request) -> Response:
    """The model that is served, and its adapters."""
    backend: Backend = request.app.state.backend
    ends = {"first_id": backend.names[0], "last_id": backend.names[-1], "has_more": False}
    return JsonReply({"object": "list", "data": [_model(backend, name) for name in backend.names], **ends})


async def get_model(request: Request) -> Response:
    """A model by its name."""
    backend: Backend = request.app.state.backend
    name = request.path_params["model"]
    backend.check_model(name)
    return JsonReply(_model(backend, name))


async def health(request: Request) -> Response:
    """Liveness: whether the engine works or is still being started. What is not live is started anew, so a start that
    takes a minute is live, and not ready."""
    service = request.app.state.backend.service
    if service.state in ("stopped", "failed"):
        raise ApiError(503, service.says, code="unhealthy")
    return JsonReply({"status": "ok"})


async def ready(request: Request) -> Response:
    """Whether requests are taken and can be worked on: not while starting, stopping, or recovering from an error."""
    service = request.app.state.backend.service
    if service.state != "ready":
        raise ApiError(503, service.says, code="unavailable", headers={"retry-after": "5"})
    return JsonReply({"status": "ready"})


async def version(request: Request) -> Response:
    """Which foretell this is."""
    return JsonReply({"version": __version__})


async def props(request: Request) -> Response:
    """What llama.cpp's clients ask of a server before they use it."""
    backend: Backend = request.app.state.backend
    settings = {"n_ctx": backend.max_model_len, "params": {}}
    return JsonReply(
        {
            "default_generation_settings": settings,
            "total_slots": backend.service.options.max_num_seqs,
            "model_path": backend.name,
            "model_alias": backend.name,
            "chat_template": backend.template(),
            "modalities": {"vision": False, "audio": False},
            "bos_token": backend.special("bos_token"),
            "eos_token": backend.special("eos_token"),
            "build_info": f"foretell-{__version__}",
        }
    )


async def icon(request: Request) -> Response:
    """None: the page draws its own, and browsers ask all the same."""
    return Response(status_code=204)


async def metrics(request: Request) -> Response:
    """Prometheus' text form."""
    content, media_type = request.app.state.backend.metrics.render()
    return Response(content, headers={"content-type": media_type})


async def page(request: Request) -> Response:
    """The page to try the model with."""
    headers = {"content-security-policy": web.csp(), "x-content-type-options": "nosniff"}
    return HTMLResponse(web.page(), headers={**headers, "referrer-policy": "no-referrer"})
