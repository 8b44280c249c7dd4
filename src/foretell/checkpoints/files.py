"""Which files of a directory hold a model's weights, or a head's, and which of them each tensor is read from: one rule for
every reader, that of transformers. And the headers of safetensors files, their indices, and JSON, checked.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from foretell.core.errors import ModelError
from foretell.core.jsontext import parse_json

SAFETENSORS, PICKLED = "model.safetensors", "pytorch_model.bin"
WEIGHT_FILES = (SAFETENSORS, PICKLED)
"""A model's weights, in transformers' order; each also as "....index.json", which names shards and comes right after it."""
_DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")

_BITS = {  # of a value, by the format's names of types
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}


@dataclass(frozen=True)
class WeightFiles:
    """The files that hold the weights of a directory."""

    files: tuple[Path, ...]  # in the order in which transformers reads them
    # Tensor -> name of its file, by the index; {} without one
    shard_of: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_safetensors(self) -> bool:
        """Whether all of them are, so that their tensors are known without loading them."""
        return all(file.suffix == ".safetensors" for file in self.files)

    def tensors(self, *, name: str) -> dict[str, tuple[Path, dict[str, Any]]]:
        """Of safetensors: the file and the entry in its header of each tensor. Raises ModelError for a damaged file."""
        headers = {file.name: read_header(file, name=name) for file in self.files}
        paths = {file.name: file for file in self.files}
        return {key: (paths[file], headers[file][key]) for key, file in self.owners(headers).items()}

    def owners(self, held: Mapping[str, Collection[str]]) -> dict[str, str]:
        """The file that each tensor is read from, of files and the tensors that each holds: the index's, where that holds
        it; else the last that does, as in transformers."""
        found: dict[str, str] = {}
        for file in (path.name for path in self.files):
            for key in held[file]:
                assigned = self.shard_of.get(key, file)
                if assigned == file or key not in held.get(assigned, ()):
                    found[key] = file
        return found

    def strays(self, *, name: str) -> bool:
        """Whether a reader that merges the files in their order, as transformers does, would take a tensor from another
        file than the index names. Of safetensors alone. Raises ModelError for a damaged file."""
        if len(self.files) < 2 or not self.is_safetensors:
            return False
        held = {file.name: read_header(file, name=name) for file in self.files}
        return self.owners(held) != {key: file.name for file in self.files for key in held[file.name]}


def weight_files(path: Path, *, name: str, known: Sequence[str] = WEIGHT_FILES) -> WeightFiles:
    """The files that hold the weights of a directory: those that config.json names as "transformers_weights", else the
    first of known that is there, or whose index is.

    Raises ModelError where there are none, where a shard is absent that the index names, and for a distributed checkpoint.
    """
    present = sorted(file.name for file in path.iterdir()) if path.is_dir() else []
    if any(map(_DISTRIBUTED.fullmatch, present)):
        raise ModelError(
            f"{name}: {path} holds a distributed checkpoint, of one part for each process; expected a whole one: save the "
            "model with save_pretrained"
        )
    named = _named(path, name=name)
    for file in [named] if named else [each for one in known for each in (one, f"{one}.index.json")]:
        if not (path / file).is_file():
            continue
        if not file.endswith(".index.json"):
            return WeightFiles((path / file,))
        shard_of = read_index(path / file, name=name)
        shards = sorted(set(shard_of.values()))
        absent = [shard for shard in shards if not (path / shard).is_file()]
        if absent:
            raise ModelError(
                f"{name}: {len(absent)} of {len(shards)} weight files are missing from {path} ({absent[0]}, named in "
                f"{file}); download them again"
            )
        return WeightFiles(tuple(path / shard for shard in shards), shard_of)
    if named:
        raise ModelError(f"{name}: config.json names {named} as its weights, which is missing from {path}")
    others = [file for file in present if file.endswith((".safetensors", ".bin", ".pt"))]
    told = f"; it holds {others[0]}, which is no name that is read" if others else ""
    expected = f"{known[0]} or {known[0]}.index.json, as save_pretrained writes them"
    also = f" (or {', '.join(known[1:])})" if len(known) > 1 else ""
    raise ModelError(f"{name}: no weights in {path}; expected {expected}{also}{told}")


def _named(path: Path, *, name: str) -> str | None:
    """The file that config.json names, as transformers takes it. Raises ModelError for one of another kind or place."""
    try:
        named = read_json(path / "config.json", name=name).get("transformers_weights")
    except (OSError, ModelError):  # heads of some tools have none; that it is damaged, those say who read it
        return None
    if named is None:
        return None
    good = isinstance(named, str) and Path(named).name == named
    if not good or not named.endswith((".safetensors", ".safetensors.index.json")):
        raise ModelError(
            f"{name}: config.json names {str(named)[:80]!r} as transformers_weights; expected the name of a safetensors "
            "file beside it, or of the index of several"
        )
    return str(named)


def read_header(file: Path, *, name: str) -> dict[str, Any]:
    """The tensors a safetensors file lists; sizes are checked: 8 bytes of length, JSON, data of one tensor after the other.

    Raises ModelError for a file that is cut short, damaged, or a Git LFS pointer.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        if start == b"version ":
            raise ModelError(
                f"{name}: {file.name} is a Git LFS pointer, not the weights; run 'git lfs pull' in {file.parent}"
            )
        length = int.from_bytes(start, "little")
        if len(start) < 8 or 8 + length > size:
            raise ModelError(
                f"{name}: {file.name} is cut short or no safetensors file ({size} bytes); download it again"
            )
        try:
            header = parse_json(stream.read(length))
        except ValueError as error:
            raise ModelError(f"{name}: {file.name} has no safetensors header; download it again") from error
    if not isinstance(header, dict):
        raise ModelError(f"{name}: {file.name} has no safetensors header; download it again")
    header.pop("__metadata__", None)
    for tensor, entry in header.items():
        wrong = _wrong_entry(entry)
        if wrong:
            raise ModelError(f"{name}: {file.name} is damaged at tensor {tensor!r}: {wrong}; download it again")
    at = 0
    for tensor, (begin, end) in sorted(
        ((tensor, entry["data_offsets"]) for tensor, entry in header.items()), key=lambda each: tuple(each[1])
    ):
        if begin != at:
            raise ModelError(
                f"{name}: {file.name} is damaged at tensor {tensor!r}: its data begin at byte {begin}, where {at} is "
                "expected; download it again"
            )
        at = end
    if size != 8 + length + at:
        raise ModelError(f"{name}: {file.name} has {size} bytes, its header says {8 + length + at}; download it again")
    tensors: dict[str, Any] = header
    return tensors


