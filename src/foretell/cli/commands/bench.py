"""``foretell bench``: measures the speedup and compares the texts."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.cli import early, options as o, settings
from foretell.cli.errors import INTERRUPTED, TERMINATED, say
from foretell.cli.fields import with_group
from foretell.cli.interrupt import Terminated, interruptible
from foretell.cli.layout import progress_bar
from foretell.cli.output import check_writable, deliver
from foretell.core.errors import ConfigError
from foretell.core.journal import read_journal
from foretell.core.params import SamplingParams

if TYPE_CHECKING:
    from foretell.bench import BenchMethod, BenchReport, Item, PromptDone
    from foretell.bench.trace import DecodedRun

Sample = Annotated[
    int | None,
    typer.Option("--sample", metavar="N", rich_help_panel=o.PROMPTS,
                 help="The same N questions of the suite for everybody: as many of each task, 10 for 60 of spec-bench."),
]  # fmt: skip
Quality = Annotated[
    bool,
    typer.Option("--quality", rich_help_panel=o.PROMPTS,
                 help="Judge answers to word problems (the final number), to suite abstention (do they say so?) and "
                 "to HumanEval's tasks: their programs are RUN, in a process with limits."),
]  # fmt: skip
Methods = Annotated[
    str | None,
    typer.Option(
        "--methods", metavar="A,B,...", rich_help_panel=o.SPECULATION,
        help="What to measure against plain decoding: [auto:]METHOD[:N][:VERIFY][:SHAPE][:DRAWS][:OPTION=VALUE], e.g. "
        "draft_model:5,draft_model:4:draft_vocab_size=32768,ngram:4:exact,draft_model:6:rejection:sequoia/size=16. "
        "auto: as much as pays. Default: --method's own default, ngram, and prediction where prompts have one.",
    ),
]  # fmt: skip
Temperatures = Annotated[list[str] | None, o.temperature("0")]
BenchSeed = Annotated[
    int,
    typer.Option("--seed", envvar="FORETELL_SEED", rich_help_panel=o.SAMPLING, help="Prompt number i gets SEED + i."),
]
Rounds = Annotated[
    int,
    typer.Option(
        "--rounds", metavar="R", rich_help_panel=o.PROMPTS, help="Runs of each prompt; the median time counts."
    ),
]
ReportFile = Annotated[
    str | None,
    typer.Option(
        "--output", "-o", metavar="FILE", rich_help_panel=o.OUTPUT,
        help="Write the JSON report to FILE as well, and every run, as it is made, to FILE.runs.jsonl.",
    ),
]  # fmt: skip
Resume = Annotated[
    bool,
    typer.Option("--resume", rich_help_panel=o.OUTPUT,
                 help="Go on with the runs in FILE.runs.jsonl of --output, if there are any: of the same configuration."),
]  # fmt: skip


@with_group(o.Models, into="models")
def bench(
    ctx: typer.Context, *, suite: o.Suite = "bundled", sample: Sample = None, categories: o.Categories = None,
    limit: o.Limit = None, raw: o.Raw = False, quality: Quality = False, rounds: Rounds = 1, models: o.Models,
    lora: o.Lora = None, threads: o.Threads = None, bandwidth: o.Bandwidth = True, methods: Methods = None,
    verify: o.Verify = None, temperature: Temperatures = None, seed: BenchSeed = 0,
    max_new_tokens: o.MaxNewTokens = 128, json_: o.Json = False, output: ReportFile = None, resume: Resume = False,
    no_color: o.NoColor = False,
) -> None:  # fmt: skip
    """Measure each method against plain decoding: same prompts, same weights, same process, one after the other.

    Figures: tokens/s; speedup with a 95 % interval (paired bootstrap over prompts); mean acceptance length; conditional
    acceptance rates by position; c and v, the cost of a guess and of a verifying pass in plain passes; the speedup that
    a cost model predicts from these; whether all tokens were identical. Texts are cut at their first loop. The second
    message of a question is put after plain decoding's answer to the first.

    Where stderr is no terminal each prompt is a line on it. Ctrl-C and SIGTERM end with a report of what was measured,
    marked partial; --resume goes on.
    """
    check_writable(output)
    runs_file = open_runs(output, resume=resume)
    at = settings.temperatures(temperature, (0.0,))
    if rounds < 1:
        raise ConfigError(f"rounds = {rounds} must be at least 1")
    SamplingParams(max_new_tokens=max_new_tokens)
    settings.check_paths(ctx, models)
    early.check_methods(methods or "")
    items = _questions(suite, sample, categories, limit, quality)
    draft = settings.draft_of(
        ctx, models.draft, [None] if methods is None else [name.partition(":")[0] for name in methods.split(",")]
    )
    settings.quiet()
    from foretell.bench import BenchInterrupted, run_bench, with_forms

    chosen = _methods(methods, models.target, draft, verify, any(item.prediction for item in items))
    if models.draft_weights is not None:
        chosen = [_with_draft_weights(method, models.draft_weights) for method in chosen]
    settings.use_threads(threads)
    engine = settings.load_engine(models, None, no_color=no_color, lora=lora)
    items = with_forms(engine, items, raw=raw, notice=say)
    if runs_file is not None and not resume:
        runs_file.unlink(missing_ok=True)  # of a bench that had finished: its report is written over too
    status = 0
    try:
        with interruptible(terminable=True) as check, progress_bar(no_color) as update:

            def progress(done: int, total: int) -> None:
                check()
                update(done, total)

            report = run_bench(
                engine, items, chosen, temperatures=at, max_new_tokens=max_new_tokens, rounds=rounds,
                seed=seed, dram_read=dram_read if bandwidth and models.device == "cpu" else None, progress=progress,
                on_prompt=None if sys.stderr.isatty() else _print_prompt, runs_file=runs_file, judged=quality,
            )  # fmt: skip
    except BenchInterrupted as stop:
        status = TERMINATED if isinstance(stop.__cause__, Terminated) else INTERRUPTED
        say(_interrupted(stop.report, runs_file))
        if stop.report is None:
            raise typer.Exit(status) from None
        report = stop.report
    from foretell.cli.tables import show

    deliver(report.to_dict(), output, json_=json_, show=lambda: show(report, no_color=no_color))
    if status:
        raise typer.Exit(status)


def _questions(name: str, size: int | None, categories: str | None, limit: int | None, quality: bool) -> "list[Item]":
    """The questions that the options ask for; what is to be said of the suite is a line each."""
    from foretell.bench import read_suite, sample as sampled, select

    suite = read_suite(name)
    if size is not None:
        suite = sampled(suite, size)
    for note in suite.notes:
        say(note)
    wanted = [part.strip() for part in categories.split(",")] if categories is not None else None
    items = select(suite.items, categories=wanted, limit=limit)
    if quality and not any(item.check is not None for item in items):
        raise ConfigError(
            "--quality needs questions whose answers can be judged: word problems with a reference, HumanEval's tasks, or "
            "questions that nobody can answer, e.g. --suite gsm8k or abstention; none of the chosen ones is"
        )
    return items


def open_runs(output: str | None, *, resume: bool) -> Path | None:
    """The file of runs beside a report, whether or not it is there. None where there is no report, or where it is no file
    (/dev/stdout).

    Raises ConfigError where an interrupted bench would be lost, and for --resume without --output.
    """
    if output is None:
        if resume:
            raise ConfigError(
                "--resume needs --output FILE: the report of the interrupted bench, beside which its runs are"
            )
        return None
    if Path(output).exists() and not Path(output).is_file():
        return None
    file = Path(f"{output}.runs.jsonl")
    found = read_journal(file)
    _, runs = found if found is not None else ({}, [])
    if runs and not resume and not any("finished" in run for run in runs):
        raise ConfigError(
            f"{file} holds {len(runs)} runs of an interrupted bench: give --resume to go on with it, another --output, "
            "or delete it"
        )
    return file


def dram_read() -> float:
    """Bytes per second that this machine reads from memory."""
    from foretell.kernels.functions import dram_read_bandwidth

    return dram_read_bandwidth()


def _methods(
    text: str | None, target: str, draft: str | None, verify: str | None, predictions: bool
) -> list["BenchMethod"]:
    """The methods of --methods, or the default ones, each checked before anything is loaded."""
    from foretell.bench import parse_method

    if text is None:
        first = settings.default_config(target, draft)["method"]
        names = [first, "ngram", *(["prediction"] if predictions else [])]
    else:
        names = [name for name in text.split(",") if name.strip()]
        if not names:
            raise ConfigError(f"--methods {text!r} names none: give names such as ngram,suffix, or drop it")
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


def _with_draft_weights(method: "BenchMethod", weights: str) -> "BenchMethod":
    """The method with its draft model's matrices held so, where it has a draft model."""
    if "draft_weights" not in method.config.key_names():
        return method
    from foretell import speculative_config

    return replace(method, config=speculative_config({**method.config.resolved(), "draft_weights": weights}))


