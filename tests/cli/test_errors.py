"""Every mistake: one line on stderr that names what was given, and the right exit status."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from foretell.cli import errors, settings
from foretell.core.errors import ConfigError, ModelError, PromptError
from tests.cli import checkpoint
from tests.cli.conftest import Invoke

USAGE, FAILURE = 2, 1

MISTAKES: list[tuple[list[str], str]] = [
    (["hi", "--temperatur", "1"], "unknown option '--temperatur'; did you mean '--temperature'?"),
    (["hi", "--zzzzz"], "unknown option '--zzzzz'; see 'foretell generate --help'"),
    (["hi", "--top-k", "many"], "--top-k"),
    (["hi", "more"], "(more)"),
    (["hi", "--temperature", "-1"], "temperature = -1.0 must be at least 0"),
    (["hi", "--temperature", "inf"], "temperature = inf must be finite and at least 0"),
    (["hi", "--top-p", "0"], "top_p = 0.0 must be in (0, 1]"),
    (["hi", "--max-new-tokens", "0"], "max_new_tokens = 0 must be at least 1"),
    (["hi", "--method", "ngrams"], "method = 'ngrams' is not a method; did you mean 'ngram'?"),
    (["hi", "--verify", "rejections"], "did you mean 'rejection'?"),
    (["hi", "--implementation", "leann"], "did you mean 'lean'?"),
    (["hi", "--dtype", "float31"], "did you mean 'float32'?"),
    (["hi", "--device", "gpu"], "device 'gpu' cannot be used here"),
    (
        ["hi", "--method", "ngram", "--num-speculative-tokens", "0"],
        "num_speculative_tokens = 0 must be between 1 and 64",
    ),
    (["hi", "--method", "ngram", "--width", "3"], "width = 3 must be 0 (off) or at least 6"),
    (["hi", "--method", "draft_model"], "needs --draft NAME_OR_DIR"),
    (["hi", "--method", "ngram", "--draft", "x"], "--draft x is read by methods with weights"),
    (["hi", "--method", "prediction"], "give --prediction TEXT"),
    (["hi", "--method", "ngram", "--prediction", "x"], "--prediction is read by --method prediction alone"),
    (["hi", "--speculative-config", "{"], "--speculative-config is not JSON"),
    (["hi", "--speculative-config", "[1]"], "must be a JSON object"),
    (["hi", "--speculative-config", '{"method": "ngram", "promt_lookup_max": 2}'], "did you mean 'prompt_lookup_max'?"),
    (["hi", "--speculative-config", '{"method": "ngram"}', "--method", "none"], "--method none contradicts"),
    (["hi", "--logit-bias", '{"a": 1}'], "must be token ids and numbers"),
    (["hi", "--output", "/nonexistent/out.txt"], "--output '/nonexistent/out.txt' cannot be written: No such file"),
    (["hi", "--output", "/"], "Is a directory"),
    (["hi", "--prompt-file", "x"], "prompt is given twice"),
    (["-", "--prediction", "-"], "standard input holds one text"),
    (["--prompt-file", "/nonexistent"], "--prompt-file: cannot read '/nonexistent'"),
    ([], "no prompt"),
]


def one_line(stderr: str) -> str:
    """The only line, without the program's name."""
    assert stderr.startswith("foretell: ")
    assert stderr.count("\n") == 1
    return stderr.removeprefix("foretell: ").rstrip("\n")


