"""The server as a process: a socket, signals, and a shutdown that lets requests finish."""

import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from foretoken.core.errors import ConfigError
from foretoken.engine.service import Service
from foretoken.server.app import build_app
from foretoken.server.options import ServerOptions

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


def bind(host: str, port: int) -> socket.socket:
    """A bound socket, so that a wrong address is found before a model is loaded. Raises ConfigError."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, proto)
    except (OSError, UnicodeError, OverflowError) as error:
        raise ConfigError(f"--host {host} --port {port} is not an address: {error}") from None
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        made.close()
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}; choose another --port") from None
    return made


def url_of(made: socket.socket) -> str:
    """Where a bound socket is reached."""
    host, port = made.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def hosts_of(made: socket.socket, host: str) -> tuple[str, ...]:
    """Host headers that a socket answers: on the loopback its own names, elsewhere all."""
    address = str(made.getsockname()[0])
    return (*LOOPBACK, host.lower()) if address.startswith("127.") or address == "::1" else ()


class _Exit:
    """Signal handling: the first signal lets requests finish, the second one does not wait for them."""

    def __init__(self, server: Any, service: Service, drain_s: float) -> None:
        self.server, self.service, self.drain_s = server, service, drain_s

    def __call__(self, signal: int, frame: FrameType | None) -> None:
        """Called between two instructions of the main thread: it must not wait."""
        if self.server.should_exit:
            self.server.force_exit = True
            return
        self.server.should_exit = True
        threading.Thread(target=self._drain, daemon=True).start()

    def _drain(self) -> None:
        if not self.service.drain(self.drain_s):
            self.service.close()  # running requests end with an error


def serve(
    service: Service,
    options: ServerOptions,
    made: socket.socket,
    *,
    drain_s: float,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve until SIGINT or SIGTERM. The service is started meanwhile, so that probes are answered, and closed at the end.

    drain_s: how long requests may take to finish then. Raises what the service's start raises.
    """
    config = uvicorn.Config(
        build_app(service, options),
        log_config=None,
        http="h11",  # httptools reads a header of any length
        h11_max_incomplete_event_size=65536,
        timeout_graceful_shutdown=round(drain_s) + 5,
        timeout_keep_alive=75,
        server_header=False,
        proxy_headers=False,
        ws="none",
    )
    server: Any = uvicorn.Server(config)
    server.handle_exit = _Exit(server, service, drain_s)
    failures: list[Exception] = []

    def start() -> None:
        try:
            service.start()
            on_ready()
        except Exception as error:
            failures.append(error)
            server.should_exit = True

    starter = threading.Thread(target=start, name="foretoken-start")
    starter.start()
    try:
        server.run(sockets=[made])
    finally:
        starter.join()
        service.close()
    if failures:
        raise failures[0]
