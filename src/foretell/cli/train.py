"""``foretell train``: trains a drafter for a target on the target's text."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretell.cli import options as o
from foretell.cli import settings
from foretell.cli.errors import say
from foretell.cli.fields import option_name, with_fields
from foretell.cli.output import as_json, has_color, waiting, write
from foretell.core import builtin
from foretell.core.errors import ConfigError, nearest
from foretell.core.journal import first_difference
from foretell.core.settings import check_keys
from foretell.train.config import TrainConfig

if TYPE_CHECKING:
    from foretell.train.metrics import Evaluation
    from foretell.train.responses import Responses
    from foretell.train.trainer import Report

TRAINING, DATA = "Training", "Data"
LINE_SECONDS = 30.0
METHODS = tuple(builtin.TRAINING)
Method = Annotated[str, typer.Argument(metavar="METHOD", help=f"What to train: {', '.join(METHODS)}.")]
Data = Annotated[
    str,
    typer.Option("--data", metavar="FILE", rich_help_panel=DATA, show_default=False,
                 help="Prompts (JSON as 'foretell bench' reads it, or plain text, cut into pieces), answered first "
                 "by the target; or the responses.safetensors of an earlier run. judge: the labels.jsonl that were mined."),
]  # fmt: skip
Out = Annotated[
    str,
    typer.Option("--out", metavar="DIR", rich_help_panel=o.OUTPUT, show_default=False,
                 help="Where weights, checkpoints, log.jsonl and record.json go."),
]  # fmt: skip
Limit = Annotated[
    int | None,
    typer.Option("--limit", metavar="N", rich_help_panel=DATA, help="Only the first N prompts. Default: all."),
]
ResponseTokens = Annotated[
    int,
    typer.Option("--max-new-tokens", metavar="N", rich_help_panel=DATA, help="The most tokens of an answer."),
]
Temperatures = Annotated[
    list[str] | None, o.temperature("0 and 1", help="At which prompts are answered, in turn.", panel=DATA)
]
Init = Annotated[
    str | None,
    typer.Option("--init", metavar="NAME_OR_DIR", rich_help_panel=o.MODELS,
                 help="What to begin from: a head of the same method (default: a fresh one); draft_model: the model. "
                 "acceptance: the draft model, or the head of eagle1, eagle3 or kangaroo, whose hidden states are read."),
]  # fmt: skip
ConfigFile = Annotated[
    str | None,
    typer.Option("--config", metavar="FILE", rich_help_panel=TRAINING,
                 help="JSON with settings of the method, e.g. '{\"num_slots\": 5}', and any of those below."),
]  # fmt: skip
Resume = Annotated[
    bool, typer.Option("--resume", rich_help_panel=TRAINING, help="Go on with the run in DIR, if there is one.")
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", envvar="FORETELL_THREADS", metavar="N", rich_help_panel=o.MODELS, help="CPU threads."),
]


@with_fields(TrainConfig, into="options", panel=TRAINING)
def train(
    method: Method,
    data: Data,
    out: Out,
    target: o.Target = "bundled",
    init: Init = None,
    device: o.Device = "cpu",
    dtype: o.Dtype = None,
    threads: Threads = None,
    limit: Limit = None,
    max_new_tokens: ResponseTokens = 160,
    temperature: Temperatures = None,
    config: ConfigFile = None,
    options: dict[str, Any] | None = None,
    resume: Resume = False,
    json_: o.Json = False,
    no_color: o.NoColor = False,
) -> None:
    """Train a drafter, or a small head around one, for a target, from text that the target itself writes.

    Ctrl-C finishes the step and leaves a checkpoint; --resume goes on to the same loss curve. Several GPUs: accelerate
    launch -m foretell.cli.main train ...
    """
    if method not in METHODS:
        raise ConfigError(f"method {method!r} cannot be trained{nearest(method, METHODS)}")
    if threads is not None and threads < 1:
        raise ConfigError(f"--threads {threads} must be at least 1")
    if max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens {max_new_tokens} must be at least 1")
    given = read_config(config)
    for key, value in (options or {}).items():
        if key in given and given[key] != value:
            flag = option_name(TrainConfig, key)
            raise ConfigError(f"{flag} {value} contradicts --config, where {key} = {given[key]!r}: drop one")
        given[key] = value
    check_out(out, resume=resume)
    if not Path(data).is_file():
        raise ConfigError(
            f"--data {data!r} cannot be read: no such file, or a folder; expected a file of prompts or responses"
        )
    settings.quiet()
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    from foretell.train import methods

    by_labels = methods.labelled(method)
    if by_labels is not None:
        figures = _from_labels(method, by_labels, target, data, out, given, device, dtype, no_color)
    else:
        answering = {
            "limit": limit,
            "max_new_tokens": max_new_tokens,
            "temperatures": settings.temperatures(temperature, (0.0, 1.0)),
        }
        figures = _drafter(method, target, data, out, given, init, device, dtype, resume, answering, no_color)
    if not speaks():
        return
    for warning in figures.get("warnings", ()):
        say(f"warning: {warning}")
    if json_:
        write(as_json(figures, pretty=sys.stdout.isatty()), None)
    else:
        write("".join(f"{line}\n" for line in summary(figures)), None)


def read_config(file: str | None) -> dict[str, Any]:
    """The settings of --config. Raises ConfigError."""
    if file is None:
        return {}
    try:
        found = json.loads(settings.read_text(file, "--config"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"--config {file!r} is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise ConfigError(f"--config {file!r} must hold one JSON object, e.g. '{{\"lr\": 0.0005}}'")
    return found


def check_out(out: str, *, resume: bool) -> None:
    """Refuse a folder in use, before anything is loaded."""
    path = Path(out)
    if path.exists() and not path.is_dir():
        raise ConfigError(f"--out {out} is a file; expected a folder")
    if not resume and path.is_dir() and any(path.iterdir()):
        raise ConfigError(f"--out {out} is not empty: give --resume to go on with the run in it, or another folder")


def _drafter(
    method: str,
    target: str,
    data: str,
    out: str,
    given: dict[str, Any],
    init: str | None,
    device: str,
    dtype: str | None,
    resume: bool,
    answering: dict[str, Any],
    no_color: bool,
) -> dict[str, Any]:
    from foretell.train import methods, slots
    from foretell.train.trainer import train

    _, training = methods.check(method, given, init=init)  # mistakes are found before anything is loaded
    answering = {**answering, "max_length": TrainConfig(**training).max_length}
    given.setdefault("seed", TrainConfig.seed)
    with waiting(f"loading {target}", no_color=no_color):
        from foretell.methods.common.teacher import Teacher
        from foretell.model.load import load_model
        from foretell.train.responses import target_hash

        model = load_model(target, dtype=dtype, device=local(device), implementation="transformers")
    responses = responses_of(data, target, model, Path(out), dtype, local(device), given["seed"], answering, no_color)
    prepared = methods.prepare(method, model, responses, given, init=init, target_name=target)
    identity = {
        "method": method,
        "options": prepared.options,
        "init": init,
        "target": target,
        "target_hash": target_hash(model),
        "target_dtype": str(model.spec.dtype).removeprefix("torch."),
    }
    with _progress(no_color) as progress:
        evaluation = train(
            prepared.objective, Teacher(model), responses, out, prepared.config, resume=resume, identity=identity,
            save=prepared.save, finish=prepared.finish, progress=progress, plot=_plot(),
        )  # fmt: skip
    figures = evaluation.as_dict()
    losses = slots.logged_losses(Path(out) / "log.jsonl")
    figures["warnings"] = slots.warnings_of(figures["conditional"], figures["conditional_greedy"], losses)
    return {"method": method, "target": target, "out": out, **figures}


def speaks() -> bool:
    """Whether this process is the one that reports progress."""
    return os.environ.get("RANK", "0") == "0"


def local(device: str) -> str:
    """The device of this process: of several on GPUs (``accelerate launch``), each has its own."""
    rank = os.environ.get("LOCAL_RANK")
    return f"cuda:{rank}" if device == "cuda" and rank is not None else device


def responses_of(
    data: str,
    target: str,
    model: Any,
    out: Path,
    dtype: str | None,
    device: str,
    seed: int,
    answering: dict[str, Any],
    no_color: bool,
) -> "Responses":
    """The target's answers: read, if they are there (a file of them, or those of a run to be resumed), or written now.

    They are kept beside the folder of weights, as DIR.responses.safetensors, so that another method can learn from them;
    while they are made, in DIR.responses.jsonl, so that the same command goes on after a kill.
    """
    from accelerate import PartialState

    from foretell import Engine
    from foretell.train import responses as r

    mine = r.target_hash(model)
    if data.endswith(".safetensors"):
        found = r.Responses.load(data)
        found.check_target(mine, name=f"--data {data}")
        return found
    kept = out.with_name(f"{out.name}.{r.FILE}")
    asked = {
        "source_sha256": r.file_sha256(data) if Path(data).is_file() else None,
        "seed": seed,
        "max_new_tokens": answering["max_new_tokens"],
        "temperatures": answering["temperatures"],
        "limit": answering["limit"],
        "target_hash": mine,
    }
    state = PartialState(cpu=device == "cpu")
    with state.main_process_first():  # one process writes them, the others read
        if kept.exists():
            found = r.Responses.load(kept)
            difference = first_difference({key: found.metadata.get(key) for key in asked}, asked)
            if difference is None:
                return found
            key, old, new = difference
            raise ConfigError(
                f"{kept} holds {len(found)} answers that were made with {key} = {old!r}, and now {key} is {new!r}: give it "
                "as --data to learn from it, or another --out, or delete it"
            )
        engine = Engine.load(target, speculative="none", device=device, dtype=dtype)
        most = answering["max_new_tokens"]
        prompts = r.read_prompts(
            data, engine, limit=answering["limit"], max_new_tokens=most, max_length=answering["max_length"]
        )
        journal = kept.with_suffix(".jsonl")
        journal.parent.mkdir(parents=True, exist_ok=True)
        with _answering(no_color, journal) as progress:
            found = r.regenerate(
                engine, prompts, temperatures=answering["temperatures"], max_new_tokens=most, seed=seed,
                progress=progress, journal=journal, source=data, source_sha256=asked["source_sha256"],
            )  # fmt: skip
        found = replace(found, metadata={**found.metadata, "limit": answering["limit"]})
        found.save(kept)
        journal.unlink()
        if skipped := found.metadata["num_skipped"]:
            say(f"{skipped} of {len(prompts)} prompts of {data} were left out: no room for an answer of {most} tokens")
    return found


def _from_labels(
    method: str,
    train_on: Callable[..., dict[str, Any]],
    target: str,
    data: str,
    out: str,
    given: dict[str, Any],
    device: str,
    dtype: str | None,
    no_color: bool,
) -> dict[str, Any]:
    import inspect

    known = [
        name
        for name, parameter in inspect.signature(train_on).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    check_keys(given, known, f"for training {method!r}")
    from foretell.model.load import load_model

    with waiting(f"loading {target}", no_color=no_color):
        model = load_model(target, dtype=dtype, device=device)
    figures = train_on(model, Path(data), Path(out), **given)
    return {"method": method, "target": target, "out": out, **figures}


def summary(figures: dict[str, Any]) -> list[str]:
    """The summary of a run for people."""
    lines = [f"{figures['method']} for {figures['target']}: {figures['out']}"]
    slots = figures.get("conditional") or []
    if slots:
        lines += [
            "slot                     " + " ".join(f"{slot:>6}" for slot in range(1, len(slots) + 1)),
            "acceptance, sampled      " + " ".join(f"{value:6.3f}" for value in slots),
            "acceptance, greedy       " + " ".join(f"{value:6.3f}" for value in figures["conditional_greedy"]),
            "calibration error        " + " ".join(f"{value:6.3f}" for value in figures["ece"]),
            f"expected length: {figures['expected_length']:.3f} sampled, {figures['expected_length_greedy']:.3f} greedy "
            f"(held-out text, {figures['num_tokens']} tokens, chains of {len(slots)}; each slot given the one before)",
        ]
    else:
        plain = {key: value for key, value in figures.items() if isinstance(value, float)}
        lines += [f"{key}: {value:.4g}" for key, value in plain.items()]
    return lines


def bar_text(report: "Report") -> str:
    """Beside the bar: mean loss of a slot, then of each, acceptance by slot and expected length of the newest evaluation.

    The sum over slots, which is minimised, would jump where slots are added.
    """
    text = f"loss {report.loss if report.loss_per_slot is None else report.loss_per_slot:.3f}"
    if len(report.slot_losses) > 1:
        slots = " ".join("-" if loss is None else f"{loss:.2f}" for loss in report.slot_losses)
        text += f" a slot ({slots})"
    text += f" · {report.tokens_per_second:.0f} tok/s"
    held: Evaluation | None = report.evaluation
    if held is not None and held.slots:
        slots = " ".join(f"{slot.conditional:.2f}" for slot in held.slots)
        text += f" · held out: {slots} · length {held.expected_length:.2f}"
    return text


@contextmanager
def _progress(no_color: bool) -> Iterator[Callable[["Report"], None]]:
    """A bar on stderr while training."""
    with _bar("training", no_color) as update:
        yield lambda report: update(min(1.0, report.share), 1.0, bar_text(report))


def _plot() -> Callable[[Path], None]:
    """Draws the loss plot. Without matplotlib it prints one message, and training continues."""
    told = False

    def draw(out: Path) -> None:
        nonlocal told
        from foretell.train.plot import draw_losses

        try:
            draw_losses(out)
        except ConfigError as error:
            if not told:
                told = True
                say(str(error))

    return draw


@contextmanager
def _answering(no_color: bool, journal: Path) -> Iterator[Callable[[int, int, int], None]]:
    """A bar on stderr while prompts are answered; after an interrupt, a message with the number of kept answers."""
    done, total = 0, 0
    with _bar("answering", no_color) as update:

        def progress(now: int, of: int, written: int) -> None:
            nonlocal done, total
            done, total = now, of
            update(done, total, f"{done}/{total} prompts · {written} tokens")

        try:
            yield progress
        except KeyboardInterrupt:
            if done and speaks():
                say(f"{done} of {total} answers are kept in {journal}: the same command goes on with the others")
            raise


@contextmanager
def _bar(what: str, no_color: bool) -> Iterator[Callable[[float, float, str], None]]:
    """A bar on stderr, or, where that is no terminal, a line of it every half minute: enough for a log."""
    if not speaks():
        yield lambda done, total, note: None
        return
    if not sys.stderr.isatty():
        yield _lines(what)
        return
    from rich.console import Console
    from rich.progress import Progress, TextColumn

    console = Console(stderr=True, no_color=not has_color(sys.stderr, no_color))
    with Progress(*Progress.get_default_columns(), TextColumn("{task.fields[note]}"), console=console) as bar:
        task = bar.add_task(what, total=1.0, note="")
        yield lambda done, total, note: bar.update(task, completed=done, total=total, note=note)


def _lines(what: str) -> Callable[[float, float, str], None]:
    last = monotonic()

    def update(done: float, total: float, note: str) -> None:
        nonlocal last
        if monotonic() - last >= LINE_SECONDS:
            last = monotonic()
            print(f"{what} {done / max(total, 1e-9):.0%} · {note}", file=sys.stderr, flush=True)

    return update
