"""Settings: fields of a dataclass, declared once with their help."""

from dataclasses import field
from typing import Any


def setting(default: Any, help: str, **more: Any) -> Any:
    """A field that a user may set, with what ``foretoken.cli.fields`` makes an option of.

    more, where it differs from what the field's name and type say: ``option`` (e.g. "--loss-temperature"), ``metavar``,
    ``envvar``, ``panel`` of the help, ``min``, and as what the default is ``told``. A default that is a type is called for
    each instance.
    """
    about = {"help": help, **more}
    if isinstance(default, type):
        return field(default_factory=default, metadata=about)
    return field(default=default, metadata=about)
