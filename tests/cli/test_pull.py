"""``foretell pull``, ``list``, ``rm``; names and GGUF files as targets; what the default target is."""

import json
import re
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from foretell.checkpoints import catalogue, pull
from foretell.cli.commands import pull as pull_command
from foretell.kernels import functions
from foretell.model.load import load_tokenizer
from tests.checkpoints.gguf.make import write
from tests.checkpoints.test_pull import FAIL, HANG, INDEX, TINY, WRITE
from tests.cli.conftest import Invoke


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of models, a catalogue with one tiny entry more, and a hub that gives it."""
    monkeypatch.setenv("FORETELL_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("FORETELL_OFFLINE", "")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setitem(catalogue.CATALOGUE, "tiny", TINY)
    use(monkeypatch, WRITE)
    return tmp_path / "models"


def use(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """What every source runs."""
    monkeypatch.setattr(pull, "_command", lambda source, path: [sys.executable, "-S", "-c", program, str(path)])


@pytest.fixture(scope="module")
def gguf(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target as a file."""
    module = AutoModelForCausalLM.from_pretrained(models["target"])
    return write(tmp_path_factory.mktemp("gguf") / "target.gguf", module, load_tokenizer(str(models["target"])))


def test_pull_list_and_remove(invoke: Invoke, root: Path) -> None:
    """What was done is said on standard output, what is being done on stderr."""
    file = root / "tiny" / "tiny.gguf"
    done = invoke("pull", "tiny")
    assert done.exit_code == 0
    assert done.stdout == f"tiny is here: {file}\n"
    first, second = done.stderr.splitlines()
    assert re.fullmatch(r"tiny \(MIT\): 1 MB to fetch, about 1 MB of memory \(.* are free\)", first)
    assert second == "fetching tiny from the Hugging Face hub (1 MB)"
    assert invoke("pull", "tiny").stdout == f"tiny was here already: {file}\n"
    found = json.loads(invoke("pull", "tiny", "--json").stdout)
    assert found == {"name": "tiny", "file": str(file), "fetched": False}
    table = invoke("list").stdout
    assert table == invoke("pull", "--list").stdout
    line = next(line for line in table.splitlines() if line.startswith("tiny"))
    assert line.split()[:4] == ["tiny", "1", "yes", "MIT"]
    assert invoke("rm", "tiny").stdout == "tiny is removed, 1 MB\n"
    assert not root.exists()
    rows = {row["name"]: row for row in json.loads(invoke("list", "--json").stdout)["models"]}
    assert rows["tiny"]["file"] is None
    assert [name for name, row in rows.items() if row["default"]] == [catalogue.DEFAULT]


@pytest.mark.parametrize(
    ("args", "status", "said"),
    [
        (["pull"], 2, "no model is named: give one of smollm2-135m"),
        (["pull", "tiny", "--list"], 2, "--list shows the models and fetches none: drop it, or drop tiny"),
        (["pull", "smolm2-135m"], 2, "did you mean 'smollm2-135m'?"),
        (["rm", "tinny"], 2, "'foretell list' has no model called 'tinny'; did you mean 'tiny'?"),
        (["rm", "tiny"], 1, "tiny is not here: there is nothing to remove"),
        (["rm"], 2, "missing argument 'NAME' (A model that was pulled, or a part of one); see 'foretell rm --help'"),
        (["generate", "x", "--target", "tiny"], 1, "tiny is not here yet (1 MB): fetch it with 'foretell pull tiny'"),
        (["generate", "x", "--target", ""], 2, "the target is empty: give a directory"),
        (["generate", "x", "--target", "./no.gguf"], 1, "file ./no.gguf does not exist"),
    ],
)
def test_mistakes_are_one_line(invoke: Invoke, root: Path, args: list[str], status: int, said: str) -> None:
    result = invoke(*args)
    assert result.exit_code == status
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_failures_of_a_fetch(invoke: Invoke, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FAIL)
    result = invoke("pull", "tiny")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith(
        "foretell: tiny could not be fetched: the Hugging Face hub: no such thing"
    )
    assert not root.exists()
    monkeypatch.setenv("FORETELL_OFFLINE", "1")
    assert "FORETELL_OFFLINE is set" in invoke("pull", "tiny").stderr


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals(invoke: Invoke, root: Path, monkeypatch: pytest.MonkeyPatch, number: int, status: int) -> None:
    """Ctrl-C and SIGTERM end a fetch in silence, and nothing is left."""
    use(monkeypatch, HANG)
    say = pull._say

    def press(*args: Any) -> None:
        say(*args)
        if args[-1]:
            signal.raise_signal(number)

    monkeypatch.setattr(pull, "_say", press)
    result = invoke("pull", "tiny")
    assert result.exit_code == status
    assert result.stderr.endswith("\nfetching tiny from the Hugging Face hub (1 MB)\n")
    assert result.stderr.count("\n") == 2
    assert not root.exists()


