"""``foretell theory ...``: what speculation can reach, computed from rates or measured on a pair of models."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretell.cli import options as o
from foretell.cli import settings
from foretell.cli.bench import Categories, Limit, Suite, Threads, _progress
from foretell.cli.errors import OneLineGroup
from foretell.cli.layout import print_table
from foretell.cli.output import as_json, check_plot, check_writable, has_color, write
from foretell.core.errors import ConfigError
from foretell.core.spec import parse_numbers

if TYPE_CHECKING:
    from foretell import Engine
    from foretell.analysis.pairs import Pairs

theory = typer.Typer(
    name="theory",
    cls=OneLineGroup,
    help="What speculation could do: from numbers alone (length), or on a real pair of models (optimum, shape).",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@theory.callback(invoke_without_command=True)
def overview(ctx: typer.Context) -> None:
    """What speculation could do: from numbers alone (length), or on a real pair of models (optimum, shape)."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


PerText = Annotated[
    int, typer.Option("--contexts", metavar="N", help="At most N contexts of each text, evenly spread.", min=1)
]
Seed = Annotated[int, typer.Option("--seed", envvar="FORETELL_SEED", help="Of the texts, and of what is drawn.")]


def length(
    acceptance: Annotated[
        str,
        typer.Option(
            "--acceptance",
            metavar="A[,A,...]",
            help="Chance that a guess is accepted; several: of each position, given the one before it.",
        ),
    ] = "0.8",
    cost: Annotated[
        float, typer.Option("--cost", metavar="C", help="Time of one guess, in plain passes of the target.")
    ] = 0.05,
    max_length: Annotated[int, typer.Option("--max-length", metavar="N", help="Longest chain considered.", min=1)] = 16,
    json_: o.Json = False,
    no_color: o.NoColor = False,
) -> None:
    """Expected tokens a step and speedup of chains of 0, 1, 2, ... guesses, and the best of them.

    Leviathan et al. 2211.17192: (1 - a^(g+1)) / (1 - a) tokens for g guesses of one rate a, divided by 1 + g c.
    operations: arithmetic against plain decoding, if a guess's share of it is its share of time. Real streams of acceptance
    are not independent: measured rates by position ('foretell bench' prints them) predict better than one.
    """
    from foretell.analysis.theory.length import best_length, expected_tokens, operations_factor, walltime_factor

    rates = parse_numbers(acceptance, "--acceptance")
    given: Any = rates[0] if len(rates) == 1 else rates
    longest = max_length if len(rates) == 1 else min(max_length, len(rates))
    rows = [
        {
            "num_speculative_tokens": count,
            "expected_tokens": expected_tokens(given, count),
            "speedup": walltime_factor(given, count, cost),
            "operations": operations_factor(given, count, cost),
        }
        for count in range(longest + 1)
    ]
    best = best_length(given, cost, max_length=longest)
    if json_:
        found = {"acceptance": list(rates), "cost": cost, "best_num_speculative_tokens": best, "lengths": rows}
        write(as_json(found, pretty=sys.stdout.isatty()), None)
        return
    columns = ("guesses", "tokens a step", "speedup", "operations")
    cells = [
        (str(row["num_speculative_tokens"]), *(f"{row[k]:.3f}" for k in ("expected_tokens", "speedup", "operations")))
        for row in rows
    ]
    _table("", columns, cells, bold=best, no_color=no_color)
    typer.echo(f"best: {best} guesses" if best else "best: no guesses; a guess costs more than it brings")


