"""Tensors that outlive a process: whole or absent at every moment, checked, bounded, and nobody else's."""

import errno
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from foretell.core import shelf as shelf_module
from foretell.core.errors import ConfigError
from foretell.core.shelf import Shelf

ABOUT = {"kind": "test"}


def opened(folder: Path, *, identity: str = "a", max_bytes: int = 1 << 20) -> Shelf:
    return Shelf(folder, option="state_dir", identity={"target": identity}, max_bytes=max_bytes)


def tensors(value: int = 1, count: int = 100) -> dict[str, Tensor]:
    return {
        "ids": torch.full((count,), value, dtype=torch.int32),
        "keys 0": torch.full((2, 3, 4), float(value), dtype=torch.bfloat16),
        "flags": torch.tensor([True, False, True]),
        "none": torch.zeros(0, 4),
        "rates": torch.tensor(value / 3, dtype=torch.float64),
    }


def same(found: dict[str, Tensor] | None, expected: dict[str, Tensor]) -> bool:
    return found is not None and found.keys() == expected.keys() and all(
        found[key].dtype == each.dtype and torch.equal(found[key], each) for key, each in expected.items()
    )  # fmt: skip


def test_what_is_put_comes_back_and_is_safetensors_own_format(tmp_path: Path) -> None:
    made = opened(tmp_path / "new" / "folder")
    assert made.put("one", ABOUT, tensors())
    assert same(made.get("one"), tensors())
    assert torch.equal(made.peek("one", "ids"), tensors()["ids"])
    assert same(dict(load_file(made.root / "one.safetensors")), tensors())
    made.close()
    again = opened(made.root)
    assert again.entries["one"].about == ABOUT
    assert same(again.get("one"), tensors())
    assert again.get("two") is None


def test_others_may_not_look_into_it(tmp_path: Path) -> None:
    made = opened(tmp_path / "kept")
    made.put("one", ABOUT, tensors())
    assert stat.S_IMODE(made.root.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in made.root.iterdir()} == {0o600}


def test_what_did_not_change_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = opened(tmp_path)
    made.put("one", ABOUT, tensors())
    monkeypatch.setattr(shelf_module, "write_whole", lambda *given: pytest.fail("written"))
    assert made.put("one", ABOUT, tensors())


