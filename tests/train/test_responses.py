"""Responses: written by the target, the same whatever the batch, kept on disk, split by prompt."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken import Engine
from foretoken.errors import ConfigError
from foretoken.train.responses import TEXT_PROMPT, Responses, pack, read_prompts, regenerate, target_hash
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
    assert [now[0] for now in seen] == [4, 8, 9]
    assert seen[-1] == (9, 9, made.num_tokens)
    other = regenerate(engine, prompts(), max_new_tokens=6, batch_size=2, seed=5)
    assert made.fingerprint == other.fingerprint  # batches change nothing
    assert made.fingerprint != regenerate(engine, prompts(), max_new_tokens=6, seed=6).fingerprint


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
    with pytest.raises(ConfigError, match="its own target's text"):
        read.check_target(target_hash(table(seed=2, context=3)), name="r")
    (tmp_path / "bad.safetensors").write_bytes(b"no")
    with pytest.raises(ConfigError, match="no file of responses"):
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
