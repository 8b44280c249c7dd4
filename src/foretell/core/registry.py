"""Registries of named parts: built-in ones, and those that installed packages add by entry points.

A registry is a mapping. Built-in values are named as "module:attribute" and imported at first use.
A package adds a name by an entry point of the registry's group (``[project.entry-points."foretell.methods"]`` in its
pyproject.toml); it too is imported at its first use, never for a built-in name.

A package that cannot be used does not affect the others. A look-up by its name is refused with a
ConfigError that names the package and the reason. In a listing it is left out, with one RuntimeWarning; ``refused`` says
why. A built-in name always refers to foretell's own value.
"""

import importlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, is_dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from foretell.core.builtin import DRAWS, MOST_SPECULATIVE_TOKENS
from foretell.core.errors import ConfigError, nearest

T = TypeVar("T")


class UnusableError(Exception):
    """Why the value of an entry point does not suit the registry. Raised by a registry's check."""


def part_of(name: str, found: Any, kind: type[T], declared: Sequence[str], *, options: bool = True) -> T:
    """A part with its default options, of a class of such parts or of a part; declared: attributes that it must have.
    options: whether its fields are any, so that it is a dataclass. Raises UnusableError."""
    made: Any = found
    if isinstance(found, type) and issubclass(found, kind) and (is_dataclass(found) or not options):
        try:
            made = found()
        except Exception as error:
            raise UnusableError(
                f"it cannot be made without options ({type(error).__name__}: {error}): give every field a default"
            ) from error
    if not isinstance(made, kind) or (options and not hasattr(made, "__dataclass_fields__")):
        what = "frozen dataclass" if options else "class"
        raise UnusableError(f"it is {made!r}; expected a {what} that is a foretell.{kind.__name__}")
    if (own := getattr(made, "name", None)) != name:
        raise UnusableError(f"its attribute 'name' is {own!r}: it must equal the entry point's name")
    if lacking := [attribute for attribute in declared if not hasattr(made, attribute)]:
        raise UnusableError(f"it does not declare {', '.join(lacking)}")
    return made


def load_reference(reference: str) -> Any:
    """The value of "module:attribute"."""
    module, _, attribute = reference.partition(":")
    return getattr(importlib.import_module(module), attribute)


@dataclass(frozen=True)
class Origin:
    """The package that a name comes from."""

    package: str
    version: str

    def __str__(self) -> str:
        return f"{self.package} {self.version}"


