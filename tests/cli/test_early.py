"""What needs no model is said, and listed, before torch is imported."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from foretell.cli.commands import methods
from foretell.core import builtin
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


CASES = """
generate hi --draft a=b | 'a=b' is neither a directory nor a Hugging Face id
generate hi --target smollm2-135m --revision x | --revision x is of a Hugging Face id, and --target smollm2-135m is none
generate hi --device cdua | device 'cdua' cannot be used here (torch has no such device; did you mean 'cuda'?)
generate hi --device-map autoo | device_map 'autoo' is unknown; did you mean 'auto'?
generate hi --draft-weights int5 | draft_weights 'int5' is unknown; did you mean 'int8'?
generate hi --width -7 | width = -7 must be 0 (off) or at least
generate hi --num-speculative-tokens 99 | num_speculative_tokens = 99 must be between 1 and 64
generate hi --draws iidd | draws = 'iidd' is not a way of drawing; did you mean 'iid'?
generate hi --verify typical/bad=1 | verifier 'typical/bad=1': unknown option 'bad' of 'typical'
generate hi --verify typical/epsilon=x | verifier 'typical/epsilon=x': epsilon = 'x' must be a number
generate hi --shape static/branching=x | shape 'static/branching=x': branching = 'x' must be whole numbers
chat --width 1 | width = 1 must be 0 (off)
bench --threads 99999 | --threads 99999 must be at most 1024
generate hi --speculative-config {"method":"ngram","promt_lookup_max":4} | unknown key 'promt_lookup_max' for method 'ngram'
generate hi --speculative-config {"method":"ngram","prompt_lookup_max":"x"} | prompt_lookup_max = 'x' must be a whole number
serve bundled --also {"method":"ngram","x":1} | unknown key 'x' for method 'ngram'
serve bundled --log-level x | log level 'x' is not a level
serve bundled --max-num-seqs -7 | max_num_seqs
serve bundled --learn --learn-device cdua | device 'cdua' cannot be used here
bench --methods ngram:promt=1 | unknown key 'promt' for method 'ngram'
bench --methods ngram:typical/bad=1 | unknown option 'bad' of 'typical'
bench --suite /nonexistent | suite '/nonexistent' cannot be read
bench --max-new-tokens 0 | max_new_tokens = 0 must be at least 1
doctor --methods ngrma | --methods: there is no method 'ngrma' to try; did you mean 'ngram'?
doctor --methods eagle3:typical/bad=1 | unknown option 'bad' of 'typical'
doctor --methods eagle3:static | --methods eagle3:static: guesses are measured in chains: drop 'static'
doctor /no/such/head | directory /no/such/head does not exist
certify --verify typical/bad=1 | unknown option 'bad' of 'typical'
certify --prompts /nonexistent | suite '/nonexistent' cannot be read
train eagle3 --data FILE --out new --target /no/such | directory /no/such does not exist
train eagle3 --data FILE --out new --init /no/such | directory /no/such does not exist
train eagle3 --data FILE --out new --lr -1 | lr = -1.0 must be
train eagle3 --data FILE --out new --config BAD | unknown key 'num_slot' for training 'eagle3'
learn --data FILE --learn-every 0 | learn_every = 0 must be at least 1
report /nonexistent | /nonexistent cannot be read
report FILE | no report of 'foretell bench --output FILE'
export /no/such --to vllm --out new | directory /no/such does not exist
export bundled/eagle3 --to vlm --out new | layout 'vlm' is unknown
"""
"""A wrong value of each kind, and what is said of it: all that needs no model."""
MEASURED = """
import contextlib, io, json, sys, time
from foretell.cli.app import app
for args in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            app(args, prog_name="foretell")
        except SystemExit as error:
            status = error.code
    print(json.dumps([said.getvalue(), status, "torch" in sys.modules]))
    if "torch" in sys.modules:
        break
"""


def test_a_wrong_value_of_any_option_is_said_without_torch(tmp_path: Path) -> None:
    """In one process, which imports no torch for any of them: ``--draws``, a verifier's options, ``train --target``,
    and ``doctor --methods`` had to wait for it."""
    file, bad = tmp_path / "p.jsonl", tmp_path / "bad.json"
    file.write_text('{"prompt": "a"}')
    bad.write_text('{"num_slot": 5}')
    rows = [line.split(" | ") for line in CASES.strip().splitlines()]
    places = {"FILE": str(file), "BAD": str(bad), "new": str(tmp_path / "new")}
    asked = [[places.get(word, word) for word in args.split()] for args, _ in rows]
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, json.dumps(asked)], capture_output=True, text=True, check=False,
        env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    found = [json.loads(line) for line in done.stdout.splitlines()]
    for (args, words), (said, status, imported) in zip(rows, found, strict=False):
        assert words in said, args
        assert (len(said.splitlines()), status in (1, 2), imported) == (1, True, False), args
    assert len(found) == len(rows), done.stderr


def test_what_is_known_without_torch_is_what_the_registries_say() -> None:
    from foretell import DrawMode

    assert [*builtin.DRAWS] == [mode.value for mode in DrawMode]


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
    asked = ["generate", "x", "--method", "none", "--target", "bundled", "--revision", "main"]
    assert "revision" in run(asked, FORETELL_DRAFT="/none")[0][0], "what is checked after paths"


@pytest.mark.parametrize("command", ["generate x", "chat", "explain", "bench", "certify", "doctor", "serve"])
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
    assert sum("LOSSY" in row for row in rows) == 3


def test_the_file_of_methods_is_fresh() -> None:
    made = methods.brief(methods.catalogue())
    assert json.loads(methods.BRIEF.read_text(encoding="utf-8")) == made, "python -m foretell.cli.commands.methods"


def test_methods_of_packages_are_listed_too(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    from foretell import METHODS

    monkeypatch.setitem(METHODS, "by_hand", METHODS["ngram"])  # type: ignore[arg-type]
    monkeypatch.setattr(METHODS["ngram"], "method", "by_hand")
    assert "by_hand" in invoke("methods").stdout
    assert "by_hand" in invoke("methods", "--all").stdout
