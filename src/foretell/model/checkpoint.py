"""Checkpoint directories: resolve a name, and check that the files are complete before any library opens them."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from foretell.core.errors import ModelError, nearest
from foretell.core.jsontext import parse_json
from foretell.model.catalogue import BUNDLED, CATALOGUE, pulled
from foretell.model.gguf.file import is_gguf, open_gguf
from foretell.model.packed import BLOCK_KINDS

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")  # each also with ".index.json", naming shards
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_BITS = {  # of a value, by the format's names of types
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}


@dataclass(frozen=True)
class Weights:
    """Facts about weights that are read without loading them."""

    dtype: torch.dtype | None  # of the first floating tensor
    layer_counts: frozenset[int]  # of every numbered stack of modules: layers, and perhaps a vision tower's
    is_quantised: bool = False  # whether the file holds matrices in blocks of small integers


def resolve(name: str, *, code: bool = False) -> Path:
    """The directory of a model or head: bundled, local, or fetched from (or found in the cache of) the Hugging Face hub;
    or a GGUF file, given by its path or pulled by its name.

    A hub id may end in "@" and a revision. code: fetch a model's own Python code too. Raises ModelError for a directory
    or hub id that does not exist, and where the hub cannot be reached.
    """
    if name == "bundled" or name.startswith("bundled/"):
        return _bundled(name)
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if is_gguf(path):
        return path
    if path.exists():
        raise ModelError(
            f"{name} is a file; expected a GGUF file, or the directory that holds config.json and the weights"
        )
    if path.suffix.lower() == ".gguf":
        raise ModelError(f"file {name} does not exist")
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name:
        raise ModelError(f"directory {name} does not exist")
    if name in CATALOGUE:
        file = pulled(name)
        if file is None:
            size = f"{CATALOGUE[name].size / 1e6:.0f} MB"
            raise ModelError(f"{name} is not here yet ({size}): fetch it with 'foretell pull {name}'")
        return file
    return _from_hub(name, code=code)


def _bundled(name: str) -> Path:
    from foretell import bundled  # imported here: not needed to load any other model

    try:
        path: Path = Path(bundled.path(name.removeprefix("bundled").removeprefix("/") or "target"))
    except KeyError as error:
        raise ModelError(f"{name}: {error.args[0]}") from None
    if not path.is_dir():
        raise ModelError(f"{name} is not part of this installation; expected {path}")
    return path


def _from_hub(name: str, *, code: bool) -> Path:
    model_id, _, revision = name.partition("@")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    small = ["*.json", "*.txt", "*.model", "*.jinja", "tokenizer*", *(["*.py"] if code else [])]
    try:
        path = Path(snapshot_download(model_id, revision=revision or None, allow_patterns=[*small, "*.safetensors"]))
        if not any(path.glob("*.safetensors")):
            patterns = [*small, "*.bin", "*.pt"]
            path = Path(snapshot_download(model_id, revision=revision or None, allow_patterns=patterns))
    except HFValidationError as error:
        raise ModelError(f"{name!r} is neither a directory nor a Hugging Face id (owner/name)") from error
    except GatedRepoError as error:
        raise ModelError(
            f"{name} is gated on the Hugging Face hub: accept its terms there and run 'hf auth login'"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(f"{model_id} has no revision {revision!r} on the Hugging Face hub") from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"there is no directory {name} here and no model {name} on the Hugging Face hub{_meant(name)}"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"there is no directory {name} here, it is not in the Hugging Face cache, and the hub cannot be reached: "
            f"check the network, or give the directory of a downloaded model{_meant(name)}"
        ) from error
    except Exception as error:  # network libraries raise many kinds of errors
        raise ModelError(f"{name} could not be fetched from the Hugging Face hub: {error}") from error
    return path


def _meant(name: str) -> str:
    """A hint where a name is nearly one of the catalogue's; empty else."""
    hint = nearest(name, [*CATALOGUE, *BUNDLED])
    return hint if "did you mean" in hint else ""


def check_files(path: Path, *, name: str) -> Weights:
    """Look at a directory's files, or at a GGUF file, without loading them.

    Raises ModelError for a missing config.json, no weights, a shard that the index names and that is absent, a Git LFS
    pointer in place of a file, and a safetensors or GGUF file that is cut short, damaged or of an unknown kind.
    """
    if path.is_file():
        return _check_gguf(path, name=name)
    if not (path / "config.json").is_file():
        raise ModelError(f"{name}: no config.json in {path}; expected the directory of a Hugging Face model")
    files = [path / file for file in WEIGHT_FILES if (path / file).is_file()]
    indices = [path / f"{file}.index.json" for file in WEIGHT_FILES if (path / f"{file}.index.json").is_file()]
    if not files and not indices:
        raise ModelError(f"{name}: no weights in {path}; expected model.safetensors or model.safetensors.index.json")
    keys: list[str] = []
    if not files:
        shard_of = read_index(indices[0], name=name)
        keys = list(shard_of)
        shards = sorted(set(shard_of.values()))
        absent = [shard for shard in shards if not (path / shard).is_file()]
        if absent:
            raise ModelError(
                f"{name}: {len(absent)} of {len(shards)} weight files are missing from {path} ({absent[0]}, named in "
                f"{indices[0].name}); download them again"
            )
        files = [path / shard for shard in shards]
    tensors: dict[str, Any] = {}
    for file in files:
        if file.suffix == ".safetensors":
            tensors |= read_header(file, name=name)
    dtypes = (DTYPES[tensor["dtype"]] for tensor in tensors.values() if tensor["dtype"] in DTYPES)
    return Weights(next(dtypes, None), _layer_counts([*keys, *tensors]))


def _check_gguf(path: Path, *, name: str) -> Weights:
    from foretell.model.gguf.weights import GGUFWeights  # imported here: it imports what imports this module

    source = GGUFWeights(open_gguf(path, name=name))
    float_kinds = source.kinds & DTYPES.keys()
    dtype = DTYPES[next(iter(float_kinds))] if float_kinds == source.kinds and len(float_kinds) == 1 else torch.bfloat16
    return Weights(dtype, _layer_counts(source.names), not source.kinds.isdisjoint(BLOCK_KINDS))


def check_layers(weights: Weights, config: Any, *, name: str) -> None:
    """Raise ModelError where the weights have another number of layers than the configuration.

    Every implementation would silently drop surplus layers, and a truncated model still produces text.
    """
    text = config.get_text_config()
    num_layers = int(text.num_hidden_layers)
    # DeepSeek and its kin keep layers of multi-token prediction after the model's own.
    most = num_layers + int(getattr(text, "num_nextn_predict_layers", None) or 0)
    counts = weights.layer_counts
    if counts and not any(num_layers <= count <= most for count in counts):
        raise ModelError(
            f"{name}: the weights do not match config.json: num_hidden_layers is {num_layers}, but they hold "
            f"{' and '.join(map(str, sorted(counts)))} layers; expected both of one checkpoint"
        )


def _layer_counts(keys: Iterable[str]) -> frozenset[int]:
    """How many entries each numbered stack has: one more than the largest number after each prefix."""
    largest: dict[str, int] = {}
    for key in keys:
        if match := re.match(r"(.*?)\.(\d+)\.", key):
            largest[match[1]] = max(largest.get(match[1], 0), int(match[2]))
    return frozenset(number + 1 for number in largest.values())


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
