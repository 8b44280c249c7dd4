"""``foretell doctor``: what to use on this machine, and why a head accepts little."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretell.cli import early, options as o, settings
from foretell.cli.commands.certify_url import read_prompts
from foretell.cli.errors import say
from foretell.cli.fields import with_group
from foretell.cli.layout import (
    ProgressLines,
    console_of,
    console_of_errors,
    new_table,
    print_line,
    print_table,
    status_line,
)
from foretell.cli.output import check_writable, deliver
from foretell.cli.train_progress import told_if_interrupted
from foretell.core import builtin
from foretell.core.errors import ConfigError, nearest
from foretell.core.registry import names_of
from foretell.core.spec import method_words

if TYPE_CHECKING:
    from rich.console import Console

    from foretell import Engine
    from foretell.bench import Item
    from foretell.costs.outlook import Cell
    from foretell.doctor.checkup import Checkup, Progress
    from foretell.doctor.diagnosis import HeadDiagnosis
    from foretell.doctor.examine import Examined

UNHEALTHY = 3
"""Exit status where a head has a fault."""
WIDE = 120
IGNORED_WITH_HEAD = ("temperature", "timed", "time_limit", "bandwidth", "context", "concurrency")
ANSWER = 48
"""Tokens of an answer that a head is measured on, where --max-new-tokens is not given."""
Head = Annotated[
    str | None,
    typer.Argument(metavar="[HEAD]", help="A trained head to be diagnosed: a directory, a hub id or bundled/METHOD."),
]
Only = Annotated[
    str | None,
    typer.Option("--methods", metavar="A,B,...", rich_help_panel=o.SPECULATION,
                 help="Try only these, METHOD[:N][:VERIFY][:OPTION=VALUE], e.g. eagle3:7:rejection. Default: all that fit "
                 "the target and --draft."),
]  # fmt: skip
Count = Annotated[
    int,
    typer.Option("--limit", metavar="N", min=1, rich_help_panel=o.PROMPTS, help="At most N prompts, evenly chosen."),
]
Timed = Annotated[
    int,
    typer.Option("--timed", metavar="N", min=1, rich_help_panel=o.PROMPTS, help="Prompts by which passes are timed."),
]
TimeLimit = Annotated[
    float,
    typer.Option("--time-limit", metavar="SECONDS", min=1.0, rich_help_panel=o.PROMPTS,
                 help="Of measuring, without what other programs take of it, and at most twice as long; it ends earlier "
                 "where the intervals decide. inf: all prompts by all methods."),
]  # fmt: skip
Temperature = Annotated[
    float,
    typer.Option("--temperature", min=0.0, rich_help_panel=o.SAMPLING, help="At which texts are drawn. 0: greedy."),
]
Tokens = Annotated[
    int, typer.Option("--max-new-tokens", metavar="N", min=8, rich_help_panel=o.SAMPLING, help="Tokens of a text.")
]
Context = Annotated[
    int | None,
    typer.Option("--context", metavar="N", min=1, rich_help_panel=o.PROMPTS,
                 help="Foresee the best method with texts of up to N tokens, by costs that are measured for it."),
]  # fmt: skip
Concurrency = Annotated[
    int | None,
    typer.Option("--concurrency", metavar="N", min=1, rich_help_panel=o.PROMPTS,
                 help="The same with up to N requests at once."),
]  # fmt: skip
Seed = Annotated[int, typer.Option("--seed", envvar="FORETELL_SEED", rich_help_panel=o.SAMPLING, help="Of the texts.")]
ReportFile = Annotated[
    str | None,
    typer.Option("--output", "-o", metavar="FILE", rich_help_panel=o.OUTPUT, help="Write the JSON report to FILE too."),
]


@with_group(o.Models, into="models", without=("draft_weights",))
def doctor(
    ctx: typer.Context, *, head: Head = None, prompts: o.Suite = "bundled", categories: o.Categories = None,
    limit: Count = 10, raw: o.Raw = False, timed: Timed = 4, time_limit: TimeLimit = 60.0, context: Context = None,
    concurrency: Concurrency = None, models: o.Models, threads: o.Threads = None, bandwidth: o.Bandwidth = True,
    methods: Only = None, temperature: Temperature = 0.0, max_new_tokens: Tokens = 64, seed: Seed = 0,
    json_: o.Json = False, output: ReportFile = None, no_color: o.NoColor = False,
) -> None:  # fmt: skip
    """What to use here: measures this machine, target and drafters on a few prompts, and recommends one command line.

    A short prompt of every method that fits, what is used where none is named first and as auto decides last, then more
    prompts of the best: acceptance by slot, the cost of guesses, and from both the speedup that is to be expected, from
    five prompts on with a 95 % interval. It ends where the intervals decide or the time is over, with warnings.

    With HEAD: why a trained head accepts little. It is measured on the target's own answers, slot by slot, as it is and
    with one mistake after the other undone: layer ids off by one, rotary positions, norms, dtype, token mapping,
    template, another target. Exit status 3 where a fault is found.
    """
    check_writable(output)
    settings.check_paths(ctx, models, head=head)
    only = [name.strip() for name in methods.split(",") if name.strip()] if methods is not None else None
    _check_methods(only)
    if head is not None:
        if only is not None or settings.draft_of(ctx, models.draft, []) is not None:
            raise ConfigError("HEAD is diagnosed by itself: drop --methods and --draft")
        settings.refuse(
            ctx, IGNORED_WITH_HEAD, "is not for HEAD, which is measured at temperature 1 and not timed: drop it"
        )
    settings.quiet()
    items = read_prompts(prompts, limit, categories)
    settings.use_threads(threads)
    with ProgressLines(f"loading {models.target}") as lines:
        engine = settings.load_engine(models, None, no_color=no_color)
        from foretell.bench import with_forms

        items = with_forms(engine, items, raw=raw, notice=say)
        found: HeadDiagnosis | Checkup
        shorter = "--limit N takes fewer prompts" if head else "--time-limit SECONDS makes it shorter"
        with told_if_interrupted(lambda: f"there is no report before the end; {shorter}"):
            if head is not None:
                from foretell.doctor.head import diagnose
                from foretell.doctor.templates import formats_of

                most = max_new_tokens if settings.typed(ctx, "max_new_tokens") else ANSWER
                with status_line("looking", no_color) as progress:
                    found = diagnose(
                        engine, head, formats_of(engine, items), max_new_tokens=most, seed=seed,
                        progress=progress if sys.stderr.isatty() else lines.now,
                    )  # fmt: skip
            else:
                with _share(no_color, lines) as share:
                    found = _check_up(engine, models, only, items, ctx.params, share)
    printed: Any = show if head is None else show_head
    deliver(found.to_dict(), output, json_=json_, show=lambda: printed(found, no_color=no_color))
    if head is not None and not found.is_healthy:  # type: ignore[union-attr]
        raise typer.Exit(UNHEALTHY)


def _check_methods(names: list[str] | None) -> None:
    known = [name for name in names_of(builtin.CONFIGS, "foretell.methods") if name != "none"]
    if names == []:
        raise ConfigError("--methods names none: give names such as ngram,suffix, or drop it")
    for text in names or ():
        config, _ = method_words(text)
        name = config["method"]
        if name not in known:
            raise ConfigError(f"--methods: there is no method {name!r} to try{nearest(name, known)}")
        for key in ("shape", "draws"):
            if key in config:
                raise ConfigError(f"--methods {text}: guesses are measured in chains: drop {config[key]!r}")
        early.check_config(config)


def _check_up(
    engine: "Engine", models: o.Models, only: list[str] | None, items: "list[Item]",
    options: dict[str, Any], progress: "Callable[[Progress], None]",
) -> "Checkup":  # fmt: skip
    from foretell.bench import encode_item
    from foretell.doctor.candidates import candidates
    from foretell.doctor.checkup import check_up
    from foretell.engine.request.request import token_ids

    guesses = [token_ids(item.prediction, engine.tokenizer) if item.prediction else None for item in items]
    tried, left = candidates(
        engine.model.spec,
        engine.tokenizer,
        draft=settings.draft_name(models.draft),
        methods=only,
        predictions=all(guesses),
    )
    if not tried:
        raise ConfigError("; ".join(f"{name}: {why}" for name, why in left.items()) or "no method to try")
    return check_up(
        engine, [encode_item(engine, item) for item in items], tried, left, target=models.target, guesses=guesses,
        temperature=options["temperature"], max_new_tokens=options["max_new_tokens"], num_timed=options["timed"],
        seed=options["seed"], bandwidth=options["bandwidth"], time_limit_s=options["time_limit"],
        flags=flags_of(models), context=options["context"], concurrency=options["concurrency"], progress=progress,
        notice=say,
    )  # fmt: skip


def flags_of(models: o.Models) -> list[str]:
    """The options that chose how the target runs, target and drafter apart, for a command that is to run the same."""
    plain = o.Models()
    words = []
    for item in fields(models):
        value = getattr(models, item.name)
        if item.name in ("target", "draft", "draft_weights") or value == getattr(plain, item.name) or value == "auto":
            continue
        flag = "--" + item.name.replace("_", "-")
        words += [flag] if value is True else [flag, str(value)]
    return words


@contextmanager
def _share(no_color: bool, lines: "ProgressLines") -> "Iterator[Callable[[Progress], None]]":
    """A bar on stderr with the share that is done and the time left; lines where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda at: lines(f"{at.share:.0%}, at most {at.seconds_left:.0f} s left: {at.what}")
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[left]}"))
    with Progress(*columns, TimeElapsedColumn(), console=console_of_errors(no_color), transient=True) as bar:
        task = bar.add_task("looking", total=1.0, left="")
        yield lambda at: bar.update(
            task, completed=at.share, description=at.what, left=f"at most {at.seconds_left:.0f} s left"
        )


