"""The models that travel inside the package: a small target, its draft, and a suite of prompts (see README.md).

Nothing is loaded here: `path` names a file or folder that any Hugging Face loader opens.
"""

from pathlib import Path

_HERE = Path(__file__).parent
_PATHS = {"target": _HERE / "target", "draft": _HERE / "draft", "suite": _HERE / "suite.jsonl"}


def path(name: str) -> Path:
    """Where `name` lies: "target" or "draft" (Hugging Face folders), or "suite" (prompts, one JSON object a line)."""
    try:
        return _PATHS[name]
    except KeyError:
        raise KeyError(f"no bundled {name!r}; there are {', '.join(_PATHS)}") from None
