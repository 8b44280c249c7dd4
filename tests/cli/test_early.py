"""What needs no model is said, and listed, before torch is imported."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

from foretell.cli import methods
from tests.cli.conftest import Invoke

RUN = """
import sys
from foretell.cli.app import app
try:
    app(prog_name="foretell")
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""


def run(args: Sequence[str], **environment: str) -> tuple[list[str], str, int]:
    """(lines of stderr, the last of which says whether torch was imported; stdout; status)."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, *args],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    return done.stderr.splitlines(), done.stdout, done.returncode


@pytest.mark.parametrize(
    ("options", "said", "status"),
    [
        ("--method ngrma", "method = 'ngrma' is not a method; did you mean 'ngram'?", 2),
        ("--verify couplde/x=1", "verifier 'couplde/x=1': 'couplde' is not a verifier; did you mean 'coupled'?", 2),
        ("--shape chian", "shape 'chian': 'chian' is not a shape; did you mean 'chain'?", 2),
        ('--speculative-config {"method":"x"}', "method = 'x' is not a method; known: ", 2),
        ('--speculative-config {"verify":"exat"}', "'exat' is not a verifier; did you mean 'exact'?", 2),
        ("--dtype floot32", "dtype 'floot32' is unknown; did you mean 'float32'?", 2),
        ("--implementation natve", "implementation 'natve' is unknown; did you mean 'native'?", 2),
        ("--weights int5", "weights 'int5' is unknown; did you mean 'int8'?", 2),
        ("--speculation of", "speculation = 'of' must be 'on' or 'auto'", 2),
        ("--temperature -1", "temperature = -1.0 must be at least 0", 2),
        ("--target /no/such/place", "directory /no/such/place does not exist", 1),
        ("--target nothing.gguf", "file nothing.gguf does not exist", 1),
        ("--target bundled/nothing", "bundled/nothing: no bundled 'nothing'", 1),
        ("--draft ./nowhere", "directory ./nowhere does not exist", 1),
    ],
)
def test_mistakes(options: str, said: str, status: int) -> None:
    lines, _, code = run(["generate", "hello", *options.split(" ")])
    assert said in lines[0]
    assert (lines[1:], code) == (["False"], status)


def test_what_was_said_before_is_what_is_said_with_torch(invoke: Invoke) -> None:
    """In this process everything is imported: names come from the registries themselves."""
    from foretell import METHODS

    for options in (["--method", "ngrma"], ["--verify", "couplde/x=1"], ["--speculative-config", '{"method": "x"}']):
        lines, _, code = run(["generate", "hello", *options])
        result = invoke("generate", "hello", *options)
        assert (result.stderr.splitlines(), result.exit_code) == (lines[:1], code)
    METHODS["by_hand"] = METHODS["ngram"]
    try:
        assert "not a method" not in invoke("generate", "x", "--method", "by_hand", "--target", "/no/such").stderr
    finally:
        del METHODS["by_hand"]


def test_what_is_typed_is_checked_by_the_option_itself() -> None:
    """Also of commands that read no speculative configuration first."""
    lines, _, code = run(["certify", "--method", "ngrma"])
    assert "'ngrma' is not a method" in lines[0]
    assert (lines[1:], code) == (["False"], 2)


def test_a_wrong_path_of_the_environment_breaks_no_command_that_has_another() -> None:
    lines, _, _ = run(
        ["generate", "x", "--method", "ngram", "--target", "bundled", "--top-k", "-1"], FORETELL_DRAFT="/none"
    )
    assert "top_k" in lines[0]
    lines, _, _ = run(
        ["generate", "x", "--method", "none", "--target", "bundled", "--draws", "x"], FORETELL_DRAFT="/none"
    )
    assert "'x' is not a way of drawing" in lines[0]


@pytest.mark.parametrize(
    "command", ["generate x", "chat", "explain", "bench", "certify", "evaluate", "doctor", "serve"]
)
def test_every_command_looks_for_its_models_first(command: str) -> None:
    named = ["/no/such"] if command == "serve" else ["--target", "/no/such"]
    lines, _, code = run([*command.split(), *named])
    assert lines[0] == "foretell: directory /no/such does not exist"
    assert (lines[1:], code) == (["False"], 1)


def test_a_wrong_option_is_said_before_a_model_that_is_to_be_fetched() -> None:
    lines, _, _ = run(["generate", "x", "--target", "smollm2-135m", "--shape", "statc"], FORETELL_CACHE="/no/such")
    assert "did you mean 'static'?" in lines[0]


def test_methods_is_one_screen_without_torch() -> None:
    lines, shown, code = run(["methods"])
    assert (lines, code) == (["False"], 0)
    rows = shown.splitlines()
    assert len(rows) <= 48
    assert max(map(len, rows)) <= 132
    assert (
        "  ngram         what followed the last tokens earlier in prompt and output (works with shapes chain)" in rows
    )
    assert "  block         a chain judged as a whole (works with shapes chain, adaptive, specdec)" in rows
    assert sum("LOSSY" in row for row in rows) == 7


def test_the_file_of_methods_is_fresh() -> None:
    made = methods.brief(methods.catalogue())
    assert json.loads(methods.BRIEF.read_text(encoding="utf-8")) == made, "python -m foretell.cli.methods"


def test_methods_of_packages_are_listed_too(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    from foretell import METHODS

    monkeypatch.setitem(METHODS, "by_hand", METHODS["ngram"])  # type: ignore[arg-type]
    monkeypatch.setattr(METHODS["ngram"], "method", "by_hand")
    assert "by_hand" in invoke("methods").stdout
    assert "by_hand" in invoke("methods", "--all").stdout
