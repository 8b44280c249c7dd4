"""``foretoken serve``: OpenAI's API over HTTP."""

import signal
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli import options as o
from foretoken.cli import settings
from foretoken.cli.errors import say
from foretoken.errors import ConfigError

if TYPE_CHECKING:
    from foretoken.engine.method import MethodConfig

SERVER, LIMITS, LOGS = "Server", "Limits", "Logs"
EXTRA = ("fastapi", "starlette", "pydantic", "uvicorn", "prometheus_client", "llguidance")

TargetName = Annotated[
    str,
    typer.Argument(metavar="TARGET", envvar="FORETOKEN_TARGET", show_default=False,
                   help="The model to serve: a directory, a Hugging Face id, or 'bundled' (the default)."),
]  # fmt: skip
Host = Annotated[
    str, typer.Option("--host", rich_help_panel=SERVER, help="Where to listen; 127.0.0.1 is this machine alone.")
]
Port = Annotated[int, typer.Option("--port", rich_help_panel=SERVER, min=0, max=65535, help="0: a free one.")]
ApiKey = Annotated[
    list[str] | None,
    typer.Option("--api-key", envvar="FORETOKEN_API_KEY", rich_help_panel=SERVER, show_envvar=True,
                 help="Ask clients for this key; may be repeated. The variable keeps it out of the list of processes."),
]  # fmt: skip
ServedModelName = Annotated[
    str | None, typer.Option("--served-model-name", metavar="NAME", rich_help_panel=SERVER,
                             help="What clients call the model.")
]  # fmt: skip
DrainTimeout = Annotated[
    float, typer.Option("--drain-timeout", metavar="SECONDS", min=0, rich_help_panel=SERVER,
                        help="At a signal to stop, how long requests may take to finish; a second signal stops at once.")
]  # fmt: skip
Also = Annotated[
    list[str] | None,
    typer.Option("--also", metavar="METHOD|JSON", rich_help_panel=o.SPECULATION,
                 help="Load a further method that requests may ask for; may be repeated."),
]  # fmt: skip
Speculation = Annotated[
    str, typer.Option("--speculation", metavar="auto|on|off", rich_help_panel=o.SPECULATION,
                      help="auto: guess as much as pays under the load of the moment. on: always. off: never.")
]  # fmt: skip
MaxNumSeqs = Annotated[
    int, typer.Option("--max-num-seqs", metavar="N", rich_help_panel=LIMITS, help="Requests decoded together.")
]
MaxQueue = Annotated[
    int, typer.Option("--max-queue", metavar="N", rich_help_panel=LIMITS,
                      help="Waiting requests at most; further ones get status 429.")
]  # fmt: skip
MaxModelLen = Annotated[
    int | None, typer.Option("--max-model-len", metavar="N", rich_help_panel=LIMITS,
                             help="Tokens of prompt and output together. Default: the model's context.")
]  # fmt: skip
KvMemory = Annotated[
    float | None, typer.Option("--kv-memory-gib", metavar="GIB", rich_help_panel=LIMITS,
                               help="Memory of the KV cache. Default: a share of what is free.")
]  # fmt: skip
StallTarget = Annotated[
    float, typer.Option("--stall-target", metavar="SECONDS", min=0.001, rich_help_panel=LIMITS,
                        help="Target for how long reading a prompt delays decoding requests.")
]  # fmt: skip
NoPrefixReuse = Annotated[
    bool, typer.Option("--no-prefix-reuse", rich_help_panel=LIMITS, help="Keep no KV for prompts that begin alike.")
]
SharedDrafts = Annotated[
    str, typer.Option("--shared-drafts", metavar="off|key|all", rich_help_panel=o.SPECULATION,
                      help="What methods that learn from texts (suffix, recycling) guess from. off: each request's own "
                      "text. key: that of all requests with the same API key. all: of all requests; clients can then see "
                      "each other's texts in guesses.")
]  # fmt: skip
RequestTimeout = Annotated[
    float, typer.Option("--request-timeout", metavar="SECONDS", min=0, rich_help_panel=LIMITS,
                        help="A request that takes longer ends with what it has. 0: no limit.")
]  # fmt: skip
MaxBody = Annotated[float, typer.Option("--max-body-mib", metavar="MIB", rich_help_panel=LIMITS, help="Of a request.")]
MaxTokensLimit = Annotated[
    int | None, typer.Option("--max-tokens-limit", metavar="N", rich_help_panel=LIMITS,
                             help="The most tokens that a completion may ask for.")
]  # fmt: skip
LogLevel = Annotated[
    str, typer.Option("--log-level", metavar="debug|info|warning|error", rich_help_panel=LOGS, help="What is logged.")
]
LogPrompts = Annotated[
    bool,
    typer.Option("--log-prompts", rich_help_panel=LOGS, help="Log prompts and outputs too; they are left out else."),
]
Debug = Annotated[
    bool,
    typer.Option("--debug", rich_help_panel=LOGS, help="Add /debug/integrity, a check of the engine's state."),
]


