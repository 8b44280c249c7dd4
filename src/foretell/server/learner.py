"""``/v1/foretell/learner``: what a server that learns while it serves has learned, and its few commands."""

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from foretell.core.errors import ForetellError
from foretell.server.answer import read_json
from foretell.server.backend import Backend
from foretell.server.errors import of_engine
from foretell.server.protocol.requests import LearnerRequest
from foretell.server.security import TENANT
from foretell.server.stream import JsonReply


async def get_learner(request: Request) -> Response:
    """Figures, adapters, events and acceptance over requests: with API keys, of the key's own requests."""
    backend: Backend = request.app.state.backend
    try:
        return JsonReply(backend.service.learner(request.scope.get(TENANT)))
    except ForetellError as error:
        raise of_engine(error) from None


async def post_learner(request: Request) -> Response:
    """pause, resume, revert or save, and then what ``get_learner`` answers."""
    backend: Backend = request.app.state.backend
    body = await read_json(request, LearnerRequest)
    tenant = request.scope.get(TENANT)
    try:
        return JsonReply(await asyncio.to_thread(backend.service.tell_learner, body.action, tenant))
    except ForetellError as error:
        raise of_engine(error, "action") from None