def prompt_line(done: "PromptDone") -> str:
    """A prompt that all methods have decoded: tokens a second of each, and the speedup against plain decoding."""
    rates = {label: _rate(run) for label, run in done.runs.items()}
    base = rates.get("none")
    parts = [
        f"bench {done.num_runs}/{done.num_planned} runs",
        f"temperature {done.temperature:g}",
        *([f"round {done.round + 1}"] if done.round else []),
        f"{done.item.category} {done.item.question_id}{f' turn {done.item.turn}' if done.item.turn > 1 else ''}",
    ]
    for label, rate in sorted(rates.items(), key=lambda pair: pair[0] != "none"):
        ratio = f" ({rate / base:.2f})" if base and label != "none" else ""
        parts.append(f"{label} {rate:.1f} tok/s{ratio}")
    return " · ".join(parts)


def _print_prompt(done: "PromptDone") -> None:
    print(prompt_line(done), file=sys.stderr, flush=True)


def _rate(run: "DecodedRun") -> float:
    seconds = sum(run.seconds_of())
    return len(run.token_ids) / seconds if seconds else 0.0


def _interrupted(report: "BenchReport | None", runs_file: Path | None) -> str:
    """The message of an interrupted bench."""
    if report is None:
        told = "interrupted before all methods had decoded a prompt: there is nothing to report"
    else:
        counts = report.settings
        told = f"interrupted after {counts['num_runs']} of {counts['num_runs_planned']} runs: the report is partial"
    how = f"runs are kept in {runs_file}" if runs_file is not None else "with --output FILE runs would be kept"
    return f"{told}; {how}, and --resume goes on with them"
