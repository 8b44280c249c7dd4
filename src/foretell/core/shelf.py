"""A folder of tensors that outlives the process: files of safetensors' format, bounded in size, for one process at a time.

A file is whole or absent (``core/whole.py``), and its content is checked against a digest when it is read. Its header
says what it was made with (``identity``): what another model, tokenizer or format has left is not read, and goes when
room is wanted. Nothing in a file is ever run. Names of tenants stand nowhere: a salt that the folder keeps and the name
make a digest.
"""

import contextlib
import hashlib
import json
import logging
import mmap
import os
import secrets
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from foretell.core.errors import ConfigError
from foretell.core.journal import first_difference
from foretell.core.jsontext import parse_json
from foretell.core.platform import lock_file
from foretell.core.whole import part_of, write_whole

log = logging.getLogger(__name__)
FORMAT = 1
LOCK, SALT = "lock", "salt"
ENDING = ".safetensors"
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True)
class Entry:
    """A file of the folder."""

    about: Mapping[str, str]  # as ``Shelf.put`` was given it
    digest: str  # of the tensors' bytes
    num_bytes: int
    used: int  # nanoseconds since 1970


class Shelf:
    """See the module's docstring. Thread-safe but for ``put``, which one thread calls."""

    def __init__(self, folder: str | Path, *, option: str, identity: Mapping[str, Any], max_bytes: int) -> None:
        """option: its name in messages. identity: JSON values; files of another one are not read. max_bytes: of all files
        together. Raises ConfigError where the folder cannot be written to, or another process uses it."""
        self.root, self.option, self.max_bytes = Path(folder), option, max_bytes
        self._identity = dict(json.loads(json.dumps({"format": FORMAT, **identity}, sort_keys=True, default=str)))
        self._has_failed, self._lock = False, RLock()
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            held = os.open(self.root / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise self._unwritable(error) from None
        self._leave = weakref.finalize(self, os.close, held)
        try:
            if not lock_file(held):
                raise ConfigError(
                    f"{option} = {self.root} is in use by another server, and each would delete what the other keeps: give "
                    "each a folder of its own"
                )
            self._salt = self._read_salt()
            self.entries, self._others = self._scan()
        except OSError as error:
            self._leave()
            raise self._unwritable(error) from None
        except BaseException:
            self._leave()
            raise

    def close(self) -> None:
        """Leave the folder to others. Idempotent."""
        self._leave()

    def owner(self, name: str) -> str:
        """What stands for a tenant on the disk: it does not tell the name, and in another folder it is another."""
        return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), key=self._salt, digest_size=16).hexdigest()

    def name_of(self, *parts: str) -> str:
        """The name for what these texts describe; another identity's is another, so neither overwrites the other's."""
        return self.owner(json.dumps([self._identity, *parts]))

    def put(self, name: str, about: Mapping[str, str], tensors: Mapping[str, Tensor]) -> bool:
        """Keep tensors (CPU) by a name; what is there by that name is replaced, unless it is the same. The least recently
        used files go first. False where the disk refuses, or they are larger than all may be: one line says so."""
        data = {key: _flat(tensor) for key, tensor in tensors.items()}
        ordered = sorted(tensors, key=lambda key: (-tensors[key].element_size(), key))  # so that all lie aligned
        digest = hashlib.sha256()
        for key in ordered:
            digest.update(data[key])
        known = self.entries.get(name)
        if known is not None and known.digest == digest.hexdigest() and known.about == dict(about):
            return True
        header = self._header(ordered, tensors, about, digest.hexdigest())
        size = len(header) + sum(len(data[key]) for key in ordered)
        if size > self.max_bytes:
            return self._failed(f"a file of {size} bytes is larger than all of them may be ({self.max_bytes})")
        try:
            self._make_room(size - (0 if known is None else known.num_bytes), name)
            for place in (self._file(name), part_of(self._file(name))):
                if place.is_dir():
                    self._clear(place)
            write_whole(self._file(name), [header, *(data[key] for key in ordered)])
        except OSError as error:
            return self._failed(f"{self._file(name)} cannot be written ({error.strerror or error})")
        self._has_failed = False
        with self._lock:
            self.entries[name] = Entry(dict(about), digest.hexdigest(), size, time.time_ns())
        return True

    def get(self, name: str) -> dict[str, Tensor] | None:
        """The tensors by a name, views of the file's content; None where there are none. A file that is damaged is deleted,
        what is no file is moved aside, and one line says so."""
        entry = self.entries.get(name)
        if entry is None:
            return None
        try:
            header, start, mapped = _open(self._file(name))
            if hashlib.sha256(memoryview(mapped)[start:]).hexdigest() != header["__metadata__"]["digest"]:
                raise ValueError("its content is not what was written")
            found = {key: _tensor(mapped, start, about) for key, about in header.items() if key != "__metadata__"}
        except Exception as error:  # of JSON, of the system, of torch: whatever a damaged file may cause
            self._clear(self._file(name), error)
            self.drop(name)
            return None
        self._use(name)
        return found

    def peek(self, name: str, key: str) -> Tensor:
        """One tensor by a name, not checked. Raises OSError, ValueError or KeyError."""
        header, start, mapped = _open(self._file(name))
        return _tensor(mapped, start, header[key])

    def drop(self, name: str) -> None:
        """Delete what is kept by a name."""
        with self._lock:
            self.entries.pop(name, None)
            self._others.pop(name, None)
        self._clear(self._file(name))

    @property
    def num_bytes(self) -> int:
        """Of all files, those of other identities too."""
        return sum(entry.num_bytes for entry in self._all().values())

    # -- inside ----------------------------------------------------------------------------------------------------

    def _all(self) -> dict[str, Entry]:
        with self._lock:
            return {**self.entries, **self._others}

    def _file(self, name: str) -> Path:
        return self.root / f"{name}{ENDING}"

    def _unwritable(self, error: OSError) -> ConfigError:
        inside = error.filename and Path(error.filename) != self.root
        which = f"{Path(error.filename).name} there: " if inside else ""
        return ConfigError(f"{self.option} = {self.root} cannot be written to: {which}{error.strerror or error}")

    def _clear(self, file: Path, error: Exception | None = None) -> None:
        """Make room for a file of this name: one that cannot be read is deleted; a folder, which somebody else has made, is
        moved aside. One line says what was done, and why it was not."""
        try:
            if file.is_dir() and not file.is_symlink():
                aside = file.with_name(f"{file.name}.{secrets.token_hex(4)}.aside")
                file.rename(aside)
                log.warning("%s: %s is a folder; it is now %s", self.option, file, aside.name)
                return
            file.unlink(missing_ok=True)
        except OSError as left:
            log.warning("%s: %s is not used, and stays (%s)", self.option, file, left.strerror or left)
            return
        if error is not None:
            log.warning("%s: %s is damaged and deleted (%s)", self.option, file, error)

    def _failed(self, reason: str) -> bool:
        """One line, not one a minute: the next after something could be written again."""
        if not self._has_failed:
            log.warning("%s: %s; serving goes on, and it is tried again", self.option, reason)
        self._has_failed = True
        return False

    def _read_salt(self) -> bytes:
        file = self.root / SALT
        if not file.is_file() or file.stat().st_size != 32:
            self._clear(file)
            write_whole(file, [secrets.token_bytes(32)])
        return file.read_bytes()

    def _header(
        self, ordered: list[str], tensors: Mapping[str, Tensor], about: Mapping[str, str], digest: str
    ) -> bytes:
        at, header = 0, dict[str, Any]()
        known = {"identity": json.dumps(self._identity, sort_keys=True), "digest": digest, "about": json.dumps(about)}
        header["__metadata__"] = known
        for key in ordered:
            tensor = tensors[key]
            size = tensor.numel() * tensor.element_size()
            kind = _NAMES[tensor.dtype]
            header[key] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header).encode()
        text += b" " * (-(8 + len(text)) % 64)
        return len(text).to_bytes(8, "little") + text

    def _scan(self) -> tuple[dict[str, Entry], dict[str, Entry]]:
        """(those of this identity, the others), by name. What was being written when a process was killed is deleted."""
        mine, others = dict[str, Entry](), dict[str, Entry]()
        difference = None
        for left in self.root.glob(part_of(Path("*" + ENDING)).name):
            self._clear(left)
        for file in sorted(self.root.glob("*" + ENDING)):
            try:
                about, known = file.stat(), _open(file)[0]["__metadata__"]
                was = parse_json(known["identity"])
                entry = Entry(parse_json(known["about"]), known["digest"], about.st_size, about.st_mtime_ns)
            except Exception as error:  # whatever a damaged file may cause
                self._clear(file, error)
                continue
            found = first_difference(was, self._identity)
            difference = difference or found
            (mine if found is None else others)[file.stem] = entry
        if difference is not None:
            key, old, new = difference
            log.warning(
                "%s: %d files in %s are not used: they were made with %s = %r, and now %s is %r; they go for want of room",
                self.option, len(others), self.root, key, old, key, new,
            )  # fmt: skip
        return mine, others

    def _make_room(self, size: int, name: str) -> None:
        """Delete the least recently used files, but this one, until so many bytes more fit."""
        for old, _ in sorted(self._all().items(), key=lambda item: item[1].used):
            if self.num_bytes + size <= self.max_bytes:
                return
            if old != name:
                self.drop(old)

    def _use(self, name: str) -> None:
        with self._lock, contextlib.suppress(OSError, KeyError):
            self.entries[name] = replace(self.entries[name], used=time.time_ns())
            os.utime(self._file(name))


