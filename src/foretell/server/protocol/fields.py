"""Kinds of fields that requests share."""

import math
from functools import cache
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, WithJsonSchema
from pydantic.functional_validators import AfterValidator, BeforeValidator, model_validator

from foretell.server.unsupported import HOSTED_TOOL, Taken, plain

INT32 = 2**31 - 1
TokenId = Annotated[int, Field(ge=0, le=INT32)]
Text = Annotated[str, Field(min_length=1, max_length=1024)]
Grammar = Annotated[str, Field(min_length=1, max_length=65536)]
Choices = Annotated[list[Text], Field(min_length=1, max_length=1024, fail_fast=True)]


def _finite(given: dict[str, Any]) -> dict[str, Any]:
    """NaN, Infinity and 1e999 are numbers to the reader of bodies. An answer that gives them back would not be JSON."""
    inner: list[Any] = [given]
    while inner:
        one = inner.pop()
        if isinstance(one, float) and not math.isfinite(one):
            raise ValueError(f"{one} is no number of JSON")
        inner += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
    return given


JsonObject = Annotated[dict[str, Any], AfterValidator(_finite)]
Ignored = Annotated[Any, Field(description="Ignored.", exclude=True)]


def _off(given: bool) -> bool:
    if given:
        raise ValueError("only false is taken")
    return given


# A literal false would take 0 as well, which the document does not.
Off = Annotated[bool, AfterValidator(_off), WithJsonSchema({"type": "boolean", "const": False})]
One = Annotated[int, Field(ge=1, le=1)]
"""1 alone: a literal 1 would take true as well."""
Option = (
    bool
    | Annotated[int, Field(ge=-INT32, le=INT32)]
    | Annotated[float, Field(ge=-1e6, le=1e6)]
    | Annotated[str, Field(max_length=256)]
    | None
)
"""A value of a method's own option."""


MAX_TOOLS, MAX_STOPS = 1024, 128
"""This server's own limits, of the protocols that name none. OpenAI's are those of its routes alone."""
TEXT_ALONE = "this server reads text only, of multi-modal models too"


def empty(reason: str) -> BeforeValidator:
    """Of a field that is taken empty alone, as clients send it: any other value has this reason as its error, and not
    that a list has an item too many."""

    def check(given: Any) -> Any:
        if given:
            raise ValueError(reason)
        return given

    return BeforeValidator(check)


NoImages = Annotated[Annotated[list[Any], Field(max_length=0)] | None, empty(f"images are not read: {TEXT_ALONE}")]


class Strict(BaseModel):
    """Strict types. Of unknown fields those that change no text are left out, and all others are refused."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, json_schema_extra={"additionalProperties": True}
    )

    @model_validator(mode="before")
    @classmethod
    def _without_others(cls, given: Any, info: ValidationInfo) -> Any:
        if not isinstance(given, dict) or given.keys() <= (known := names_of(cls)):
            return given
        taken = info.context if isinstance(info.context, Taken) else Taken()
        place = f"{info.field_name}." if info.field_name else ""
        return taken.without_others(given, known, _everywhere(), place)


@cache
def names_of(kind: type[BaseModel]) -> frozenset[str]:
    """The names of a model's fields in JSON."""
    return frozenset(field.alias or name for name, field in kind.model_fields.items())


@cache
def _everywhere() -> frozenset[str]:
    """The names of the fields of all models: where one stands that does not belong there, it was meant."""
    kinds, names = [Strict], set[str]()
    for kind in kinds:
        kinds += kind.__subclasses__()
        names |= names_of(kind)
    return frozenset(map(plain, names))


def _offered(given: Any, info: ValidationInfo) -> Any:
    """Tools without those that a provider's server would run."""
    if not isinstance(given, list):
        return given
    hosted = [one["type"] for one in given if _is_hosted(one)]
    if isinstance(info.context, Taken):
        info.context.names.update(dict.fromkeys(f"tools.{kind}" for kind in hosted))
    return [one for one in given if not _is_hosted(one)] if hosted else given


def _is_hosted(given: Any) -> bool:
    kind = given.get("type") if isinstance(given, dict) else None
    return isinstance(kind, str) and HOSTED_TOOL.fullmatch(kind) is not None


def _of_the_client(given: Any) -> Any:
    if _is_hosted(given):
        raise ValueError(f"{given['type']!r:.64} cannot be called: this server runs no tools itself, clients run them")
    return given


OFFERED, OF_THE_CLIENT = BeforeValidator(_offered), BeforeValidator(_of_the_client)
"""Of a list of tools, and of a choice among them."""