class Crashes:
    """Copies of a folder as a kill or a power cut would leave it, before each thing that is done to a file of it."""

    def __init__(self, folder: Path, copies: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.copies, self.seen, self.flushed = folder, copies, list[Path](), set[int]()
        fsync, rename, unlink = os.fsync, Path.replace, Path.unlink

        def flush(file: int) -> None:
            self.look()
            fsync(file)
            self.flushed.add(os.fstat(file).st_ino)
            self.look()

        def move(path: Path, target: Path) -> Path:
            self.look()
            moved = rename(path, target)
            self.look()
            return moved

        def remove(path: Path, missing_ok: bool = False) -> None:
            self.look()
            unlink(path, missing_ok=missing_ok)

        monkeypatch.setattr(os, "fsync", flush)
        monkeypatch.setattr(Path, "replace", move)
        monkeypatch.setattr(Path, "unlink", remove)

    def look(self) -> None:
        """Both ends of a crash: all that was written is there; of what was not flushed, half."""
        for loses in (False, True):
            copy = self.copies / str(len(self.seen))
            copy.mkdir()
            for file in self.folder.iterdir():
                content = file.read_bytes()
                lost = loses and file.suffix in (".part", ".safetensors") and file.stat().st_ino not in self.flushed
                (copy / file.name).write_bytes(content[: len(content) // 2] if lost else content)
            self.seen.append(copy)


def test_whenever_it_is_killed_the_old_or_the_new_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = opened(tmp_path / "kept")
    (tmp_path / "copies").mkdir()
    with monkeypatch.context() as patch:
        crashes = Crashes(made.root, tmp_path / "copies", patch)
        made.put("one", ABOUT, tensors(1))
        first = len(crashes.seen)
        made.put("one", ABOUT, tensors(2))
    found = []
    for copy in crashes.seen:
        kept = opened(copy)
        content = kept.get("one")
        assert content is None or same(content, tensors(1)) or same(content, tensors(2))
        found.append(0 if content is None else int(content["ids"][0]))
        assert not list(copy.glob("*.part"))
        kept.close()
    assert not caplog.records, "nothing was damaged"
    assert set(found[:first]) == {0, 1}
    assert set(found[first:]) == {1, 2}, "the old one stays until the new one is there"
    assert len(found) >= 8


def test_a_damaged_file_is_told_and_deleted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = opened(tmp_path)
    for name in ("flipped", "whole"):
        made.put(name, ABOUT, tensors())
    file = tmp_path / "flipped.safetensors"
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    made.close()
    for name, damaged in (("cut", content[:-1]), ("short", content[:5]), ("empty", b""), ("other", b"{}" * 50)):
        (tmp_path / f"{name}.safetensors").write_bytes(damaged)
    again = opened(tmp_path)
    assert again.entries.keys() == {"flipped", "whole"}
    assert again.get("flipped") is None
    assert same(again.get("whole"), tensors())
    assert [record.getMessage().count("is damaged and deleted") for record in caplog.records] == [1] * 5
    assert sorted(file.stem for file in tmp_path.glob("*.safetensors")) == ["whole"]


def test_a_folder_in_a_file_s_place_is_moved_aside_and_all_can_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At the start and while it runs, for every file of ours: what lies in it stays, no line says that it is deleted, and
    what is put there next is kept."""
    made = opened(tmp_path)
    for name in ("one", "two"):
        made.put(name, ABOUT, tensors())
    made.close()
    places = ["one.safetensors", "salt", ".two.safetensors.part"]
    for place in places:
        (tmp_path / place).unlink(missing_ok=True)
        (tmp_path / place).mkdir()
        (tmp_path / place / "mine").write_text("of somebody else")
    again = opened(tmp_path)
    assert again.entries.keys() == {"two"}
    (tmp_path / "two.safetensors").unlink()
    (tmp_path / "two.safetensors").mkdir()
    (tmp_path / ".two.safetensors.part").mkdir()
    assert again.get("two") is None
    for name in ("one", "two"):
        assert again.put(name, ABOUT, tensors(2))
        assert same(again.get(name), tensors(2))
    said = [record.getMessage() for record in caplog.records]
    assert not [line for line in said if "deleted" in line]
    assert len([line for line in said if "is a folder; it is now" in line]) == 5
    assert [aside.read_text() for aside in tmp_path.glob("*.aside/mine")] == ["of somebody else"] * 3
    again.close()
    assert opened(tmp_path).entries.keys() == {"one", "two"}


def test_what_is_no_file_is_not_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A pipe, and a link to nothing."""
    opened(tmp_path).close()
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "gone.safetensors").symlink_to(tmp_path / "nothing")
    made = opened(tmp_path)
    assert not made.entries
    first, second = (record.getMessage() for record in caplog.records)
    assert "gone.safetensors is damaged and deleted ([Errno 2] No such file" in first
    assert second.endswith("pipe.safetensors is damaged and deleted (it is no file)")
    assert made.put("pipe", ABOUT, tensors())


def test_what_cannot_be_moved_is_left_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lock").mkdir()
    with pytest.raises(ConfigError, match=r"cannot be written to: lock there: Is a directory"):
        opened(tmp_path)
    (tmp_path / "lock").rmdir()
    (tmp_path / "one.safetensors").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", refuse)
        made = opened(tmp_path)
        assert not made.put("one", ABOUT, tensors())
        assert made.put("two", ABOUT, tensors())
    assert "one.safetensors is not used, and stays (Permission denied)" in caplog.text
    assert made.put("one", ABOUT, tensors())


def refuse(*_: object) -> None:
    raise PermissionError(errno.EACCES, "Permission denied")


def test_what_another_model_has_left_is_not_read_and_not_overwritten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = opened(tmp_path, identity="a")
    first.put(first.name_of("x"), ABOUT, tensors(1))
    first.close()
    assert not caplog.records
    second = opened(tmp_path, identity="b")
    (told,) = [record.getMessage() for record in caplog.records]
    assert "1 files" in told
    assert "target = 'a', and now target is 'b'" in told
    assert not second.entries
    second.put(second.name_of("x"), ABOUT, tensors(2))
    second.close()
    third = opened(tmp_path, identity="a")
    assert same(third.get(third.name_of("x")), tensors(1))


def test_the_least_recently_used_goes_first_others_included(tmp_path: Path) -> None:
    foreign = opened(tmp_path, identity="b")
    foreign.put("foreign", ABOUT, tensors())
    size = foreign.num_bytes
    foreign.close()
    made = opened(tmp_path, max_bytes=4 * size)
    for name in ("one", "two", "three"):
        made.put(name, ABOUT, tensors())
    assert made.get("one") is not None  # used: "two" is older now
    made.put("four", ABOUT, tensors())
    made.put("five", ABOUT, tensors())
    assert sorted(file.stem for file in tmp_path.glob("*.safetensors")) == ["five", "four", "one", "three"]
    made.close()
    assert opened(tmp_path, max_bytes=4 * size).entries.keys() == {"five", "four", "one", "three"}


def test_more_than_all_may_be_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = opened(tmp_path, max_bytes=2000)
    made.put("small", ABOUT, tensors(count=10))
    assert not made.put("large", ABOUT, tensors(count=10_000))
    assert made.get("small") is not None
    assert "larger than all of them may be" in caplog.text


def test_a_full_disk_is_one_line_and_leaves_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = opened(tmp_path)
    made.put("one", ABOUT, tensors(1))
    with monkeypatch.context() as patch:

        def full(file: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(os, "fsync", full)
        for _ in range(3):
            assert not made.put("one", ABOUT, tensors(2))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "No space left on device" in record.getMessage()
    assert same(made.get("one"), tensors(1))
    assert not list(tmp_path.glob(".*"))
    assert made.put("one", ABOUT, tensors(2))


def test_a_folder_is_one_processs(tmp_path: Path) -> None:
    made = opened(tmp_path)
    with pytest.raises(ConfigError, match="is in use by another server"):
        opened(tmp_path)
    made.close()
    opened(tmp_path)


def test_a_wrong_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"state_dir = .*file cannot be written to"):
        opened(tmp_path / "file")


def test_names_of_tenants_stand_nowhere(tmp_path: Path) -> None:
    made, other = opened(tmp_path / "a"), opened(tmp_path / "b")
    assert made.owner("key-1") == made.owner("key-1") != made.owner("key-2")
    assert made.owner("key-1") != other.owner("key-1"), "who knows a key's name cannot look for its files"
    salted = made.owner("key-1")
    made.close()
    assert opened(tmp_path / "a").owner("key-1") == salted


KILLS = """
import os, random, signal, sys, time
from pathlib import Path
from tests.core.test_shelf import ABOUT, opened, same, tensors

random.seed(1)
seen, size = [], 200_000
for _ in range(100):
    hear, say = os.pipe()
    child = os.fork()
    if not child:
        made = opened(Path(sys.argv[1]))
        os.write(say, b"begun")
        for number in range(len(seen) * 1000, 10**9):
            made.put("one", ABOUT, tensors(number, count=size))
    os.read(hear, 5)
    time.sleep(random.uniform(0.0, 0.05))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    kept = opened(Path(sys.argv[1]))
    content = kept.get("one")
    seen.append(-1 if content is None else int(content["ids"][0]))
    assert content is None or same(content, tensors(seen[-1], count=size))
    kept.close()
assert seen == sorted(seen), "what was there once stays, or is replaced by what came later"
print(len(set(seen)))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="it kills forks")
def test_a_real_process_is_killed_at_random_moments(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", KILLS, str(tmp_path)], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "damaged" not in done.stderr
    assert int(done.stdout) > 30, "kills came while it was writing"
