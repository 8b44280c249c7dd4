"""Where in a JSON schema something stands, and where its references lead."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

Place = tuple[str | int, ...]
"""Of a schema or keyword in the whole schema: names, and numbers in lists."""


def at(schema: Any, place: Place) -> Any:
    """The value at a place, which is there."""
    for step in place:
        schema = schema[step]
    return schema


def pointer(place: Place) -> str:
    """A place as a JSON pointer, without its first slash."""
    return "/".join(str(step).replace("~", "~0").replace("/", "~1") for step in place)


class References:
    """Those of one schema, whose documents may have addresses of their own (``$id``)."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = given
        self._addresses = dict[str, Place]()
        self._find()

    def target(self, place: Place, ref: str) -> Place | None:
        """The place that a reference names, there or not; None in another document."""
        base, root = "", Place()
        for end in range(len(place) + 1):
            node = at(self.given, place[:end]) if self.exists(place[:end]) else None
            if isinstance(node, dict) and isinstance(node.get("$id"), str):
                base, root = _joined(base, node["$id"]), place[:end] if "#" not in node["$id"][:1] else root
        address, fragment = urldefrag(_joined(base, ref))
        if not ref.startswith("#"):
            if address not in self._addresses:
                return None
            root = self._addresses[address]
        if fragment and not fragment.startswith("/"):
            return self._addresses.get(f"{address}#{fragment}", (*root, "#" + fragment))
        steps = [unquote(step).replace("~1", "/").replace("~0", "~") for step in fragment.split("/")[1:]]
        for step in steps:
            holder = at(self.given, root) if self.exists(root) else None
            root = (*root, int(step) if isinstance(holder, list) and step.isdecimal() else step)
        return root

    def exists(self, place: Place) -> bool:
        """Whether there is a value at a place."""
        node: Any = self.given
        for step in place:
            known = range(len(node)) if isinstance(node, list) else node if isinstance(node, dict) else ()
            if step not in known:
                return False
            node = node[step]
        return True

    def _find(self) -> None:
        """The documents that the schema holds, its own and those with an ``$id`` inside it, and their anchors."""
        waiting = [(Place(), "")]
        while waiting:
            place, base = waiting.pop()
            node = at(self.given, place)
            if isinstance(node, list):
                waiting += [((*place, at), base) for at, part in enumerate(node) if isinstance(part, (dict, list))]
                continue
            if isinstance(node.get("$id"), str):
                base = _joined(base, node["$id"])
            if not place or "$id" in node:
                self._addresses.setdefault(urldefrag(base)[0] if "#" not in base[:-1] else base, place)
            for key in ("$anchor", "$dynamicAnchor"):
                if isinstance(node.get(key), str):
                    self._addresses.setdefault(f"{urldefrag(base)[0]}#{node[key]}", place)
            waiting += [
                ((*place, key), base) for key, part in node.items()
                if isinstance(part, (dict, list)) and key not in ("const", "enum", "default", "examples")
            ]  # fmt: skip


def _joined(base: str, given: Any) -> str:
    try:
        return urljoin(base, given) if isinstance(given, str) else base
    except ValueError:  # it is no address
        return base