def _flat(tensor: Tensor) -> memoryview:
    """A tensor's bytes."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _open(file: Path) -> tuple[dict[str, Any], int, mmap.mmap]:
    """(header, where the data begin, the content) of a file. Raises OSError; ValueError where it is cut short, or none."""
    if not file.is_file():  # a pipe would wait for somebody to write
        raise ValueError("it is no file" if file.exists() else "it is not there")
    with file.open("rb") as stream:
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    length = int.from_bytes(mapped[:8], "little")
    if 8 + length > len(mapped):
        raise ValueError(f"it has {len(mapped)} bytes, and its header alone {8 + length}")
    header = parse_json(mapped[8 : 8 + length])
    ends = [about["data_offsets"][1] for key, about in header.items() if key != "__metadata__"]
    if 8 + length + max(ends, default=0) != len(mapped):
        raise ValueError(f"it has {len(mapped)} bytes, its header says {8 + length + max(ends, default=0)}")
    return header, 8 + length, mapped


def _tensor(mapped: mmap.mmap, start: int, about: Mapping[str, Any]) -> Tensor:
    dtype, (begin, end) = _DTYPES[about["dtype"]], about["data_offsets"]
    count = (end - begin) // dtype.itemsize
    if not count:
        return torch.empty(about["shape"], dtype=dtype)
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=start + begin).view(about["shape"])
