"""``foretell serve``: OpenAI's API over HTTP."""

import math
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from foretell.cli import early, options as o, settings
from foretell.cli.errors import explain
from foretell.cli.fields import with_fields, with_group
from foretell.core.errors import ConfigError
from foretell.learn.options import LearnOptions
from foretell.server.options import ModelsOptions, ServerOptions, check_level, name_of
from foretell.service.options import ServiceOptions

if TYPE_CHECKING:
    from foretell.draft.config import MethodConfig
    from foretell.engine.prefix import PrefixStore
    from foretell.service.service import Service

SERVER, LIMITS, LOGS, LEARNING = "Server", "Limits", "Logs", "Learning"
EXTRA = ("fastapi", "starlette", "pydantic", "uvicorn", "prometheus_client", "llguidance", "sse_starlette", "structlog")

ALIAS = re.compile(r"([^=/\\.~][^=\\]*)=(.+)")  # a name may be an owner's, as in owner/name; a path is none
OF_ONE = {
    "served_model_name": "give NAME=TARGET for each of several",
    "revision": "give ID@REV for each of several",
    "lora": "serve that one alone",
    "learn": "serve that one alone",
}
VARIABLE = "FORETELL_TARGET"


def chosen_targets(ctx: typer.Context, param: Any, given: list[str] | None) -> list[str]:
    """The targets that are meant; the variable names one, which may hold spaces."""
    source = ctx.get_parameter_source(param.name)
    if source is not None and source.name == "ENVIRONMENT":
        given = [os.environ[VARIABLE]]
    return [o.chosen_target(target) for target in given or ()]


Targets = Annotated[
    list[str] | None,
    typer.Argument(metavar="[NAME=]TARGET", envvar=VARIABLE, show_default=False, callback=chosen_targets,
                   help="The model to serve, as --target of 'generate' (auto, the default, too). Of several a request's "
                   "model names one; the first is loaded at the start."),
]  # fmt: skip
Host = Annotated[
    str, typer.Option("--host", rich_help_panel=SERVER, help="Where to listen; 127.0.0.1 is this machine alone.")
]
Port = Annotated[int, typer.Option("--port", rich_help_panel=SERVER, min=0, max=65535, help="0: a free one.")]
DrainTimeout = Annotated[
    float, typer.Option("--drain-timeout", metavar="SECONDS", min=0, rich_help_panel=SERVER,
                        help="At a signal to stop, how long requests may take to finish; a second signal stops at once.")
]  # fmt: skip
Also = Annotated[
    list[str] | None,
    typer.Option("--also", metavar="METHOD|JSON", rich_help_panel=o.SPECULATION,
                 help="Load a further method that requests may ask for; may be repeated."),
]  # fmt: skip
Learn = Annotated[
    bool, typer.Option("--learn", rich_help_panel=LEARNING,
                       help="The drafter learns from the requests; what it learns serves once it is better on requests "
                       "kept apart. With API keys each key has a drafter of its own.")
]  # fmt: skip
LogLevel = Annotated[
    str, typer.Option("--log-level", metavar="debug|info|warning|error", rich_help_panel=LOGS, help="What is logged.",
                      callback=o.checked(check_level))
]  # fmt: skip


