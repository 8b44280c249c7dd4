"""``/v1/foretell/learner``: what a server that learns while it serves has learned, and its few commands."""

import asyncio
from bisect import bisect_right
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from foretell.core.errors import ForetellError
from foretell.server.answer import backend_of, read_json
from foretell.server.errors import of_engine
from foretell.server.protocol.requests import LearnerRequest
from foretell.server.security import TENANT
from foretell.server.stream import JsonReply

COUNTED = {"num_swaps": "swap", "num_refused": "refused", "num_reverts": "revert", "num_drifts": "drift"}
"""Figures of one client, and the events that they count."""


def _told(state: dict[str, Any], tenant: str | None) -> dict[str, Any]:
    """What a client may read: without keys all, with a key what is its own. The sums of all clients would tell it how much
    the others ask and what they learn, and so would numbers of requests: they count its own from 1."""
    if tenant is None:
        return state
    adapters, history = state["adapters"], sorted(state["history"], key=lambda one: one["number"])
    rates = [one["acceptance"] for one in adapters if one["acceptance"] is not None]
    numbers = [one["number"] for one in history]
    events = [
        {**event, "request": bisect_right(numbers, event["request"])} for event in state["events"] if event["adapter"]
    ]
    figures = {
        "is_learning": not state["paused"] and not state["failure"],
        "version": max((one["version"] for one in adapters), default=0),
        "acceptance": sum(rates) / len(rates) if rates else None,
        "num_adapters": len(adapters),
        **{name: sum(event["event"] == kind for event in events) for name, kind in COUNTED.items()},
    }
    history = [{**one, "number": at} for at, one in enumerate(history, 1)]
    return {**state, "figures": figures, "events": events, "history": history}


async def get_learner(request: Request) -> Response:
    """Figures, adapters, events and acceptance over requests: with API keys, of the key's own requests."""
    backend = await backend_of(request, None)
    try:
        tenant = request.scope.get(TENANT)
        return JsonReply(_told(backend.service.learner(tenant), tenant))
    except ForetellError as error:
        raise of_engine(error) from None


async def post_learner(request: Request) -> Response:
    """pause, resume, revert or save, and then what ``get_learner`` answers."""
    backend = await backend_of(request, None)
    body = await read_json(request, LearnerRequest)
    tenant = request.scope.get(TENANT)
    try:
        return JsonReply(_told(await asyncio.to_thread(backend.service.tell_learner, body.action, tenant), tenant))
    except ForetellError as error:
        raise of_engine(error, "action") from None
