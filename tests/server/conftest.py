"""Servers over a fake and over the bundled pair, and clients of them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import httpx
    import openai

    from foretell.service.service import Service

NEEDED = ("fastapi", "uvicorn", "prometheus_client", "llguidance", "sse_starlette", "structlog", "httpx", "openai")
collect_ignore_glob = [] if all(find_spec(name) for name in NEEDED) else ["test_*.py"]  # without the extra "serve"

Serve = Callable[..., "httpx.Client"]
OPENED: list[Any] = []  # clients of a test, closed behind it


@pytest.fixture(autouse=True)
def close() -> Iterator[None]:
    yield
    while OPENED:
        OPENED.pop().close()


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Puts a service (a fake one by default) onto a port; returns a client of it."""
    import httpx

    from foretell.server.app import build_app
    from foretell.server.options import ServerOptions
    from tests.server.fake import FakeService
    from tests.server.live import live

    with ExitStack() as stack:

        def start(service: Any = None, **options: Any) -> httpx.Client:
            url = stack.enter_context(live(build_app(service or FakeService(), ServerOptions(**options))))
            return stack.enter_context(httpx.Client(base_url=url, timeout=60))

        yield start


@pytest.fixture(scope="session")
def fake() -> "Iterator[httpx.Client]":
    """A client of the default fake, for tests that ask nothing special of it."""
    import httpx

    from foretell.server.app import build_app
    from tests.server.fake import FakeService
    from tests.server.live import live

    with live(build_app(FakeService())) as at, httpx.Client(base_url=at, timeout=60) as made:
        yield made


@pytest.fixture(scope="session")
def bundled() -> "Iterator[Service]":
    """The bundled pair, guessing always, so that no costs need be measured."""
    from foretell import Engine
    from foretell.service.options import ServiceOptions
    from foretell.service.service import Service

    service = Service(
        Engine.load("bundled", speculative="draft_model"),
        ServiceOptions(max_num_seqs=4, max_queue=8, speculation="on", kv_memory_gib=0.25),
    )
    service.start()
    yield service
    service.close()


@pytest.fixture(scope="session")
def url(bundled: "Service") -> Iterator[str]:
    """Where it is served."""
    from foretell.server.app import build_app
    from foretell.server.options import ServerOptions
    from tests.server.live import live

    with live(build_app(bundled, ServerOptions())) as at:
        yield at


@pytest.fixture
def client(url: str) -> "Iterator[openai.OpenAI]":
    """OpenAI's own client of it."""
    import openai

    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made