@with_group(o.Models, into="models", without=("target", "width"))
@with_group(o.Guessing, into="guessing")
@with_fields(ServiceOptions, into="service", panel=LIMITS)
@with_fields(ModelsOptions, into="several", panel="Models")
@with_fields(ServerOptions, into="server", panel=SERVER)
@with_fields(LearnOptions, into="learning", panel=LEARNING)
def serve(
    ctx: typer.Context, *, target: Targets = None, models: o.Models, lora: o.Loras = None, guessing: o.Guessing,
    also: Also = None, host: Host = "127.0.0.1", port: Port = 8000, drain_timeout: DrainTimeout = 30.0,
    service: dict[str, Any] | None = None, several: dict[str, Any] | None = None, server: dict[str, Any] | None = None,
    learn: Learn = False, learning: dict[str, Any] | None = None, log_level: LogLevel = "info",
    no_color: o.NoColor = False,
) -> None:  # fmt: skip
    """Serve models by OpenAI's API, with Anthropic's messages, Ollama's chats, and a page to try it at /.

    Speculation is planned by load, request by request; texts do not change. auto measures, steps aside where guessing
    does not pay, and stays within 2 % of plain decoding, but for small models in 4 or 8 bits: temperature 1 cost 4 %,
    the first hundred steps on a busy machine up to half.
    Needs the extra: pip install "foretell\\[serve]".
    """
    if guessing.method == "prediction":
        raise ConfigError("--method prediction: requests that bring a prediction use it anyway; choose another method")
    if drain_timeout == math.inf:
        raise ConfigError(
            "--drain-timeout inf: give a number of seconds; requests end by --request-timeout in any case"
        )
    more = ModelsOptions(**(several or {})) if several or len(target or ()) > 1 else None
    named = _named(target or ([] if more is not None and more.models_dir else [o.chosen_target(o.AUTO)]))
    wanted = _learn_options(learn, learning or {})
    asked = ServiceOptions(**(service or {})), _server_options(server or {})
    if asked[0].shared_drafts == "key" and not asked[1].api_keys:
        raise ConfigError(
            "--shared-drafts key: no API key is given, so clients look alike; give --api-key for each client, or "
            "'--shared-drafts all' where all clients may see each other's texts"
        )
    settings.loras(lora)
    for given in also or ():
        early.check_config(
            settings.json_object(given, "--also") if given.lstrip().startswith("{") else {"method": given}
        )
    if more is not None:
        for one, reason in OF_ONE.items():
            settings.refuse(ctx, [one], f"is of one model: {reason}")
    elif target and named[name := next(iter(named))] != target[0]:  # NAME=TARGET
        if asked[1].served_model_name:
            raise ConfigError(f"{name}=... and --served-model-name both name the model: drop one")
        asked = asked[0], replace(asked[1], served_model_name=(name,))

    def speculated(target: str) -> tuple[o.Models, dict[str, Any]]:
        own = replace(models, target=target)
        return own, settings.speculation(ctx, own, guessing)

    for each in named.values():
        speculated(each)
    try:
        _serve(ctx.params, named, speculated, *asked, wanted, more)
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in EXTRA:
            raise
        raise ConfigError(f'foretell serve needs the package {name}: pip install "foretell[serve]"') from None


def _named(targets: Sequence[str]) -> dict[str, str]:
    """Targets by the names that clients have for them. Raises ConfigError for a name twice."""
    named: dict[str, str] = {}
    for given in targets:
        alias = ALIAS.fullmatch(given)
        name, target = (name_of(given), given) if alias is None or Path(given).exists() else alias.groups()
        if name in named:
            raise ConfigError(f"two models would be called {name!r}: give one of them as NAME=TARGET")
        named[name] = o.chosen_target(target)
    return named


def _learn_options(learn: bool, given: dict[str, Any]) -> LearnOptions | None:
    if given and not learn:
        raise ConfigError(f"--{next(iter(given)).replace('_', '-')} needs --learn")
    return settings.learn_options(given) if learn else None


def _server_options(given: dict[str, Any]) -> ServerOptions:
    limit = given.get("request_timeout_s", ServerOptions.request_timeout_s)
    return ServerOptions(**{**given, "request_timeout_s": limit or None})


