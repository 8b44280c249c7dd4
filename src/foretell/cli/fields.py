"""Options made from the fields of a dataclass: a setting is declared once, with its type, its default and its help.

Metadata keys are documented in ``foretell.core.settings.setting``. A field without help is not an option.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, get_args, get_origin

import typer

METAVARS: dict[Any, str | None] = {int: "N", float: "X", str: "TEXT", list[str]: "TEXT", bool: None}
Command = Callable[..., None]


def with_fields(kind: type, *, into: str, panel: str) -> Callable[[Command], Command]:
    """A decorator: in place of the parameter ``into``, a dict, the command has an option for every field of a dataclass.

    The dict holds what was given, by the name of the field. panel: the help panel of fields that name none. A flag
    inverts a field's default. A mapping is passed on as text.
    """
    fields = {_parameter_name(item): item for item in dataclasses.fields(kind) if "help" in item.metadata}
    made = {name: _parameter(name, item, panel) for name, item in fields.items()}

    def decorate(command: Command) -> Command:
        own = inspect.signature(command).parameters

        @functools.wraps(command)
        def run(**options: Any) -> None:
            values = {item.name: _value(item, options.pop(name)) for name, item in fields.items()}
            command(**options, **{into: {name: value for name, value in values.items() if value is not None}})

        parameters: list[inspect.Parameter] = []
        for name, parameter in own.items():
            if name == into:
                parameters += made.values()
            else:
                parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def option(kind: type, name: str, *, panel: str) -> Any:
    """The option of one field, for commands with another default: ``Annotated[int, option(kind, name)]``."""
    item = next(item for item in dataclasses.fields(kind) if item.name == name)
    return _option(item, panel, show_default=True)


def option_name(kind: type, name: str) -> str:
    """As a field is called on the command line. kind: the dataclass."""
    return _name(next(item for item in dataclasses.fields(kind) if item.name == name))


def _name(item: "dataclasses.Field[Any]") -> str:
    return str(item.metadata.get("option", "--" + item.name.replace("_", "-")))


def _parameter_name(item: "dataclasses.Field[Any]") -> str:
    return _name(item).removeprefix("--").replace("-", "_")


def _kind(item: "dataclasses.Field[Any]") -> Any:
    """The type that typer gets for a field: T of T and of T | None, a list of texts for a tuple, a text for a
    mapping."""
    union = get_args(item.type) if isinstance(item.type, UnionType) else (item.type,)
    kinds = [kind for kind in union if kind is not type(None)]
    kind: Any = kinds[0]
    if kind in (tuple[str, ...], Sequence[str]):
        kind = list[str]
    elif get_origin(kind) is Mapping:
        kind = str
    if len(kinds) != 1 or kind not in METAVARS:
        raise TypeError(
            f"no option can be made for {item.name}: {item.type}; expected int, float, str, one of them or None, bool, "
            "tuple[str, ...], Sequence[str] or a mapping"
        )
    return kind


def _parameter(name: str, item: "dataclasses.Field[Any]", panel: str) -> inspect.Parameter:
    made: Any = Annotated[_kind(item) | None, _option(item, panel, show_default=False)]
    if _kind(item) is bool:
        made = Annotated[bool, _option(item, panel, show_default=False)]
    default = False if _kind(item) is bool else None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=made)


def _option(item: "dataclasses.Field[Any]", panel: str, *, show_default: bool) -> Any:
    about = item.metadata
    default = about.get("default_text", item.default)
    tell = not show_default and default is not dataclasses.MISSING and default not in (None, ())
    shown = f" Default: {default}." if tell and not isinstance(default, bool) else ""
    return typer.Option(
        _name(item), envvar=about.get("envvar"), metavar=about.get("metavar", METAVARS[_kind(item)]),
        min=about.get("min"), rich_help_panel=about.get("panel", panel), show_default=show_default,
        help=about["help"] + shown,
    )  # fmt: skip


def _value(item: "dataclasses.Field[Any]", given: Any) -> Any:
    """As the field holds it; None where the option was not given."""
    if isinstance(given, bool):
        return not item.default if given else None
    if isinstance(given, list):
        return tuple(given) or None
    return given
