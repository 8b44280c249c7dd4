"""``foretoken bench``: is it faster, by how much, and is the text the same?"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.cli import options as o
from foretoken.cli import settings
from foretoken.cli.output import as_json, check_writable, has_color, write
from foretoken.errors import ConfigError

if TYPE_CHECKING:
    from foretoken.bench import BenchMethod

PROMPTS = "Prompts"
Suite = Annotated[
    str,
    typer.Option("--suite", metavar="bundled|FILE", rich_help_panel=PROMPTS,
                 help="Prompts: JSON lines in our format or Spec-Bench's (the first turn is used)."),
]  # fmt: skip
Categories = Annotated[
    str | None,
    typer.Option("--categories", metavar="A,B,...", rich_help_panel=PROMPTS, help="Only these. Default: all."),
]
Limit = Annotated[
    int | None,
    typer.Option("--limit", metavar="N", rich_help_panel=PROMPTS, help="At most N prompts of each category."),
]
Methods = Annotated[
    str | None,
    typer.Option(
        "--methods", metavar="A,B,...", rich_help_panel=o.SPECULATION,
        help="What to measure against plain decoding: METHOD[:N][:VERIFY][:SHAPE][:DRAWS], e.g. draft_model:5,"
        "ngram:4:exact,draft_model:6:rejection:sequoia/size=16. Default: draft_model where there is a draft, "
        "ngram, and prediction where prompts have one.",
    ),
]  # fmt: skip
Temperatures = Annotated[
    list[float] | None,
    typer.Option(
        "--temperature",
        metavar="T",
        rich_help_panel=o.SAMPLING,
        help="May be repeated. Default: 0.",
        show_default=False,
    ),
]
BenchSeed = Annotated[
    int,
    typer.Option("--seed", envvar="FORETOKEN_SEED", rich_help_panel=o.SAMPLING, help="Prompt number i gets SEED + i."),
]
Rounds = Annotated[
    int,
    typer.Option("--rounds", metavar="R", rich_help_panel=PROMPTS, help="Runs of each prompt; the median time counts."),
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", envvar="FORETOKEN_THREADS", metavar="N", rich_help_panel=o.MODELS, help="CPU threads."),
]
Bandwidth = Annotated[
    bool,
    typer.Option("--bandwidth/--no-bandwidth", rich_help_panel=o.MODELS,
                 help="Measure the memory's read bandwidth (1 GiB, about a second), the limit of plain decoding."),
]  # fmt: skip
ReportFile = Annotated[
    str | None,
    typer.Option(
        "--output", "-o", metavar="FILE", rich_help_panel=o.OUTPUT, help="Write the JSON report to FILE as well."
    ),
]


def bench(
    ctx: typer.Context,
    suite: Suite = "bundled",
    categories: Categories = None,
    limit: Limit = None,
    rounds: Rounds = 1,
    target: o.Target = "bundled",
    draft: o.Draft = None,
    device: o.Device = "cpu",
    dtype: o.Dtype = None,
    device_map: o.DeviceMap = None,
    implementation: o.Implementation = "auto",
    width: o.Width = 0,
    threads: Threads = None,
    bandwidth: Bandwidth = True,
    methods: Methods = None,
    verify: o.Verify = None,
    temperature: Temperatures = None,
    seed: BenchSeed = 0,
    max_new_tokens: o.MaxNewTokens = 128,
    json_: o.Json = False,
    output: ReportFile = None,
    no_color: o.NoColor = False,
) -> None:
    """Measure each method against plain decoding: same prompts, same weights, same process, one after the other.

    Figures: tokens/s; speedup with a 95 % interval (paired bootstrap over prompts); mean acceptance length; conditional
    acceptance rates by position; c and v, the cost of a guess and of a verifying pass in plain passes; the speedup that
    a cost model predicts from these; whether all tokens were identical. Texts are cut at their first loop.
    """
    check_writable(output)
    draft = settings.draft_name(draft)
    if threads is not None and threads < 1:
        raise ConfigError(f"--threads {threads} must be at least 1")
    settings.quiet()
    from foretoken.bench import load_suite, run_bench, select

    wanted = [name.strip() for name in categories.split(",")] if categories is not None else None
    items = select(load_suite(suite), categories=wanted, limit=limit)
    chosen = _methods(methods, target, draft, verify, any(item.prediction for item in items))
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    engine = settings.load_engine(ctx.params, None)
    with _progress(no_color) as progress:
        report = run_bench(
            engine, items, chosen, temperatures=temperature or [0.0], max_new_tokens=max_new_tokens, rounds=rounds,
            seed=seed, dram_read=dram_read if bandwidth and device == "cpu" else None, progress=progress,
        )  # fmt: skip
    if output is not None:
        write(as_json(report.to_dict(), pretty=True), output)
    if json_:
        write(as_json(report.to_dict(), pretty=sys.stdout.isatty()), None)
    else:
        from foretoken.cli.tables import show

        show(report, no_color=no_color)


def dram_read() -> float | None:
    """Bytes per second that this machine reads from memory; None where it cannot be measured."""
    from foretoken.bench import dram_read_bytes_per_second

    return dram_read_bytes_per_second()


def _methods(
    text: str | None, target: str, draft: str | None, verify: str | None, predictions: bool
) -> list["BenchMethod"]:
    """The methods of --methods, or the default ones, each checked before anything is loaded."""
    from foretoken.bench import parse_method

    if text is None:
        names = ["draft_model"] if settings.default_method(target, draft) == "draft_model" else []
        names += ["ngram", *(["prediction"] if predictions else [])]
    else:
        names = [name for name in text.split(",") if name.strip()]
    methods = [parse_method(name, draft=draft, verify=verify) for name in names]
    for method in methods:
        settings.check_method(method.config.resolved(), target)
        if method.config.capabilities.needs_prediction and not predictions:
            raise ConfigError(
                f"--methods {method.config.method} needs prompts with a 'prediction', and none of the chosen ones has any"
            )
    if draft is not None and not any("model" in method.config.key_names() for method in methods):
        raise ConfigError(
            f"--draft {draft} is read by methods with weights, e.g. draft_model: add it to --methods or drop --draft"
        )
    return methods


@contextmanager
def _progress(no_color: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr while runs are made; nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    console = Console(stderr=True, no_color=not has_color(sys.stderr, no_color))
    columns = [*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("decoding", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
