"""Responses: written by the target, the same whatever the batch, kept on disk, split by prompt."""

import json
import os
import signal
import subprocess
import sys
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from foretell import Engine, Request
from foretell.core.errors import ConfigError, PromptError
from foretell.core.journal import read_journal
from foretell.engine.request.conversation import is_instruct
from foretell.learn.session import read_prompts as read_learned
from foretell.model.identity import target_hash
from foretell.train.answering import SURE, ShortAnswers
from foretell.train.responses import TEXT_PROMPT, Responses, pack, read_prompts, regenerate
from tests.engine.harness import VOCAB, ToyTokenizer, table


@pytest.fixture
def engine() -> Engine:
    return Engine(table(), ToyTokenizer(), speculative="none")


def prompts(count: int = 9) -> list[list[int]]:
    return [[(3 * i + j) % (VOCAB - 2) for j in range(1 + i % 4)] for i in range(count)]


def test_regenerate(engine: Engine) -> None:
    seen: list[tuple[int, int, int]] = []
    made = regenerate(engine, prompts(), max_new_tokens=6, batch_size=4, seed=5, progress=lambda *now: seen.append(now))
    assert len(made) == 9
    for index, prompt in enumerate(prompts()):
        text, start = made.text(index), int(made.start[index])
        assert text[:start] == prompt
        if index % 2 == 0:  # the first temperature: greedy
            alone = engine.generate(prompt, temperature=0.0, max_new_tokens=6)
            assert text[start:] == alone.token_ids
    assert [now[0] for now in seen] == list(range(1, 10))
    assert seen[-1] == (9, 9, made.num_tokens)
    other = regenerate(engine, prompts(), max_new_tokens=6, batch_size=2, seed=5)
    assert made.fingerprint == other.fingerprint  # batches change nothing
    assert made.fingerprint != regenerate(engine, prompts(), max_new_tokens=6, seed=6).fingerprint


class KillError(Exception):
    """In the middle of the work."""


