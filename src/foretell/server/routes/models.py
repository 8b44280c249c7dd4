"""``/v1/models``, the probes, the figures and the page."""

from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from foretell import __version__, web
from foretell.server.answer import backend_of
from foretell.server.backend import Backend
from foretell.server.entries import Entry
from foretell.server.errors import ApiError
from foretell.server.models import Models
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


def unloaded(name: str, created: int, state: str, context: int | None = None) -> dict[str, Any]:
    """A model that is not loaded, and its state as llama.cpp's router says it."""
    named = {"id": name, "object": "model", "type": "model", "display_name": name, "root": name}
    unknown: dict[str, Any] = {"parent": None, "speculative": {}, "methods": [], "resting": {}}
    made = {"created": created, "created_at": time_text(created), "status": {"value": state}}
    return {**named, **unknown, "owned_by": "foretell", "max_model_len": context, **made}


def _entry(models: Models, entry: Entry) -> dict[str, Any]:
    """The same of one of several, loaded or not."""
    made = unloaded(entry.name, models.created, entry.state, entry.told().context)
    if entry.backend is None:
        return made
    return {**made, **_model(entry.backend, entry.name), **{key: made[key] for key in ("created", "created_at")}}


def listed(told: list[dict[str, Any]]) -> dict[str, Any]:
    """The list of some models."""
    ends = {"first_id": told[0]["id"], "last_id": told[-1]["id"]} if told else {"first_id": None, "last_id": None}
    return {"object": "list", "data": told, **ends, "has_more": False}


async def list_models(request: Request) -> Response:
    """The models that are served, and adapters."""
    models: Models | None = request.app.state.models
    if models is not None:
        return JsonReply(listed([_entry(models, entry) for entry in await models.all()]))
    backend: Backend = request.app.state.backend
    return JsonReply(listed([_model(backend, name) for name in backend.names]))


async def get_model(request: Request) -> Response:
    """A model by its name."""
    models: Models | None = request.app.state.models
    name = request.path_params["model"]
    if models is not None:
        return JsonReply(_entry(models, await models.entry(name)))
    backend: Backend = request.app.state.backend
    backend.check_model(name)
    return JsonReply(_model(backend, name))


async def health(request: Request) -> Response:
    """Liveness: whether the engine works or is still being started. What is not live is started anew, so a start that
    takes a minute is live, and not ready."""
    service = request.app.state.served
    if service.state in ("stopped", "failed"):
        raise ApiError(503, service.says, code="unhealthy")
    return JsonReply({"status": "ok"})


async def ready(request: Request) -> Response:
    """Whether requests are taken and can be worked on: not while starting, stopping, or recovering from an error."""
    service = request.app.state.served
    if service.state != "ready":
        raise ApiError(503, service.says, code="unavailable", headers={"retry-after": "5"})
    return JsonReply({"status": "ready"})


async def version(request: Request) -> Response:
    """Which foretell this is."""
    return JsonReply({"version": __version__})


async def props(request: Request) -> Response:
    """What llama.cpp's clients ask of a server before they use it."""
    several = request.app.state.models is not None
    backend = await backend_of(request, request.query_params.get("model") if several else None)
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
    models: Models | None = request.app.state.models
    content, media_type = request.app.state.backend.metrics.render() if models is None else models.render_metrics()
    return Response(content, headers={"content-type": media_type})


async def page(request: Request) -> Response:
    """The page to try the model with."""
    headers = {"content-security-policy": web.csp(), "x-content-type-options": "nosniff"}
    return HTMLResponse(web.page(), headers={**headers, "referrer-policy": "no-referrer"})
