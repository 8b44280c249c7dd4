"""The header of a GGUF file, checked, and its data mapped: nothing is copied until a tensor is read.

The format: magic, version, counts; metadata as typed key-value pairs; a table of tensors; aligned data (GGUF
specification, version 3). The gguf library's reader is the slow twin: it makes a numpy array of each of 300,000 strings
(4 to 14 s for a vocabulary of 150,000), and reads past the end of a file that was cut short.
"""

import struct
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from numpy.typing import NDArray

from foretell.core.errors import ModelError
from foretell.core.platform import forget_pages

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
_ALIGNMENT = 32  # where the file states none
_REMOVED = {4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8"}
_REMOVED |= {36: "IQ4_NL_4_4 (or I2_S of Microsoft's BitNet)", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"}
_OLDER = (b"lmgg", b"fmgg", b"tjgg", b"algg")  # what began such files before August 2023
_FORMATS = {  # of values of fixed size
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


Listed = TypeVar("Listed", str, int, float)
"""Of a list of the tokenizer's metadata."""


class TensorInfo(NamedTuple):
    """Where one tensor is, and how it is stored."""

    kind: str  # "F32", "Q4_K", ... as the gguf library names them
    shape: tuple[int, ...]  # rows first, as torch has it
    offset: int  # bytes from the start of the file
    size: int  # bytes


@dataclass(frozen=True)
class GGUFFile:
    """An open file. ``data`` maps the whole of it, one page when it is first read."""

    path: Path
    name: str  # what the user called it, for messages
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    data: NDArray[np.uint8]

    @property
    def where(self) -> str:
        """How messages begin."""
        return called(self.name, self.path)

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The bytes of one tensor, in the mapping. Never written to."""
        info = self.tensors[name]
        return self.data[info.offset : info.offset + info.size]

    def release(self) -> None:
        """Let the system take back the pages that were read, where it can be told: they are read again when needed."""
        forget_pages(getattr(self.data, "_mmap", None))

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the metadata; in key, ``{arch}`` is the file's architecture."""
        return self.metadata.get(key.replace("{arch}", str(self.metadata.get("general.architecture"))), default)


def listed(file: GGUFFile, key: str, kind: type[Listed], *more: type) -> list[Listed]:
    """A list of the tokenizer's metadata, empty where there is none. more: other types that its values may have. Raises
    ModelError where it is anything else."""
    value = file.get(f"tokenizer.ggml.{key}")
    if value is None:
        return []
    if not isinstance(value, list) or not all(issubclass(each, (kind, *more)) for each in {type(one) for one in value}):
        shown = repr(value) if len(repr(value)) < 40 else f"{repr(value)[:40]}..."
        expected = f"expected a list of {kind.__name__}"
        raise ModelError(f"{file.where} is damaged: tokenizer.ggml.{key} is {shown}; {expected}")
    return value


def called(name: str, path: Path) -> str:
    """What the user called a file, and, where that was another name, the file."""
    return name if Path(name).name == path.name else f"{name}: {path.name}"


def is_gguf(path: Path) -> bool:
    """Whether a file is, or is meant to be, a GGUF file: by its first bytes, or by its suffix."""
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        return stream.read(4) == MAGIC or path.suffix.lower() == ".gguf"


def open_gguf(path: Path, *, name: str) -> GGUFFile:
    """Read a file's header. Raises ModelError, in one line, for anything that is no whole GGUF file of this machine's
    byte order in one part."""
    state = path.stat()
    return _open(path, name, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=1)  # weights, configuration and tokenizer are read one after the other
def _open(path: Path, name: str, changed: int, size: int) -> GGUFFile:
    if size < 24:
        raise ModelError(f"{called(name, path)} has {size} bytes, too few for a GGUF file; download it again")
    # Copy on write, so that tensors of it may be handed to libraries that ask for writable memory; nobody writes.
    data = np.memmap(path, dtype=np.uint8, mode="c")
    return _Reader(path, name, data).read()


class _Reader:
    """A position in a file, and what is read there. Every read is checked against the end of the file."""

    def __init__(self, path: Path, name: str, data: NDArray[np.uint8]) -> None:
        self.path, self.name, self.data = path, name, data
        self.buffer = memoryview(data)  # type: ignore[arg-type]  # numpy says so from 3.12 on
        self.at = 0

    def fail(self, what: str) -> NoReturn:
        raise ModelError(f"{called(self.name, self.path)} {what}")

    def read(self) -> GGUFFile:
        """The whole header."""
        magic = bytes(self.buffer[:4])
        if magic != MAGIC:
            older = "a GGML file of before GGUF: convert the model again; " if magic in _OLDER else ""
            self.fail(f"is no GGUF file: {older}it begins with {magic!r}, not {MAGIC!r}")
        self.at = 4
        version = self.number("I")
        if version & 0xFFFF == 0:
            self.fail("is a big-endian GGUF file; expected little-endian: convert it (gguf-convert-endian FILE little)")
        if version not in VERSIONS:
            self.fail(f"is GGUF version {version}; versions 2 and 3 can be read")
        num_tensors, num_pairs = self.number("Q"), self.number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self.text()
            if key in metadata:
                self.fail(f"is damaged: it states {key!r} twice; download it again")
            metadata[key] = self.value(self.number("I"))
        parts, part = metadata.get("split.count", 0), metadata.get("split.no", 0)
        if type(parts) is not int or type(part) is not int:
            self.fail(f"is damaged: it says that it is part {part!r} of {parts!r}; download it again")
        if parts > 1:
            self.fail(
                f"is part {part + 1} of {parts}; expected one file: join them (llama-gguf-split --merge FIRST OUT)"
            )
        return GGUFFile(self.path, self.name, metadata, self.table(num_tensors, metadata), self.data)

    def table(self, count: int, metadata: dict[str, Any]) -> dict[str, TensorInfo]:
        """The table of tensors; every one lies within the file."""
        found = []
        for _ in range(count):
            name = self.text()
            rank = self.number("I")
            if not 1 <= rank <= MAX_DIMENSIONS:
                self.fail(f"is damaged: tensor {name!r} has {rank} dimensions; download it again")
            shape = tuple(reversed([self.number("Q") for _ in range(rank)]))
            if 0 in shape:
                self.fail(f"is damaged: tensor {name!r} has shape {shape}; download it again")
            found.append((name, shape, self.number("I"), self.number("Q")))
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
            self.fail(f"is damaged: general.alignment is {alignment!r}, not a power of two from 8 on")
        start = -(-self.at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, number, offset in found:
            kind, size = self.measure(name, shape, number)
            if name in tensors or offset % alignment:
                self.fail(f"is damaged at tensor {name!r} (named twice, or not aligned); download it again")
            tensors[name] = TensorInfo(kind, shape, start + offset, size)
        end = max((info.offset + info.size for info in tensors.values()), default=start)
        if end > len(self.data):
            self.fail(f"is cut short: it has {len(self.data)} bytes, its header says {end}; download it again")
        return tensors

    def measure(self, name: str, shape: tuple[int, ...], number: int) -> tuple[str, int]:
        """(kind, bytes) of a tensor."""
        try:
            kind = GGMLQuantizationType(number)
            values, size = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            if number in _REMOVED:
                self.fail(
                    f"holds tensor {name!r} as {_REMOVED[number]}, which llama.cpp reads no more: convert it again"
                )
            self.fail(f"holds tensor {name!r} in unknown quantisation {number}; a newer gguf library may know it")
        if shape[-1] % values:
            self.fail(f"is damaged: rows of tensor {name!r} have {shape[-1]} values, not a multiple of {values}")
        return kind.name, prod(shape) // values * size

    def number(self, format_: str) -> Any:
        """One number."""
        size = struct.calcsize(f"<{format_}")
        self.need(size)
        (value,) = struct.unpack_from(f"<{format_}", self.buffer, self.at)
        self.at += size
        return value

    def text(self) -> str:
        """One string."""
        length = self.number("Q")
        self.need(length)
        self.at += length
        try:
            return str(self.buffer[self.at - length : self.at], "utf-8")
        except UnicodeDecodeError:
            self.fail(f"is damaged: the text at byte {self.at - length} is not UTF-8; download it again")

    def texts(self, count: int) -> list[str]:
        """Several strings, as ``text`` reads them: a tokenizer's 100,000 without five calls for each."""
        buffer, at, length_at, found = self.buffer, self.at, struct.Struct("<Q").unpack_from, []
        try:
            for _ in range(count):
                start = at + 8
                at = start + length_at(buffer, at)[0]
                if at > len(buffer):
                    break
                found.append(str(buffer[start:at], "utf-8"))
        except (struct.error, UnicodeDecodeError):
            pass
        if len(found) < count:  # the slow way says what is wrong, and where
            return [self.text() for _ in range(count)]
        self.at = at
        return found

    def value(self, number: int) -> Any:
        """A value of the type of this number."""
        try:
            kind = GGUFValueType(number)
        except ValueError:
            self.fail(f"is damaged: unknown type {number} of a value at byte {self.at}; download it again")
        if kind == GGUFValueType.STRING:
            return self.text()
        if kind != GGUFValueType.ARRAY:
            return self.number(_FORMATS[kind])
        inner, count = self.number("I"), self.number("Q")
        if inner == GGUFValueType.STRING:
            self.need(8 * count)
            return self.texts(count)
        format_: str
        try:
            format_ = _FORMATS[GGUFValueType(inner)]
        except (ValueError, KeyError):
            self.fail(f"is damaged: an array of type {inner} at byte {self.at}; download it again")
        size = struct.calcsize(f"<{format_}") * count
        self.need(size)
        self.at += size
        return list(struct.unpack_from(f"<{count}{format_}", self.buffer, self.at - size))

    def need(self, count: int) -> None:
        """Raise ModelError where fewer than count bytes are left."""
        if count > len(self.buffer) - self.at:
            self.fail(f"is cut short: its {len(self.buffer)} bytes end inside the header; download it again")
