"""The key of config.json that says what this library wrote."""

from collections.abc import Mapping
from typing import Any

from foretell.heads.layout import MARKER


def marker(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """This library's marker in a directory; empty in directories of other tools."""
    found = config.get(MARKER)
    return found if isinstance(found, Mapping) else {}
