"""The options that commands share: name, help, bounds, environment variable. The API defines their meaning.

What several commands have in common stands here once, and those that go together are a dataclass that a command takes
whole: ``@with_group(Models, into="models")``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from foretell.checkpoints import names
from foretell.checkpoints.catalogue import DEFAULT, default_target
from foretell.cli import early
from foretell.cli.fields import option
from foretell.core import builtin
from foretell.core.errors import ConfigError
from foretell.core.params import SamplingParams, check_speculation
from foretell.core.platform import num_cores
from foretell.core.registry import check_draws, check_method, check_number

MODELS, SPECULATION, SAMPLING, OUTPUT, PROMPTS = "Models", "Speculation", "Sampling", "Output", "Prompts"

AUTO = "auto"
MOST_THREADS = 1024
"""Of --threads: OpenMP ends the process where it has no memory for theirs."""
_KINDS = "a directory, a GGUF file, a Hugging Face id, a name of 'foretell list', or 'bundled'"


def chosen_target(target: str) -> str:
    """The target that is meant: for "auto" the default one, of what is here. Raises ConfigError for a blank one."""
    if not target.strip():
        raise ConfigError(f"the target is empty: give {_KINDS}")
    return default_target() if target == AUTO else target


def checked(check: Callable[[Any], object]) -> Callable[[Any], Any]:
    """A callback: the value of an option, looked at before torch is imported. Raises ConfigError as ``check`` does."""

    def callback(given: Any) -> Any:
        if given is not None:
            check(given)
        return given

    return callback


def checked_method(ctx: typer.Context, param: Any, name: str | None) -> str | None:
    """The same of a method; one of the environment may yet be replaced."""
    source = ctx.get_parameter_source(param.name)
    if name is not None and source is not None and source.name == "COMMANDLINE":
        check_method(name, builtin.CONFIGS)
    return name


def checked_width(width: int) -> int:
    """A width that a method may have. Raises ConfigError."""
    if width < 0 or width == 1:
        raise ConfigError(
            f"width = {width} must be 0 (off) or at least 2: the root and as many guesses as a step may make"
        )
    return width


def checked_number(count: int | None) -> int | None:
    """A number of guesses. Raises ConfigError."""
    if count is not None:
        check_number(count)
    return count


def checked_threads(threads: int | None) -> int | None:
    """A number of threads. Raises ConfigError for one out of range."""
    if threads is not None and threads < 1:
        raise ConfigError(f"--threads {threads} must be at least 1")
    if threads is not None and threads > MOST_THREADS:
        raise ConfigError(f"--threads {threads} must be at most {MOST_THREADS}; this process has {num_cores()} cores")
    return threads


Target = Annotated[
    str,
    typer.Option(
        "--target", envvar="FORETELL_TARGET", metavar="NAME_OR_DIR", rich_help_panel=MODELS, callback=chosen_target,
        help=f"The model whose text is wanted: {_KINDS}. auto: {DEFAULT} where it has been pulled, else bundled.",
    ),
]  # fmt: skip
Revision = Annotated[
    str | None,
    typer.Option(
        "--revision", envvar="FORETELL_REVISION", metavar="REV", rich_help_panel=MODELS,
        help="Branch, tag or commit of the target's Hugging Face id; the same as --target ID@REV.",
    ),
]  # fmt: skip
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", envvar="FORETELL_TRUST_REMOTE_CODE", rich_help_panel=MODELS,
        help="Run the Python code that a model comes with, with your rights. Off: such models are refused.",
    ),
]  # fmt: skip
Draft = Annotated[
    str | None,
    typer.Option(
        "--draft", envvar="FORETELL_DRAFT", metavar="NAME_OR_DIR", rich_help_panel=MODELS,
        help="The draft model, or the trained head, of --method: a directory, a GGUF file or a hub id. Default: what "
        "comes with the target's model.",
    ),
]  # fmt: skip
Device = Annotated[
    str,
    typer.Option(
        "--device",
        envvar="FORETELL_DEVICE",
        rich_help_panel=MODELS,
        help="cpu, cuda, cuda:1, ...",
        callback=checked(names.check_device),
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype", envvar="FORETELL_DTYPE", rich_help_panel=MODELS, callback=checked(names.torch_name),
        help="float32, bfloat16, float16 or auto (the checkpoint's own). Default: float32 on the CPU, auto elsewhere.",
    ),
]  # fmt: skip
Weights = Annotated[
    str,
    typer.Option(
        "--weights", envvar="FORETELL_WEIGHTS", metavar="auto|fp32|bf16|int8|int4|least", rich_help_panel=MODELS,
        callback=checked(names.check_weights),
        help="How the target's matrices are held: auto as the file has them (those of a quantised GGUF file stay packed), "
        "fp32 and bf16 dequantised, int8 and int4 rounded, least as for drafts. The text then follows the quantised "
        "model's distribution.",
    ),
]  # fmt: skip
Lora = Annotated[
    str | None,
    typer.Option(
        "--lora", metavar="DIR", rich_help_panel=MODELS,
        help="A LoRA adapter in peft's files: merged into the weights, beside those of a quantised file.",
    ),
]  # fmt: skip
Loras = Annotated[
    list[str] | None,
    typer.Option(
        "--lora", metavar="NAME=DIR", rich_help_panel=MODELS,
        help="A LoRA adapter in peft's files, chosen by a request's model; may be repeated.",
    ),
]  # fmt: skip
Kv = Annotated[
    str,
    typer.Option(
        "--kv", envvar="FORETELL_KV", metavar="auto|int8", rich_help_panel=MODELS, callback=checked(names.check_kv),
        help="How the target's keys and values are held: auto in dtype, int8 rounded, in half the memory of bfloat16, on "
        "the CPU. The text then follows the distribution of a model that reads them so.",
    ),
]  # fmt: skip
MemoryGib = Annotated[
    float | None,
    typer.Option(
        "--memory-gib",
        envvar="FORETELL_MEMORY_GIB",
        metavar="GIB",
        rich_help_panel=MODELS,
        callback=checked(names.check_memory),
        help="Memory for the target's weights, keys and values, and passes. A mixture of experts that does not fit leaves "
        "experts on the disk and reads them as they are needed, with the same text. Default: what is free.",
    ),
]
DraftWeights = Annotated[
    str | None,
    typer.Option(
        "--draft-weights", envvar="FORETELL_DRAFT_WEIGHTS", metavar="auto|fp32|bf16|int8|int4|least",
        rich_help_panel=MODELS,
        callback=checked(lambda name: names.check_weights(name, "draft_weights")),
        help="The same for the draft model; it changes speed and acceptance, never the text. Default: least, 4 bits "
        "where the native decoder runs a model of 64 million weights or more.",
    ),
]  # fmt: skip
DeviceMap = Annotated[
    str | None,
    typer.Option(
        "--device-map", envvar="FORETELL_DEVICE_MAP", metavar="auto|JSON", rich_help_panel=MODELS,
        callback=checked(names.check_device_map),
        help="Accelerate's device map, for models larger than one device.",
    ),
]  # fmt: skip
Implementation = Annotated[
    str,
    typer.Option(
        "--implementation", envvar="FORETELL_IMPLEMENTATION", metavar="auto|transformers|lean|native",
        callback=checked(names.check_implementation), rich_help_panel=MODELS,
        help="What runs the models; auto takes the fastest that supports the model.",
    ),
]  # fmt: skip
CudaGraphs = Annotated[
    str,
    typer.Option(
        "--cuda-graphs", envvar="FORETELL_CUDA_GRAPHS", metavar="auto|off", rich_help_panel=MODELS,
        callback=checked(names.check_cuda_graphs),
        help="auto: a CUDA device runs captured graphs of steps, where it can. off: none.",
    ),
]  # fmt: skip
Width = Annotated[
    int,
    typer.Option(
        "--width", envvar="FORETELL_WIDTH", metavar="N", rich_help_panel=MODELS, callback=checked_width,
        help="Run every pass, plain ones too, with N rows, so that bfloat16 texts agree bit for bit. 0: off.",
    ),
]  # fmt: skip
Method = Annotated[
    str | None,
    typer.Option(
        "--method", envvar="FORETELL_METHOD", metavar="NAME", rich_help_panel=SPECULATION, callback=checked_method,
        help="How to guess; 'foretell methods' lists them. Default: what --draft holds (a draft model or the head of a "
        "method), prediction with --prediction, else what comes with the target's model ('foretell list --json'), else "
        "suffix.",
    ),
]  # fmt: skip
NumSpeculativeTokens = Annotated[
    int | None,
    typer.Option(
        "--num-speculative-tokens", envvar="FORETELL_NUM_SPECULATIVE_TOKENS", metavar="N", rich_help_panel=SPECULATION,
        callback=checked_number,
        help="The most tokens guessed in a line. Default: the method's own.",
    ),
]  # fmt: skip
Verify = Annotated[
    str | None,
    typer.Option(
        "--verify", envvar="FORETELL_VERIFY", metavar="NAME[/OPTION=VALUE]", rich_help_panel=SPECULATION,
        callback=checked(early.check_verifier),
        help="How guesses are checked (see 'foretell methods'). Default: coupled, the same text for any method.",
    ),
]  # fmt: skip
Shape = Annotated[
    str | None,
    typer.Option(
        "--shape", envvar="FORETELL_SHAPE", metavar="NAME[/OPTION=VALUE]", rich_help_panel=SPECULATION,
        callback=checked(early.check_shape),
        help="The shape of a proposal, e.g. static/branching=3x2x1, sequoia/size=16 (see 'methods'). Default: chain",
    ),
]  # fmt: skip
Draws = Annotated[
    str | None,
    typer.Option(
        "--draws", envvar="FORETELL_DRAWS", metavar="NAME", rich_help_panel=SPECULATION, callback=checked(check_draws),
        help="How children are drawn: fixed, iid, without_replacement, coupled, greedy. Default: as the rule asks.",
    ),
]  # fmt: skip
Speculation = Annotated[
    str,
    typer.Option(
        "--speculation", envvar="FORETELL_SPECULATION", metavar="auto|on", rich_help_panel=SPECULATION,
        callback=checked(check_speculation),
        help="on: guess as deep as the method says. auto: before each step as deep as pays, or not at all; it measures "
        "what passes cost here, once (seconds), and remembers it. Plain decoding: --method none.",
    ),
]  # fmt: skip
SpeculativeConfig = Annotated[
    str | None,
    typer.Option(
        "--speculative-config", envvar="FORETELL_SPECULATIVE_CONFIG", metavar="JSON", rich_help_panel=SPECULATION,
        help='The same and the method\'s other options as JSON, e.g. \'{"method": "ngram", "prompt_lookup_max": 4}\'.',
    ),
]  # fmt: skip
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        envvar="FORETELL_THREADS",
        metavar="N",
        rich_help_panel=MODELS,
        help="CPU threads.",
        callback=checked_threads,
    ),
]
Bandwidth = Annotated[
    bool,
    typer.Option("--bandwidth/--no-bandwidth", rich_help_panel=MODELS,
                 help="Measure the memory's read bandwidth (1 GiB, about a second), the limit of plain decoding."),
]  # fmt: skip
Suite = Annotated[
    str,
    typer.Option("--prompts", "--suite", metavar="bundled|NAME|FILE", rich_help_panel=PROMPTS,
                 help="Prompts. NAME: abstention (bundled: questions that nobody can answer), or spec-bench, "
                 "eagle/mt_bench, eagle/humaneval, eagle/gsm8k, eagle/alpaca, eagle/sum, eagle/qa, gsm8k or humaneval, "
                 "from the cache directory, fetched once. FILE: a prompt a line, or JSON: texts, objects with 'prompt', "
                 "'messages' or 'turns', Spec-Bench's, GSM8K's or HumanEval's."),
]  # fmt: skip
Prompts = Annotated[
    str,
    typer.Option("--prompts", "--suite", metavar="bundled|FILE", rich_help_panel=PROMPTS,
                 help="Prompts, as 'foretell bench' reads them."),
]  # fmt: skip
Categories = Annotated[
    str | None,
    typer.Option("--categories", metavar="A,B,...", rich_help_panel=PROMPTS, help="Only these. Default: all."),
]
Limit = Annotated[
    int | None,
    typer.Option("--limit", metavar="N", rich_help_panel=PROMPTS, help="At most N prompts of each category."),
]
MaxNewTokens = Annotated[int, option(SamplingParams, "max_new_tokens", panel=SAMPLING)]
Raw = Annotated[
    bool,
    typer.Option("--raw", rich_help_panel=PROMPTS,
                 help="Texts go in as they are; else an instruct model gets those without a format as messages, in its "
                 "chat template."),
]  # fmt: skip
OF_FILES = ("json_schema", "grammar")
"""Settings of SamplingParams that are given by files."""
OF_ONE_ANSWER = (*OF_FILES, "regex", "choice", "lenient_schema", "logprobs")
"""Settings of SamplingParams that only commands with one answer have as options."""
Json = Annotated[bool, typer.Option("--json", rich_help_panel=OUTPUT, help="Print one JSON object instead.")]
Output = Annotated[
    str | None,
    typer.Option("--output", "-o", metavar="FILE", rich_help_panel=OUTPUT,
                 help="Write to FILE instead of standard output."),
]  # fmt: skip
NoColor = Annotated[
    bool, typer.Option("--no-color", rich_help_panel=OUTPUT, help="No colours; the variable NO_COLOR says so too.")
]


def temperature(default: str, *, help: str = "", panel: str = SAMPLING) -> Any:
    """The option of commands that run at several temperatures. default: as the help says it."""
    told = f"{help}{' ' if help else ''}Joined by commas, or repeated. Default: {default}."
    return typer.Option("--temperature", metavar="T[,T,...]", rich_help_panel=panel, show_default=False, help=told)


@dataclass(frozen=True)
class Models:
    """Which models, and how they run: ``settings.load_engine`` reads it."""

    target: Target = AUTO
    revision: Revision = None
    trust_remote_code: TrustRemoteCode = False
    draft: Draft = None
    device: Device = "cpu"
    dtype: Dtype = None
    device_map: DeviceMap = None
    implementation: Implementation = "auto"
    weights: Weights = "auto"
    draft_weights: DraftWeights = None
    kv: Kv = "auto"
    memory_gib: MemoryGib = None
    cuda_graphs: CudaGraphs = "auto"
    width: Width = 0


@dataclass(frozen=True)
class Guessing:
    """How guesses are made and checked: ``settings.speculation`` reads it."""

    method: Method = None
    num_speculative_tokens: NumSpeculativeTokens = None
    verify: Verify = None
    shape: Shape = None
    draws: Draws = None
    speculative_config: SpeculativeConfig = None