def asked(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How long the prompts are that the engine is asked from here on: each of ``prompts`` below has its own length."""
    lengths: list[int] = []
    sound = Engine.completions

    def noted(self: Engine, requests: list[Request], **options: Any) -> Any:
        lengths.extend(len(request.prompt) for request in requests)
        return sound(self, requests, **options)

    monkeypatch.setattr(Engine, "completions", noted)
    return lengths


STAIRS = [[1 + (3 * i + j) % (VOCAB - 3) for j in range(1 + i)] for i in range(9)]


def test_answers_are_kept_as_they_are_made_and_not_asked_for_again(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = regenerate(engine, STAIRS, max_new_tokens=6, batch_size=4, seed=5)
    file = tmp_path / "answers.jsonl"

    def kill(done: int, total: int, written: int) -> None:
        if done == 6:  # those that were being decoded are lost
            raise KillError

    with pytest.raises(KillError):
        regenerate(engine, STAIRS, max_new_tokens=6, batch_size=4, seed=5, journal=file, progress=kill)
    found = read_journal(file)
    kept = {record["prompt"] for record in found[1]}
    assert len(kept) == 6
    file.write_bytes(file.read_bytes() + b'{"prompt":8,"tok')  # a line that was cut short is no answer
    lengths, seen = asked(engine, monkeypatch), []
    again = regenerate(
        engine, STAIRS, max_new_tokens=6, batch_size=4, seed=5, journal=file, progress=lambda *now: seen.append(now)
    )
    assert sorted(lengths) == [1 + index for index in range(9) if index not in kept]
    assert [now[0] for now in seen] == [6, 7, 8, 9]
    assert seen[-1] == (9, 9, whole.num_tokens)
    assert again.fingerprint == whole.fingerprint
    assert dict(again.metadata) == dict(whole.metadata)
    lengths.clear()
    assert regenerate(engine, STAIRS, max_new_tokens=6, seed=5, journal=file).fingerprint == whole.fingerprint
    assert lengths == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": 6}, "seed = 5, and now seed is 6"),
        ({"max_new_tokens": 7}, "max_new_tokens = 6"),
        ({"temperatures": (0.5,)}, "temperatures = "),
        ({"prompts": STAIRS[:4]}, "num_prompts = 9"),
        ({"prompts": [[2], *STAIRS[1:]]}, "prompts_sha256 = "),
        ({"engine": Engine(table(dtype=torch.float32), ToyTokenizer(), speculative="none")}, "dtype = 'float64'"),
    ],
)
def test_answers_of_another_run_are_not_mixed_in(
    engine: Engine, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    given = {"engine": engine, "prompts": STAIRS, "max_new_tokens": 6, "seed": 5, "journal": tmp_path / "a.jsonl"}
    regenerate(**given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=said):
        regenerate(**{**given, **changes})  # type: ignore[arg-type]


KILLED = """
import os, signal, sys
from foretell import Engine
from foretell.train.responses import regenerate
from tests.engine.harness import ToyTokenizer, table
from tests.train.test_responses import STAIRS

def kill(done, total, written):
    if done == 6:
        os.kill(os.getpid(), signal.SIGKILL)

engine = Engine(table(), ToyTokenizer(), speculative="none")
regenerate(engine, STAIRS, max_new_tokens=6, batch_size=4, seed=5, journal=sys.argv[1], progress=kill)
"""


def test_a_killed_process_loses_no_answer(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "answers.jsonl"
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(file)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        timeout=120,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    lengths = asked(engine, monkeypatch)
    again = regenerate(engine, STAIRS, max_new_tokens=6, batch_size=4, seed=5, journal=file)
    assert len(lengths) == 3
    assert again.fingerprint == regenerate(engine, STAIRS, max_new_tokens=6, batch_size=4, seed=5).fingerprint


def test_a_full_disk_is_an_error_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of safetensors was called an internal one."""
    full = SafetensorError("I/O error: No space left on device")
    monkeypatch.setattr("foretell.train.responses.save_file", lambda *_, **__: (_ for _ in ()).throw(full))
    with pytest.raises(OSError, match="No space left on device") as raised:
        pack([([1, 2, 3], 1)]).save(tmp_path / "responses.safetensors")
    assert raised.value.filename == str(tmp_path / "responses.safetensors")


def test_nothing_that_can_be_answered(engine: Engine, tmp_path: Path) -> None:
    room = engine.model.spec.max_positions
    with pytest.raises(PromptError, match=f"none of 2 prompts can be answered: expected 1 to {room - 4} tokens"):
        regenerate(engine, [[1] * room, [2] * (room - 3)], max_new_tokens=4)
    file = lines(tmp_path, {"prompt": "a" * room}, {"prompt": "a" * (room - 2)})
    with pytest.raises(
        PromptError, match=rf"data.jsonl': all 2 prompts are too long: the shortest, line 2, .* at most {room - 4}"
    ):
        read_prompts(file, engine, max_new_tokens=4)
    with pytest.raises(PromptError, match=r"at most 19 can be used \(max_length = 20"):
        read_prompts(file, engine, max_new_tokens=4, max_length=20)
    assert len(read_prompts(file, engine, max_new_tokens=2)) == 2  # one of them fits
    with pytest.raises(ConfigError, match="max_length = 3 tokens, and the shortest prompt has 4"):
        pack([([1] * 9, 4), ([1] * 9, 7)]).cut(3)


class Chatter(ToyTokenizer):
    """With a template that needs every content to be a text."""

    chat_template = "there is one"

    def apply_chat_template(self, messages: list[Any], **options: Any) -> str:
        if messages[0]["role"] == "critic":
            from jinja2 import TemplateError

            raise TemplateError("no critics")
        return "".join("the " + message["content"] for message in messages)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([{"role": "user"}], r"line 2: message 1 \(user\) has none: expected 'content'"),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": None}], r"message 2 \(user\) has none"),
        ([{"role": "user", "content": 7}], r"message 1 \(user\) has 7: expected 'content', a text"),
        ([{"content": "a"}], "message 1 must be an object with 'role' and 'content'"),
        (["a"], "message 1 must be an object"),
        ([{"role": "assistant", "content": "a"}], "nothing to answer"),
        ([{"role": "critic", "content": "a"}], r"refuses these messages \(no critics\)"),
        (
            [{"role": "assistant", "content": None, "tool_calls": [1]}, {"role": "user", "content": "a"}],
            "chat template",
        ),
    ],
)
def test_bad_messages(engine: Engine, tmp_path: Path, messages: list[Any], said: str) -> None:
    engine.tokenizer = Chatter()
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    assert read_prompts(lines(tmp_path, good), engine) == [ToyTokenizer().encode("the a")]
    with pytest.raises(ConfigError, match=said):
        read_prompts(lines(tmp_path, good, {"messages": messages}), engine)


def test_prompts_without_room_are_skipped(engine: Engine) -> None:
    room = engine.model.spec.max_positions
    made = regenerate(engine, [[1, 2], [1] * room, []], max_new_tokens=4)
    assert len(made) == 1
    assert made.metadata["num_skipped"] == 2


