"""More than one machine, by Ray: replicas of the server (``app``) and batch generation over files (``generate_files``).

>>> import foretell.ray
>>> from ray import serve
>>> serve.run(foretell.ray.app("bundled", speculative="draft_model", num_replicas=2))
>>> foretell.ray.generate_files("prompts.jsonl", "completions.jsonl", speculative="draft_model", concurrency=4)

Ray is the extra ``foretell[ray]``; names are imported when they are first used, so this module itself needs no Ray.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from foretell.core.errors import ConfigError

if TYPE_CHECKING:
    from foretell.ray.data import Summary, generate_files
    from foretell.ray.serve import Settings, app, from_args

__all__ = ["Settings", "Summary", "app", "from_args", "generate_files"]

_HOMES = {"Settings": "serve", "Summary": "data", "app": "serve", "from_args": "serve", "generate_files": "data"}
_NEEDS = {
    "serve": ("ray", "fastapi", "mmh3"),  # mmh3: the session router's hash
    "data": ("ray", "pyarrow", "pandas"),
}
INSTALL = "pip install 'foretell[ray]'"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name]
    missing = [package for package in _NEEDS[home] if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError(f"foretell.ray.{name} needs {', '.join(missing)}, not installed here: {INSTALL}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value  # the next access finds it without this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
