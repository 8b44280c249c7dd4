"""A method's configuration by name, or read from the JSON that ``--speculative-config`` takes.

Key names are those that vLLM's users know. An unknown key is refused with the nearest known one.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, ClassVar, get_origin, get_type_hints

from foretoken import builtin
from foretoken.draft.base import Capabilities
from foretoken.draft.config import MethodConfig
from foretoken.draft.model import DraftModelConfig
from foretoken.draft.none import NoneConfig
from foretoken.errors import ConfigError, nearest
from foretoken.registry import Registry, UnusableError


def _method(name: str, found: Any) -> type[MethodConfig]:
    """A class of configurations. Raises UnusableError."""
    if not (isinstance(found, type) and issubclass(found, MethodConfig)):
        raise UnusableError(f"it is {found!r}; expected a subclass of foretoken.MethodConfig")
    if not isinstance(getattr(found, "capabilities", None), Capabilities):
        raise UnusableError("it declares no capabilities; expected a foretoken.Capabilities")
    if getattr(found, "method", None) != name:
        raise UnusableError(
            f"its attribute 'method' is {getattr(found, 'method', None)!r}: it must equal the entry point's name"
        )
    if found.__abstractmethods__:
        raise UnusableError(f"it does not define {', '.join(sorted(found.__abstractmethods__))}")
    for key, kind in get_type_hints(found).items():
        if key not in found.key_names() and get_origin(kind) is not ClassVar:
            raise UnusableError(f"its key {key!r} is not a field: decorate the class with @dataclass(frozen=True)")
        if key in found.key_names() and kind not in _KINDS:
            raise UnusableError(f"the type of its key {key!r} must be bool, int, float, str or 'str | None'")
    try:
        found()
    except Exception as error:
        raise UnusableError(f"its defaults do not make a configuration ({type(error).__name__}: {error})") from error
    return found


METHODS: Registry[type[MethodConfig]] = Registry("method", builtin.CONFIGS, "foretoken.methods", _method)
"""Names, as the CLI and JSON configurations spell them, to configurations. Those of packages come from entry points of the
group "foretoken.methods": a subclass of MethodConfig."""


def speculative_config(given: Mapping[str, Any] | str | MethodConfig | None) -> MethodConfig:
    """A method's configuration from a method's name, a mapping, or JSON text. Raises ConfigError."""
    if isinstance(given, MethodConfig):
        return given
    if given is None:
        return NoneConfig()
    if isinstance(given, str):
        if not given.lstrip().startswith("{"):
            return _config_class(given)()
        try:
            given = json.loads(given)
        except json.JSONDecodeError as error:
            raise ConfigError(f"speculative config is not JSON: {error}") from None
        assert isinstance(given, Mapping)
    options = dict(given)
    name = options.pop("method", None)
    if name is None:
        name = DraftModelConfig.method if options.get("model") else NoneConfig.method
    kind = _config_class(name)
    known = {field.name: field for field in dataclasses.fields(kind)}
    hints = get_type_hints(kind)  # annotations may be texts
    for key, value in options.items():
        if key not in known:
            raise ConfigError(f"unknown key {key!r} for method {name!r}{nearest(key, known)}")
        if value is None and known[key].default is None:
            continue
        options[key] = _value(key, value, hints[key])
    return kind(**options)


_KINDS: dict[Any, tuple[type, str]] = {
    bool: (bool, "true or false"),
    int: (int, "a whole number"),
    float: (float, "a number"),
    str: (str, "a text"),
    str | None: (str, "a text"),
}
"""Types of keys: the Python type, and its name in messages."""


def _value(key: str, value: object, kind: object) -> object:
    """value converted to a field's type: an int is accepted for a float. Raises ConfigError."""
    expected, called = _KINDS[kind]
    if expected is float and type(value) is int:
        value = float(value)
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        raise ConfigError(f"{key} = {value!r} must be {called}")
    return value


def _config_class(name: object) -> type[MethodConfig]:
    if not isinstance(name, str) or name not in METHODS:
        raise ConfigError(f"method = {name!r} is not a method{nearest(str(name), METHODS.names())}")
    return METHODS[name]
