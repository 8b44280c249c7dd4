"""Values of a GGUF file's metadata, checked: a number that cannot be is said with its key."""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np

from foretell.checkpoints.gguf.file import GGUFFile
from foretell.core.errors import ModelError

logger = logging.getLogger(__name__)
_INERT = ("vocab_size", "tensor_data_layout", "pooling_type", "classifier.", "block_count", "context_length")
"""Keys, and beginnings of keys, that change nothing that a decoder computes."""
_SIZES = (
    "embedding_length_out", "feed_forward_length", "expert_feed_forward_length", "expert_count", "expert_used_count",
    "expert_shared_feed_forward_length", "expert_shared_count", "moe_latent_size", "attention.layer_norm_epsilon",
)  # fmt: skip
"""Keys that repeat the shapes of tensors, of which only those that the model has are read, and the epsilon of norms that
only heads for drafts have."""
# Beside 0, False and nothing: what llama.cpp writes where a model has no such thing
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "expert_group_count": (1,),
    "expert_group_used_count": (1,),
    "expert_weights_scale": (1.0,),
    "rope.scaling.finetuned": (True,),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_beta_fast": (32.0,),
    "rope.scaling.yarn_beta_slow": (1.0,),
}


class _AskedKeys(dict[str, Any]):
    """Metadata that know which of their keys were asked for."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        super().__init__(metadata)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


@contextmanager
def all_read(file: GGUFFile) -> Iterator[GGUFFile]:
    """The file, of which all that its architecture states is to be read inside. What was not, and could change what a model
    computes, is said in one line: a newer key, or one that models of this architecture do not have."""
    metadata = _AskedKeys(file.metadata)
    yield replace(file, metadata=metadata)
    prefix = f"{file.get('general.architecture')}."
    keys = [key for key in metadata if key.startswith(prefix) and key not in metadata.asked]
    odd = [key for key in keys if not _is_neutral(key.removeprefix(prefix), metadata[key])]
    if odd:
        stated = ", ".join(f"{key} = {metadata[key]!r:.40}" for key in odd)
        say(f"{file.where} states {stated}, which nothing here reads: the model may need it")


def _is_neutral(key: str, value: Any) -> bool:
    if key.startswith(_INERT) or key in _SIZES:
        return True
    if isinstance(value, list):
        return not any(each and each != -1 for each in value)
    return not value or value in _NEUTRAL.get(key, ())


@lru_cache(maxsize=64)
def say(line: str) -> None:
    """Once, although a file is read several times."""
    logger.warning("%s", line)


def whole(file: GGUFFile, key: str, default: int | None = None) -> int:
    """A positive number, one for each layer where they are all alike, or the default, which 0 stands for too where that is
    0."""
    value = file.get(f"{{arch}}.{key}", default)
    if isinstance(value, list) and value == value[:1] * (file.get("{arch}.block_count") or 0):
        value = value[0] if value else None
    if type(value) is not int or value < (0 if default == 0 else 1):
        refuse(file, key, "expected a positive number")
    return value


def decimal(file: GGUFFile, key: str, default: float | None = None, *, zero: bool = False) -> float:
    """A float32 of the file, a base, a factor or an epsilon, as the shortest decimal that it stands for. zero: 0 stands for
    the default."""
    value = file.get(f"{{arch}}.{key}", default)
    value = default if zero and type(value) in (int, float) and not value else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
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
    if kind is bool and isinstance(value, list) and all(type(one) is int and one in (0, 1) for one in found):
        found = [bool(one) for one in found]
    if len(found) != num_layers or not all(type(one) is kind for one in found):
        refuse(file, key, f"expected {kind.__name__}, one or {num_layers} of them")
    return found


def only(file: GGUFFile, key: str, allowed: Any, why: str) -> None:
    """Raise ModelError where a file states anything but the only value that a model of its architecture has here."""
    if file.get(f"{{arch}}.{key}", allowed) != allowed:
        refuse(file, key, f"expected {allowed!r}: {why}")


def refuse(file: GGUFFile, key: str, expected: str) -> NoReturn:
    """Raise ModelError for the value of a key."""
    arch, value = file.get("general.architecture"), file.get(f"{{arch}}.{key}")
    raise ModelError(f"{file.where} states {arch}.{key} = {value!r:.80}; {expected}")
