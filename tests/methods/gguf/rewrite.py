"""A GGUF file with some of its keys and tensors in other words."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from foretell.checkpoints.gguf.file import open_gguf


def rewrite(
    path: Path,
    out: Path,
    *,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
    kinds: Mapping[str, str] | None = None,
) -> Path:
    """keys and tensors: other or further ones (arrays in float32), None for leaving one out; kinds: tensor -> the blocks
    that it is quantised to."""
    file = open_gguf(path, name="it")
    metadata = {**file.metadata, **(keys or {})}
    writer = GGUFWriter(out, metadata.pop("general.architecture"))
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, info in file.tensors.items():
        if name in (tensors or {}):
            continue
        number = GGMLQuantizationType[info.kind]
        raw = file.raw(name).reshape(*info.shape[:-1], -1).copy()
        if name in (kinds or {}):
            number = GGMLQuantizationType[(kinds or {})[name]]
            raw = quantize(raw.view(np.float32), number)
        if info.kind == "F32" and raw.dtype == np.uint8 and name not in (kinds or {}):
            writer.add_tensor(name, raw.view(np.float32))
        else:
            writer.add_tensor(name, raw.view(np.int64) if info.kind == "I64" else raw, raw_dtype=number)
    for name, array in (tensors or {}).items():
        if array is not None:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value:
        writer.add_array(key, value)
