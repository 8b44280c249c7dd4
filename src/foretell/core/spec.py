"""Values that users write as one word with options: ``typical/epsilon=0.1``, ``static/branching=4x2x1``.

The word names a frozen dataclass, the options are its fields, but for those with ``metadata={"spec": False}``: no text
can give them. ``/`` and ``=`` need no quotes in any shell, and neither JSON nor the lists of the command line use them.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from foretell.core import builtin
from foretell.core.errors import ConfigError, nearest
from foretell.core.jsontext import JSONDecodeError, parse_json
from foretell.core.registry import names_of
from foretell.core.settings import field_kinds, value_of_text

T = TypeVar("T")
AUTO = "auto:"


def parse_spec(text: str, known: Mapping[str, T], what: str) -> T:
    """The value of ``name[/field=value]...``: known[name] with these fields replaced. Raises ConfigError.

    what names the kind for messages ("verifier", "shape"). Fields are bool, int, float, str or tuples of int or float,
    whose values are joined by ``x``.
    """
    name, *options = text.strip().split("/")
    if name not in known:
        raise ConfigError(f"{what} {text!r}: {name!r} is not a {what}{nearest(name, known)}")
    default = known[name]
    assert dataclasses.is_dataclass(default)
    assert not isinstance(default, type)
    hints = field_kinds(type(default))
    kinds = {field.name: hints[field.name] for field in dataclasses.fields(default) if _is_option(field)}
    given: dict[str, object] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals:
            raise ConfigError(f"{what} {text!r}: {option!r} is not an option; expected {name}/field=value")
        if key not in kinds:
            hint = nearest(key, kinds) if kinds else f"; {name} has no options"
            raise ConfigError(f"{what} {text!r}: unknown option {key!r} of {name!r}{hint}")
        if key in given:
            raise ConfigError(f"{what} {text!r}: {key!r} is given twice")
        given[key] = value_of_text(value, kinds[key], f"{what} {text!r}: {key}")
    try:
        return dataclasses.replace(default, **given)
    except ConfigError as error:
        raise ConfigError(f"{what} {text!r}: {error}") from None


def method_words(text: str) -> tuple[dict[str, Any], str]:
    """The configuration of ``[auto:]METHOD[:N][:VERIFY][:SHAPE][:DRAWS][:OPTION=VALUE]``, and how it is used: "on" or
    "auto". Names are not looked up, but to tell a shape from a verifier. Raises ConfigError."""
    auto = text.strip().startswith(AUTO)
    name, *rest = text.strip().removeprefix(AUTO).split(":")
    if name in ("auto", "none") and (auto or name == "auto"):
        raise ConfigError(f"method {text!r}: name what auto guesses with, e.g. 'auto:draft_model:5'")
    shapes = names_of(builtin.SHAPES, "foretell.shapes") if rest else ()
    config: dict[str, Any] = {"method": name}
    for part in rest:
        word = part.split("/")[0]
        if part.isdecimal():
            config["num_speculative_tokens"] = int(part)
        elif "=" in word:
            key, _, value = part.partition("=")
            try:
                config[key] = parse_json(value)
            except JSONDecodeError:  # a word
                config[key] = value
        elif part:
            config["shape" if word in shapes else "draws" if word in builtin.DRAWS else "verify"] = part
        else:
            raise ConfigError(
                f"method {text!r}: expected [auto:]METHOD[:N][:VERIFY][:SHAPE][:DRAWS][:OPTION=VALUE], e.g. 'draft_model:5'"
            )
    return config, "auto" if auto else "on"


def spec_of(value: object, name: str) -> str:
    """The text that ``parse_spec`` reads as value: its name and the fields that are not the class's defaults."""
    assert dataclasses.is_dataclass(value)
    assert not isinstance(value, type)
    parts = [name]
    for field in dataclasses.fields(value):
        mine = getattr(value, field.name)
        if _is_option(field) and mine != field.default:
            parts.append(f"{field.name}={_text(mine)}")
    return "/".join(parts)


def _is_option(field: "dataclasses.Field[object]") -> bool:
    return field.init and bool(field.metadata.get("spec", True))


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return "x".join(map(_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def parse_numbers(text: str, option: str) -> list[float]:
    """The numbers of a list joined by commas. Raises ConfigError that names the option."""
    return list(value_of_text(text, tuple[float, ...], option, joined_by=","))
