"""Options made from the fields of a dataclass: a setting is declared once, with its type, its default and its help."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from types import UnionType
from typing import Annotated, Any, get_args, get_type_hints

import typer

METAVARS = {int: "N", float: "X", str: "TEXT"}


def with_fields(kind: type, *, into: str, panel: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator: in place of the parameter ``into``, a dict, the command has an option for every field of a dataclass.

    The dict holds what was given, by the name of the field. A field's metadata has "help", and where they differ from the
    field's own "option" (e.g. "--loss-temperature"), "metavar", "envvar" and "told", the text of the default in the
    help.
    """
    fields = {_parameter_name(item): item for item in dataclasses.fields(kind)}
    hints = get_type_hints(kind)
    made = {name: _annotation(item, _plain(hints[item.name]), panel) for name, item in fields.items()}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command).parameters

        @functools.wraps(command)
        def run(**options: Any) -> None:
            values = {item.name: options.pop(name) for name, item in fields.items()}
            command(**options, **{into: {name: value for name, value in values.items() if value is not None}})

        parameters: list[inspect.Parameter] = []
        for name, parameter in own.items():
            kept = inspect.Parameter.KEYWORD_ONLY
            if name == into:
                parameters += [inspect.Parameter(n, kept, default=None, annotation=kind) for n, kind in made.items()]
            else:
                parameters.append(parameter.replace(kind=kept))
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def option_name(kind: type, name: str) -> str:
    """As a field is called on the command line. kind: the dataclass."""
    return _option(next(item for item in dataclasses.fields(kind) if item.name == name))


def _option(item: "dataclasses.Field[Any]") -> str:
    return str(item.metadata.get("option", "--" + item.name.replace("_", "-")))


def _parameter_name(item: "dataclasses.Field[Any]") -> str:
    return _option(item).removeprefix("--").replace("-", "_")


def _plain(hint: Any) -> Any:
    """T of T and of T | None."""
    union = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    kinds = [kind for kind in union if kind is not type(None)]
    if len(kinds) != 1 or kinds[0] not in METAVARS:
        raise TypeError(f"no option can be made for {hint}: expected one of {', '.join(k.__name__ for k in METAVARS)}")
    return kinds[0]


def _annotation(item: "dataclasses.Field[Any]", kind: Any, panel: str) -> Any:
    about = item.metadata
    default = about.get("told", item.default)
    told = "" if default is None else f" Default: {default}."
    option = typer.Option(
        _option(item), envvar=about.get("envvar"), metavar=about.get("metavar", METAVARS[kind]), rich_help_panel=panel,
        show_default=False, help=about["help"] + told,
    )  # fmt: skip
    return Annotated[kind | None, option]
