"""Heads for which no other engine has a layout: config.json is the head's configuration, names are the head's own."""

import dataclasses
import typing
from typing import Any, ClassVar

from foretell.core.errors import ConfigError, ModelError
from foretell.heads.config_keys import Keys
from foretell.heads.head import HeadConfig
from foretell.heads.layout import MARKER, FoundLayout, Layout, TargetInfo, some

OURS = ("architectures", "dtype", "torch_dtype", MARKER)
"""Keys of config.json that are not the head's configuration."""


class Own(Layout):
    """A flat config.json."""

    config: ClassVar[type[HeadConfig]]

    def __init_subclass__(cls) -> None:
        """Name the layout after its heads."""
        cls.name = cls.head.method
        cls.architectures = (f"Foretell{cls.name.capitalize()}",)

    def describe(self, head: Any, target: TargetInfo) -> dict[str, Any]:
        """Every field of the configuration."""
        return {"architectures": [self.architectures[0]], **head.config.as_dict()}

    def parse(self, found: FoundLayout) -> HeadConfig:
        """Every field, of its type; fields that have defaults may be absent."""
        fields = {field.name: field for field in dataclasses.fields(self.config)}
        unknown = found.keys.values.keys() - fields.keys() - set(OURS)
        if unknown:
            raise ModelError(
                f"{found.name}: config.json has {some(unknown)}, which no {self.head.method} head knows; it may be of a "
                "later version of foretell"
            )
        types = typing.get_type_hints(self.config)
        values = {
            key: _read(found.keys, key, types[key])
            for key, field in fields.items()
            if key in found.keys
            or (field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING)
        }
        try:
            return self.config(**values)
        except ConfigError as error:
            raise ModelError(f"{found.name}: {error}") from error


def _read(keys: Keys, key: str, kind: Any) -> Any:
    if kind is bool:
        return keys.flag(key)
    if kind is int:
        return keys.integer(key)
    if kind is float:
        return keys.number(key)
    if kind is str:
        return keys.text(key)
    if typing.get_origin(kind) is dict:
        return dict(keys.inner(key).values)
    return keys.integers(key)
