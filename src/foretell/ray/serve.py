"""Replicas of ``foretell serve`` on a Ray cluster.

Every replica holds one copy of the model, one engine thread and the ASGI app of ``foretell serve``. Ray Serve works
across machines: it places replicas, routes requests, scales, checks health, restarts and drains. A model is not split
here: one that needs several devices is loaded with a ``device_map`` inside one replica.
"""

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from inspect import signature
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ray.serve import Application

from foretell.core.errors import ConfigError
from foretell.core.jsontext import JSONDecodeError, parse_json
from foretell.core.settings import check_keys, read
from ray import serve

if TYPE_CHECKING:
    from foretell.draft.config import MethodConfig
    from foretell.server.options import ServerOptions
    from foretell.service.options import ServiceOptions

NAME = "foretell"
"""Of the deployment, as Serve's status and log lines have it."""

ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]
T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """The settings of a replica. They are pickled and sent to the replicas: plain values only, no model."""

    target: str = "bundled"
    speculative: "MethodConfig | Mapping[str, Any] | str | None" = None
    service_options: "ServiceOptions | Mapping[str, Any] | None" = None
    server_options: "ServerOptions | Mapping[str, Any] | None" = None
    engine_options: Mapping[str, Any] = field(default_factory=dict)  # device, dtype, ... of ``Engine.load``
    drain_timeout_s: float = 30.0  # how long a replica that is to stop waits for its requests


class Served(Protocol):
    """The interface that a replica needs of a service; ``Service`` has it."""

    @property
    def healthy(self) -> bool:
        """Whether it can still answer requests; if not, Serve replaces the replica."""

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for running ones; returns whether all ended in time."""

    def close(self) -> None:
        """Stop at once. A second call does nothing."""


Build = Callable[[Settings], tuple[Served, ASGIApp]]


def build_replica(settings: Settings) -> tuple[Served, ASGIApp]:
    """Load the model, start its engine thread, and build the app of ``foretell serve`` over it."""
    from foretell.engine.engine import Engine
    from foretell.server.app import build_app
    from foretell.server.options import ServerOptions
    from foretell.service.options import ServiceOptions
    from foretell.service.service import Service

    engine = Engine.load(settings.target, speculative=settings.speculative, **settings.engine_options)
    service = Service(engine, _options(ServiceOptions, settings.service_options, "service_options"))
    service.start()
    return service, build_app(service, _options(ServerOptions, settings.server_options, "server_options"))


def check(settings: Settings) -> int:
    """Raise ConfigError, before anything is deployed, for options that ``build_replica`` would refuse. Returns the rows
    of a step."""
    from foretell.engine.config import speculative_config
    from foretell.ray.data import check_engine_options
    from foretell.server.options import ServerOptions
    from foretell.service.options import ServiceOptions

    speculative_config(settings.speculative)
    check_engine_options(settings.engine_options)
    _options(ServerOptions, settings.server_options, "server_options")
    num_rows: int = _options(ServiceOptions, settings.service_options, "service_options").max_num_seqs
    return num_rows


class Replica:
    """One process of the deployment. ``serve.ingress()`` gets the ASGI app from it after construction."""

    def __init__(self, settings: Settings, build: Build) -> None:
        """Returns when requests can be answered; Serve sends none before."""
        self._settings = settings
        self._served, self._app = build(settings)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The app of this replica; made here, so neither a model nor a lock is ever pickled."""
        return self._app

    def check_health(self) -> None:
        """Called by Serve every ``health_check_period_s``; a replica that raises three times in a row is restarted."""
        if not self._served.healthy:
            raise RuntimeError("the engine thread of this replica has died; its log has the reason")

    def __del__(self) -> None:
        """Called by Serve when no request is running here, or after a timeout."""
        served: Served | None = getattr(self, "_served", None)  # missing where the constructor raised
        if served is not None:
            served.drain(self._settings.drain_timeout_s)
            served.close()


