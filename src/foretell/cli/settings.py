"""Convert command-line options to API arguments. Mistakes raise ConfigError before anything is loaded."""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from foretell.checkpoints.catalogue import BUNDLED, CATALOGUE
from foretell.checkpoints.names import check_device
from foretell.cli import early
from foretell.cli.errors import is_out_of_memory
from foretell.cli.options import Guessing, Models
from foretell.cli.output import waiting
from foretell.cli.starting import uncollected
from foretell.cli.train_progress import told_if_interrupted
from foretell.core.errors import ConfigError, ModelError
from foretell.core.jsontext import JSONDecodeError, parse_json
from foretell.core.params import SamplingParams, params_of
from foretell.core.platform import free_memory
from foretell.core.settings import field_kinds, value_of_json
from foretell.core.spec import parse_numbers
from foretell.learn.options import LearnOptions
from foretell.model.trained import default_speculation

if TYPE_CHECKING:
    from foretell import Engine, MethodConfig
    from foretell.engine.selfcheck import SelfCheck

TWICE = 2.2
"""What a model takes while it is loaded, in the size of its files: these are mapped, and their matrices written anew in the
form in which they are multiplied."""
NOT_OF_LOADING = ("target", "revision", "draft", "draft_weights")
"""Of ``Models``: what is no argument of ``Engine.load``, or is given otherwise."""
FLAGS = {  # option -> key of a speculative configuration
    "method": "method",
    "draft": "model",
    "draft_weights": "draft_weights",
    "num_speculative_tokens": "num_speculative_tokens",
    "verify": "verify",
    "shape": "shape",
    "draws": "draws",
}


def quiet() -> None:
    """Silence the messages of libraries while they load; foretell reports errors itself."""
    import warnings

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore")


