"""Batch generation over files without a cluster: what the driver reads, refuses and continues; one actor, here."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import foretell
from foretell.core.errors import ConfigError
from foretell.engine.engine import Engine
from foretell.ray import data

PARAMS = foretell.SamplingParams(max_new_tokens=4, temperature=0.8, seed=5)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load("bundled", speculative="ngram")


@pytest.fixture(autouse=True)
def here(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One actor, in this process."""

    def completed(spans: Sequence[data.Span], job: data.RayJob, *_: Any) -> Iterator[dict[str, Any]]:
        actor = object.__new__(data.Generator)
        actor.job, actor.engine = job, engine
        for span in spans:
            rows = actor({name: [value] for name, value in vars(span).items()})["row"]
            yield from map(json.loads, rows)

    monkeypatch.setattr(data, "_completed", completed)


def generate(file: Path, out: Path, **options: Any) -> data.Summary:
    defaults: dict[str, Any] = {"speculative": "ngram", "params": PARAMS}
    return data.generate_files(file, out, **(defaults | options))


def prompts(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"dtypee": "float32"}, r"unknown key 'dtypee' in engine_options; did you mean 'dtype'"),
        ({"speculative": "ngram"}, "unknown key 'speculative' in engine_options"),
    ],
)
def test_options_that_no_engine_takes_are_refused_here(given: dict[str, Any], says: str, tmp_path: Path) -> None:
    """An actor raised TypeError, and Ray told it with the traceback of another process."""
    file, out = prompts(tmp_path / "in.jsonl", '{"prompt": "x"}'), tmp_path / "out.jsonl"
    with pytest.raises(ConfigError, match=says):
        generate(file, out, engine_options=given)
    assert not out.exists()


def test_a_run_that_is_continued_with_other_settings_is_refused(tmp_path: Path) -> None:
    file, out = (
        prompts(tmp_path / "in.jsonl", '{"prompt": "def f("}', '{"prompt": "x"}'),
        tmp_path / "new" / "out.jsonl",
    )
    assert generate(file, out).num_written == 2
    whole = out.read_bytes()
    out.write_bytes(whole[: whole.index(b"\n") + 9])  # what a run leaves that is killed in its second row
    for options, says in (
        ({"target": "other/model"}, "other target or engine_options:"),
        ({"engine_options": {"dtype": "bfloat16"}}, "other target or engine_options:"),
        ({"speculative": "suffix"}, "other speculative:"),
        ({"params": foretell.SamplingParams(max_new_tokens=4, temperature=0.7, seed=5)}, "other params:"),
        (
            {"params": foretell.SamplingParams(max_new_tokens=4, seed=5), "speculative": "none"},
            "speculative and other params",
        ),
        ({"params": foretell.SamplingParams(max_new_tokens=4, temperature=0.8, seed=6)}, "another seed"),
    ):
        with pytest.raises(ConfigError, match=says):
            generate(file, out, **options)
    assert generate(file, out, engine_options={"prefix_memory_gib": 0.1}).num_skipped == 1  # changes no token
    assert out.read_bytes() == whole
    out.write_text('{"id": "in.jsonl:1", "text": "", "seed": null}\n')
    with pytest.raises(ConfigError, match="other settings"):
        generate(file, out)


def test_an_output_that_is_no_file_of_rows(tmp_path: Path) -> None:
    file = prompts(tmp_path / "in.jsonl", '{"prompt": "x"}')
    with pytest.raises(ConfigError, match=r"is a directory: name a file in it, e\.g\. .*completions\.jsonl"):
        generate(file, tmp_path)
    with pytest.raises(ConfigError, match=r"in\.jsonl/out\.jsonl' cannot be written"):
        generate(file, file / "out.jsonl")
    for kept in (
        b"a precious note without an end of line",
        b'{"text": "", "id": "in.jsonl:1"}',
        b"[" * 100_000 + b"\n",
    ):
        (tmp_path / "note").write_bytes(kept)
        with pytest.raises(ConfigError, match="note:1 is not a row of an earlier run"):
            generate(file, tmp_path / "note")
        assert (tmp_path / "note").read_bytes() == kept


def test_ids_that_are_null_are_no_ids(tmp_path: Path) -> None:
    lines = ['{"prompt": "x", "id": null}', '{"prompt": "y", "id": null}', '{"prompt": "z", "id": 7}']
    out = tmp_path / "out.jsonl"
    assert generate(prompts(tmp_path / "in.jsonl", *lines), out).num_written == 3
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == ["in.jsonl:1", "in.jsonl:2", "7"]
    with pytest.raises(ConfigError, match=r"in\.jsonl:1: the id \[1\] must be a text or a number"):
        generate(prompts(tmp_path / "in.jsonl", '{"prompt": "x", "id": [1]}'), tmp_path / "other")


@pytest.mark.parametrize(
    ("line", "says"),
    [("[" * 100_000, "brackets are nested too deeply"), ('{"prompt": ' + "1" * 5000 + "}", "5000 digits")],
)
def test_lines_that_no_parser_reads(line: str, says: str, tmp_path: Path) -> None:
    file = prompts(tmp_path / "in.jsonl", '{"prompt": "x"}', line)
    with pytest.raises(ConfigError, match=rf"in\.jsonl:2 is not JSON: .*{says}"):
        generate(file, tmp_path / "out")


def test_an_instruct_model_gets_texts_as_messages(
    engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of every command that reads prompts; what a line or ``raw`` says counts first."""
    lines = ['{"prompt": "x"}', '{"prompt": "x", "format": "text"}', '{"prompt": "x", "format": "chat"}']
    file = prompts(tmp_path / "in.jsonl", *lines)
    chat = engine.chat_prompt([{"role": "user", "content": "x"}])

    def made(name: str, **options: Any) -> list[dict[str, Any]]:
        out = tmp_path / name
        generate(file, out, params=foretell.SamplingParams(max_new_tokens=12, temperature=0.8, seed=5), **options)
        return [json.loads(line) for line in out.read_text().splitlines()]

    params = foretell.SamplingParams(max_new_tokens=12, temperature=0.8)
    for name, forms in (("out", (chat, "x", chat)), ("raw", ("x", "x", chat))):
        for row, prompt in zip(made(name, raw=name == "raw"), forms, strict=True):
            alone = engine.generate(prompt, params, seed=row["seed"])
            assert alone.token_ids == row["token_ids"]
        assert ("texts go into the chat template of 'bundled'" in capsys.readouterr().err) == (name == "out")
    with pytest.raises(ConfigError, match="other params:"):
        made("out", raw=True)