def _serve(
    options: dict[str, Any],
    named: Mapping[str, str],
    speculated: Callable[[str], tuple[o.Models, dict[str, Any]]],
    service_options: ServiceOptions,
    wanted: ServerOptions,
    learn: LearnOptions | None,
    several: ModelsOptions | None,
) -> None:
    from foretell.server import run
    from foretell.server.loading import loading
    from foretell.server.logs import configure_logs, log
    from foretell.server.security import tenant_of

    configure_logs(options["log_level"], log_prompts=wanted.log_prompts)
    for target in named.values():
        also = [_also(given, target) for given in options["also"] or ()]
        if learn is not None:
            guessing: list[Any] = [] if service_options.speculation == "off" else [speculated(target)[1], *also]
            settings.check_learning(guessing, target)
    import torch

    from foretell.server.models import Models
    from foretell.service.memory import free_bytes

    def load(name: str, target: str, prefixes: "PrefixStore | None") -> "Service":
        assert several is not None
        most = several.max_models if several.models_dir else min(several.max_models, len(named))
        folders = {  # a directory is one model's
            key: str(Path(folder, quote(name, safe="")))
            for key in ("state_dir", "prefix_dir")
            if (folder := getattr(service_options, key)) is not None
        }
        own: dict[str, Any] = {"models_at_once": most, **folders}
        service = _service(
            options, *speculated(target), replace(service_options, **own), None, prefixes, lambda what: tell(name, what)
        )
        try:
            service.start()
        except BaseException:
            service.close()
            raise
        configure_logs(options["log_level"], log_prompts=wanted.log_prompts)
        return service

    def tell(name: str, what: str) -> None:
        said[:] = [f"loading {name}: {what}"]

    made, said = run.bind(options["host"], options["port"]), list[str]()
    with made, _logged_errors():
        hosts = run.hosts_of(made, options["host"], wanted.allowed_hosts)
        if not run.is_local(made) and not wanted.api_keys:
            text = f"every client that reaches {options['host']} may use this server; --api-key asks for a key"
            log(text, level="warning", always=True)
        wanted, served = replace(wanted, allowed_hosts=hosts), ",".join(named.values())
        service: Service | Models
        if several is None:
            (target,) = named.values()
            is_file = Path(target).expanduser().is_file()
            own = [name for name in wanted.served_model_name if name != "*"]
            names = own or [Path(target).name if is_file else name_of(target)]
            with loading(made, wanted, names, said):
                service = _service(
                    options, *speculated(target), service_options, learn, None, lambda what: tell(names[0], what)
                )
            configure_logs(options["log_level"], log_prompts=wanted.log_prompts)  # the libraries just loaded changed it
        else:
            device = torch.device(options["device"])
            service = Models(load, named, wanted, several, free=lambda: free_bytes(device))
            served = ",".join(entry.name for entry in service.entries.values()) or several.models_dir or ""
            with loading(made, wanted, list(service.entries), said):
                service.preload()
        url = run.url_of(made)
        ids: dict[str, Any] = {"key_ids": [tenant_of(key) for key in wanted.api_keys]} if wanted.api_keys else {}
        run.serve(
            service,
            wanted,
            made,
            drain_s=options["drain_timeout"],
            on_ready=lambda: log(f"serving {served} at {url} (API: {url}/v1, page: {url}/)", always=True, **ids),
        )
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # everything has ended: ignore a further Ctrl-C


def _service(
    options: dict[str, Any],
    models: o.Models,
    speculative: dict[str, Any],
    asked: ServiceOptions,
    learn: LearnOptions | None,
    prefixes: "PrefixStore | None",
    tell: Callable[[str], None],
) -> "Service":
    """A service of one model, loaded. tell: called with what is done. Raises ConfigError, ModelError."""
    from foretell.server.logs import log
    from foretell.service.service import Service

    also = [_also(given, models.target) for given in options["also"] or ()]
    tell("reading weights")
    engine = settings.load_engine(
        models, speculative, no_color=options["no_color"], lora=settings.loras(options["lora"])
    )
    tell("checking that guesses keep the text")
    engine, seen = settings.with_kept_text(engine, no_color=options["no_color"])
    if seen is not None:
        log(str(seen), level="error" if seen.fault else "info", always=True)
        if seen.fault:
            also, learn, asked = [], None, _one_by_one(asked)
    return Service(engine, asked, also=also, learn=learn, prefixes=prefixes)


def _one_by_one(asked: ServiceOptions) -> ServiceOptions:
    """Where guesses do not keep the text: none, a request at a time, each from its own prompt."""
    return replace(
        asked, speculation="off", max_num_seqs=1, prefix_reuse=False, state_dir=None, prefix_dir=None,
        prefix_max_gib=None,
    )  # fmt: skip


@contextmanager
def _logged_errors() -> Iterator[None]:
    """What ends a server whose log is read by a program is a line of that log."""
    from foretell.server.logs import log

    try:
        yield
    except Exception as error:
        if sys.stderr.isatty():
            raise
        line, status = explain(error)
        if line is not None:
            log(line, level="error", always=True)
        raise typer.Exit(status) from error


def _also(given: str, target: str) -> "MethodConfig":
    """Check a further method before anything is loaded."""
    from foretell.engine.config import speculative_config

    config = speculative_config(given)
    settings.check_method(config.resolved(), target)
    return config
