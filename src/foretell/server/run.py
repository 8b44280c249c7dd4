"""The server as a process: a socket, signals, and a shutdown that lets requests finish."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn

from foretell.core.errors import ConfigError, EngineError
from foretell.core.platform import own_port
from foretell.server.app import build_app
from foretell.server.connection import connections
from foretell.server.logs import log
from foretell.server.models import Models
from foretell.server.options import ServerOptions
from foretell.service.service import Service

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


def bind(host: str, port: int) -> socket.socket:
    """A bound socket, so that a wrong address is found before a model is loaded. Raises ConfigError."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, proto)
    except (OSError, UnicodeError, OverflowError) as error:
        raise ConfigError(f"--host {host} --port {port} is not an address: {error}") from None
    try:
        own_port(made)
        made.bind(address)
    except OSError as error:
        made.close()
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}; choose another --port") from None
    return made


def url_of(made: socket.socket) -> str:
    """Where a bound socket is reached."""
    host, port = made.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_local(made: socket.socket) -> bool:
    """Whether only this machine reaches a bound socket."""
    address = str(made.getsockname()[0])
    return address.startswith("127.") or address == "::1"


def hosts_of(made: socket.socket, host: str, further: Sequence[str] = ()) -> tuple[str, ...]:
    """Host headers that a socket answers: the loopback's names and the further ones; elsewhere all, until some are
    given."""
    return (*LOOPBACK, host.lower(), *further) if is_local(made) or further else ()


class _Exit:
    """Signal handling: the first signal lets requests finish, the second one does not wait for them.

    Until they have finished the server still answers, so that probes and balancers read from ``/ready`` that it takes no
    requests any more, and do not find a closed port.
    """

    def __init__(self, server: Any, service: Service | Models, drain_s: float) -> None:
        self.server, self.service, self.drain_s = server, service, drain_s
        self._heard = False

    def __call__(self, signal: int, frame: FrameType | None) -> None:
        """Called between two instructions of the main thread: it must not wait."""
        if self._heard:
            self.server.should_exit = self.server.force_exit = True
            return
        self._heard = True
        threading.Thread(target=self._drain, daemon=True).start()

    def _drain(self) -> None:
        try:
            now = self.service.snapshot() if self.service.state == "ready" else None
            log(
                "draining: no requests are taken any more",
                timeout_s=self.drain_s,
                num_running=0 if now is None else now.num_running + now.num_prefilling,
                num_waiting=0 if now is None else now.num_waiting,
            )
            if not self.service.drain(self.drain_s):
                log(f"requests did not finish within {self.drain_s:g} s: they end with an error", level="warning")
                self.service.close()  # running requests end with an error
        finally:
            self.server.should_exit = True


def config_of(app: Any, options: ServerOptions, *, drain_s: float) -> uvicorn.Config:
    """How uvicorn serves an app."""
    return uvicorn.Config(
        app,
        log_config=None,
        # of h11: httptools reads a header of any length
        http=connections(options.header_timeout_s, options.write_timeout_s),
        h11_max_incomplete_event_size=65536,
        timeout_graceful_shutdown=round(drain_s) + 5,
        timeout_keep_alive=75,
        server_header=False,
        proxy_headers=False,
        ws="none",
    )


def serve(
    service: Service | Models,
    options: ServerOptions,
    made: socket.socket,
    *,
    drain_s: float,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve until SIGINT or SIGTERM. The service is started meanwhile, so that probes are answered, and closed at the end.

    drain_s: how long requests may take to finish then. Raises what the service's start raises, and EngineError where the
    engine has failed for good: then it ends by itself, so that a supervisor starts it anew.
    """
    server: Any = uvicorn.Server(config_of(build_app(service, options), options, drain_s=drain_s))
    server.handle_exit = _Exit(server, service, drain_s)
    failures: list[Exception] = []

    def end() -> None:
        server.should_exit = True

    service.on_failure = end

    def start() -> None:
        try:
            service.start()
            if not server.should_exit and service.state not in ("draining", "stopped"):  # else nothing is served
                on_ready()
        except Exception as error:
            failures.append(error)
            end()

    starter = threading.Thread(target=start, name="foretell-start")
    starter.start()
    try:
        server.run(sockets=[made])
    finally:
        starter.join()
        service.close()
    if failures:
        raise failures[0]
    if service.failure:
        raise EngineError(service.failure)


@contextmanager
def in_thread(service: Service, made: socket.socket) -> Iterator[None]:
    """Start a service and serve it on a thread while this lasts: for a caller that is its own client."""
    service.start()
    server: Any = uvicorn.Server(config_of(build_app(service, ServerOptions()), ServerOptions(), drain_s=0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [made]}, name="foretell-server")
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        yield
    finally:
        server.should_exit = True
        thread.join()
        service.close()