def use_threads(threads: int | None) -> None:
    """The CPU threads of --threads; None: torch's own number."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


@contextmanager
def loading(target: str, *, no_color: bool, stopped: str = "") -> Iterator[None]:
    """While a model is loaded: a line that says so, one at Ctrl-C (which ends in ``stopped``), and an error for too little
    memory that says what is needed, what is left, and what would fit. Raises ModelError."""
    told = told_if_interrupted(lambda: stopped or f"{target} was being loaded")
    with told, waiting(f"loading {target}", no_color=no_color):
        quiet()
        from foretell import Engine  # noqa: F401  # what libraries take is no part of what is left

        left = free_memory()
        try:
            yield
        except (MemoryError, OSError, RuntimeError, ModelError) as error:
            if not is_out_of_memory(error):
                raise
            from foretell.checkpoints.directories import find_here

            path = find_here(target)
            files = [] if path is None else [path] if path.is_file() else [*path.glob("*.safetensors")]
            size = TWICE * sum(file.stat().st_size for file in files) / 1e9
            needs = f" (it takes about {size:.1f} GB while it is loaded)" if size else ""
            fits = [name for name, model in CATALOGUE.items() if TWICE * model.size < left and name != target]
            raise ModelError(
                f"{target} does not fit{needs}: {left / 1e9:.1f} GB are left to this process (see ulimit -v); make room or "
                f"take a smaller model ({' or '.join(fits[:3]) or 'bundled'} would fit)"
            ) from None


@uncollected()
def load_engine(models: Models, speculative: Any, *, no_color: bool, **more: Any) -> "Engine":
    """The engine of the options of panel "Models". more: of ``Engine.load``; with speculation "auto" costs are measured."""
    target = models.target
    check_revision(target, models.revision)
    target = target if models.revision is None else f"{target}@{models.revision}"
    own = {name: value for name, value in vars(models).items() if name not in NOT_OF_LOADING}
    own["device_map"] = device_map(models.device_map)
    with loading(models.target, no_color=no_color):
        from foretell import Engine

        engine = Engine.load(target, speculative=speculative, **own, **more)
    if more.get("speculation") == "auto":
        why = "costs were being measured (--speculation on starts without)"
        with told_if_interrupted(lambda: why), waiting("measuring what passes cost here, once", no_color=no_color):
            engine.measure()
    return engine


def loras(given: Sequence[str] | None) -> dict[str, str] | None:
    """--lora NAME=DIR, repeated, as ``Engine.load`` takes them. Raises ConfigError for another form, and a name twice."""
    made: dict[str, str] = {}
    for each in given or ():
        name, equal, directory = each.partition("=")
        if not (name and equal and directory):
            raise ConfigError(
                f"--lora {each}: expected NAME=DIR, the name by which requests choose it and its directory"
            )
        if name in made:
            raise ConfigError(f"--lora {each}: {name!r} is given twice: names must differ")
        made[name] = directory
    return made or None


def with_kept_text(engine: "Engine", *, no_color: bool) -> "tuple[Engine, SelfCheck | None]":
    """The engine, or one that does not guess where guesses do not keep the text on this machine; and what was seen, None
    where nothing is guessed anyway."""
    from foretell.engine.selfcheck import self_check

    if engine.speculative.method == "none" or engine.model.is_shared:  # processes that share it make the same passes
        return engine, None
    with waiting("checking that guesses keep the text, once", no_color=no_color):
        found = self_check(engine.model)
    return (engine.with_method("none", speculation="on") if found.fault else engine), found


def careful(engine: "Engine", *, no_color: bool) -> "Engine":
    """``with_kept_text`` of a command: what was seen is said on stderr, what is as it should be on terminals alone."""
    engine, found = with_kept_text(engine, no_color=no_color)
    if found is not None and (found.fault or found.error or sys.stderr.isatty()):
        with suppress(OSError):
            print(found, file=sys.stderr)
    return engine


def check_revision(target: str, revision: str | None) -> None:
    """Raise ConfigError where --revision is of a target that has none."""
    has_none = target in BUNDLED or target in CATALOGUE or Path(target).expanduser().exists() or "@" in target
    if revision is not None and has_none:
        raise ConfigError(f"--revision {revision} is of a Hugging Face id, and --target {target} is none: drop one")


@uncollected()
def speculation(
    ctx: typer.Context, models: Models, guessing: Guessing, *, has_prediction: bool = False
) -> dict[str, Any]:
    """One speculative configuration from --speculative-config and the flags; a flag that contradicts it is refused.
    ctx: tells what was typed from what is the environment's."""
    options = {**asdict(models), **asdict(guessing)}
    merged = json_object(guessing.speculative_config, "--speculative-config")
    config_typed = typed(ctx, "speculative_config")
    for option, key in FLAGS.items():
        value = draft_name(options[option]) if option == "draft" else options[option]
        if value is None:
            continue
        if key in merged and merged[key] != value and typed(ctx, option) == config_typed:
            flag = "--" + option.replace("_", "-")
            raise ConfigError(
                f"{flag} {value} contradicts --speculative-config, where {key} = {merged[key]!r}: drop one"
            )
        if key not in merged or typed(ctx, option) or not config_typed:  # what was typed beats the environment
            merged[key] = value
    early.check_config(merged)
    check_paths(ctx, models)
    if not typed(ctx, "draft") and merged.get("model") == draft_name(models.draft):
        wants = "prediction" if has_prediction else None  # what is named is not changed by the environment
        if not takes_draft(merged.get("method", wants)):
            merged.pop("model", None)
    asked = merged
    if "method" not in asked:
        merged = {**default_config(models.target, asked.get("model"), has_prediction=has_prediction), **asked}
    try:
        check_method(merged, models.target)
    except ConfigError as error:
        if "method" in asked or repr(merged["method"]) not in str(error):
            raise
        raise ConfigError(f"{error} ({unnamed_method(asked, merged['method'], models.target)})") from None
    if reads_prediction(merged["method"]) and not has_prediction:
        raise ConfigError(
            f"--method {merged['method']} needs the guess: give --prediction TEXT or --prediction-file FILE"
        )
    if has_prediction and not reads_prediction(merged["method"]):
        raise ConfigError(f"--prediction is read by --method prediction alone, not by {merged['method']!r}: drop one")
    return merged


