"""Values of a GGUF file's metadata, checked: a number that cannot be is said with its key."""

import math
from typing import Any, NoReturn

import numpy as np

from foretell.core.errors import ModelError
from foretell.model.gguf.file import GGUFFile


def whole(file: GGUFFile, key: str, default: int | None = None) -> int:
    """A positive number, or the default, which 0 stands for too where that is 0."""
    value = file.get(f"{{arch}}.{key}", default)
    if type(value) is not int or value < (0 if default == 0 else 1):
        refuse(file, key, "expected a positive number")
    return value


def decimal(file: GGUFFile, key: str, default: float | None = None) -> float:
    """A float32 of the file, a base, a factor or an epsilon, as the shortest decimal that it stands for."""
    value = file.get(f"{{arch}}.{key}", default)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        refuse(file, key, "expected a positive number")
    return float(str(np.float32(value)))


def depth(file: GGUFFile) -> tuple[int, int]:
    """(layers of the model, layers of multi-token prediction after them), which a file counts together."""
    heads = whole(file, "nextn_predict_layers", 0)
    layers = whole(file, "block_count") - heads
    if layers < 1:
        refuse(file, "nextn_predict_layers", f"expected fewer than the {layers + heads} layers")
    return layers, heads


def each(file: GGUFFile, key: str, num_layers: int, kind: type, default: Any = None) -> list[Any]:
    """One value of this kind a layer; a single one of the file stands for all layers."""
    value = file.get(f"{{arch}}.{key}", default)
    found = value if isinstance(value, list) else [value] * num_layers
    if len(found) != num_layers or not all(type(one) is kind for one in found):
        refuse(file, key, f"expected {kind.__name__}, one or {num_layers} of them")
    return found


def refuse(file: GGUFFile, key: str, expected: str) -> NoReturn:
    """Raise ModelError for the value of a key."""
    arch, value = file.get("general.architecture"), file.get(f"{{arch}}.{key}")
    raise ModelError(f"{file.name}: {file.path.name} states {arch}.{key} = {value!r:.80}; {expected}")
