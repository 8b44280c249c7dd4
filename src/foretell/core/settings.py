"""Settings: fields of a dataclass, declared once with their help, and read from text, JSON and keywords by pydantic.

pydantic is imported when something is read, so that ``--help`` does not wait for it.
"""

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from math import isnan
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from foretell.core.errors import ConfigError
from foretell.core.places import place_of

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")
_LISTS: dict[Any, tuple[str, tuple[str, ...]]] = {  # name of the items in messages, and an example
    tuple[int, ...]: ("whole numbers", ("4", "2", "1")),
    tuple[float, ...]: ("numbers", ("0.6", "0.2")),
    tuple[str, ...]: ("texts", ("a", "b")),
}
_LISTS |= {Sequence[int]: _LISTS[tuple[int, ...]], Sequence[str]: _LISTS[tuple[str, ...]]}
_TEXTS = (tuple[str, ...], Sequence[str])
_ITEMS: dict[Any, type] = {tuple[int, ...]: int, tuple[float, ...]: float, tuple[str, ...]: str}
_AS_TUPLE = {Sequence[int]: tuple[int, ...], Sequence[str]: tuple[str, ...]}
"""Kinds that are declared as sequences, so that callers may give any, and held as tuples."""
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
    """A field that a user may set, with the metadata from which ``foretell.cli.fields`` makes an option.

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
    """Refuse the first key that is not known, with the place where it belongs, or the nearest that is known. Raises
    ConfigError."""
    known = list(known)
    for key in given:
        if key not in known:
            raise ConfigError(f"unknown key {key!r} {where}{place_of(str(key), known)}")


def fitted(given: Mapping[str, Any], ranges: Iterable[tuple[str, str]], others: object) -> dict[str, Any]:
    """given, and of each range (lowest, largest) of which it has one end alone the other: the attribute of others, moved
    where it lies beyond. Nobody asked for that end, so it refuses nothing."""
    made = dict(given)
    for lowest, largest in ranges:
        for mine, its, choose in ((lowest, largest, max), (largest, lowest, min)):
            if its not in given and type(given.get(mine)) is int:
                made[its] = choose(getattr(others, its), given[mine])
    return made


def value_of(value: object, kind: Any, name: str) -> Any:
    """A value of JSON or a keyword as a setting of this kind: a list is taken for a tuple, one text for a tuple of texts, a
    path for a text, a NumPy number for a number. Raises ConfigError."""
    if kind not in _KINDS:
        return value
    plain = _plain(kind)
    asked: object = _of_numpy(value)
    if plain in _LISTS and isinstance(value, (str, list, tuple)):
        one_text = isinstance(value, str) and plain in _TEXTS
        asked = (value,) if one_text else value if isinstance(value, str) else tuple(map(_of_numpy, value))
    elif plain is str and isinstance(value, os.PathLike):
        asked = os.fspath(value)
    try:
        return _adapter(_AS_TUPLE.get(plain, kind)).validate_python(asked, strict=True)
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


def settle(settings: object) -> None:
    """Bring the fields of a dataclass to their declared types, as ``value_of`` reads them; to be called first in
    ``__post_init__``. Raises ConfigError for a field of another type, which would be cut or fail later."""
    declaring: Any = type(settings)
    for name, kind in _declared(declaring):
        value = getattr(settings, name)
        if not _is_settled(value, kind):
            object.__setattr__(settings, name, value_of(value, kind, name))  # the dataclass may be frozen


def _is_settled(value: object, kind: Any) -> bool:
    """Whether value_of would return the value itself: the fast way, true for nearly all."""
    if value is None:
        return kind is not _plain(kind)
    plain = _plain(kind)
    if plain in _LISTS:
        item = _ITEMS.get(plain)
        return value == () or (type(value) is tuple and item is not None and all(type(one) is item for one in value))
    return type(value) is plain or (plain == Mapping[int, float] and type(value) is dict and not value)


@cache
def _declared(kind: type) -> tuple[tuple[str, Any], ...]:
    return tuple((name, item) for name, item in field_kinds(kind).items() if item in _KINDS)


def _of_numpy(value: object) -> object:
    if isinstance(value, Real) and not isinstance(value, (int, float)):
        return int(value) if isinstance(value, Integral) else float(value)
    return value


def _said(name: str, text: str) -> str:
    """As it was given: "--option 'text'", or "field = 'text'"."""
    return f"{name} {text!r}" if name.startswith("--") else f"{name} = {text!r}"


@cache
def _plain(kind: Any) -> Any:
    """T of T and of T | None."""
    return next((one for one in _KINDS if kind == one | None), kind) if kind not in _LISTS else kind


@lru_cache(maxsize=64)
def _adapter(kind: Any) -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
