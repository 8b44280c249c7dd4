"""Kinds of fields that requests share."""

import math
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

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
    """Strict types, and unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Returned(Strict):
    """What clients and other servers add to messages, and to their parts. Histories come back with it."""

    id: Ignored = None
    index: Ignored = None
    cache_control: Ignored = None
    extra_content: Ignored = None
    provider_specific_fields: Ignored = None
