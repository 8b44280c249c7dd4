"""An app on a port of the loopback, as clients meet it."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI

from foretell.server.options import ServerOptions
from foretell.server.run import config_of


@contextmanager
def live(app: Any) -> Iterator[str]:
    """The URL of an app that is served while this lasts."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        options = app.state.options if isinstance(app, FastAPI) else ServerOptions()
        config = config_of(app, options, drain_s=0)
        config.timeout_graceful_shutdown = 2
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [made]})
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{made.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
