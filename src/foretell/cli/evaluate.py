"""``foretell evaluate``: the quality of a drafter for a target, before any decoding is timed."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretell.cli import options as o
from foretell.cli import settings
from foretell.cli.bench import ReportFile
from foretell.cli.fields import with_group
from foretell.cli.layout import progress_bar, show_table
from foretell.cli.output import as_json, check_writable, write
from foretell.core.errors import ConfigError

if TYPE_CHECKING:
    from foretell import Engine
    from foretell.analysis.drafter import DrafterFigures, DrafterReport, Mean
    from foretell.bench import Item

NumTimed = Annotated[
    int,
    typer.Option("--timed", metavar="N", rich_help_panel=o.PROMPTS, min=0,
                 help="Prompts by which passes are timed. 0: no costs, no prediction."),
]  # fmt: skip
NOTES = (
    "accepted: of the guesses made there, given that all before were kept. 1-TV, coupled, argmax: the exact chance under\n"
    "the rules rejection, coupled and exact, from both distributions. agree: target and drafter have the same "
    "first choice. sure:\n"
    "probability that the drafter gives to its own. +-: standard error over texts. cost: drafting and the verifying pass,\n"
    "in plain passes; predicted: tokens / cost; whole: the same with distributions and bookkeeping on both sides."
)


@with_group(o.Models, into="models")
@with_group(o.Guessing, into="guessing", without=("shape", "draws"))
def evaluate(
    ctx: typer.Context,
    *,
    prompts: o.Prompts = "bundled",
    categories: o.Categories = None,
    limit: o.Limit = 4,
    timed: NumTimed = 3,
    models: o.Models,
    threads: o.Threads = None,
    guessing: o.Guessing,
    temperature: Annotated[list[str] | None, o.temperature("0 and 1")] = None,
    seed: Annotated[
        int, typer.Option("--seed", envvar="FORETELL_SEED", rich_help_panel=o.SAMPLING, help="Prompt i gets SEED + i.")
    ] = 0,
    max_new_tokens: o.MaxNewTokens = 128,
    json_: o.Json = False,
    output: ReportFile = None,
    no_color: o.NoColor = False,
) -> None:
    """How good a drafter is for this target: acceptance slot by slot, calibration, costs, and the speedup these predict.

    Measured at contexts of the target's own text, on chains of guesses; texts count up to their first loop. Only short
    runs for the costs are timed: 'foretell bench' measures the real speedup.
    """
    check_writable(output)
    at = settings.temperatures(temperature, (0.0, 1.0))
    settings.check_paths(ctx, models)
    settings.quiet()
    from foretell.bench import first_loop, load_suite, select

    wanted = [name.strip() for name in categories.split(",")] if categories is not None else None
    items = select(load_suite(prompts), categories=wanted, limit=limit)
    named = settings.json_object(guessing.speculative_config, "--speculative-config").get("method", guessing.method)
    guessed = any(item.prediction for item in items)
    if named == "prediction" and not guessed:
        raise ConfigError("--method prediction needs prompts with a 'prediction', and none of the chosen ones has any")
    config = settings.speculation(ctx, models, guessing, has_prediction=named == "prediction")
    if config["method"] == "none":
        raise ConfigError("nothing to evaluate: name a drafter by --draft NAME_OR_DIR or --method NAME")
    settings.use_threads(threads)
    engine = settings.load_engine(models, config, no_color=no_color)
    from foretell.analysis.drafter import evaluate as measure

    with progress_bar(no_color) as progress:
        report = measure(
            engine, _requests(engine, items), temperatures=at, max_new_tokens=max_new_tokens, seed=seed,
            num_timed=timed, until=first_loop, progress=progress,
        )  # fmt: skip
    found = {**report.to_dict(), "conclusions": list(conclusions(report))}
    if output is not None:
        write(as_json(found, pretty=True), output)
    if json_:
        write(as_json(found, pretty=sys.stdout.isatty()), None)
    else:
        show(report, no_color=no_color)


def _requests(engine: "Engine", items: "list[Item]") -> list[Any]:
    """The prompts that fit the context, and where the method reads them their predictions."""
    from foretell import Request
    from foretell.bench import encode_item

    guessed = engine.method.capabilities.needs_prediction
    encoded = [(item, encode_item(engine, item)) for item in items if item.prediction is not None or not guessed]
    room = engine.model.spec.max_positions
    fitting = [
        Request(ids, prediction=item.prediction if guessed else None) for item, ids in encoded if len(ids) < room
    ]
    if not fitting:
        raise ConfigError(f"none of {len(encoded)} prompts fits the context of {room} tokens")
    return fitting


def show(report: "DrafterReport", *, no_color: bool) -> None:
    """Two tables a temperature, and a conclusion."""
    method, longest = report.config["method"], report.num_speculative_tokens
    for at in report.temperatures:
        title = f"{report.target}, {method}: temperature {at.temperature:g}, up to {longest} guesses"
        show_table(title, SLOT_COLUMNS, _slots(at), no_color=no_color)
        if at.lengths:
            columns = ("guesses", "tokens a step", "cost", "predicted", "whole")
            show_table("", columns, _lengths(at), bold=at.best - 1 if at.best else None, no_color=no_color)
        typer.echo("\n".join(_about(at)) + "\n")
    typer.echo(NOTES)
    typer.echo("\n".join(conclusions(report)))


SLOT_COLUMNS = ("slot", "contexts", "guesses", "accepted", "1-TV", "coupled", "argmax", "agree", "sure")


def _slots(at: "DrafterFigures") -> Iterator[tuple[str, ...]]:
    for slot in at.slots:
        rules = (_mean(slot.by_rule.get(rule)) for rule in ("rejection", "coupled", "exact"))
        yield (
            str(slot.slot), str(slot.num_contexts), str(slot.num_guesses), _mean(slot.acceptance), *rules,
            _mean(slot.agreement), _number(slot.confidence),
        )  # fmt: skip


def _lengths(at: "DrafterFigures") -> Iterator[tuple[str, ...]]:
    for length in at.lengths:
        yield (
            str(length.num_speculative_tokens),
            f"{length.expected_tokens:.2f}",
            _number(length.draft_and_verify_cost),
            _number(length.predicted_speedup),
            _number(length.predicted_speedup_with_overhead),
        )


def _about(at: "DrafterFigures") -> Iterator[str]:
    yield (
        f"measured under {at.measured_with}: {at.num_contexts} guesses in {at.num_steps} steps of {at.num_texts} texts, "
        f"mean acceptance length {at.mean_acceptance_length:.2f}"
    )
    if at.lengths:
        rates = "the rates measured" if at.rule == "measured" else f"the exact rates of {at.rule!r}"
        yield f"expected length {at.expected_length:.2f} by {rates}"
    if at.calibration_error is not None:
        yield f"calibration error (ECE, 10 bins) {at.calibration_error:.3f}"
    if at.costs is not None:
        plain = f"a plain pass takes {1e3 * at.costs.seconds_plain_pass:.2f} ms"
        each = "" if at.costs.per_guess is None else f", a guess {at.costs.per_guess:.3f} of it"
        most = max(at.costs.verify, default=0)
        wide = f", a pass over {most + 1} nodes {at.costs.verify[most]:.2f}" if most else ""
        yield plain + each + wide


def conclusions(report: "DrafterReport") -> Iterator[str]:
    """A sentence for each temperature."""
    method = report.config["method"]
    for at in report.temperatures:
        where = f"temperature {at.temperature:g}: {method}"
        if not any(length.predicted_speedup_with_overhead for length in at.lengths):
            yield f"{where}: no prediction: no guess was made, or nothing was timed"
        elif at.best:
            yield (
                f"{where} is predicted to pay: {at.best_speedup:.2f} times plain decoding with "
                f"--num-speculative-tokens {at.best}"
            )
        else:
            most = max(length.predicted_speedup_with_overhead or 0.0 for length in at.lengths)
            yield f"{where} is predicted not to pay: at best {most:.2f} times plain decoding"


def _mean(found: "Mean | None") -> str:
    if found is None:
        return "-"
    error = "" if found.standard_error is None else f" +- {found.standard_error:.3f}"
    return f"{found.value:.3f}{error}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
