"""``foretell certify --url``: a server is checked from outside."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretell.cli import options as o, settings
from foretell.cli.layout import console_of, new_table, print_line, print_table, status_line
from foretell.cli.output import VISIBLE, deliver
from foretell.core.errors import ConfigError

if TYPE_CHECKING:
    from foretell.bench import Item
    from foretell.certify.endpoint import EndpointCertificate

PANEL = "A server, from outside"


def _asked(name: str, metavar: str, help: str, *, show_default: bool = False, envvar: str | None = None) -> Any:
    return typer.Option(
        name, metavar=metavar, rich_help_panel=PANEL, show_default=show_default, help=help, envvar=envvar
    )


Url = Annotated[str | None, _asked(
    "--url", "URL", "Check this server, not models here: any that speaks OpenAI's API, e.g. http://127.0.0.1:8000."
)]  # fmt: skip
ReferenceUrl = Annotated[str | None, _asked(
    "--reference-url", "URL", "The same model without speculation, on another server, to compare with."
)]  # fmt: skip
Plain = Annotated[str | None, _asked(
    "--plain", "JSON", "Fields of a request that switch speculation off, to compare the server with itself. A foretell "
    "server is asked with '{\"speculative\": false}' by default. With --target DIR the reference is these weights, "
    "decoded plainly here."
)]  # fmt: skip
ModelName = Annotated[
    str | None, _asked("--model", "NAME", "The server's name of the model. Default: the first of /v1/models.")
]
ReferenceModelName = Annotated[str | None, _asked("--reference-model", "NAME", "The same of --reference-url.")]
ApiKey = Annotated[
    str | None, _asked("--api-key", "KEY", "The key of the server, and of --reference-url.", envvar="FORETELL_API_KEY")
]
Api = Annotated[str, _asked(
    "--api", "auto|completions|chat", "The route to use. auto: completions where the server has it.", show_default=True
)]  # fmt: skip
Concurrency = Annotated[
    int, _asked("--concurrency", "N", "Requests at a time, where order is free.", show_default=True)
]
Timeout = Annotated[float, _asked(
    "--timeout", "SECONDS", "For one answer. A server may compile for minutes at the first request of a kind.",
    show_default=True,
)]  # fmt: skip
Samples = Annotated[int, _asked(
    "--samples", "N", "Short texts of each prompt and temperature. More find smaller deviations.", show_default=True
)]  # fmt: skip
Tolerance = Annotated[float, _asked(
    "--tolerance", "GAP", "The logit gap that counts as rounding where greedy texts part, and the largest difference of "
    "log probabilities.", show_default=True,
)]  # fmt: skip
FalseAlarms = Annotated[float, _asked(
    "--false-alarms", "RATE", "How often the statistical checks together may fail where nothing is wrong.",
    show_default=True,
)]  # fmt: skip
Skip = Annotated[list[str] | None, _asked("--skip", "CHECK", "A check to leave out, e.g. seed; may be repeated.")]
ENDPOINT = (
    "reference_url", "plain", "model", "reference_model", "api", "concurrency", "timeout", "samples", "tolerance",
    "false_alarms", "skip",
)  # fmt: skip
"""Options that are read with --url alone."""
HERE = ("draft", "method", "num_speculative_tokens", "verify", "shape")
"""Options of models here: a server has chosen them."""
WEIGHTS = (
    "revision", "trust_remote_code", "device", "dtype", "device_map", "implementation", "weights", "kv", "memory_gib",
    "cuda_graphs", "width", "threads",
)  # fmt: skip
"""Options of --target, where it is the reference."""
MAX_TOKENS = 48


def check_options(ctx: typer.Context) -> None:
    """Refuse options that would be ignored."""
    given = ctx.params
    if given["url"] is None:
        settings.refuse(ctx, (*ENDPOINT, "api_key"), "is for --url URL: add it, or drop this")
        return
    settings.refuse(ctx, HERE, "is of models that run here, and --url checks a server as it was started: drop it")
    settings.refuse(
        ctx, ("raw",), "is of models that run here: with --url, --api says how the server is asked: drop it"
    )
    if not settings.typed(ctx, "target"):
        settings.refuse(
            ctx, WEIGHTS, "is of --target, and without it no model is loaded here: drop it, or add --target"
        )
    sources = {
        "--reference-url": given["reference_url"] is not None,
        "--plain": given["plain"] is not None,
        "--target": settings.typed(ctx, "target"),
    }
    chosen = [name for name, is_given in sources.items() if is_given]
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(chosen)} are each a reference: keep one")
    if given["reference_model"] is not None and given["reference_url"] is None:
        raise ConfigError("--reference-model is the model of --reference-url: add that, or drop this")
    for name, least in (("limit", 1), ("concurrency", 1), ("samples", 20)):
        if given[name] < least:
            raise ConfigError(f"--{name} {given[name]} must be at least {least}")
    if settings.typed(ctx, "max_new_tokens") and given["max_new_tokens"] < 8:
        raise ConfigError(
            f"--max-new-tokens {given['max_new_tokens']} must be at least 8: speculation needs a few to begin"
        )
    if not 0 < given["false_alarms"] < 1:
        raise ConfigError(f"--false-alarms {given['false_alarms']} must lie between 0 and 1")
    if not given["timeout"] > 0:
        raise ConfigError(f"--timeout {given['timeout']} must be positive")
    if not given["tolerance"] >= 0:
        raise ConfigError(f"--tolerance {given['tolerance']} must not be negative")


def certify_url(ctx: typer.Context, models: o.Models) -> None:
    """The command, once its options are known to fit together. Exit status as of ``certify``."""
    from foretell.certify.endpoint import Endpoint, EndpointBudget, certify_endpoint
    from foretell.certify.endpoint.run import NAMES

    given = ctx.params
    skip = [name for text in given["skip"] or () for name in text.split(",")]
    unknown = [name for name in skip if name not in NAMES]
    if unknown:
        raise ConfigError(f"--skip {unknown[0]} is not a check; known: {', '.join(NAMES)}")
    most = given["max_new_tokens"] if settings.typed(ctx, "max_new_tokens") else MAX_TOKENS
    budget = EndpointBudget(
        max_tokens=most, samples=given["samples"], tolerance=given["tolerance"], alpha=given["false_alarms"]
    )
    temperatures = settings.temperatures(given["temperature"], (0.7, 1.0))
    items = read_prompts(given["prompts"], given["limit"])
    if any(item.messages for item in items):
        raise ConfigError(f"--prompts {given['prompts']}: a server is asked with texts, and here are conversations")
    fields = settings.json_object(given["plain"], "--plain")
    shared = {"api": given["api"], "concurrency": given["concurrency"], "timeout_s": given["timeout"]}
    keyed = {**shared, "api_key": given["api_key"]}
    with ExitStack() as stack:
        endpoint = stack.enter_context(Endpoint(given["url"], model=given["model"], **keyed))
        reference = None
        if given["reference_url"] is not None:
            reference = Endpoint(given["reference_url"], model=given["reference_model"], **keyed)
            stack.enter_context(reference)
        elif settings.typed(ctx, "target"):
            endpoint.find_model()  # a wrong URL is found before a model is loaded
            local = stack.enter_context(served_here(models, given["threads"], no_color=given["no_color"]))
            reference = stack.enter_context(Endpoint(local, **shared))
        else:
            endpoint.find_model()
            if not fields and "speculative" in endpoint.about:
                fields = {"speculative": False}
            reference = endpoint.sibling(fields) if fields else None
        with status_line("asking", given["no_color"]) as progress:
            certificate = certify_endpoint(
                endpoint, [item.prompt for item in items], reference=reference, temperatures=temperatures,
                budget=budget, seed=given["seed"], skip=skip, progress=progress,
            )  # fmt: skip
    deliver(
        certificate.to_dict(), given["output"], json_=given["json_"],
        show=lambda: show(certificate, no_color=given["no_color"]),
    )  # fmt: skip
    if not certificate.passed:
        raise typer.Exit(1)


@contextmanager
def served_here(models: o.Models, threads: int | None, *, no_color: bool) -> Iterator[str]:
    """The URL of the target, decoded plainly in this process."""
    try:
        from foretell.server.run import bind, in_thread, url_of
    except ModuleNotFoundError as error:
        raise ConfigError(
            f'--target as a reference needs the package {error.name}: pip install "foretell[serve]"'
        ) from None
    from foretell.service.service import Service, ServiceOptions

    settings.use_threads(threads)
    engine = settings.load_engine(models, {"method": "none"}, no_color=no_color)
    service = Service(engine, ServiceOptions(speculation="off"))
    with bind("127.0.0.1", 0) as made:
        url = url_of(made)
        with in_thread(service, made):
            yield url


def show(certificate: "EndpointCertificate", *, no_color: bool) -> None:
    """A table, the findings, the faults by name, and the verdict on a line of its own."""
    from rich.markup import escape

    from foretell.certify.endpoint.report import asked, with_findings

    console = console_of(no_color, 150)

    def say(text: str, style: str | None = None) -> None:
        print_line(console, text.translate(VISIBLE), style)

    columns = ("check", "looked at", "found", "verdict")
    table = new_table(columns, left=columns, wraps=True)
    for check in certificate.checks:
        style = "bold red" if check.verdict == "DEFECT" else None if check.passed else "yellow"
        cells = check.name, check.looked_at, check.summary, check.verdict
        table.add_row(*(escape(cell.translate(VISIBLE)) for cell in cells), style=style)
    print_table(console, table)
    for check in with_findings(certificate):
        for found in check.findings[:3]:
            say(f"{found.verdict}: {check.name}: {found.where}: {found.what}")
        if len(check.findings) > 3:
            say(f"  ... and {len(check.findings) - 3} more (--json has them)")
    for name, value in asked(certificate):
        say(f"{name}: {value}")
    for fault in certificate.faults:
        say(f"{fault.name} ({', '.join(fault.evidence)}): {fault.what}")
    say(certificate.verdict, "bold")


def read_prompts(name: str, limit: int, categories: str | None = None) -> list["Item"]:
    """At most limit prompts, of all categories, or those that are listed, in turn. Raises ConfigError that names the
    line."""
    from foretell.bench import Item, load_suite, select

    wanted = [part.strip() for part in categories.split(",")] if categories is not None else None
    items = select(load_suite(name), categories=wanted)
    groups: dict[str, list[Item]] = {}
    for item in items:
        groups.setdefault(item.category, []).append(item)
    deepest = max(map(len, groups.values()))
    return [group[k] for k in range(deepest) for group in groups.values() if k < len(group)][:limit]
