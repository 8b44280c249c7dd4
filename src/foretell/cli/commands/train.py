"""``foretell train``: trains a drafter for a target on the target's text."""

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretell.cli import early, options as o, settings
from foretell.cli.errors import say
from foretell.cli.fields import option_name, with_fields
from foretell.cli.output import deliver, write
from foretell.cli.train_progress import answering_bar, speaks, told_if_interrupted, training_bar
from foretell.core import builtin
from foretell.core.errors import ConfigError, nearest
from foretell.core.registry import names_of
from foretell.core.settings import check_keys, field_kinds
from foretell.train.config import TrainConfig

if TYPE_CHECKING:
    from foretell.train.answering import AskedPrompt

TRAINING, DATA = "Training", "Data"
NOTHING = "nothing was written, the same command begins again"
AUTO = "auto"
METHODS = (*builtin.TRAINING, AUTO)
OF_AUTO = ("seed",)
"""Settings of training that ``auto`` leaves to the user."""
LONG_READ = 256 << 20
"""Bytes of weights from which on it is said that reading texts could be faster."""
ANSWERING = {"limit": "limit", "raw": "raw", "max_new_tokens": "max_new_tokens", "temperature": "temperatures"}
"""Options that say how prompts are answered, by the names that files of answers have for them."""
Method = Annotated[
    str,
    typer.Argument(
        metavar="METHOD", help=f"What to train: {', '.join(METHODS)}, or a package's head. auto: all by itself."
    ),
]
Data = Annotated[
    str | None,
    typer.Option("--data", metavar="FILE", rich_help_panel=DATA, show_default=False,
                 help="Prompts (JSON as 'foretell bench' reads it, or plain text, cut into pieces), answered first "
                 "by the target; or the responses.safetensors of an earlier run. judge: the labels.jsonl that were mined. "
                 "auto: the target makes its own where none are given."),
]  # fmt: skip
Out = Annotated[
    str | None,
    typer.Option("--out", metavar="DIR", rich_help_panel=o.OUTPUT, show_default=False,
                 help="Where weights, checkpoints, log.jsonl and record.json go. auto: where 'foretell generate' finds "
                 "the head by itself, if none is given."),
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
MaxShortShare = Annotated[
    float,
    typer.Option("--max-short-share", metavar="X", min=0, max=1, rich_help_panel=DATA,
                 help="Refuse to train where more than this share of the answers has fewer than 4 tokens; 1: never."),
]  # fmt: skip
Init = Annotated[
    str | None,
    typer.Option("--init", metavar="NAME_OR_DIR", rich_help_panel=o.MODELS,
                 help="What to begin from: a head of the same method (default: a fresh one); draft_model: the model. "
                 "acceptance: the draft model whose hidden states are read."),
]  # fmt: skip
ConfigFile = Annotated[
    str | None,
    typer.Option("--config", metavar="FILE", rich_help_panel=TRAINING,
                 help="JSON with settings of the method, e.g. '{\"num_slots\": 5}', and any of those below."),
]  # fmt: skip
Hours = Annotated[
    float | None,
    typer.Option(
        "--hours", metavar="H", rich_help_panel=TRAINING, help="auto: how long all of it may take. Default: 6."
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", rich_help_panel=TRAINING, help="Go on with the run in DIR, if there is one.")
]


@with_fields(TrainConfig, into="options", panel=TRAINING)
def train(
    ctx: typer.Context, method: Method, data: Data = None, out: Out = None, target: o.Target = o.AUTO,
    init: Init = None, device: o.Device = "cpu", dtype: o.Dtype = None, threads: o.Threads = None, limit: Limit = None,
    max_new_tokens: ResponseTokens = 160, temperature: Temperatures = None, raw: o.Raw = False,
    max_short_share: MaxShortShare = 0.25, config: ConfigFile = None, options: dict[str, Any] | None = None,
    hours: Hours = None, resume: Resume = False, json_: o.Json = False, no_color: o.NoColor = False,
) -> None:  # fmt: skip
    """Train a drafter, or a small head around one, for a target, from text that the target itself writes.

    auto makes prompts and answers, chooses the size of an eagle3 head by what guesses cost here, trains it in --hours, and
    says what it is worth; where it is worth something, it guesses for the target from then on. The same command goes on.

    Ctrl-C finishes the step and leaves a checkpoint; --resume goes on to the same loss curve. Several GPUs: accelerate
    launch -m foretell.cli.main train ...
    """
    if method not in (known := [*METHODS, *names_of((), "foretell.heads")]):
        raise ConfigError(f"method {method!r} cannot be trained{nearest(method, known)}")
    if method == AUTO:
        _auto(ctx, ctx.params, options or {})
        return
    settings.refuse(ctx, ("hours",), f"is for 'train {AUTO}': give --minutes, or drop it")
    if data is None or out is None:
        raise ConfigError(
            f"{'--data FILE' if data is None else '--out DIR'} is missing: only 'train {AUTO}' does without"
        )
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
    settings.check_paths(ctx, o.Models(target=target), init=init)
    if not data.endswith(".safetensors"):  # what contradicts given answers is said first
        check_settings(method, given)
    at = settings.temperatures(temperature, (0.0, 1.0))
    settings.quiet()
    settings.use_threads(threads)
    from foretell.train import methods

    by_labels = methods.labelled(method)
    if by_labels is not None:
        unread = ("init", "limit", "max_new_tokens", "temperature", "raw", "max_short_share", "resume")
        settings.refuse(ctx, unread, f"is not for {method!r}, which is fitted to the labels of --data at once: drop it")
        figures = _from_labels(method, by_labels, target, data, out, given, device, dtype, no_color)
    else:
        from foretell.train.answering import AskedPrompt

        given.setdefault("seed", TrainConfig.seed)
        asked = AskedPrompt(limit, max_new_tokens, at, given["seed"], raw)
        if data.endswith(".safetensors"):
            check_answers(data, asked, {name for name in ANSWERING if settings.typed(ctx, name)})
        figures = _drafter(
            method, target, data, out, given, init, device, dtype, resume, asked, max_short_share, no_color
        )
    if not speaks():
        return
    deliver(figures, json_=json_, show=lambda: write("".join(f"{line}\n" for line in summary(figures)), None))


def _auto(ctx: typer.Context, given: dict[str, Any], options: dict[str, Any]) -> None:
    """Prompts, answers, training and what it is worth, by ``commands.train_auto``."""
    from foretell.cli import train_worth
    from foretell.cli.commands import train_auto
    from foretell.train.plan import Task

    unread = ("init", "limit", "max_new_tokens", "temperature", "raw", "max_short_share", "config")
    fixed = [name for name in field_kinds(TrainConfig) if name not in OF_AUTO]
    settings.refuse(ctx, (*unread, *fixed), f"is not for 'train {AUTO}', which decides that itself: drop it")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(f"'train {AUTO}' is one process: start it without accelerate")
    target, data = given["target"], given["data"]
    settings.check_paths(ctx, o.Models(target=target))
    if data is not None and not Path(data).is_file():
        raise ConfigError(f"--data {data!r} cannot be read: no such file, or a folder; expected a file of prompts")
    settings.quiet()
    settings.use_threads(given["threads"])
    folder = train_auto.default_out(target) if given["out"] is None else Path(given["out"])
    hours, own = given["hours"], (options.get("seed", 0), given["device"], given["dtype"], given["no_color"])
    result = train_auto.auto(Task(target, 6.0 if hours is None else hours, data, folder, *own), _drafter)
    deliver(result, json_=given["json_"], show=lambda: write(f"{train_worth.worth(result)}\n", None))


def check_settings(method: str, given: dict[str, Any]) -> None:
    """Raise ConfigError for settings that are unknown or cannot be, before torch is imported: the method's own and those of
    TrainConfig."""
    own, common = early.known()["options"]["training"].get(method), field_kinds(TrainConfig)
    if own is None:
        return
    check_keys(given, [*common, "save_dtype", *own], f"for training {method!r}")
    early.check_options(own, given, "", but=(*common, "save_dtype"))
    TrainConfig(**{key: given[key] for key in given if key in common})


def read_config(file: str | None) -> dict[str, Any]:
    """The settings of --config. Raises ConfigError."""
    return settings.json_object(None if file is None else settings.read_text(file, "--config"), f"--config {file}")


def check_answers(data: str, asked: "AskedPrompt", typed: Collection[str]) -> None:
    """Refuse options that say how prompts are answered where --data holds answers that were made otherwise: they would be
    ignored. typed: those of ANSWERING that were given."""
    from foretell.train.responses import Responses

    made = Responses.load(data).metadata
    for name in typed:
        field = ANSWERING[name]
        old, new = made.get(field), getattr(asked, field)
        if old is not None and old != new:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{flag} contradicts --data {data}: it holds answers that were made with {field} = {old!r}, not {new!r}: "
                f"drop {flag}, or give the prompts as --data"
            )


def check_out(out: str, *, resume: bool) -> None:
    """Refuse a folder in use, before anything is loaded."""
    path = Path(out)
    if path.exists() and not path.is_dir():
        raise ConfigError(f"--out {out} is a file; expected a folder")
    if not resume and path.is_dir() and any(path.iterdir()):
        raise ConfigError(f"--out {out} is not empty: give --resume to go on with the run in it, or another folder")


def _drafter(
    method: str, target: str, data: str, out: str, given: dict[str, Any], init: str | None, device: str, dtype: str | None,
    resume: bool, asked: "AskedPrompt", max_short_share: float, no_color: bool,
) -> dict[str, Any]:  # fmt: skip
    from foretell.train import methods
    from foretell.train.answering import answers_of
    from foretell.train.trainer import train

    _, training = methods.check(method, given, init=init)  # mistakes are found before anything is loaded
    with settings.loading(target, no_color=no_color, stopped=NOTHING):
        from foretell.cli.commands.train_auto import fast_dtype
        from foretell.heads.teacher import Teacher
        from foretell.model.identity import target_hash
        from foretell.model.load import load_model

        model = load_model(target, dtype=dtype, device=local(device), implementation="transformers")
    if dtype is None and fast_dtype(device) and model.spec.weight_bytes >= LONG_READ:
        _tell("the target reads the texts in float32; with --dtype bfloat16 this machine takes about half as long")
    responses = answers_of(
        data, target, model, Path(out), asked, max_length=TrainConfig(**training).max_length, dtype=dtype,
        device=local(device), bar=lambda journal: answering_bar(no_color, journal), notice=_tell,
        max_short_share=max_short_share,
    )  # fmt: skip
    with told_if_interrupted(lambda: "the answers are kept, and the same command goes on with them"):
        prepared = methods.prepare(method, model, responses, given, init=init, target_name=target)
    identity = {
        "method": method,
        "options": prepared.options,
        "init": init,
        "target": target,
        "target_hash": target_hash(model),
        "target_dtype": str(model.spec.dtype).removeprefix("torch."),
    }
    before = _last(out)
    with told_if_interrupted(lambda: _kept(out)), training_bar(no_color) as progress:
        evaluation = train(
            prepared.objective, Teacher(model), responses, out, prepared.config, resume=resume, identity=identity,
            save=prepared.save, finish=prepared.finish, progress=progress, notice=_tell,
        )  # fmt: skip
    resumed = {"resumed_at": before, "steps": _last(out)} if resume else {}
    return {"method": method, "target": target, "out": out, **evaluation.as_dict(), **resumed}


def _last(out: str) -> int:
    """The step of the last checkpoint; 0 where there is none."""
    from foretell.train import checkpoint

    there = checkpoint.found(Path(out)) if Path(out).is_dir() else []
    return int(there[-1].name.partition("-")[2]) if there else 0


def _kept(out: str) -> str:
    """What a run that was stopped has left in its folder."""
    from foretell.train import checkpoint

    there = checkpoint.found(Path(out)) if Path(out).is_dir() else []
    if not there:
        return "there is no checkpoint yet; the answers are kept, and --resume begins with them"
    return f"the last checkpoint is {there[-1]}; the same command with --resume goes on from there"


def _tell(line: str) -> None:
    """Of several processes one speaks."""
    if speaks():
        say(line)


def local(device: str) -> str:
    """The device of this process: of several on GPUs (``accelerate launch``), each has its own."""
    rank = os.environ.get("LOCAL_RANK")
    return f"cuda:{rank}" if device == "cuda" and rank is not None else device


def _from_labels(
    method: str, train_on: Callable[..., dict[str, Any]], target: str, data: str, out: str, given: dict[str, Any],
    device: str, dtype: str | None, no_color: bool,
) -> dict[str, Any]:  # fmt: skip
    import inspect

    known = [
        name
        for name, parameter in inspect.signature(train_on).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    check_keys(given, known, f"for training {method!r}")
    from foretell.model.load import load_model

    with settings.loading(target, no_color=no_color):
        model = load_model(target, dtype=dtype, device=device)
    with told_if_interrupted(lambda: NOTHING):
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
    if "steps" in figures:
        before, steps = figures["resumed_at"], figures["steps"]
        went = f"went on behind step {before}" if before else "there was no checkpoint: began with step 1"
        done = f"{went}, to step {steps}" if before < steps else f"all {steps} steps were done before"
        lines.append(f"--resume: {done}")
    return lines