def optimum(
    ctx: typer.Context,
    prompts: Suite = "bundled",
    categories: Categories = None,
    limit: Limit = 2,
    target: o.Target = "bundled",
    revision: o.Revision = None,
    trust_remote_code: o.TrustRemoteCode = False,
    draft: o.Draft = None,
    device: o.Device = "cpu",
    dtype: o.Dtype = None,
    device_map: o.DeviceMap = None,
    implementation: o.Implementation = "auto",
    weights: o.Weights = "auto",
    threads: Threads = None,
    temperature: Annotated[list[str] | None, o.temperature("0, 0.3, 0.6, 0.8, 1 and 1.2")] = None,
    drafts: Annotated[
        str, typer.Option("--drafts", metavar="N,N,...", help="Numbers of drafts for one token, 1 to 16.")
    ] = "1,2,3,4,6,8",
    contexts: PerText = 8,
    max_new_tokens: o.MaxNewTokens = 64,
    seed: Seed = 0,
    json_: o.Json = False,
    csv: Annotated[str | None, typer.Option("--csv", metavar="FILE", help="Write the table as CSV too.")] = None,
    plot: Annotated[str | None, typer.Option("--plot", metavar="FILE", help="Draw it too: .png, .svg or .pdf.")] = None,
    no_color: o.NoColor = False,
) -> None:
    """Acceptance of every rule for several drafts of one token, beside the most that any rule could accept.

    At contexts of the target's own text, written at each temperature. The optimum is that of drafts drawn in the same way
    (Hu et al. 2502.18779); coupled drafts depend on the target's noise, so no such bound is printed for them.
    """
    check_writable(csv)
    check_plot(plot)
    settings.quiet()
    from foretell.analysis.optimum import optimum_table
    from foretell.cli.figures_theory import csv_of, draw_plot, optimum_rows

    at = settings.temperatures(temperature, (0.0, 0.3, 0.6, 0.8, 1.0, 1.2))
    counts = [int(count) for count in parse_numbers(drafts, "--drafts", whole=True)]
    engine = _engine(ctx, threads)
    with _progress(no_color) as progress:
        pairs = {t: _pairs(engine, prompts, categories, limit, t, max_new_tokens, contexts, seed) for t in at}
        table = optimum_table(pairs, temperatures=at, num_drafts=counts, seed=seed, progress=progress)
    found = {"target": engine.model.spec.name, "draft": _draft_of(engine).spec.name, "seed": seed, **table.to_dict()}
    if csv is not None:
        write(csv_of(table), csv)
    if plot is not None:
        draw_plot(table, plot)
    if json_:
        write(as_json(found, pretty=sys.stdout.isatty()), None)
        return
    for title, columns, cells in optimum_rows(table):
        _table(title, columns, cells, no_color=no_color)
    typer.echo(
        f"{table.num_contexts} contexts of {table.num_texts} texts at each temperature. In brackets: the share of the "
        "optimum for drafts\ndrawn so. +-: standard error over texts. optimum: the most that any rule could accept."
    )


