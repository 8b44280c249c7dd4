"""Read a config.json of other tools key by key: errors name the key that is absent, wrong or unsupported."""

import dataclasses
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from foretell.core.errors import ConfigError, ModelError, require
from foretell.core.settings import settle

RANGES: dict[str, tuple[int, int]] = {
    "hidden_size": (1, 2**20), "vocab_size": (1, 2**26), "draft_vocab_size": (1, 2**26), "columns": (1, 2**20),
    "intermediate_size": (1, 2**22), "num_heads": (1, 2**12), "num_kv_heads": (1, 2**12), "head_dim": (1, 2**12),
    "num_layers": (0, 2**10), "block_size": (1, 2**10), "markov_rank": (0, 2**16), "tap_layer": (0, 2**16),
    "layer": (0, 2**16), "exit_layer": (1, 2**16), "mask_token_id": (0, 2**26),
}  # fmt: skip
"""Least and largest value by a field's name: beyond every model known, and small enough that products of a few of them fit
into 64 bits."""
SHARES = {"rms_norm_eps": (0.0, 1.0), "eps": (0.0, 1.0), "rope_theta": (1.01, 1e11)}
"""Least and largest of numbers that need not be whole."""
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def check_sizes(config: Any) -> None:
    """Bring the fields of a head's configuration to their types, and raise ModelError for the first that is of another one,
    not finite or out of range.

    A size is looked at before anything is allocated: a damaged config.json costs one line, not the machine's
    memory.
    """
    try:
        settle(config)
    except ConfigError as error:
        raise ModelError(str(error)) from None
    for field in dataclasses.fields(config):
        name, value = field.name, getattr(config, field.name)
        if value is None:  # where its type allows that
            continue
        if name in RANGES:
            least, most = RANGES[name]
            require(least <= value <= most, name, value, f"between {least} and {most}", ModelError)
        elif isinstance(value, float):
            low, high = SHARES.get(name, (-sys.float_info.max, sys.float_info.max))
            require(low <= value <= high, name, value, f"a number between {low:g} and {high:g}", ModelError)
        elif name in ("layer_ids", "windows"):
            _check_all(value, name, 2**16 if name == "layer_ids" else 2**40)


def _check_all(values: Iterable[int], name: str, most: int) -> None:
    values = list(values)
    require(all(0 <= value <= most for value in values), name, values, f"numbers between 0 and {most}", ModelError)


def check_ids(ids: Tensor, size: int, vocab_size: int, *, name: str, of: str, hint: str = "") -> None:
    """Raise ModelError unless ids [size], of an integer dtype, are different tokens of a vocabulary: native code writes at
    these places unchecked. name: of the checkpoint; of: the tensor that holds them; hint: how it does."""
    if ids.shape != (size,) or ids.dtype not in _INTEGERS:
        kind = str(ids.dtype).removeprefix("torch.")
        raise ModelError(f"{name}: {of} is {list(ids.shape)} of {kind}, expected [{size}] whole numbers{hint}")
    found = ids.long().sort().values
    if not size or int(found[0]) < 0 or int(found[-1]) >= vocab_size or not bool((found[1:] > found[:-1]).all()):
        raise ModelError(
            f"{name}: {of} does not lead to {size} different ids of a vocabulary of {vocab_size}{hint}; it is damaged, or "
            "of another target"
        )


def check_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Raise ModelError where attention's sizes do not go together."""
    if head_dim % 2 or num_heads % num_kv_heads:
        raise ModelError(
            f"num_heads = {num_heads} must be a multiple of num_kv_heads = {num_kv_heads}, and head_dim = {head_dim} even"
        )


MOST = 2**53
"""Largest whole number that every reader of JSON takes for the same."""
MOST_LAYERS = RANGES["num_layers"][1]


class Keys:
    """The keys of one JSON object. Every method raises ModelError; without a default, a key must be there."""

    def __init__(self, values: Mapping[str, Any], name: str, prefix: str = "") -> None:
        self.values, self.name, self.prefix = values, name, prefix
        self.read: set[str] = set()
        """The keys that were read, present or not."""

    def __contains__(self, key: str) -> bool:
        """Whether the key is there and not null."""
        self.read.add(key)
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number."""
        value = self._get(key, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not abs(value) <= MOST
            or value != int(value)
        ):
            raise self.wrong(key, "a whole number")
        return int(value)

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value = self.integer(key, default)
        if value < 1:
            raise self.wrong(key, "at least 1")
        return value

    def layers(self, key: str, default: int | None = None) -> int:
        """A number of layers, of which lists and modules are made before the weights are compared with it."""
        value = self.size(key, default)
        if value > MOST_LAYERS:
            raise self.wrong(key, f"at most {MOST_LAYERS}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
            raise self.wrong(key, "a number")  # NaN, too
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """True or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers."""
        value = self._get(key, None)
        if not isinstance(value, list) or any(isinstance(item, bool) or not isinstance(item, int) for item in value):
            raise self.wrong(key, "a list of whole numbers")
        return tuple(value)

    def inner(self, key: str) -> "Keys":
        """The object under a key; empty where there is none."""
        self.read.add(key)
        value = self.values.get(key)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self.wrong(key, "an object")
        return Keys(value, self.name, f"{self.prefix}{key}.")

    def only(self, key: str, allowed: Any, *, default: Any = None) -> None:
        """Refuse a value that is not implemented here."""
        self.read.add(key)
        value = self.values.get(key, default)
        if value is not None and value != allowed:
            raise ModelError(
                f"{self.name}: {self.prefix}{key} is {value!r} in config.json; only {allowed!r} is supported"
            )

    def wrong(self, key: str, expected: str) -> ModelError:
        """The error of a key of the wrong kind."""
        return ModelError(
            f"{self.name}: {self.prefix}{key} is {self.values.get(key)!r} in config.json, expected {expected}"
        )

    def _get(self, key: str, default: Any) -> Any:
        self.read.add(key)
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise ModelError(f"{self.name}: config.json has no {self.prefix + key!r}, which this kind of head needs")
        return default


def rope_theta(keys: Keys, default: float = 10000.0) -> float:
    """Of either spelling (rope_theta, or rope_parameters as transformers 5 writes it). Raises where angles are scaled."""
    for key in ("rope_parameters", "rope_scaling"):
        inner = keys.inner(key)
        kind = inner.values.get("rope_type", inner.values.get("type", "default"))
        if kind != "default":
            raise ModelError(
                f"{keys.name}: {inner.prefix}rope_type is {kind!r} in config.json; only plain rotary positions "
                "('default') are supported"
            )
    return keys.inner("rope_parameters").number("rope_theta", keys.number("rope_theta", default))
