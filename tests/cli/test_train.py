"""``foretell train`` on tiny models: a head that loads again, and every mistake in one line."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import Result

from foretell.cli.train_progress import bar_text
from foretell.train import checkpoint
from foretell.train.responses import Responses, pack
from tests.cli.conftest import Invoke
from tests.cli.test_errors import one_line

CONFIG = {"batch_tokens": 128, "eval_every": 2, "checkpoint_every": 2, "held_out": 0.3, "eval_tokens": 64}


def mistake(result: Result, said: str) -> None:
    """Refused as a wrong option, in one line."""
    assert said in one_line(result.stderr)
    assert result.exit_code == 2


@pytest.fixture(autouse=True)
def without_bars() -> Iterator[None]:
    """transformers decides at its import whether to draw bars: a process of its own is told by ``settings.quiet``."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    words = ("the class", "def self", "import", "return the", "self", "class def")
    records = [{"prompt": f"{word} {n}"} for n in range(2) for word in words]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


@pytest.fixture
def train(invoke: Invoke, models: dict[str, Path], data: Path, tmp_path: Path) -> Invoke:
    """The command with the tiny target and four steps."""

    def run(method: str, *args: object, **settings: object) -> Result:
        config = tmp_path / "config.json"
        config.write_text(json.dumps({**CONFIG, **settings}))
        fixed = ["--target", models["target"], "--config", config, "--max-new-tokens", 8]
        given = {"--data": data, "--out": tmp_path / "out", "--steps": 4}
        for option in [option for option in given if option in args]:
            del given[option]
        return invoke("train", method, *fixed, *(part for pair in given.items() for part in pair), *args)

    return run


def test_eagle3(train: Invoke, tmp_path: Path) -> None:
    result = train("eagle3", "--json", num_slots=2, draft_vocab_size=64)
    assert (result.exit_code, result.stderr) == (0, "")
    figures = json.loads(result.stdout)
    assert len(figures["conditional"]) == 2
    out = tmp_path / "out"
    from foretell.heads import formats

    head = formats.load(out)
    assert head.method == "eagle3"
    assert head.config.as_dict()["draft_vocab_size"] == 64
    record = json.loads((out / "record.json").read_text())
    assert (record["method"], record["options"]["num_slots"], record["config"]["steps"]) == ("eagle3", 2, 4)
    made = Responses.load(tmp_path / "out.responses.safetensors")
    assert len(made) == 12
    assert made.metadata["source_sha256"]
    # The same texts teach another method, without being written again.
    again = train("medusa", "--data", tmp_path / "out.responses.safetensors", "--out", tmp_path / "medusa", num_heads=2)
    assert (again.exit_code, again.stderr) == (0, "")
    assert "expected length" in again.stdout
    assert json.loads((tmp_path / "medusa" / "record.json").read_text())["data"] == record["data"]