@pytest.mark.parametrize(
    ("args", "said"), MISTAKES, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_wrong_options(generate: Invoke, args: list[str], said: str) -> None:
    result = generate(*args)
    assert said in one_line(result.stderr)
    assert (result.exit_code, result.stdout) == (USAGE, "")


def test_unknown_command(invoke: Invoke) -> None:
    result = invoke("benhc")
    assert one_line(result.stderr) == "unknown command 'benhc'; did you mean 'bench'?"
    assert result.exit_code == USAGE


@pytest.mark.parametrize(
    ("args", "status", "said"),
    [
        (["--target", "truncated"], FAILURE, "download it again"),
        (["--target", "absent"], FAILURE, "no weights"),
        (["--target", "./nowhere"], FAILURE, "./nowhere does not exist"),
        (["--target", "short"], FAILURE, "the prompt has 60 tokens"),
        (["--target", "plain", "--chat"], USAGE, "has no chat template"),
    ],
)
def test_models_and_prompts(invoke: Invoke, models: dict[str, Path], args: list[str], status: int, said: str) -> None:
    given = [str(models.get(arg, arg)) for arg in args]
    result = invoke("generate", "x" * 60, *given)
    assert said in one_line(result.stderr)
    assert (result.exit_code, result.stdout) == (status, "")


def test_a_draft_of_another_vocabulary(invoke: Invoke, models: dict[str, Path]) -> None:
    """It guesses what both can say, unless that is refused."""
    options = ["--target", models["target"], "--seed", 1, "--max-new-tokens", 8]
    plain = invoke("generate", "def the", *options, "--method", "none")
    assert plain.exit_code == 0
    assert invoke("generate", "def the", *options, "--draft", models["stranger"]).stdout == plain.stdout
    config = {"method": "draft_model", "model": str(models["stranger"]), "vocabulary": "same"}
    refused = invoke("generate", "def the", *options, "--speculative-config", json.dumps(config))
    assert "vocabulary 'tli' (guesses the tokens that both have)" in one_line(refused.stderr)
    assert (refused.exit_code, refused.stdout) == (FAILURE, "")


def test_empty_prompt(generate: Invoke) -> None:
    result = generate("")
    assert "the prompt is empty" in one_line(result.stderr)
    assert result.exit_code == FAILURE


def test_damaged_config(invoke: Invoke, models: dict[str, Path], tmp_path: Path) -> None:
    for name, damage in [
        ("no JSON", lambda folder: (folder / "config.json").write_text("{")),
        ("no type", lambda folder: checkpoint.change_config(folder, model_type="nothing")),
        ("no tokenizer", lambda folder: [file.unlink() for file in folder.glob("tokenizer*")]),
    ]:
        folder = checkpoint.copy(models["target"], tmp_path / name)
        damage(folder)
        result = invoke("generate", "hi", "--target", folder)
        assert one_line(result.stderr)
        assert result.exit_code == FAILURE


def test_prompt_that_is_not_text(generate: Invoke, invoke: Invoke) -> None:
    result = generate("a\udcffb")  # how Python hands over a byte that is not UTF-8
    assert one_line(result.stderr) == r"prompt: 'a\udcffb' is not UTF-8 text"
    for command in (
        ("explain", "a\udcffb"),
        ("generate", "a", "--system", "a\udcffb"),
        ("chat", "--system", "a\udcffb"),
    ):
        told = one_line(invoke(*command, "--target", "bundled").stderr)
        assert told.endswith(r"'a\udcffb' is not UTF-8 text"), command  # an internal error
    result = generate("-", input=b"\xff\xfe\x00")
    assert one_line(result.stderr).startswith("prompt: standard input is not UTF-8 text (byte 0)")  # it said '-'
    assert result.exit_code == USAGE


def test_a_misspelled_model_is_told_the_nearest_name(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the network was named, which a user of short names does not ask for."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    def absent(*args: object, **options: object) -> None:
        raise LocalEntryNotFoundError("no")

    monkeypatch.setattr("huggingface_hub.snapshot_download", absent)
    told = one_line(invoke("generate", "a", "--target", "smolm2-135m", "--method", "ngram").stderr)
    assert told.endswith("did you mean 'smollm2-135m'?")
    other = one_line(invoke("generate", "a", "--target", "owner/other", "--method", "ngram").stderr)
    assert "did you mean" not in other


def test_a_method_that_the_user_did_not_name_is_told_as_the_targets(invoke: Invoke) -> None:
    """It was named as if it had been asked for."""
    mine = ("explain", "--shape", "static", "--target", "smollm2-135m")
    told = one_line(invoke(*mine).stderr)
    assert "hybrid is what smollm2-135m uses then; --method eagle3 can" in told
    advised = one_line(
        invoke(*mine, "--method", "eagle3").stderr
    )  # it gets past this check, to a model that is not here
    assert "smollm2-135m is not here yet" in advised
    for named in (("--method", "hybrid"), ("--num-speculative-tokens", "99")):  # his own, or none of the method's
        assert "is what" not in one_line(
            invoke(*mine, *named, "--shape", "chain" if "99" in named else "static").stderr
        )


def test_a_full_disk_is_one_line(generate: Invoke) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    result = generate("hi", "--max-new-tokens", 3, "--output", "/dev/full")
    assert "'/dev/full': No space left on device" in result.stderr.splitlines()[-1]
    assert result.exit_code == FAILURE


def test_a_standard_output_that_is_full_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It said "cannot read or write", and not what."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    full = open("/dev/full", "w")  # noqa: SIM115 - closing it fails
    monkeypatch.setattr("sys.stdout", full)
    full.write("x")
    with pytest.raises(OSError, match="No space left") as caught:
        full.flush()
    assert errors.explain(caught.value) == ("cannot read or write standard output: No space left on device", 1)
    monkeypatch.undo()
    assert raised(lambda: OSError(errno.ENOSPC, "No space"))[0] == "cannot read or write: No space"
    os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())
    full.close()


def test_checking_an_output_leaves_it_as_it_was(generate: Invoke, tmp_path: Path) -> None:
    there = tmp_path / "there.txt"
    there.write_text("old")
    generate("hi", "--temperature", "-1", "--output", there)
    generate("hi", "--temperature", "-1", "--output", tmp_path / "new.txt")
    assert [file.name for file in tmp_path.iterdir()] == ["there.txt"]
    assert there.read_text() == "old"


def raised(kind: Callable[[], BaseException]) -> tuple[str | None, int]:
    """What is said of an error."""
    return errors.explain(kind())


def test_every_kind_of_error_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORETELL_TRACEBACK", raising=False)
    assert raised(lambda: ConfigError("a")) == ("a", 2)
    assert raised(lambda: ModelError("b")) == ("b", 1)
    assert raised(lambda: PromptError("c")) == ("c", 1)
    assert raised(KeyboardInterrupt) == (None, 130)
    assert raised(BrokenPipeError) == (None, 1)
    assert raised(lambda: OSError(errno.ENOSPC, "No space left on device", "f")) == (
        "cannot read or write 'f': No space left on device",
        1,
    )
    lacking = ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn")
    assert raised(lambda: lacking) == ("the package torch is not installed: pip install torch", 1)
    own = ModuleNotFoundError("No module named 'foretell.x'", name="foretell.x")
    assert "internal error" in str(raised(lambda: own)[0])
    line, status = raised(lambda: MemoryError("12 GiB\nmore"))
    assert status == 1
    assert line is not None
    assert line.startswith("out of memory: 12 GiB (")
    line, status = raised(
        lambda: RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ...")
    )
    assert line is not None
    assert line.startswith("out of memory")
    line, status = raised(lambda: RuntimeError("first\nsecond"))
    assert line == "internal error: RuntimeError: first; FORETELL_TRACEBACK=1 shows where"
    assert status == 1


HINTS = """
serve --target x | '--target'; here the model is the argument: foretell serve TARGET
serve -m x | '-m'; here the model is the argument: foretell serve TARGET
serve --model x | '--model'; here the model is the argument: foretell serve TARGET
serve bundled -c 4096 | '-c'; here it is --max-model-len
serve bundled --ctx-size=4096 | '--ctx-size'; here it is --max-model-len
serve bundled -ngl 99 | '-ngl'; here it is --device=cuda
serve bundled -t 4 | '-t'; there is none for it here: OMP_NUM_THREADS=N
serve bundled --temp 0 | '--temp'; each request says it: its field temperature
serve bundled -n 9 | '-n'; each request says it: its field max_tokens
serve bundled --gpu-memory-utilization 0.9 | here it is --kv-memory-gib
serve bundled --tensor-parallel-size 2 | here it is --device-map=auto
serve bundled -tp 2 | '-tp'; here it is --device-map=auto
generate hi -m x | '-m'; here it is --target
generate hi --model x | '--model'; here it is --target
generate hi --temp 0 | '--temp'; here it is --temperature
generate hi -n 9 | '-n'; here it is --max-new-tokens
generate -p hi | '-p'; here it is PROMPT
generate hi --port 80 | '--port'; --port is of 'foretell serve', 'foretell launch'
generate hi -c 4096 | '-c'; there is none for it here: a text may be as long as the model's context
generate hi --served-model-name x | there is none for it here: it serves nothing
generate hi --data x | '--data'; --data is of 'foretell train', 'foretell learn'
bench -t 4 | '-t'; here it is --threads
chat --temprature 1 | '--temprature'; did you mean '--temperature'?
chat --zzz | '--zzz'; see 'foretell chat --help'
run x | unknown command 'run': here it is 'foretell chat --target NAME' talks with a model
ls | unknown command 'ls': here it is 'foretell list'
lsit | unknown command 'lsit'; did you mean 'list'?
"""


@pytest.mark.parametrize("line", HINTS.strip().splitlines())
def test_spellings_of_other_commands_and_programs(invoke: Invoke, line: str) -> None:
    args, said = line.split(" | ")
    result = invoke(*args.split())
    assert said in one_line(result.stderr)
    assert result.exit_code == USAGE


def test_hints_name_options_that_there_are() -> None:
    from foretell.cli import hints
    from foretell.cli.app import app

    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    there = {form for command in commands.values() for each in command.params for form in each.opts}
    wanted = {own.partition("=")[0] for own in hints.SPELLINGS.values()}
    assert wanted - {"PROMPT"} <= there
    assert set(hints.TABLES["missing"]) <= there
    assert not set(hints.TABLES["commands"]) & set(commands)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        MemoryError(),
        RuntimeError("can't allocate memory: ..."),
        ModelError("transformers could not load it: can't allocate memory"),
    ],
)
def test_too_little_memory_says_what_is_needed_and_what_would_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception
) -> None:
    """It said 'cannot read or write: Cannot allocate memory'."""
    file = tmp_path / "model.safetensors"
    with file.open("wb") as stream:
        stream.truncate(10**9)
    monkeypatch.setattr(settings, "free_memory", lambda: 500_000_000)
    with pytest.raises(ModelError) as caught, settings.loading(str(tmp_path), no_color=True):
        raise error
    assert "does not fit (it takes about 2.2 GB while it is loaded): 0.5 GB are left to this process" in str(
        caught.value
    )
    assert "take a smaller model (smollm2-135m would fit)" in str(caught.value)
    with pytest.raises(OSError, match="other"), settings.loading(str(tmp_path), no_color=True):
        raise OSError(errno.ENOENT, "other")
    line, status = errors.explain(error)
    assert "memory" in str(line)
    assert status == 1