def _wrong_entry(entry: Any) -> str:
    """What is wrong with a tensor's entry of a safetensors header; empty where nothing is."""
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return f"its entry is {str(entry)[:80]!r}, without a dtype"
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        return f"its shape is {str(shape)[:80]}, its data_offsets are {str(offsets)[:80]}"
    expected, taken = prod(shape) * _BITS.get(entry["dtype"], 0) // 8, offsets[1] - offsets[0]
    if entry["dtype"] in _BITS and taken != expected:
        return f"shape {tuple(shape)} in {entry['dtype']} takes {expected} bytes, not {taken}"
    return ""


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int and 0 <= each < 1 << 63 for each in value)


def read_index(file: Path, *, name: str) -> dict[str, str]:
    """The file of each tensor, by the index of a checkpoint in parts. Raises ModelError where it is no such index."""
    files = read_json(file, name=name).get("weight_map")
    if not isinstance(files, dict) or not all(
        isinstance(each, str) and Path(each).name == each for each in files.values()
    ):
        raise ModelError(
            f"{name}: {file.name} has no 'weight_map' of tensors and the names of files beside it; download it again"
        )
    return files


def read_json(file: Path, *, name: str) -> dict[str, Any]:
    """A JSON object in a file. Raises ModelError for anything else."""
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{name}: {file.name} is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise ModelError(f"{name}: {file.name} holds {type(content).__name__}, expected one JSON object")
    found: dict[str, Any] = content
    return found