class Registry(MutableMapping[str, T]):
    """See the module's docstring. Iteration gives the built-in names in their order, then those of packages by name.

    Values may also be set and deleted, by code that holds no entry point: a notebook, a test.
    """

    def __init__(
        self, what: str, builtin: Mapping[str, str | T], group: str, check: Callable[[str, Any], T] | None = None
    ) -> None:
        """what: one word for messages. builtin: values, or "module:attribute". check(name, found) returns the value of
        what was found, or raises UnusableError with the reason."""
        self.what, self.group = what, group
        self._builtin = dict(builtin)
        self._check: Callable[[str, Any], T] = check or (lambda _, found: found)
        self._values: dict[str, T] = {}
        self._set: set[str] = set()  # names that were set by hand
        self._found: dict[str, EntryPoint] | None = None  # by name; None: not looked for yet
        self._refused: dict[str, str] = {}
        _MADE.setdefault(group, self)

    # -- packages --------------------------------------------------------------------------------------------------

    def _packages(self) -> dict[str, EntryPoint]:
        """Entry points of the group with unique names."""
        if self._found is None:
            found: dict[str, EntryPoint] = {}
            for point in sorted(entry_points(group=self.group), key=lambda point: (point.name, str(_origin(point)))):
                before = found.get(point.name)
                if point.name in self._builtin:
                    self._refuse(point, f"{point.name!r} is a {self.what} of foretell's own: choose another name")
                elif before is not None and before.value != point.value:
                    self._refuse(
                        point, f"{_origin(before)} declares the same {self.what}: uninstall one of the two packages"
                    )
                else:
                    found[point.name] = point
            self._found = found
        return self._found

    def _refuse(self, point: EntryPoint, reason: str) -> str:
        """Remember, and warn of, an entry point that is not used; returns the whole message."""
        message = f"{self.what} {point.name!r} of the package {_origin(point)} ({point.value}) is not used: {reason}"
        if message not in self._refused.values():
            key = point.name if point.name not in self._refused else f"{point.name} ({_origin(point)})"
            self._refused[key] = message
            warnings.warn(message, RuntimeWarning, stacklevel=3)
        return message

    @property
    def refused(self) -> dict[str, str]:
        """Names of packages that are not used, and why. Looks at all packages."""
        list(self)
        return dict(self._refused)

    def origin(self, name: str) -> Origin | None:
        """The package that a name comes from; None: foretell, or set by hand."""
        if name in self._builtin or name in self._set:
            return None
        return _origin(self._packages()[name])

    def called(self, name: str) -> str:
        """A value's name for messages, with the package that it comes from."""
        origin = self.origin(name) if name in self.names() else None
        return f"{self.what} {name!r}" + (f" of the package {origin}" if origin is not None else "")

    def _load(self, point: EntryPoint) -> T:
        """Raises UnusableError."""
        try:
            found = point.load()
        except Exception as error:  # a package may raise anything while it is imported
            raise UnusableError(f"it cannot be imported ({type(error).__name__}: {error})") from error
        return self._check(point.name, found)

    # -- the mapping -----------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> T:
        """Raises KeyError for an unknown name, ConfigError for one whose package cannot be used."""
        if name in self._values:
            return self._values[name]
        if name in self._builtin:
            held = self._builtin[name]
            value: T = self._check(name, load_reference(held)) if isinstance(held, str) else held
        else:
            point = self._packages()[name]
            try:
                value = self._load(point)
            except UnusableError as error:
                raise ConfigError(
                    f"{self.what} {name!r} of the package {_origin(point)} ({point.value}) cannot be used: {error}; "
                    "mend or uninstall the package"
                ) from error
        self._values[name] = value
        return value

    def __setitem__(self, name: str, value: T) -> None:
        self._values[name] = value
        self._set.add(name)

    def __delitem__(self, name: str) -> None:
        """Delete a value that was set. A built-in value, or a package's, is visible again."""
        del self._values[name]
        self._set.discard(name)

    def __iter__(self) -> Iterator[str]:
        yield from self._builtin
        for name, point in self._packages().items():
            if name in self._values:
                yield name
                continue
            try:
                self._values[name] = self._load(point)
            except UnusableError as error:
                self._refuse(point, str(error))
                continue
            yield name
        yield from [name for name in self._set if name not in self._builtin and name not in self._packages()]

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        """Without importing anything."""
        return name in self._builtin or name in self._values or name in self._packages()

    @property
    def builtin(self) -> tuple[str, ...]:
        """Names that come with foretell, in their order."""
        return tuple(self._builtin)

    def names(self) -> Iterable[str]:
        """All names, without importing anything: for messages."""
        return dict.fromkeys((*self._builtin, *self._packages(), *self._set))

    def forget(self) -> None:
        """Search for packages again, after one was installed or removed while this process runs."""
        for name in self._found or {}:
            if name not in self._set:
                self._values.pop(name, None)
        self._found, self._refused = None, {}


_MADE: dict[str, Registry[Any]] = {}  # by group


def names_of(builtin: Iterable[str], group: str) -> list[str]:
    """All names of a registry, which need not be made yet: nothing is imported."""
    if group in _MADE:
        return list(_MADE[group].names())
    return list(dict.fromkeys((*builtin, *sorted(point.name for point in entry_points(group=group)))))


def registry_of(group: str) -> Registry[Any]:
    """The registry of a group, for files below the one in which it is made."""
    return _MADE[group]


def check_spec(text: str, builtin: Iterable[str], what: str) -> None:
    """Raise ConfigError, as ``spec.parse_spec`` does, where the word of ``name[/option=value]...`` is unknown. what:
    "verifier" or "shape"."""
    name = text.strip().split("/")[0]
    if name not in builtin and name not in (known := names_of(builtin, f"foretell.{what}s")):
        raise ConfigError(f"{what} {text!r}: {name!r} is not a {what}{nearest(name, known)}")


def check_draws(text: str) -> None:
    """Raise ConfigError for a way of drawing that is unknown."""
    if text not in ("auto", *DRAWS):
        raise ConfigError(f"draws = {text!r} is not a way of drawing{nearest(text, ['auto', *DRAWS])}")


def check_number(count: int) -> None:
    """Raise ConfigError for a number of guesses in a line that no method takes."""
    if not 1 <= count <= MOST_SPECULATIVE_TOKENS:
        raise ConfigError(f"num_speculative_tokens = {count} must be between 1 and {MOST_SPECULATIVE_TOKENS}")


def check_method(name: object, builtin: Iterable[str]) -> None:
    """Raise ConfigError for the name of a method that is unknown."""
    if not isinstance(name, str) or (name not in builtin and name not in names_of(builtin, "foretell.methods")):
        known = names_of(builtin, "foretell.methods")
        raise ConfigError(f"method = {name!r} is not a method{nearest(str(name), known)}")


def _origin(point: EntryPoint) -> Origin:
    package = point.dist
    return Origin("unknown", "0") if package is None else Origin(package.name, package.version)