def test_round_trip(engine: Engine, tmp_path: Path) -> None:
    made = regenerate(engine, prompts(), max_new_tokens=6, source="here.jsonl", source_sha256="ab")
    made.save(tmp_path / "r.safetensors")
    read = Responses.load(tmp_path / "r.safetensors")
    assert read.fingerprint == made.fingerprint
    assert dict(read.metadata) == dict(made.metadata)
    assert (read.tokens.dtype, read.length.dtype) == (torch.int32, torch.int64)
    assert read.metadata["temperatures"] == [0.0, 1.0]
    read.check_target(target_hash(engine.model), name="r")
    with pytest.raises(ConfigError, match="its target's text"):
        read.check_target(target_hash(table(seed=2, context=3)), name="r")
    (tmp_path / "bad.safetensors").write_bytes(b"no")
    with pytest.raises(ConfigError, match="not a file of responses"):
        Responses.load(tmp_path / "bad.safetensors")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_batch_and_cut() -> None:
    made = pack([([1, 2, 3, 4], 2), ([5, 6, 7, 8, 9, 10], 5), ([1, 1], 1)])
    batch = made.batch([0, 1])
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 0, 0], [5, 6, 7, 8, 9, 10]]
    assert batch.supervised.tolist() == [[False, True, True] + [False] * 3, [False] * 4 + [True, False]]
    cut = made.cut(3)
    assert [cut.text(index) for index in range(len(cut))] == [[1, 2, 3], [1, 1]]


def test_split_follows_the_prompt() -> None:
    made = pack([([i, i + 1, 7, j], 2) for i in range(60) for j in range(2)])
    learned, held = made.split(0.2)
    sides = [{tuple(part.text(i)[:2]) for i in range(len(part))} for part in (learned, held)]
    assert not sides[0] & sides[1]
    assert len(learned) + len(held) == len(made)
    assert 4 <= len(held) <= 48
    grown = pack([([99, i, 7], 2) for i in range(20)] + [(made.text(i), 2) for i in range(len(made))])
    mine = {tuple(part) for part in sides[1]}
    again = grown.split(0.2)[1]
    assert mine <= {tuple(again.text(i)[:2]) for i in range(len(again))}
    assert [len(part) for part in pack([([1, 2], 1)]).split()] == [1, 1]
    assert [len(part) for part in pack([([1, 2], 1), ([2, 2], 1)]).split(0.0001)] == [1, 1]


