"""Read a config.json of other tools key by key: errors name the key that is absent, wrong or unsupported."""

import sys
from collections.abc import Mapping
from typing import Any

from foretell.core.errors import ModelError
from foretell.heads.config_values import RANGES

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
