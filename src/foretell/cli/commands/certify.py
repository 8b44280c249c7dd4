"""``foretell certify``: checks the output on given models."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretell.cli import early, options as o, settings
from foretell.cli.commands import certify_url as u
from foretell.cli.errors import say
from foretell.cli.fields import with_group
from foretell.cli.layout import console_of, new_table, print_line, print_table, progress_bar
from foretell.cli.output import check_writable, deliver
from foretell.core.errors import ConfigError
from foretell.core.params import SamplingParams

if TYPE_CHECKING:
    from foretell.certify import Certificate, Check

Limit = Annotated[
    int,
    typer.Option("--limit", metavar="N", rich_help_panel=o.PROMPTS,
                 help="At most N prompts, taken from the categories in turn."),
]  # fmt: skip
Verifiers = Annotated[
    list[str] | None,
    typer.Option("--verify", metavar="NAME[/OPTION=VALUE]", rich_help_panel=o.SPECULATION, show_default=False,
                 help="What to certify; may be repeated. Default: every exact verifier."),
]  # fmt: skip
Shapes = Annotated[
    list[str] | None,
    typer.Option("--shape", metavar="NAME[/OPTION=VALUE]", rich_help_panel=o.SPECULATION, show_default=False,
                 help="Shapes of proposals; may be repeated. Default: chain and static/branching=3x2x1."),
]  # fmt: skip
Temperatures = Annotated[list[str] | None, o.temperature("0, 0.7 and 1")]
Seed = Annotated[
    int, typer.Option("--seed", envvar="FORETELL_SEED", rich_help_panel=o.SAMPLING, help="Of the whole certificate.")
]
ReportFile = Annotated[
    str | None,
    typer.Option("--output", "-o", metavar="FILE", rich_help_panel=o.OUTPUT,
                 help="Write the JSON certificate to FILE as well."),
]  # fmt: skip


@with_group(o.Models, into="models", without=("draft_weights",))
def certify(
    ctx: typer.Context, *, prompts: o.Prompts = "bundled", limit: Limit = 8, raw: o.Raw = False, models: o.Models,
    threads: o.Threads = None, method: o.Method = None, num_speculative_tokens: o.NumSpeculativeTokens = None,
    verify: Verifiers = None, shape: Shapes = None, temperature: Temperatures = None, seed: Seed = 0,
    max_new_tokens: o.MaxNewTokens = 16, url: u.Url = None, reference_url: u.ReferenceUrl = None, plain: u.Plain = None,
    model: u.ModelName = None, reference_model: u.ReferenceModelName = None, api_key: u.ApiKey = None,
    api: u.Api = "auto", concurrency: u.Concurrency = 8, timeout: u.Timeout = 600.0, samples: u.Samples = 200,
    tolerance: u.Tolerance = 0.1, false_alarms: u.FalseAlarms = 1e-3, skip: u.Skip = None, json_: o.Json = False,
    output: ReportFile = None, no_color: o.NoColor = False,
) -> None:  # fmt: skip
    """Check that the output is still right: production decoding on these models against what it must be.

    window: the distribution at every guess is plain decoding's. draws: guesses come from the distribution that is
    reported. law, joint: the rule emits exactly the target's distribution. tokens: the same text with and without
    speculation. Lossy rules are measured, never certified.

    With --url: the same of a server, any that speaks OpenAI's API, from outside, by requests alone.

    Exit status: 0 certified, 1 a defect or too little to look at, 2 a wrong option, 130 interrupted.
    """
    check_writable(output)
    u.check_options(ctx)
    if url is not None:
        return u.certify_url(ctx, models)
    temperatures = settings.temperatures(temperature, (0.0, 0.7, 1.0))
    settings.check_paths(ctx, models)
    for name in verify or ():
        early.check_verifier(name)
    for name in shape or ():
        early.check_shape(name)
    SamplingParams(max_new_tokens=max_new_tokens)
    draft = settings.draft_of(ctx, models.draft, [method])
    if limit < 1:
        raise ConfigError(f"--limit {limit} must be at least 1")
    items = u.read_prompts(prompts, limit)
    settings.quiet()
    from foretell.bench import encode_item, with_forms
    from foretell.certify import certify as run
    from foretell.certify.run import SHAPES, combinations
    from foretell.engine.config import speculative_config

    config = speculation(models.target, draft, method, num_speculative_tokens)
    verifiers, shapes = verify or exact_verifiers(), shape or list(SHAPES)
    combinations(speculative_config(config), verifiers, shapes)  # mistakes are found before anything is loaded
    settings.use_threads(threads)
    engine = settings.load_engine(models, config, no_color=no_color)
    items = with_forms(engine, items, raw=raw, notice=say)
    with progress_bar(no_color, "certifying") as progress:
        certificate = run(
            engine, [encode_item(engine, item) for item in items], verifiers=verifiers, shapes=shapes,
            temperatures=temperatures, max_new_tokens=max_new_tokens, seed=seed, progress=progress,
        )  # fmt: skip
    deliver(certificate.to_dict(), output, json_=json_, show=lambda: show(certificate, no_color=no_color))
    if not certificate.passed:
        raise typer.Exit(1)
    return None


def exact_verifiers() -> list[str]:
    """All verifiers that are declared exact."""
    from foretell import VERIFIERS

    return [name for name, verifier in VERIFIERS.items() if verifier.exact]


def speculation(target: str, draft: str | None, method: str | None, count: int | None) -> dict[str, Any]:
    """The method configuration."""
    config: dict[str, Any] = {"method": method or settings.default_config(target, draft)["method"]}
    if draft is not None:
        config["model"] = draft
    if count is not None:
        config["num_speculative_tokens"] = count
    settings.check_method(config, target)
    if config["method"] == "none" or settings.reads_prediction(config["method"]):
        raise ConfigError(f"--method {config['method']} cannot be certified here: choose draft_model or ngram")
    return config


def show(certificate: "Certificate", *, no_color: bool) -> None:
    """A table, the findings, and the verdict on a line of its own."""
    from rich.markup import escape

    console = console_of(no_color, 120)
    columns = ("check", "verifier", "shape", "looked at", "largest deviation", "tolerance", "verdict")
    table = new_table(columns, left=("verifier", "shape", "verdict"), wraps=True)
    for check in certificate.checks:
        style = {"DEFECT": "bold red", "lossy": "yellow"}.get(check.verdict)
        table.add_row(*(escape(cell) for cell in cells(check)), style=style)
    print_table(console, table)
    for check in certificate.checks:
        for finding in check.findings[:3]:
            line = f"{finding.verdict}: {check.name}, {check.verifier}, {check.shape}: {finding.where}: {finding.what}"
            print_line(console, line)
        if len(check.findings) > 3:
            console.print(f"  ... and {len(check.findings) - 3} more (--json has them)")
    for reason in certificate.left_out:
        print_line(console, f"left out: {reason}")
    s = certificate.settings
    if certificate.weights_distance is not None:
        print_line(console, certificate.weights_distance.words)
    held = s["dtype"] if s["weights"] == s["dtype"] else f"{s['weights']} weights, {s['dtype']}"
    held += f", {s['kv']} keys and values" if "kv" in s else ""
    ran = f"{s['target']} ({s['implementation']}, {held}) · {s['speculative']['method']} · "
    ran += f"{s['num_prompts']} prompts x {s['max_new_tokens']} tokens at temperatures "
    ran += f"{', '.join(f'{value:g}' for value in s['temperatures'])} · seed {s['seed']} · {certificate.seconds:.0f} s"
    print_line(console, ran)
    print_line(console, certificate.verdict, "bold")


def cells(check: "Check") -> tuple[str, ...]:
    """One row of the table."""
    deviation = "-" if check.deviation is None else f"{check.deviation:.1e}" if check.deviation else "0"
    tolerance = "-" if check.tolerance is None else f"{check.tolerance:.1e}"
    verdict = check.verdict
    if check.verdict == "lossy" and check.name == "tokens":
        deviation, verdict = "-", f"lossy ({check.figures['texts_parted']} of {check.figures['texts']} texts differ)"
    elif check.verdict == "lossy":
        verdict = f"lossy (up to {check.figures['largest_total_variation']:.2g} from p)"
    elif check.verdict == "near-tie":
        verdict = f"near-tie ({sum(finding.verdict == 'near-tie' for finding in check.findings)})"
    return check.name, check.verifier, check.shape, f"{check.num_contexts} {check.unit}", deviation, tolerance, verdict
