"""Checkpoint directories on disk: tensors are read from any supported file, and files are replaced all or none."""

import json
import math
import os
import shutil
from collections.abc import Iterable, Mapping
from glob import escape
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from foretell.checkpoints.files import PICKLED, SAFETENSORS, read_header, read_json, weight_files
from foretell.core.errors import ConfigError, ModelError, first_line
from foretell.core.platform import process_runs
from foretell.core.whole import write_bytes

WEIGHTS = SAFETENSORS
MEDUSA_WEIGHTS = "medusa_lm_head.safetensors"
WEIGHT_FILES = (WEIGHTS, MEDUSA_WEIGHTS, PICKLED, "medusa_lm_head.pt")
"""Files that hold the weights of a head, in order of preference; each also with ``.index.json``, naming shards."""
HOLDERS = (*WEIGHT_FILES, *(f"{file}.index.json" for file in WEIGHT_FILES))
"""These files and their indices: what a directory that is written anew must not keep."""


def read_config(path: Path, *, name: str) -> dict[str, Any]:
    """config.json of a directory. Raises ModelError where there is none, or it is no JSON object."""
    if not path.is_dir():
        raise ModelError(f"{name}: there is no directory {path}; expected one with config.json and {WEIGHTS}")
    file = path / "config.json"
    if not file.is_file():
        raise ModelError(f"{name}: no config.json in {path}; expected the directory of a trained head")
    config = read_json(file, name=name)
    if not isinstance(config, dict):
        raise ModelError(f"{name}: config.json holds {type(config).__name__}, expected one JSON object")
    return config


def read_tensors(path: Path, *, name: str, prefer: str = WEIGHTS) -> dict[str, Tensor]:
    """Every tensor of a directory, on the CPU, as it was stored.

    prefer: the file that is read where there are several. Raises ModelError where there are no weights, or they are
    damaged.
    """
    known = sorted(WEIGHT_FILES, key=lambda file: file != prefer)  # stable: the preferred one first
    stored = weight_files(path, name=name, known=known)
    held = {file.name: _read(file, name=name) for file in stored.files}
    return {key: held[file][key] for key, file in stored.owners(held).items()}


def _read(file: Path, *, name: str) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        read_header(file, name=name)  # raises a clear error for a damaged file
        try:
            return dict(load_file(file))
        except SafetensorError as error:
            raise ModelError(f"{name}: {file.name} cannot be read ({error}); download it again") from error
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip and torch raise many kinds of errors
        raise ModelError(f"{name}: {file.name} cannot be read ({first_line(error)})") from error
    if not isinstance(found, dict) or not all(isinstance(k, str) and isinstance(t, Tensor) for k, t in found.items()):
        raise ModelError(f"{name}: {file.name} holds no dictionary of tensors")
    return found


def replace(path: Path, files: Mapping[str, bytes], *, stale: Iterable[str] = ()) -> None:
    """Write files into directory path, made where there is none: all of them, or none.

    Everything is written beside and flushed to the disk first, so a full disk or an interruption leaves the old files.
    A new directory then appears by one renaming; in one that exists, each file is renamed into place, in order, and the
    files named stale are deleted. Raises ConfigError where path is a file, and OSError that names what could not be
    written.
    """
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path} is a file; expected a directory, or a place where one can be made")
    fresh = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.parent if fresh else path
    part = beside / f".{path.name}.{os.getpid()}.part"
    for left in beside.glob(f".{escape(path.name)}.*.part"):
        if left == part or not _runs(left.name.split(".")[-2]):  # of a process that was killed
            shutil.rmtree(left, ignore_errors=True)
    part.mkdir()
    try:
        for name, content in files.items():
            _write(part / name, content)
        if fresh:
            part.rename(path)
        else:
            for name in files:
                (part / name).replace(path / name)
            for name in stale:
                (path / name).unlink(missing_ok=True)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _runs(process: str) -> bool:
    """Whether there is a process of that number; for what is no number, there is."""
    return not process.isdecimal() or process_runs(int(process))


def _write(file: Path, content: bytes) -> None:
    try:
        write_bytes(file, content)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from error


def as_json(config: Mapping[str, Any]) -> bytes:
    """A config.json as Hugging Face writes it: sorted, indented. Numbers that JSON does not have become null."""
    return (json.dumps(_finite(config), indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, (list, tuple)) else value
