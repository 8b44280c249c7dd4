"""``foretell theory ...``: what speculation can reach, computed from rates or measured on a pair of models."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretell.cli import options as o, settings
from foretell.cli.errors import OneLineGroup, say
from foretell.cli.fields import with_group
from foretell.cli.layout import progress_bar, show_table
from foretell.cli.output import as_json, check_plot, check_writable, write
from foretell.core.errors import ConfigError
from foretell.core.spec import parse_numbers

if TYPE_CHECKING:
    from foretell import Engine
    from foretell.analysis.pairs import Pairs
    from foretell.bench.suite import Item

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


pair_of_models = with_group(o.Models, into="models", without=("draft_weights", "width"))
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
    max_length: Annotated[
        int, typer.Option("--max-length", metavar="N", help="Longest chain considered.", min=1, max=1000)
    ] = 16,
    json_: o.Json = False,
    no_color: o.NoColor = False,
) -> None:
    """Expected tokens a step and speedup of chains of 0, 1, 2, ... guesses, and the best of them.

    Leviathan et al. 2211.17192: (1 - a^(g+1)) / (1 - a) tokens for g guesses of one rate a, divided by 1 + g c.
    operations: arithmetic against plain decoding, if a guess's share of it is its share of time. Real streams of acceptance
    are not independent: measured rates by position ('foretell bench' prints them) predict better than one.
    """
    from foretell.theory.length import (
        LONGEST,
        best_length,
        expected_tokens,
        operations_factor,
        walltime_factor,
    )

    rates = parse_numbers(acceptance, "--acceptance")
    given: Any = rates[0] if len(rates) == 1 else rates
    if len(rates) > LONGEST:
        raise ConfigError(f"--acceptance has {len(rates)} rates; expected {LONGEST} at most")
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
    show_table("", columns, cells, bold=best, no_color=no_color)
    typer.echo(f"best: {best} guesses" if best else "best: no guesses; a guess costs more than it brings")


@pair_of_models
def optimum(
    ctx: typer.Context,
    *,
    prompts: o.Suite = "bundled",
    categories: o.Categories = None,
    limit: o.Limit = 2,
    raw: o.Raw = False,
    models: o.Models,
    threads: o.Threads = None,
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
    check_writable(csv, "--csv")
    check_plot(plot)
    at = settings.temperatures(temperature, (0.0, 0.3, 0.6, 0.8, 1.0, 1.2))
    counts = [int(count) for count in parse_numbers(drafts, "--drafts", whole=True)]
    if not 1 <= min(counts) <= max(counts) <= 16:
        raise ConfigError(f"--drafts {drafts!r} must be numbers from 1 to 16")
    settings.check_paths(ctx, models)
    items = _items(prompts, categories, limit)
    settings.quiet()
    from foretell.analysis.optimum import optimum_table
    from foretell.bench import with_forms
    from foretell.cli.figures_theory import csv_of, draw_plot, optimum_rows

    engine = _engine(models, threads, no_color=no_color)
    items = with_forms(engine, items, raw=raw, notice=say)
    # Kept for every temperature, and five times over in float64 while the rules are computed for one of them.
    _check_room(engine, len(items), min(contexts, max_new_tokens), copies=len(at) + 10)
    with progress_bar(no_color) as progress:
        pairs = {t: _pairs(engine, items, t, max_new_tokens, contexts, seed) for t in at}
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
        show_table(title, columns, cells, no_color=no_color)
    typer.echo(
        f"{table.num_contexts} contexts of {table.num_texts} texts at each temperature. In brackets: the share of the "
        "optimum for drafts\ndrawn so. +-: standard error over texts. optimum: the most that any rule could accept."
    )


@pair_of_models
def shape(
    ctx: typer.Context,
    *,
    prompts: o.Suite = "bundled",
    categories: o.Categories = None,
    limit: o.Limit = 2,
    raw: o.Raw = False,
    models: o.Models,
    threads: o.Threads = None,
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
    at = settings.temperatures(temperature, (0.0, 0.6, 1.0))
    settings.check_paths(ctx, models)
    items = _items(prompts, categories, limit)
    settings.quiet()
    from foretell.analysis.trees import choose_tree, pass_seconds
    from foretell.bench import with_forms
    from foretell.draft.legality import parse_draws
    from foretell.verify import parse_verifier

    verifier = parse_verifier(verify or "coupled")
    asked = parse_draws(draws or "auto")
    engine = _engine(models, threads, no_color=no_color)
    items = with_forms(engine, items, raw=raw, notice=say)
    _check_room(engine, len(items), min(contexts, max_new_tokens), copies=3)
    seconds_target, seconds_draft = pass_seconds(engine.model), pass_seconds(_draft_of(engine), (1, 4))
    choices = [
        choose_tree(
            _pairs(engine, items, t, max_new_tokens, contexts, seed), t, verifier,
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
    show_table(f"{choices[0].verifier}, draws {choices[0].draws}", columns, cells, no_color=no_color)
    costs = "  ".join(f"{width}: {cost:.2f}" for width, cost in choices[0].cost_target.items())
    typer.echo(f"cost of a pass by nodes, in plain passes: {costs}\ntokens and speedup: as the cost model expects them")
    for choice in choices:  # on a line of its own, so that it can be copied whole
        answer = f"--shape {choice.spec}" if choice.spec else "no guesses: plain decoding is fastest"
        typer.echo(f"temperature {choice.temperature:g}: {answer}")


for command in (length, optimum, shape):
    paragraphs = (command.__doc__ or "").split("\n\n")
    theory.command(help="\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs))(command)


def _engine(models: o.Models, threads: int | None, *, no_color: bool) -> "Engine":
    """The engine of the options, with the draft model that they name. Raises ConfigError for one of another vocabulary:
    what the models say of a token would be compared by ids that mean different tokens."""
    draft = settings.draft_name(models.draft)
    config: dict[str, Any] = {"method": "draft_model", **({"model": draft} if draft is not None else {})}
    settings.check_method(config, models.target)
    settings.use_threads(threads)
    engine = settings.load_engine(models, config, no_color=no_color)
    from foretell.methods.draft_model.vocabulary.translated import TranslatedDraft

    if isinstance(engine.method, TranslatedDraft):
        raise ConfigError(
            f"draft model {_draft_of(engine).spec.name} has another vocabulary than target {engine.model.spec.name}, so "
            "their laws cannot be compared token by token: give a draft of the target's own, or use 'foretell bench'"
        )
    return engine


def _draft_of(engine: "Engine") -> Any:
    return engine.method.model  # type: ignore[attr-defined]


def _items(prompts: str, categories: str | None, limit: int | None) -> "list[Item]":
    """The prompts that are asked for: read before any model is loaded."""
    from foretell.bench import load_suite, select

    wanted = [name.strip() for name in categories.split(",")] if categories is not None else None
    return select(load_suite(prompts), categories=wanted, limit=limit)


def _check_room(engine: "Engine", num_texts: int, per_text: int, *, copies: int) -> None:
    """Raises ConfigError, before any text is written, where the logits of all contexts are more than the memory."""
    from foretell.analysis.pairs import check_room

    spec = engine.model.spec
    check_room(num_texts * min(per_text, spec.max_positions), spec.vocab_size, copies=copies)


def _pairs(
    engine: "Engine", items: "list[Item]", temperature: float, max_new_tokens: int, contexts: int, seed: int
) -> "Pairs":
    """Logits of both models at contexts of the target's own text at this temperature."""
    from foretell.analysis.pairs import PairText, collect
    from foretell.bench import encode_item

    texts = []
    for index, item in enumerate(items):
        ids = encode_item(engine, item)
        if len(ids) < engine.model.spec.max_positions:
            done = engine.generate(ids, temperature=temperature, seed=seed + index, max_new_tokens=max_new_tokens)
            texts.append(PairText([*ids, *done.token_ids], len(ids)))
    return collect(engine.model, _draft_of(engine), texts, per_text=contexts)
