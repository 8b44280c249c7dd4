"""Other files made of a GGUF file: metadata changed, tensors left out, matrices quantised."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import quantize


def change(
    path: Path,
    out: Path,
    *,
    metadata: Mapping[str, Any] | None = None,
    dropped: Collection[str] = (),
    renamed: Mapping[str, str] | None = None,
    replaced: Mapping[str, Any] | None = None,
    kind: str | None = None,
) -> Path:
    """metadata: values of keys that are there, None leaves one out. renamed, replaced: tensors by their old names, replaced
    ones by float32 arrays, or by (blocks, their kind). kind: of the blocks of all matrices but the embedding and those
    of too few columns."""
    reader, asked = GGUFReader(path), metadata or {}
    name = asked.get("general.architecture", reader.fields["general.architecture"].contents())
    writer = GGUFWriter(out, name)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value = asked.get(field.name, field.contents())
        if value is not None:
            inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, value, field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        if tensor.name in dropped:
            continue
        data: Any = (replaced or {}).get(tensor.name, tensor.data)
        if isinstance(data, tuple):
            writer.add_tensor(tensor.name, data[0], raw_dtype=GGMLQuantizationType[data[1]])
            continue
        blocks = kind is not None and data.ndim > 1 and data.shape[-1] % 32 == 0 and tensor.name != "token_embd.weight"
        if blocks and "ffn_gate_inp" not in tensor.name:
            number = GGMLQuantizationType[str(kind)]
            writer.add_tensor((renamed or {}).get(tensor.name, tensor.name), quantize(data, number), raw_dtype=number)
        else:
            writer.add_tensor((renamed or {}).get(tensor.name, tensor.name), np.array(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out