def lines(folder: Path, *records: Any) -> Path:
    file = folder / "data.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def test_read_prompts(engine: Engine, tmp_path: Path) -> None:
    file = lines(tmp_path, {"prompt": "ab c"}, {"turns": ["the end", "more"], "format": "text"})
    tokenizer = ToyTokenizer()
    assert read_prompts(file, engine) == [tokenizer.encode("ab c"), tokenizer.encode("the end")]
    assert len(read_prompts(file, engine, limit=1)) == 1
    plain = tmp_path / "plain.txt"
    plain.write_text("ab c\n" * 40)
    cut = read_prompts(plain, engine)
    assert [token for prompt in cut for token in prompt] == tokenizer.encode(plain.read_text())
    assert {len(prompt) for prompt in cut[:-1]} == {TEXT_PROMPT}


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([{"prompt": "ab"}, {"prompt": ""}], "line 2: expected"),
        ([{"text": "ab"}], "line 1: expected"),
        ([], "is empty"),
    ],
)
def test_bad_prompts(engine: Engine, tmp_path: Path, records: list[Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_prompts(lines(tmp_path, *records), engine)


def test_unreadable(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(tmp_path / "absent.jsonl", engine)
    broken = lines(tmp_path, {"prompt": "ab"})
    broken.write_text(broken.read_text() + "{")
    with pytest.raises(ConfigError, match="line 2: not JSON"):
        read_prompts(broken, engine)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens": torch.ones(3, 4)}, r"tokens is \[3, 4\] of float32"), ({"length": torch.tensor([9, 2, 2])}, "text 0"),
        ({"start": torch.tensor([1, 3, 1])}, "text 1 has no place"), ({"start": torch.tensor([1, -1, 1])}, "text 1"),
        ({"start": torch.tensor([1, 1])}, r"start is \[2\]"), ({"tokens": -torch.ones(3, 4).int()}, "negative"),
    ],
)  # fmt: skip
def test_damaged_responses(tmp_path: Path, changes: dict[str, torch.Tensor], said: str) -> None:
    whole = {
        "tokens": torch.ones(3, 4, dtype=torch.int32), "length": torch.tensor([2, 2, 2]), "start": torch.tensor([1, 1, 1]),
    }  # fmt: skip
    save_file(whole, tmp_path / "whole.safetensors")
    assert len(Responses.load(tmp_path / "whole.safetensors")) == 3
    save_file({**whole, **changes}, tmp_path / "damaged.safetensors")
    with pytest.raises(ConfigError, match=f"is damaged: .*{said}"):
        Responses.load(tmp_path / "damaged.safetensors")


@pytest.fixture(scope="module")
def instruct() -> Engine:
    """Its template ends the assistant's turn with an end token."""
    return Engine.load("bundled", speculative="none")


def test_an_instruct_model_gets_texts_as_messages(instruct: Engine, tmp_path: Path) -> None:
    """27 of 60 answers to bare texts were the end token alone."""
    file = lines(
        tmp_path,
        {"prompt": "ab c"},
        "bare",
        {"prompt": "def f(", "format": "text"},
        {"turns": ["hi"]},
        {"messages": [{"role": "user", "content": "hi"}]},
    )
    texts = ["ab c", "bare", "def f(", "hi", "hi"]
    chat = [instruct.chat_prompt([{"role": "user", "content": text}]) for text in texts]
    plain = [instruct.make_row(0, Request(text)).prompt_ids for text in texts]
    said: list[str] = []
    found = read_prompts(file, instruct, notice=said.append)
    assert found == [chat[0], chat[1], plain[2], chat[3], chat[4]]
    (line,) = said
    assert "2 of 5 prompts go into the chat template of 'bundled', an instruct model; --raw" in line
    said.clear()
    assert read_prompts(file, instruct, raw=True, notice=said.append) == [*plain[:3], *chat[3:]]
    assert read_learned(file, instruct) == found
    assert read_learned(file, instruct, raw=True) == [*plain[:3], *chat[3:]]
    assert said == []
    read_prompts(lines(tmp_path, {"turns": ["hi"]}), instruct, notice=said.append)
    assert said == [], "a line that says what it is needs no word"


def test_other_models_get_texts_as_they_are(instruct: Engine, tmp_path: Path) -> None:
    """No template, or one of markers that end no output, as many base models have."""
    bare = instruct.make_row(0, Request("ab c")).prompt_ids
    tokenizer: Any = copy(instruct.tokenizer)
    for template in (
        None,
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}[/]{% endfor %}",
        "{{ no.such.thing }}",
    ):
        tokenizer.chat_template = template
        engine, said = Engine(instruct.model, tokenizer), list[str]()
        assert not is_instruct(tokenizer, engine.model.spec.eos_token_ids)
        assert read_prompts(lines(tmp_path, {"prompt": "ab c"}), engine, notice=said.append) == [bare]
        assert said == []
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[/]{% endfor %}"
    engine = Engine(instruct.model, tokenizer)
    assert read_prompts(lines(tmp_path, {"turns": ["hi"]}), engine)[0] == engine.chat_prompt(
        [{"role": "user", "content": "hi"}]
    )
    assert is_instruct(instruct.tokenizer, instruct.model.spec.eos_token_ids)
    assert not is_instruct(instruct.tokenizer, [3])
    assert not is_instruct(None, [0])


def counted(*answers: list[int], most: float = 0.25) -> ShortAnswers:
    made = ShortAnswers([0, 2], most, "kept.safetensors")
    for tokens in answers:
        made.count(tokens)
    return made


def test_short_answers_are_counted() -> None:
    """Ended by themselves before four tokens; what the limit has cut is none."""
    made = counted([], [2], [5, 0], [5, 5, 5, 2], [5, 5, 5, 5], [5, 5, 5, 5, 2], [5, 5], most=1.0)
    assert (made.num, made.num_short, made.num_empty) == (7, 4, 2)
    said: list[str] = []
    made.end(said.append)
    assert said == ["4 of 7 answers have fewer than 4 tokens (2 are empty): there is little to learn from them"]
    counted([5] * 9, [5] * 3).end(said.append)
    assert len(said) == 1


def test_too_many_short_answers_are_refused() -> None:
    sound = [5] * 9
    counted([2], sound, sound, sound).end(lambda line: None)
    with pytest.raises(
        ConfigError, match=r"2 of 5 answers .* \(1 are empty\), more than a share of 0.25.*--max-short-share 1"
    ):
        counted([2], [7, 2], sound, sound, sound).end(lambda line: None)
    made = counted()
    for _ in range(SURE - 1):
        made.early([2])  # a few may be any
    with pytest.raises(ConfigError, match="64 of 64 answers"):
        made.early([2])
    some = counted()
    for number in range(4 * SURE):
        some.early([2] if number % 2 else sound)  # half of them: the others are waited for


def test_answers_are_judged_as_they_are_made(engine: Engine, tmp_path: Path) -> None:
    file, seen = tmp_path / "answers.jsonl", list[int]()

    def judge(tokens: Any) -> None:
        seen.append(len(tokens))
        if len(seen) == 3:
            raise KillError

    with pytest.raises(KillError):
        regenerate(engine, STAIRS, max_new_tokens=6, journal=file, judge=judge)
    found = read_journal(file)
    assert [len(record["tokens"]) for record in found[1]] == seen
