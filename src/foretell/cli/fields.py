"""Options made from the fields of a dataclass: a setting is declared once, with its type, its default and its help.

``with_fields`` makes them from the settings of the API: metadata keys are documented in
``foretell.core.settings.setting``, and a field without help is not an option. ``with_group`` takes dataclasses of the
command line itself, whose fields are options already: what several commands have in common.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, get_args, get_origin

import typer

METAVARS: dict[Any, str | None] = {int: "N", float: "X", str: "TEXT", list[str]: "TEXT", bool: None}
Command = Callable[..., None]


def with_fields(kind: type, *, into: str, panel: str, without: Collection[str] = ()) -> Callable[[Command], Command]:
    """A decorator: in place of the parameter ``into``, a dict, the command has an option for every field of a dataclass.

    The dict holds what was given, by the name of the field. panel: the help panel of fields that name none. without:
    fields that the command does not have; they keep their defaults. A flag inverts a field's default. A mapping is passed
    on as text.
    """
    asked = [item for item in dataclasses.fields(kind) if "help" in item.metadata and item.name not in without]
    fields = {_parameter_name(item): item for item in asked}
    made = [_parameter(name, item, panel) for name, item in fields.items()]

    def collect(options: dict[str, Any]) -> dict[str, Any]:
        values = {item.name: _value(item, options[name]) for name, item in fields.items()}
        return {name: value for name, value in values.items() if value is not None}

    return _in_place_of(into, made, collect)


def with_group(
    kind: type, *, into: str, without: Collection[str] = (), **defaults: Any
) -> Callable[[Command], Command]:
    """A decorator: in place of the parameter ``into``, an instance of a dataclass, the command has all its options.

    Every field of the dataclass has a default and the type ``Annotated[..., typer.Option(...)]``. without: fields that
    the command does not have; they keep their defaults. defaults: the command's own, by field. Raises TypeError for
    fields that the dataclass has not.
    """
    fields = {item.name: item for item in dataclasses.fields(kind)}
    if unknown := {*without, *defaults} - fields.keys():
        raise TypeError(f"{kind.__name__} has no field {min(unknown)!r}; it has {', '.join(fields)}")
    made = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name, item.default), annotation=item.type
        )
        for name, item in fields.items()
        if name not in without
    ]
    return _in_place_of(into, made, lambda options: kind(**options))


def _in_place_of(
    into: str, made: Sequence[inspect.Parameter], collect: Callable[[dict[str, Any]], Any]
) -> Callable[[Command], Command]:
    """A decorator: the command has the parameters ``made`` where it had ``into``, which gets what ``collect`` makes of
    their values."""

    def decorate(command: Command) -> Command:
        own = inspect.signature(command).parameters
        if into not in own:  # typer would pass the options to a command that cannot take them
            raise TypeError(f"{command.__name__} has no parameter {into!r}; it has {', '.join(own)}")

        @functools.wraps(command)
        def run(**options: Any) -> None:
            command(**{into: collect({one.name: options.pop(one.name) for one in made}), **options})

        parameters: list[inspect.Parameter] = []
        for name, parameter in own.items():
            if name == into:
                parameters += made
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
