"""The models that travel inside the package: a small target, drafters for it, and a suite of prompts (see README.md).

Nothing is loaded here: `path` names a file or folder. "target" and "draft" are folders that any Hugging Face loader
opens; the heads are folders in their own formats (`foretell.heads.formats`), or GGUF files.
"""

from pathlib import Path

_HERE = Path(__file__).parent
HEADS = ("medusa", "eagle1", "eagle3", "kangaroo", "dflash", "acceptance", "judge")
NAMED = {f"{target}/eagle3": "head.gguf" for target in ("smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b")}
"""Heads for models of ``foretell list``, and the file of a folder. Their output heads are their targets' own rows."""
_ALIASES = {"eagle2": "eagle1"}  # the same weights on another tree
_PATHS = {
    "target": _HERE / "target",
    "draft": _HERE / "draft",
    "suite": _HERE / "suite.jsonl",
    "abstention": _HERE / "abstention.jsonl",
    **{name: _HERE / name for name in HEADS},
    **{name: _HERE / name / file for name, file in NAMED.items()},
    **{name: _HERE / head for name, head in _ALIASES.items()},
}


def path(name: str) -> Path:
    """Where `name` lies: "target" or "draft", a head of HEADS ("eagle2": eagle1's), "suite" (a prompt a line), or
    "abstention" (questions that nobody can answer)."""
    try:
        return _PATHS[name]
    except KeyError:
        raise KeyError(f"no bundled {name!r}; there are {', '.join(_PATHS)}") from None
