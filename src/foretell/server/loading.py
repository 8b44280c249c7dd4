"""The port while weights are read: every route says what is done, and ``/v1/models`` has the names."""

import asyncio
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from threading import Event, Thread
from time import time

from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from foretell.server.errors import ApiError
from foretell.server.options import ServerOptions
from foretell.server.routes.models import listed, unloaded
from foretell.server.run import config_of
from foretell.server.security import Gate
from foretell.server.stream import JsonReply

MODELS = ("/v1/models", "/models")
RETRY_S, LINGER_S = 2, 1.0
"""After which clients should ask again; how long a request that has begun may take to arrive when the weights are there."""


@contextmanager
def loading(made: socket.socket, options: ServerOptions, names: Sequence[str], said: Sequence[str]) -> Iterator[None]:
    """Answer on a bound socket, on a thread, while this lasts: with 503, and what was said last. Clients that come when it
    is over wait for who listens next. names: of the models; the first is the one that is loaded."""
    begun, opened, closed = int(time()), Event(), Event()
    loop, over = asyncio.new_event_loop(), asyncio.Event()

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        path, headers = scope["path"], {"connection": "close"}
        if path in MODELS:
            told = [unloaded(name, begun, "loading" if name == names[0] else "unloaded") for name in names]
            reply: Response = JsonReply(listed(told), headers=headers)
        else:
            headers["retry-after"] = str(RETRY_S)
            reply = ApiError(503, said[-1] if said else "loading", code="loading", headers=headers).response(path)
        await reply(scope, receive, send)

    async def run() -> None:
        config, state = config_of(Gate(answer, options), options, drain_s=0), ServerState()
        config.load()
        protocol = partial(config.http_protocol_class, config=config, server_state=state, app_state={})
        server = await loop.create_server(protocol, sock=made.dup(), backlog=config.backlog)
        opened.set()
        await over.wait()
        server.close()
        closed.set()
        until = loop.time() + LINGER_S
        await asyncio.sleep(0.05)  # of a client that was just taken the connection is not made yet
        while state.connections and loop.time() < until:
            await asyncio.sleep(0.05)
        for connection in list(state.connections):
            connection.shutdown()

    def serve() -> None:
        try:
            loop.run_until_complete(run())
        finally:
            closed.set()
            loop.close()

    thread = Thread(target=serve, name="foretell-loading")
    thread.start()
    while not opened.wait(0.01) and thread.is_alive():
        pass
    try:
        yield
    finally:
        with suppress(RuntimeError):  # it has failed, as the server then will
            loop.call_soon_threadsafe(over.set)
        closed.wait()
