"""Heads for which no other engine has a layout: config.json is the head's configuration, names are the head's own."""

import dataclasses
import typing
from typing import Any, ClassVar

from foretoken.errors import ConfigError, ModelError
from foretoken.heads.acceptance import AcceptanceConfig, AcceptanceHead
from foretoken.heads.base import HeadConfig
from foretoken.heads.formats.keys import Keys
from foretoken.heads.formats.layout import MARKER, Found, Layout, Target, some
from foretoken.heads.judge import JudgeConfig, JudgeWeights
from foretoken.heads.kangaroo import KangarooConfig, KangarooHead

OURS = ("architectures", "dtype", "torch_dtype", MARKER)
"""Keys of config.json that are not the head's configuration."""


class Own(Layout):
    """A flat config.json."""

    config: ClassVar[type[HeadConfig]]

    def describe(self, head: Any, target: Target) -> dict[str, Any]:
        """Every field of the configuration."""
        return {"architectures": [self.architectures[0]], **head.config.as_dict()}

    def parse(self, found: Found) -> HeadConfig:
        """Every field, of its type; fields that have defaults may be absent."""
        fields = {field.name: field for field in dataclasses.fields(self.config)}
        unknown = found.keys.values.keys() - fields.keys() - set(OURS)
        if unknown:
            raise ModelError(
                f"{found.name}: config.json has {some(unknown)}, which no {self.head.method} head knows; it may be of a "
                "later version of foretoken"
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


class Kangaroo(Own):
    """The adapter; its tensors are named as in the authors' AdapterModel."""

    name = "kangaroo"
    summary = "Kangaroo's adapter (foretoken alone)"
    head = KangarooHead
    config = KangarooConfig
    architectures = ("ForetokenKangaroo",)


class Acceptance(Own):
    """SpecDec++'s acceptance head."""

    name = "acceptance"
    summary = "SpecDec++'s acceptance head (foretoken alone)"
    head = AcceptanceHead
    config = AcceptanceConfig
    architectures = ("ForetokenAcceptance",)


class Judge(Own):
    """The judge's linear head."""

    name = "judge"
    summary = "the judge's head (foretoken alone)"
    head = JudgeWeights
    config = JudgeConfig
    architectures = ("ForetokenJudge",)
