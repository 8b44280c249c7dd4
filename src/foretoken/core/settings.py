"""Settings: fields of a dataclass, declared once with their help, and read from text, JSON and keywords by pydantic.

pydantic is imported when something is read, so that ``--help`` does not wait for it.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import isnan
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from foretoken.core.errors import ConfigError, nearest

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")
_LISTS: dict[Any, tuple[str, tuple[str, ...]]] = {  # name of the items in messages, and an example
    tuple[int, ...]: ("whole numbers", ("4", "2", "1")),
    tuple[float, ...]: ("numbers", ("0.6", "0.2")),
    tuple[str, ...]: ("texts", ("a", "b")),
}
_KINDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    Mapping[int, float]: "token ids and numbers, e.g. '{\"42\": -5.0}'",
    **{kind: f"a list of {items}" for kind, (items, _) in _LISTS.items()},
}
_KINDS |= {kind | None: called for kind, called in _KINDS.items()}
"""Types of settings, and their names in messages. Values of other types are not checked."""


def setting(default: Any, help: str, **more: Any) -> Any:
    """A field that a user may set, with the metadata from which ``foretoken.cli.fields`` makes an option.

    more: values that differ from the field's name and type: ``option`` (e.g. "--loss-temperature"), ``metavar``,
    ``envvar``, ``panel`` of the help, ``min``, and ``default_text``, the text of the default. A default that is a type is
    called for each instance.
    """
    about = {"help": help, **more}
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=about)
    return dataclasses.field(default=default, metadata=about)


def read(kind: type[T], given: Mapping[str, Any], where: str) -> T:
    """A dataclass of these settings; see ``checked``. Raises ConfigError."""
    return kind(**checked(kind, given, where))


def checked(kind: type, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The settings as the fields of a dataclass hold them. where ends the message about an unknown key ("in X").

    An int is accepted for a float and a list for a tuple; nothing else is converted. Raises ConfigError.
    """
    kinds = field_kinds(kind)
    check_keys(given, kinds, where)
    return {key: value_of(value, kinds[key], key) for key, value in given.items()}


def field_kinds(kind: type) -> dict[str, Any]:
    """The type of each field of a dataclass that its constructor takes."""
    fields = [item for item in dataclasses.fields(kind) if item.init]
    hints = get_type_hints(kind) if any(isinstance(item.type, str) for item in fields) else {}
    return {item.name: hints.get(item.name, item.type) for item in fields}


def check_keys(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """Refuse the first key that is not known, with the nearest that is. Raises ConfigError."""
    known = list(known)
    for key in given:
        if key not in known:
            raise ConfigError(f"unknown key {key!r} {where}{nearest(str(key), known)}")


def value_of(value: object, kind: Any, name: str) -> Any:
    """A value of JSON or a keyword as a setting of this kind. Raises ConfigError."""
    if kind not in _KINDS:
        return value
    if isinstance(value, Real) and not isinstance(value, (int, float)):  # of NumPy
        value = int(value) if isinstance(value, Integral) else float(value)
    asked: object = value
    if _plain(kind) in _LISTS and isinstance(value, list):
        asked = tuple(value)
    try:
        return _adapter(kind).validate_python(asked, strict=True)
    except ValueError:
        raise ConfigError(f"{name} = {value!r} must be {_KINDS[kind]}") from None


def value_of_text(text: str, kind: Any, name: str, *, joined_by: str = "x") -> Any:
    """A setting written as one word, which joins the items of a list. NaN is refused. Raises ConfigError."""
    if kind not in _KINDS:
        raise RuntimeError(f"{name}: fields of kind {kind} cannot be written as text")
    is_list = _plain(kind) in _LISTS
    try:
        made = _adapter(kind).validate_python(tuple(text.split(joined_by)) if is_list else text)
        if any(isinstance(number, float) and isnan(number) for number in (made if is_list else (made,))):
            raise ValueError(text)
        return made
    except ValueError:
        called = _KINDS[kind]
        if is_list:
            items, example = _LISTS[_plain(kind)]
            called = f"{items} joined by {'commas' if joined_by == ',' else joined_by}, e.g. {joined_by.join(example)}"
        raise ConfigError(f"{_said(name, text)} must be {called}") from None


def value_of_json(text: str, kind: Any, name: str) -> Any:
    """A setting written in JSON. Raises ConfigError."""
    try:
        return _adapter(kind).validate_json(text, strict=True)
    except ValueError:
        raise ConfigError(f"{_said(name, text)} must be {_KINDS[kind]}") from None


def _said(name: str, text: str) -> str:
    """As it was given: "--option 'text'", or "field = 'text'"."""
    return f"{name} {text!r}" if name.startswith("--") else f"{name} = {text!r}"


def _plain(kind: Any) -> Any:
    """T of T and of T | None."""
    return next((one for one in _KINDS if kind == one | None), kind) if kind not in _LISTS else kind


@lru_cache(maxsize=64)
def _adapter(kind: Any) -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