def app(
    target: str = "bundled",
    *,
    speculative: "MethodConfig | Mapping[str, Any] | str | None" = None,
    service_options: "ServiceOptions | Mapping[str, Any] | None" = None,
    server_options: "ServerOptions | Mapping[str, Any] | None" = None,
    engine_options: Mapping[str, Any] | None = None,
    num_replicas: int | None = None,
    autoscaling: Mapping[str, Any] | None = None,
    affinity: bool = True,
    ray_actor_options: Mapping[str, Any] | None = None,
    max_ongoing_requests: int | None = None,
    health_check_period_s: float = 5.0,
    drain_timeout_s: float = 30.0,
    build: Build = build_replica,
) -> Application:
    """The server as a Ray Serve application: give it to ``serve.run``, or name ``from_args`` in a Serve config file.

    service_options and server_options are those of ``foretell serve``, engine_options those of ``Engine.load`` (device,
    dtype, ...). Either num_replicas (default 1) or autoscaling, the keys of Serve's ``autoscaling_config``. affinity
    sends requests with the same ``x-session-id`` header to the same replica, whose cache has the conversation.
    ray_actor_options are what one replica takes: by default a GPU where the device is one, else one CPU, and Ray gives
    the model as many threads as CPUs. max_ongoing_requests is how many requests Serve sends a replica at once: by
    default those decoded together and a quarter more, so that a row that ends is replaced without a round trip.
    build makes a replica's service and app; a custom one serves another app in the same way.

    Raises ConfigError for invalid options, here and not in a replica.
    """
    engine = dict(engine_options or {})
    settings = Settings(target, speculative, service_options, server_options, engine, drain_timeout_s)
    num_rows = check(settings) if build is build_replica else 32
    if max_ongoing_requests is None:
        max_ongoing_requests = num_rows + max(1, num_rows // 4)
    options: dict[str, Any] = {
        "name": NAME,
        "max_ongoing_requests": max_ongoing_requests,
        "health_check_period_s": health_check_period_s,
        "graceful_shutdown_timeout_s": drain_timeout_s,
        "ray_actor_options": dict(ray_actor_options or _resources(engine.get("device", "cpu"))),
    }
    if autoscaling is None:
        options["num_replicas"] = 1 if num_replicas is None else num_replicas
    elif num_replicas is None:
        target_ongoing = {"target_ongoing_requests": max(1, num_rows // 2)}
        options["autoscaling_config"] = {**target_ongoing, **autoscaling}
    else:
        raise ConfigError(
            f"num_replicas = {num_replicas} and autoscaling = {dict(autoscaling)} were both given: give one of them"
        )
    if affinity:
        options["request_router_config"] = {"request_router_class": ROUTER}
    try:
        deployment = serve.deployment(**options)(_Ingress)
    except ValueError as error:  # of pydantic, whose own text names the field
        raise ConfigError(f"Ray Serve refuses these options: {error}") from error
    application: Application = deployment.bind(settings, build)
    return application


def from_args(args: dict[str, Any]) -> Application:
    """``app`` as Serve's config files call it: ``import_path: foretell.ray:from_args`` and ``args``, the keywords of app.

    ``serve run foretell.ray:from_args target=bundled num_replicas=2`` gives texts, which are parsed as JSON where
    possible.
    """
    known = [name for name in signature(app).parameters if name != "build"]
    given = dict(args)
    check_keys(given, known, "in the arguments of foretell.ray")
    for key, value in given.items():
        if key != "target" and isinstance(value, str):
            try:
                given[key] = parse_json(value)
            except JSONDecodeError:
                continue  # the name of a method
    return app(**given)


_Ingress = serve.ingress()(Replica)


def _resources(device: str) -> dict[str, float]:
    """The resources of one replica by default."""
    return {"num_cpus": 1} if str(device).startswith("cpu") else {"num_cpus": 1, "num_gpus": 1}


def _options(kind: type[T], given: T | Mapping[str, Any] | None, name: str) -> T:
    """The dataclass of these options. Raises ConfigError for unknown keys."""
    if isinstance(given, kind):
        return given
    if given is None:
        return kind()
    if not isinstance(given, Mapping):
        raise ConfigError(f"{name} = {given!r} must be a mapping or {kind.__name__}")
    return read(kind, given, f"in {name}")