def check_paths(ctx: typer.Context, models: Models, **more: str | None) -> None:
    """Look for the models that were typed, before torch is imported. more: further models or heads, by parameter. Raises
    ModelError for a path where there is none, ConfigError for a revision of what has none; what would have to be fetched is
    left to loading."""
    from foretell.checkpoints.directories import find_here

    for option, name in {"target": models.target, "draft": draft_name(models.draft), **more}.items():
        if name is not None and typed(ctx, option) and name not in CATALOGUE:
            find_here(name)
    check_revision(models.target, models.revision)


def default_config(target: str, draft: str | None, *, has_prediction: bool = False) -> dict[str, Any]:
    """The speculative configuration where no method is named: of all commands."""
    if has_prediction and draft is None:
        return {"method": "prediction"}
    return dict(default_speculation(target)) if draft is None else {"method": _method_of(draft)}


def _method_of(draft: str) -> str:
    """The method that a draft model or head is for, by its files; what is not here is taken for a draft model."""
    from foretell import METHODS
    from foretell.doctor.candidates import drafter_method

    found = "draft_model"
    with suppress(ModelError):
        if draft.startswith("bundled/") or Path(draft).expanduser().is_dir():
            found = drafter_method(draft)
    return found if found in METHODS else "draft_model"


def unnamed_method(asked: Mapping[str, Any], default: str, target: str) -> str:
    """For an error that names a method which the user did not: where it comes from, and the methods of this target that
    take what was asked for."""
    from foretell import METHODS
    from foretell.engine.config import default_drafter

    fit = []
    for name, kind in METHODS.items():
        if kind.capabilities.needs_prediction or not (kind.capabilities.by_request or default_drafter(name, target)):
            continue
        with suppress(ConfigError):
            check_method({**asked, "method": name}, target)
            fit += [name] if kind.guesses else []
    others = f"; --method {' or '.join(fit)} can" if fit else ""
    return f"none was named, and {default} is what {target} uses then{others}"


def takes_draft(method: object) -> bool:
    """Whether --draft is for a method; True where it is not known yet."""
    from foretell import METHODS

    return not isinstance(method, str) or method not in METHODS or "model" in METHODS[method].key_names()


def draft_of(ctx: typer.Context, draft: str | None, methods: Iterable[object]) -> str | None:
    """--draft as the API spells it; None where only the environment names one and none of the methods takes it."""
    if draft is not None and not typed(ctx, "draft") and not any(takes_draft(method) for method in methods):
        return None
    return draft_name(draft)


def temperatures(given: Sequence[str] | None, default: Sequence[float]) -> list[float]:
    """The numbers of --temperature, which may be repeated or joined by commas. Raises ConfigError."""
    found = parse_numbers(",".join(given), "--temperature") if given else list(default)
    for value in found:
        SamplingParams(temperature=value)
    return found


def reads_prediction(method: str) -> bool:
    """Whether a method needs the caller's guess of the output."""
    from foretell import METHODS

    return METHODS[method].capabilities.needs_prediction