def _tabled(
    console: "Console", title: str, columns: list[str], rows: list[list[str]], *, bold: int | None = None
) -> None:
    from rich.markup import escape

    print_line(console, title, "bold")  # as a table's own it would be broken to the table's width
    table = new_table(columns, wraps=True)
    for number, row in enumerate(rows):
        table.add_row(*map(escape, row), style="bold" if number == bold else None)
    print_table(console, table)


def show(found: "Checkup", *, no_color: bool) -> None:
    """The report of a checkup, for people."""
    console = console_of(no_color, WIDE)
    for line in _about(found):
        print_line(console, line)
    rows = [_row(one) for one in found.methods]
    title = (
        f"what guessing would bring: temperature {found.temperature:g}, up to {found.num_prompts} prompts, "
        f"{found.tokens_a_text:.0f} tokens a text"
    )
    columns = [
        "method", "prompts", "guesses", "slot 1", "slot 2", "slot 4", "tokens a step", "a guess", "step", "speedup", "95 %",
    ]  # fmt: skip
    chosen = [
        one.method == found.recommended["method"] and one.speculation == found.speculation for one in found.methods
    ]
    _tabled(console, title, columns, rows, bold=chosen.index(True) if True in chosen else None)
    best = next((one for one in found.methods if one.predictions), None)
    if best is not None and len(best.predictions) > 1:
        parts = "  ".join(f"{one.num_speculative_tokens}: {one.speedup.value:.2f}" for one in best.predictions)
        print_line(console, f"{best.method}, speedup by guesses: {parts}")
    print_line(
        console,
        "slot: share of guesses accepted there, given that those before were. a guess, step: their cost in plain passes "
        "and steps.\nspeedup: predicted for decoding, by the best number of guesses (auto: measured), and drawn towards 1 "
        "where it is from few prompts;\n'foretell bench' measures it.",
    )
    for each in found.methods:
        if each.possible is not None:
            print_line(console, f"{each.label}: {each.possible.line}.")
    _show_outlook(console, found.outlook)
    for why, names in _by_reason(found.left).items():
        print_line(console, f"not tried: {', '.join(names)}: {why}")
    for one in found.warnings:
        print_line(console, f"! {one.text}")
    print_line(console, f"\n{found.conclusion}.", "bold")
    print_line(console, found.command)