def shape(
    ctx: typer.Context,
    prompts: Suite = "bundled",
    categories: Categories = None,
    limit: Limit = 2,
    target: o.Target = "bundled",
    revision: o.Revision = None,
    trust_remote_code: o.TrustRemoteCode = False,
    draft: o.Draft = None,
    device: o.Device = "cpu",
    dtype: o.Dtype = None,
    device_map: o.DeviceMap = None,
    implementation: o.Implementation = "auto",
    weights: o.Weights = "auto",
    threads: Threads = None,
    verify: o.Verify = None,
    draws: o.Draws = None,
    temperature: Annotated[list[str] | None, o.temperature("0, 0.6 and 1")] = None,
    contexts: PerText = 32,
    max_new_tokens: o.MaxNewTokens = 64,
    max_size: Annotated[int, typer.Option("--max-size", metavar="N", help="Most guesses.", min=1, max=63)] = 63,
    seed: Seed = 0,
    json_: o.Json = False,
    no_color: o.NoColor = False,
) -> None:
    """The fastest tree of guesses for a pair of models on this machine, as --shape takes it.

    Measures how often the first, second, ... child is the accepted one, and what passes of both models cost at each width;
    a dynamic program finds the tree (Sequoia, 2402.12374).
    """
    settings.quiet()
    from foretell.analysis.trees import choose_tree, pass_seconds
    from foretell.draft.legality import parse_draws
    from foretell.verify import parse_verifier

    verifier = parse_verifier(verify or "coupled")
    asked = parse_draws(draws or "auto")
    at = settings.temperatures(temperature, (0.0, 0.6, 1.0))
    engine = _engine(ctx, threads)
    seconds_target, seconds_draft = pass_seconds(engine.model), pass_seconds(_draft_of(engine), (1, 4))
    choices = [
        choose_tree(
            _pairs(engine, prompts, categories, limit, t, max_new_tokens, contexts, seed), t, verifier,
            draws=asked, max_size=max_size, seconds_target=seconds_target, seconds_draft=seconds_draft,
        )
        for t in at
    ]  # fmt: skip
    if json_:
        write(as_json([choice.to_dict() for choice in choices], pretty=sys.stdout.isatty()), None)
        return
    cells = [
        (
            f"{choice.temperature:g}",
            " ".join(f"{rate:.3f}" for rate in choice.acceptance),
            f"{choice.cost_draft:.3f}",
            f"{choice.expected_tokens:.2f}",
            f"{choice.expected_speedup:.2f}",
        )
        for choice in choices
    ]
    columns = ("T", "acceptance by child", "c", "tokens a step", "speedup")
    _table(f"{choices[0].verifier}, draws {choices[0].draws}", columns, cells, no_color=no_color)
    costs = "  ".join(f"{width}: {cost:.2f}" for width, cost in choices[0].cost_target.items())
    typer.echo(f"cost of a pass by nodes, in plain passes: {costs}\ntokens and speedup: as the cost model expects them")
    for choice in choices:  # on a line of its own, so that it can be copied whole
        answer = f"--shape {choice.spec}" if choice.spec else "no guesses: plain decoding is fastest"
        typer.echo(f"temperature {choice.temperature:g}: {answer}")


for command in (length, optimum, shape):
    paragraphs = (command.__doc__ or "").split("\n\n")
    theory.command(help="\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs))(command)


def _engine(ctx: typer.Context, threads: int | None) -> "Engine":
    """The engine of the options, with the draft model that they name."""
    options = ctx.params
    draft = settings.draft_name(options["draft"])
    config: dict[str, Any] = {"method": "draft_model", **({"model": draft} if draft is not None else {})}
    settings.check_method(config, options["target"])
    if threads is not None:
        if threads < 1:
            raise ConfigError(f"--threads {threads} must be at least 1")
        import torch

        torch.set_num_threads(threads)
    return settings.load_engine({**options, "width": 0}, config)


def _draft_of(engine: "Engine") -> Any:
    return engine.method.model  # type: ignore[attr-defined]


def _pairs(
    engine: "Engine", prompts: str, categories: str | None, limit: int | None, temperature: float, max_new_tokens: int,
    contexts: int, seed: int,
) -> "Pairs":  # fmt: skip
    """Logits of both models at contexts of the target's own text at this temperature."""
    from foretell.analysis.pairs import PairText, collect
    from foretell.bench import encode_item, load_suite, select

    wanted = [name.strip() for name in categories.split(",")] if categories is not None else None
    items = select(load_suite(prompts), categories=wanted, limit=limit)
    texts = []
    for index, item in enumerate(items):
        ids = encode_item(engine, item)
        if len(ids) < engine.model.spec.max_positions:
            done = engine.generate(ids, temperature=temperature, seed=seed + index, max_new_tokens=max_new_tokens)
            texts.append(PairText([*ids, *done.token_ids], len(ids)))
    return collect(engine.model, _draft_of(engine), texts, per_text=contexts)


def _table(title: str, columns: Any, rows: Any, *, no_color: bool, bold: int | None = None) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    width = None if sys.stdout.isatty() else 150
    console = Console(no_color=not has_color(sys.stdout, no_color), highlight=False, width=width)
    table = Table(title=title or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 else "right")
    for index, row in enumerate(rows):
        table.add_row(*row, style="bold" if index == bold else None)
    print_table(console, table)