def check_method(config: dict[str, Any], target: str) -> None:
    """Refuse, before anything is loaded, what the method's configuration refuses, and drafts missing or not read."""
    from foretell import METHODS, speculative_config
    from foretell.engine.config import default_drafter

    name = config["method"]
    if name in METHODS and "model" not in METHODS[name].key_names() and config.get("model") is not None:
        having = ", ".join(known for known, kind in METHODS.items() if "model" in kind.key_names())
        raise ConfigError(
            f"--draft {config['model']} is read by methods with weights ({having}), not by {name!r}: drop one"
        )
    made = speculative_config(config)
    part = made.trained
    if getattr(made, "model", "none needed") is not None or default_drafter(part.method, target) is not None:
        return
    if name == "draft_model":
        raise ConfigError(
            f"--method draft_model needs --draft NAME_OR_DIR with --target {target}: the bundled draft, --draft "
            "bundled/draft, has the vocabulary of the bundled target alone"
        )
    can = part.capabilities
    if (can.needs_head or can.needs_draft) and target in CATALOGUE:
        what = "a draft model" if can.needs_draft else f"a trained head ({part.method})"
        raise ConfigError(
            f"--method {name} needs {what} for {target}, and none comes with it: give one by --draft NAME_OR_DIR"
        )


def learn_options(given: Mapping[str, Any]) -> LearnOptions:
    """How to learn. Raises ConfigError, also for what is no device."""
    made = LearnOptions(**given)
    if made.learn_device is not None:
        check_device(made.learn_device)
    return made


def check_learning(configs: "Sequence[MethodConfig | dict[str, Any]]", target: str) -> None:
    """Refuse, before anything is loaded, methods of which none can learn while serving."""
    from foretell import speculative_config
    from foretell.engine.config import with_draft
    from foretell.learn.options import check_configs

    check_configs([with_draft(speculative_config(config), target) for config in configs])


def sampling(given: dict[str, Any]) -> SamplingParams:
    """SamplingParams of the options that were given, by field."""
    if "logit_bias" in given:
        kind = field_kinds(SamplingParams)["logit_bias"]
        given = {**given, "logit_bias": value_of_json(given["logit_bias"], kind, "--logit-bias")}
    return params_of(given)


def device_map(text: str | None) -> str | dict[str, Any] | None:
    """A name such as "auto", or a JSON object."""
    if text is not None and text.lstrip().startswith("{"):
        return json_object(text, "--device-map")
    return text


def json_object(text: str | None, option: str) -> dict[str, Any]:
    """The object of an option; empty where the option was not given."""
    try:
        value = parse_json("{}" if text is None else text)
    except JSONDecodeError as error:
        raise ConfigError(f"{option} is not JSON ({error}): {text!r:.60}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{option} must be a JSON object, e.g. '{{\"key\": 1}}', not {text!r:.60}")
    return value


def read_text(file: str, option: str) -> str:
    """A text file, or standard input for ``-``, exactly as it is."""
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"{option}: cannot read {file!r}: {error.strerror}") from None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        what = "standard input" if file == "-" else repr(file)
        raise ConfigError(
            f"{option}: {what} is not UTF-8 text (byte {error.start}); convert it, e.g. by iconv"
        ) from None


def one_text(text: str | None, file: str | None, name: str) -> str | None:
    """The text of an option or argument that can also come from a file; both is a mistake."""
    if text is not None and file is not None:
        raise ConfigError(f"{name} is given twice, as text and by --{name}-file {file}: drop one of the two")
    if file is not None:
        return read_text(file, f"--{name}-file")
    if text == "-":
        return read_text("-", name)
    check_text(text, name)
    return text


def check_text(text: str | None, name: str) -> None:
    """Refuse bytes that are no UTF-8, which Python hands over as lone surrogates."""
    if text is not None and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ConfigError(f"{name}: {text!a} is not UTF-8 text")


def draft_name(draft: str | None) -> str | None:
    """As the API spells it: "bundled" alone is the bundled target."""
    return "bundled/draft" if draft == "bundled" else draft


def refuse(ctx: typer.Context, names: Iterable[str], reason: str) -> None:
    """Raise ConfigError where one of these options was typed: it would be ignored. names: of parameters."""
    spelt = {parameter.name: parameter.opts[0] for parameter in ctx.command.params}
    for name in names:
        if typed(ctx, name):
            raise ConfigError(f"{spelt[name]} {reason}")


def typed(ctx: typer.Context, name: str) -> bool:
    """Whether an option was typed, rather than taken from the environment."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