def _show_outlook(console: "Console", cells: "list[Cell]") -> None:
    if not cells:
        return
    last, counts = cells[-1], sorted({cell.concurrency for cell in cells})
    rows = [
        [f"{cells[start].context:,}", *(f"{cell.guesses}: {cell.speedup:.2f}" if cell.guesses else "none"
                                        for cell in cells[start : start + len(counts)])]
        for start in range(0, len(cells), len(counts))
    ]  # fmt: skip
    title = f"{last.method}, foreseen by tokens of text and requests at once: guesses, and their speedup"
    _tabled(console, title, ["tokens", *map(str, counts)], rows)
    what = f"{last.guesses} guesses, {last.speedup:.2f} times plain decoding" if last.guesses else "guesses do not pay"
    print_line(console, f"{last.context:,} tokens and {last.concurrency} at once: {what}, if as many are kept as here.")


def _about(found: "Checkup") -> Iterator[str]:
    m = found.machine
    where = m.accelerator or f"{m.processor}, {m.threads} of {m.cores} cores"
    held = m.dtype if m.weights == m.dtype == m.kv else f"{m.weights} weights, {m.kv} cache"
    yield f"machine: {where}"
    ran = f"{m.implementation} ({m.kernels})" if m.kernels else m.implementation
    yield f"target:  {found.target}, {ran}, {held}, {m.weight_bytes / 1e6:.0f} MB a pass"
    if found.plain_pass_seconds is not None:
        step = 1e3 * (found.plain_step_seconds or 0.0)
        line = f"pass:    {found.plain_pass_seconds * 1e3:.2f} ms, a plain step {step:.2f} ms"
        if m.bytes_per_second and m.least_pass_seconds:
            line += (
                f"; memory gives {m.bytes_per_second / 1e9:.1f} GB/s, so {m.least_pass_seconds * 1e3:.2f} ms at least "
                f"({found.share_of_limit:.0%} of the limit)"
            )
        yield line


