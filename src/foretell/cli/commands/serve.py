"""``foretell serve``: OpenAI's API over HTTP."""

import math
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretell.cli import early, options as o, settings
from foretell.cli.errors import explain
from foretell.cli.fields import with_fields, with_group
from foretell.core.errors import ConfigError
from foretell.learn.options import LearnOptions
from foretell.server.options import ServerOptions, check_level
from foretell.service.options import ServiceOptions

if TYPE_CHECKING:
    from foretell.draft.config import MethodConfig

SERVER, LIMITS, LOGS, LEARNING = "Server", "Limits", "Logs", "Learning"
EXTRA = ("fastapi", "starlette", "pydantic", "uvicorn", "prometheus_client", "llguidance", "sse_starlette", "structlog")

TargetName = Annotated[
    str,
    typer.Argument(metavar="TARGET", envvar="FORETELL_TARGET", show_default=False, callback=o.chosen_target,
                   help="The model to serve, as --target of 'generate' (auto, the default, too)."),
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
@with_fields(ServerOptions, into="server", panel=SERVER)
@with_fields(LearnOptions, into="learning", panel=LEARNING)
def serve(
    ctx: typer.Context,
    *,
    target: TargetName = o.AUTO,
    models: o.Models,
    lora: o.Loras = None,
    guessing: o.Guessing,
    also: Also = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    drain_timeout: DrainTimeout = 30.0,
    service: dict[str, Any] | None = None,
    server: dict[str, Any] | None = None,
    learn: Learn = False,
    learning: dict[str, Any] | None = None,
    log_level: LogLevel = "info",
    no_color: o.NoColor = False,
) -> None:
    """Serve a model by OpenAI's API, with Anthropic's messages, Ollama's chats, and a page to try it at /.

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
    models = replace(models, target=target)
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
    speculative = settings.speculation(ctx, models, guessing)
    try:
        _serve(ctx.params, models, speculative, *asked, wanted)
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in EXTRA:
            raise
        raise ConfigError(f'foretell serve needs the package {name}: pip install "foretell[serve]"') from None


def _learn_options(learn: bool, given: dict[str, Any]) -> LearnOptions | None:
    if given and not learn:
        raise ConfigError(f"--{next(iter(given)).replace('_', '-')} needs --learn")
    return settings.learn_options(given) if learn else None


def _server_options(given: dict[str, Any]) -> ServerOptions:
    limit = given.get("request_timeout_s", ServerOptions.request_timeout_s)
    return ServerOptions(**{**given, "request_timeout_s": limit or None})


def _serve(
    options: dict[str, Any],
    models: o.Models,
    speculative: dict[str, Any],
    service_options: ServiceOptions,
    wanted: ServerOptions,
    learn: LearnOptions | None,
) -> None:
    from foretell.server import run
    from foretell.server.logs import configure_logs, log
    from foretell.server.security import tenant_of

    configure_logs(options["log_level"], log_prompts=wanted.log_prompts)
    also = [_also(given, models.target) for given in options["also"] or ()]
    if learn is not None:
        guessing: list[Any] = [] if service_options.speculation == "off" else [speculative, *also]
        settings.check_learning(guessing, models.target)
    from foretell.service.service import Service

    made = run.bind(options["host"], options["port"])
    with made, _logged_errors():
        hosts = run.hosts_of(made, options["host"], wanted.allowed_hosts)
        if not run.is_local(made) and not wanted.api_keys:
            text = f"every client that reaches {options['host']} may use this server; --api-key asks for a key"
            log(text, level="warning", always=True)
        engine = settings.load_engine(
            models, speculative, no_color=options["no_color"], lora=settings.loras(options["lora"])
        )
        engine, seen = settings.with_kept_text(engine, no_color=options["no_color"])
        if seen is not None:
            log(str(seen), level="error" if seen.fault else "info", always=True)
            if seen.fault:
                also, learn = [], None
                service_options = _one_by_one(service_options)
        service = Service(engine, service_options, also=also, learn=learn)
        configure_logs(options["log_level"], log_prompts=wanted.log_prompts)  # the libraries just loaded changed it
        url = run.url_of(made)
        ids: dict[str, Any] = {"key_ids": [tenant_of(key) for key in wanted.api_keys]} if wanted.api_keys else {}
        run.serve(
            service,
            replace(wanted, allowed_hosts=hosts),
            made,
            drain_s=options["drain_timeout"],
            on_ready=lambda: log(f"serving {models.target} at {url} (API: {url}/v1, page: {url}/)", always=True, **ids),
        )
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # everything has ended: ignore a further Ctrl-C


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
