"""Results kept as they are made: read again whole, whatever was cut short, and never mixed with another run's."""

import errno
import io
import os
from pathlib import Path

import pytest

from foretell.core.errors import ConfigError
from foretell.core.journal import Journal, first_difference

MINE = {"seed": 1, "target": {"name": "a", "size": 3}}


def written(file: Path, count: int = 3) -> bytes:
    with Journal(file, MINE) as journal:
        for index in range(count):
            journal.append({"index": index, "text": "é"})
    return file.read_bytes()


def indices(file: Path) -> list[int]:
    with Journal(file, MINE) as journal:
        return [record["index"] for record in journal.records]


def test_it_is_read_again_and_appended_to(tmp_path: Path) -> None:
    file = tmp_path / "j.jsonl"
    written(file)
    assert indices(file) == [0, 1, 2]
    with Journal(file, MINE) as journal:
        journal.append({"index": 7})
    assert indices(file) == [0, 1, 2, 7]


def test_each_result_is_there_before_the_file_is_closed(tmp_path: Path) -> None:
    file = tmp_path / "j.jsonl"
    journal = Journal(file, MINE)
    journal.append({"index": 0})
    assert len(file.read_bytes().splitlines()) == 2
    journal.close()
    journal.close()


def test_whatever_the_kill_left_of_the_file_whole_lines_count(tmp_path: Path) -> None:
    """Cut at every byte: never an error, never a wrong result, and what is appended next is whole."""
    file = tmp_path / "j.jsonl"
    whole = written(file)
    ends = [at for at, byte in enumerate(whole) if byte == 10]
    for cut in range(len(whole)):
        file.write_bytes(whole[:cut])
        kept = [index for index, end in enumerate(ends[1:]) if cut >= end]  # a line may lack its newline alone
        with Journal(file, MINE) as journal:
            assert [record["index"] for record in journal.records] == kept, cut
            journal.append({"index": 9})
        assert indices(file) == [*kept, 9], cut


def test_a_damaged_line_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "j.jsonl"
    lines = written(file).splitlines(keepends=True)
    for damage in (b"\x00\x00\xff\n", b"[1]\n", b"\n"):
        file.write_bytes(b"".join([*lines[:2], damage, *lines[3:]]))
        assert indices(file) == [0, 2]


def test_another_run_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "j.jsonl"
    before = written(file)
    with pytest.raises(ConfigError, match=r"3 results that were made with target\.size = 3, and now target\.size is 4"):
        Journal(file, {"seed": 1, "target": {"name": "a", "size": 4}})
    with pytest.raises(ConfigError, match="seed = 1, and now seed is None"):
        Journal(file, {"target": MINE["target"]})
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    "content", [b"my thesis", b'{"prompt": "a"}\n', b'{"journal": 99, "identity": {}}\n', b"{\n{}\n"]
)
def test_a_file_of_another_kind_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "j.jsonl"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="was not written by"):
        Journal(file, MINE)
    assert file.read_bytes() == content


class Full(io.StringIO):
    """A file on a disk without room."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    with Journal(tmp_path / "j.jsonl", MINE) as journal:
        sound, journal._stream = journal._stream, Full()
        with pytest.raises(OSError, match="No space left") as caught:
            journal.append({"index": 0})
        assert caught.value.filename == str(tmp_path / "j.jsonl")
        journal._stream = sound


def test_first_difference() -> None:
    assert first_difference({"a": {"b": 1}}, {"a": {"b": 1}}) is None
    assert first_difference({"a": {"b": 1, "c": 2}, "z": 0}, {"a": {"b": 1, "c": 3}, "z": 1}) == ("a.c", 2, 3)
    assert first_difference({}, {"a": None}) is None
    assert first_difference({"a": [1]}, {"a": [1, 2]}) == ("a", [1], [1, 2])