def _by_reason(left: dict[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, why in left.items():
        found.setdefault(why, []).append(name)
    return found


def _row(one: "Examined") -> list[str]:
    name = one.label if one.drafter is None else f"{one.label} {Path(one.drafter).name}"
    slots = [f"{one.slots[at]:.2f}" if len(one.slots) > at else "-" for at in (0, 1, 3)]
    best = one.best
    cost = "-" if one.guess_cost is None else f"{one.guess_cost:.3f}"
    if best is None:
        return [name, str(one.num_prompts), "-", *slots, f"{one.mean_acceptance_length:.2f}", cost, "-", "-", "-"]
    value = best.speedup
    return [
        name, str(one.num_prompts), str(best.num_speculative_tokens), *slots, f"{best.tokens_per_step:.2f}", cost,
        f"{best.cost:.2f}", f"{value.value:.2f}", "-" if value.is_point else f"{value.low:.2f} to {value.high:.2f}",
    ]  # fmt: skip


def show_head(found: "HeadDiagnosis", *, no_color: bool) -> None:
    """The diagnosis of a head, for people."""
    from foretell.doctor.variants import FAULTS

    console = console_of(no_color, WIDE)
    print_line(console, f"{found.head} ({found.method}) for {found.target}", "bold")
    if found.slots:
        rows = [
            [str(slot.slot), f"{slot.acceptance:.2f}", "-" if slot.expected is None else f"{slot.expected:.2f}",
             f"{slot.agreement:.2f}", "#" * round(30 * slot.acceptance)]
            for slot in found.slots
        ]  # fmt: skip
        title = f"acceptance on {found.num_tokens} tokens of {found.num_texts} answers, temperature 1"
        _tabled(console, title, ["slot", "accepted", "after training", "agrees", ""], rows)
        expected = "" if found.expected_accepted is None else f", {found.expected_accepted:.2f} after training"
        print_line(console, f"guesses accepted a step: {found.accepted:.2f}{expected}")
    if found.trials:
        rows = [
            [FAULTS[one.fault] if one.fault not in ("template",) else "other template", one.change, f"{one.accepted:.2f}",
             f"{one.gain:+.0%}", "-" if one.standard_errors is None else f"{one.standard_errors:+.1f}"]
            for one in found.trials[:6]
        ]  # fmt: skip
        _tabled(console, "what would change that", ["if", "change", "accepted", "gain", "errors"], rows)
    for note in found.notes:
        print_line(console, f"! {note}")
    if found.is_healthy:
        print_line(console, "No fault was found: no change makes it clearly better.", "bold")
    for one in found.findings:
        print_line(console, f"{one.fault}: {FAULTS[one.fault]}.", "bold")
        print_line(console, f"  seen: {one.evidence}\n  remedy: {one.remedy}")