def serve(
    ctx: typer.Context,
    target: TargetName = "bundled",
    draft: o.Draft = None,
    device: o.Device = "cpu",
    dtype: o.Dtype = None,
    device_map: o.DeviceMap = None,
    implementation: o.Implementation = "auto",
    method: o.Method = None,
    num_speculative_tokens: o.NumSpeculativeTokens = None,
    verify: o.Verify = None,
    shape: o.Shape = None,
    draws: o.Draws = None,
    speculative_config: o.SpeculativeConfig = None,
    also: Also = None,
    speculation: Speculation = "auto",
    shared_drafts: SharedDrafts = "off",
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key: ApiKey = None,
    served_model_name: ServedModelName = None,
    drain_timeout: DrainTimeout = 30.0,
    max_num_seqs: MaxNumSeqs = 32,
    max_queue: MaxQueue = 256,
    max_model_len: MaxModelLen = None,
    kv_memory_gib: KvMemory = None,
    stall_target: StallTarget = 0.1,
    no_prefix_reuse: NoPrefixReuse = False,
    request_timeout: RequestTimeout = 600.0,
    max_body_mib: MaxBody = 4.0,
    max_tokens_limit: MaxTokensLimit = None,
    log_level: LogLevel = "info",
    log_prompts: LogPrompts = False,
    debug: Debug = False,
    no_color: o.NoColor = False,
) -> None:
    """Serve a model by OpenAI's API: /v1/chat/completions, /v1/completions, /v1/models, and a page to try it at /.

    Speculation is planned by load, request by request, so that it is never slower than without; texts do not change.
    Needs the extra: pip install "foretoken\\[serve]".
    """
    if method == "prediction":
        raise ConfigError("--method prediction: requests that bring a prediction use it anyway; choose another method")
    speculative = settings.speculation(ctx)
    try:
        _serve(ctx.params, speculative)
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in EXTRA:
            raise
        raise ConfigError(f'foretoken serve needs the package {name}: pip install "foretoken[serve]"') from None


def _serve(options: dict[str, Any], speculative: dict[str, Any]) -> None:
    from foretoken.server import run
    from foretoken.server.logs import configure_logs
    from foretoken.server.options import ServerOptions

    configure_logs(options["log_level"], log_prompts=options["log_prompts"])
    wanted = ServerOptions(
        served_model_name=options["served_model_name"],
        api_keys=tuple(options["api_key"] or ()),
        max_body_mib=options["max_body_mib"],
        max_tokens_limit=options["max_tokens_limit"],
        request_timeout_s=options["request_timeout"] or None,
        log_prompts=options["log_prompts"],
        debug=options["debug"],
    )
    also = [_also(given, options) for given in options["also"] or ()]
    from foretoken.engine.service import Service, ServiceOptions

    service_options = ServiceOptions(
        max_num_seqs=options["max_num_seqs"],
        max_queue=options["max_queue"],
        max_model_len=options["max_model_len"],
        kv_memory_gib=options["kv_memory_gib"],
        speculation=options["speculation"],
        shared_drafts=options["shared_drafts"],
        prefix_reuse=not options["no_prefix_reuse"],
        stall_target_s=options["stall_target"],
    )
    if service_options.shared_drafts == "key" and not wanted.api_keys:
        raise ConfigError(
            "--shared-drafts key: no API key is given, so clients look alike; give --api-key for each client, or "
            "'--shared-drafts all' where all clients may see each other's texts"
        )
    made = run.bind(options["host"], options["port"])
    with made:
        hosts = run.hosts_of(made, options["host"])
        if not hosts and not wanted.api_keys:
            say(f"warning: every client that reaches {options['host']} may use this server; --api-key asks for a key")
        engine = settings.load_engine({**options, "width": 0}, speculative)
        service = Service(engine, service_options, also=also)
        configure_logs(options["log_level"], log_prompts=options["log_prompts"])  # the libraries just loaded changed it
        url = run.url_of(made)
        run.serve(
            service,
            replace(wanted, allowed_hosts=hosts),
            made,
            drain_s=options["drain_timeout"],
            on_ready=lambda: say(f"serving {options['target']} at {url} (API: {url}/v1, page: {url}/)"),
        )
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # everything has ended: ignore a further Ctrl-C


def _also(given: str, options: dict[str, Any]) -> "MethodConfig":
    """Check a further method before anything is loaded."""
    from foretoken.engine.config import speculative_config

    config = speculative_config(given)
    settings.check_method(config.resolved(), options["target"])
    return config