def test_lines(train: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where stderr is no terminal the bar is a line now and then."""
    monkeypatch.setattr("foretell.cli.train_progress.LINE_SECONDS", 0.0)
    result = train("eagle3", num_slots=2)
    assert result.exit_code == 0
    lines = result.stderr.splitlines()
    assert any(line.startswith("answering 100% · ") for line in lines), lines
    assert any(line.startswith("training ") and "loss" in line for line in lines), lines


def test_bar_text() -> None:
    from foretell.train.trainer import Report

    one = Report(5, 10, 0.5, 1.7, 100.0, None, (1.7,), 1.7)
    seven = Report(6, 10, 0.6, 17.5, 100.0, None, (1.69, None, 4.5), 3.25)
    assert bar_text(one) == "loss 1.700 · 100 tok/s"
    assert bar_text(seven) == "loss 3.250 a slot (1.69 - 4.50) · 100 tok/s"
    assert bar_text(Report(5, 10, 0.5, 0.4, 100.0)) == "loss 0.400 · 100 tok/s"


@pytest.mark.parametrize(
    ("method", "size"),
    [
        ("eagle1", "intermediate_size"),
        ("eagle3", "draft_vocab_size"),
        ("medusa", "num_heads"),
        ("kangaroo", "head_dim"),
        ("dflash", "block_size"),
    ],
)
def test_begin_from_a_head(train: Invoke, tmp_path: Path, method: str, size: str) -> None:
    """A second run goes on with all weights of the first; sizes are its, and a setting that differs is refused."""
    from foretell.heads import formats

    given: dict[str, object] = {size: 12, **({"exit_layer": 1} if method == "kangaroo" else {})}
    first = train(method, "--out", tmp_path / "first", "--data", tmp_path / "prompts.jsonl", **given)
    assert (first.exit_code, first.stderr) == (0, "")
    texts = ["--data", tmp_path / "first.responses.safetensors"]
    again = train(method, "--out", tmp_path / "out", *texts, "--init", tmp_path / "first", lr=1e-9)
    assert (again.exit_code, again.stderr) == (0, "")
    was, now = (formats.load(tmp_path / name) for name in ("first", "out"))
    assert now.config == was.config
    assert now.config.as_dict()[size] == given[size]
    for (name, old), new in zip(was.named_parameters(), dict(now.named_parameters()).values(), strict=True):
        torch.testing.assert_close(new, old, atol=1e-6, rtol=0.0, msg=name)
    refused = train(method, "--out", tmp_path / "x", *texts, "--init", tmp_path / "first", **{size: 11})
    mistake(refused, f"{size} = 11, but the head of --init")
    other = "medusa" if method != "medusa" else "eagle1"
    wrong = train(other, "--out", tmp_path / "y", *texts, "--init", tmp_path / "first")
    assert wrong.exit_code != 0
    assert f"head, and {'a medusa' if other == 'medusa' else 'an eagle1'} head is needed here" in one_line(wrong.stderr)


def test_settings_are_options(train: Invoke, tmp_path: Path) -> None:
    result = train("kangaroo", "--lr", 0.01, "--weight-decay", 0.5, "--loss-temperature", 2, "--seed", 4, exit_layer=1)
    assert (result.exit_code, result.stderr) == (0, "")
    config = json.loads((tmp_path / "out" / "record.json").read_text())["config"]
    assert [config[key] for key in ("lr", "weight_decay", "temperature", "seed")] == [0.01, 0.5, 2.0, 4]
    assert (config["batch_tokens"], config["steps"]) == (CONFIG["batch_tokens"], 4)  # of --config, of --steps
    other = ["--out", tmp_path / "b"]
    mistake(
        train("kangaroo", *other, "--loss-temperature", 2, temperature=1.0),
        "--loss-temperature 2.0 contradicts --config",
    )
    mistake(train("kangaroo", *other, "--lr", -1), "lr = -1.0 must be above 0")
    mistake(train("kangaroo", *other, "--precision", "int8"), "precision = 'int8' must be float32 or bfloat16")


def test_resume(train: Invoke, tmp_path: Path) -> None:
    first = train("kangaroo", exit_layer=1)
    assert (first.exit_code, first.stderr) == (0, "")
    mistake(train("kangaroo", exit_layer=1), "--resume")
    again = train("kangaroo", "--resume", "--json", exit_layer=1)
    assert again.exit_code == 0
    said = train("kangaroo", "--resume", exit_layer=1).stdout.splitlines()
    assert said[-1] == "--resume: all 4 steps were done before"
    shutil.rmtree(tmp_path / "out" / "checkpoints" / "step-00000004")
    said = train("kangaroo", "--resume", exit_layer=1).stdout.splitlines()
    assert said[-1] == "--resume: went on behind step 2, to step 4"
    mistake(train("kangaroo", "--resume", exit_layer=1, lr=0.5), "config.lr was")
    assert len((tmp_path / "out" / "log.jsonl").read_text().splitlines()) == 4


def test_draft_model(train: Invoke, models: dict[str, Path], tmp_path: Path) -> None:
    result = train("draft_model", "--init", models["draft"], "--json", divergence="lk_hybrid/eta=2", lr=0.01)
    assert (result.exit_code, result.stderr) == (0, "")
    assert len(json.loads(result.stdout)["conditional"]) == 8
    from foretell.model.load import load_model, load_tokenizer

    assert load_model(str(tmp_path / "out"), implementation="lean").spec.hidden_size == 32
    assert load_tokenizer(str(tmp_path / "out"))


def test_interrupted(train: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import os
    import signal

    from foretell.train.trainer import Trainer

    step = Trainer._step

    def interrupted(self: Trainer, *args: object) -> object:
        if self.step == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "_step", interrupted)
    result = train("kangaroo", exit_layer=1)
    assert result.exit_code == 130
    saved = checkpoint.found(tmp_path / "out")[-1]
    at_once, ended = result.stderr.splitlines()
    assert f"stopping after step 2, which is saved in {tmp_path / 'out'}: --resume goes on from there" in at_once
    assert "Ctrl-C again stops at once; then the last good checkpoint is " in at_once
    assert (
        ended == f"foretell: stopped: the last checkpoint is {saved}; the same command with --resume goes on from there"
    )
    monkeypatch.setattr(Trainer, "_step", step)
    assert train("kangaroo", "--resume", exit_layer=1).exit_code == 0


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("foretell.model.load.load_model", "nothing was written, the same command begins again"),
        ("foretell.Engine.completions", "stopped before the first answer: nothing is kept"),
        ("foretell.train.methods.prepare", "the answers are kept, and the same command goes on with them"),
        (
            "foretell.train.trainer.Trainer._open",
            "there is no checkpoint yet; the answers are kept, and --resume begins",
        ),
    ],
)
def test_interrupted_anywhere(train: Invoke, monkeypatch: pytest.MonkeyPatch, place: str, said: str) -> None:
    def stop(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(place, stop)
    result = train("kangaroo", exit_layer=1)
    assert result.exit_code == 130
    assert said in one_line(result.stderr)


def test_interrupted_at_the_end(train: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import os
    import signal

    from foretell.train.trainer import Trainer

    measure = Trainer._evaluate

    def interrupted(self: Trainer) -> object:
        if self.step == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return measure(self)

    monkeypatch.setattr(Trainer, "_evaluate", interrupted)
    result = train("kangaroo", exit_layer=1)
    assert result.exit_code == 0
    assert f"all steps are done and saved in {tmp_path / 'out'}; the end is being measured" in one_line(result.stderr)


def test_texts_for_an_instruct_model(invoke: Invoke, models: dict[str, Path], data: Path, tmp_path: Path) -> None:
    """They went in as they are, without a word."""
    import shutil

    target, config = tmp_path / "target", tmp_path / "config.json"
    shutil.copytree(models["target"], target)
    (target / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}")
    config.write_text(json.dumps({**CONFIG, "exit_layer": 1}))
    fixed = ["--target", target, "--config", config, "--max-new-tokens", 8, "--data", data, "--steps", 2]
    fixed += ["--max-short-share", 1]
    result = invoke("train", "kangaroo", *fixed, "--out", tmp_path / "chat")
    assert result.exit_code == 0
    assert "12 of 12 prompts go into the chat template of" in result.stderr.splitlines()[0]
    chat = Responses.load(tmp_path / "chat.responses.safetensors")
    assert chat.metadata["raw"] is False
    raw = invoke("train", "kangaroo", *fixed, "--out", tmp_path / "raw", "--raw")
    assert (raw.exit_code, "template" in raw.stderr) == (0, False)
    plain = Responses.load(tmp_path / "raw.responses.safetensors")
    assert int(plain.start.max()) < int(chat.start.min())
    mistake(
        invoke("train", "medusa", *fixed[:-6], "--data", tmp_path / "chat.responses.safetensors", "--raw",
               "--out", tmp_path / "other", "--steps", 2),
        "made with raw = False, not True",
    )  # fmt: skip


def test_answers_that_end_at_once_are_refused(train: Invoke, models: dict[str, Path], tmp_path: Path) -> None:
    """They were trained on without a word."""
    from foretell.model.identity import target_hash
    from foretell.model.load import load_model

    model, file = load_model(str(models["target"])), tmp_path / "a.safetensors"
    (end,) = model.spec.eos_token_ids
    texts = [([1, 2, 3, end], 3)] * 3 + [([1, 2, 3 + n, *range(4, 12)], 3) for n in range(5)]
    pack(texts, {"target_hash": target_hash(model)}).save(file)
    result = train("kangaroo", "--data", file, exit_layer=1)
    mistake(result, "3 of 8 answers have fewer than 4 tokens (3 are empty), more than a share of 0.25")
    assert not (tmp_path / "out").exists()
    result = train("kangaroo", "--data", file, "--max-short-share", 0.5, exit_layer=1)
    assert result.exit_code == 0
    assert "3 of 8 answers have fewer than 4 tokens (3 are empty): there is little to learn" in one_line(result.stderr)


def test_interrupted_while_prompts_are_answered(train: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from foretell import Engine, Request

    sound, asked = Engine.completions, []

    def noted(self: Engine, requests: list[Request], **options: Any) -> Any:
        asked.append(len(requests))
        first = len(asked) == 1
        for done, ended in enumerate(sound(self, requests, **options)):
            if first and done == 5:
                raise KeyboardInterrupt
            yield ended

    monkeypatch.setattr(Engine, "completions", noted)
    result = train("kangaroo", exit_layer=1)
    assert result.exit_code == 130
    kept = tmp_path / "out.responses.jsonl"
    assert f"5 of 12 answers are kept in {kept}: the same command goes on" in one_line(result.stderr)
    mistake(train("kangaroo", "--seed", 3, exit_layer=1), "5 results that were made with seed = 0, and now seed is 3")
    again = train("kangaroo", exit_layer=1)
    assert (again.exit_code, again.stderr) == (0, "")
    assert asked == [12, 7]
    assert not kept.exists()
    cut = Responses.load(tmp_path / "out.responses.safetensors")
    train("kangaroo", "--out", tmp_path / "whole", exit_layer=1)
    assert cut.fingerprint == Responses.load(tmp_path / "whole.responses.safetensors").fingerprint
    mistake(
        train("kangaroo", "--resume", "--seed", 3, exit_layer=1),
        "12 answers that were made with seed = 0, and now seed is 3",
    )


def test_prompts_that_cannot_be_used(train: Invoke, tmp_path: Path) -> None:
    """Messages without content, and prompts that are all too long for the context or for training."""

    def refused(record: dict[str, object], **settings: object) -> Result:
        file = tmp_path / "bad.jsonl"
        file.write_text(json.dumps(record) + "\n")
        return train("kangaroo", "--data", file, exit_layer=1, **settings)

    mistake(
        refused({"messages": [{"role": "user"}]}), "bad.jsonl', line 1: message 1 (user) has none: expected 'content'"
    )
    for record, settings, said in (
        ({"prompt": "x" * 16380}, {"max_length": 20000}, "at most 16376 can be used (the context of"),
        ({"prompt": "x" * 200}, {"max_length": 100}, "at most 99 can be used (max_length = 100"),
    ):
        result = refused(record, **settings)
        assert result.exit_code == 1
        assert "all 1 prompts are too long: the shortest, line 1, has" in one_line(result.stderr)
        assert said in one_line(result.stderr)
    assert not (tmp_path / "out.responses.jsonl").exists()


def test_prompts_that_are_left_out_are_told(train: Invoke, data: Path) -> None:
    data.write_text(data.read_text() + json.dumps({"prompt": "x" * 16384}) + "\n")
    result = train("kangaroo", exit_layer=1)
    assert result.exit_code == 0
    assert "1 of 13 prompts of" in one_line(result.stderr)


@pytest.mark.parametrize(
    ("method", "args", "settings", "said"),
    [
        ("eagle4", [], {}, "did you mean 'eagle"),
        ("eagle3", [], {"num_slot": 3}, "did you mean 'num_slots'"),
        ("eagle3", [], {"lr": "fast"}, "lr = 'fast' must be a number"),
        ("eagle3", [], {"lr": None}, "lr = None must be a number"),
        ("eagle3", [], {"minutes": "one"}, "minutes = 'one' must be a number"),
        ("eagle3", [], {"num_slots": "3"}, "num_slots = '3' must be a whole number"),
        ("eagle3", [], {"steps": 5}, "contradicts --config"),
        ("eagle3", ["--minutes", 1], {}, "one of steps, epochs and minutes"),
        ("draft_model", [], {}, "needs --init"),
        ("eagle3", ["--data", "absent.jsonl"], {}, "cannot be read"),
        ("eagle3", [], {"save_dtype": "int4"}, "int4"),
        ("eagle3", ["--threads", 0], {}, "--threads 0"),
        ("judge", [], {}, "--max-new-tokens is not for 'judge'"),
    ],
)
def test_mistakes(train: Invoke, method: str, args: list[object], settings: dict[str, object], said: str) -> None:
    mistake(train(method, *args, **settings), said)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--max-new-tokens", 9], "made with max_new_tokens = 8, not 9"),
        (["--temperature", "0.5"], "made with temperatures = [0.0], not [0.5]"),
        (["--limit", 2], "made with limit = 3, not 2"),
    ],
)
def test_answers_that_were_made_otherwise(
    invoke: Invoke, models: dict[str, Path], tmp_path: Path, args: list[object], said: str
) -> None:
    """Options that say how prompts are answered were ignored where --data holds answers."""
    file = tmp_path / "a.safetensors"
    pack([([1, 2, 3], 1)], {"max_new_tokens": 8, "temperatures": [0.0], "limit": 3}).save(file)
    fixed = ["--target", models["target"], "--data", file, "--out", tmp_path / "out"]
    mistake(invoke("train", "medusa", *fixed, *args), said)


def test_strangers_text(train: Invoke, models: dict[str, Path], tmp_path: Path) -> None:
    assert train("kangaroo", exit_layer=1).exit_code == 0
    other = train(
        "kangaroo", "--data", tmp_path / "out.responses.safetensors", "--out", tmp_path / "b", "--target",
        models["draft"], exit_layer=1,
    )  # fmt: skip
    mistake(other, "its target's text")