def test_what_a_model_takes_and_reaches_is_said_before(
    invoke: Invoke, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mixture reads a part of its weights a token; memory that is too small is said, and prevents nothing."""
    made = replace(TINY, name="tiny-20b", size=12_000_000_000, read=0.25, sources=TINY.sources[:1])
    monkeypatch.setitem(catalogue.CATALOGUE, "tiny-20b", made)
    monkeypatch.setattr(functions, "dram_read_bandwidth", lambda *args, **options: 12e9)
    monkeypatch.setattr(pull_command, "free_memory", lambda: 8_000_000_000)
    usage = shutil.disk_usage(root.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=13_000_000_000))
    result = invoke("pull", "tiny:20b")
    assert result.exit_code == 0
    assert result.stderr.splitlines()[0] == (
        "tiny-20b (MIT): 12.0 GB to fetch, about 13.2 GB of memory (8.0 GB are free, too little); a token reads about "
        "3.0 GB, at 12.0 GB/s at most 4 tokens/s without guesses"
    )
    assert invoke("rm", "tiny:20b").stdout == "tiny-20b is removed, 1 MB\n"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=12_000_000_000))
    refused = invoke("pull", "tiny-20b")
    assert refused.exit_code == 1
    assert "12750 MB are needed for the fetch and 12000 MB are free" in refused.stderr
    assert refused.stdout == ""


def test_a_gguf_target(invoke: Invoke, models: dict[str, Path], gguf: Path) -> None:
    """The text of the directory that the file was made of; as a draft too."""
    options = ["def the self", "--seed", 1, "--temperature", 0.7, "--max-new-tokens", 16, "--implementation", "lean"]
    expected = invoke("generate", *options, "--target", models["target"])
    assert expected.exit_code == 0
    found = invoke("generate", *options, "--target", gguf)
    assert found.stdout == expected.stdout
    drafted = invoke("generate", *options, "--target", models["target"], "--draft", gguf, "--json")
    whole = json.loads(drafted.stdout)
    assert whole["text"] + "\n" == expected.stdout
    assert whole["num_steps"] < 16


def test_a_damaged_gguf_target(invoke: Invoke, gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "half.gguf"
    path.write_bytes(gguf.read_bytes()[:-100])
    result = invoke("generate", "x", "--target", path)
    assert result.exit_code == 1
    assert f"foretell: {path} is cut short" in result.stderr, "its name is said once"
    assert result.stderr.count("\n") == 1


def test_a_pulled_name_as_target(invoke: Invoke, gguf: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name stands for its file, is the default where it is the catalogue's default, and brings its own method."""
    place = catalogue.place(TINY)
    place.parent.mkdir(parents=True)
    place.write_bytes(gguf.read_bytes())
    options = ["def the self", "--seed", 1, "--max-new-tokens", 8, "--implementation", "lean", "--json"]
    named = json.loads(invoke("generate", *options, "--target", "tiny").stdout)
    assert named["config"]["target"] == "tiny"
    assert named["config"]["speculative"]["method"] == "suffix"
    assert json.loads(invoke("generate", *options).stdout)["config"]["target"] == "bundled"
    monkeypatch.setattr(catalogue, "DEFAULT", "tiny")
    assert json.loads(invoke("generate", *options).stdout)["config"]["target"] == "tiny"
    plain = json.loads(invoke("generate", *options, "--method", "none").stdout)
    assert plain["config"]["speculative"]["method"] == "none"
    assert plain["token_ids"] == named["token_ids"]
    report = json.loads(
        invoke("bench", "--limit", 1, "--categories", "code", "--max-new-tokens", 8, "--no-bandwidth", "--json").stdout
    )
    labels = [method["label"] for method in report["temperatures"][0]["methods"]]
    assert labels == ["none", "suffix", "ngram"]


def test_index_is_the_last_source() -> None:
    """The hub is asked first."""
    assert TINY.sources[-1] is INDEX
    for model in catalogue.CATALOGUE.values():
        assert isinstance(model.sources[0], catalogue.HubFile)
