"""foretoken: speculative decoding that you can trust.

>>> import foretoken
>>> engine = foretoken.Engine.load("bundled", speculative="draft_model")
>>> completion = engine.generate("def fibonacci(n):", temperature=0.7, seed=1)
>>> print(completion.text, completion.mean_acceptance_length)

Names are imported when they are first used: torch and transformers take seconds, and ``foretoken --help`` needs neither.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretoken.draft.shape import SHAPES
    from foretoken.engine.config import METHODS, speculative_config
    from foretoken.engine.engine import Engine, Request, Stream
    from foretoken.engine.result import Completion
    from foretoken.engine.service import Service, ServiceOptions
    from foretoken.engine.state import Piece
    from foretoken.engine.submission import Submission, Update
    from foretoken.errors import ConfigError, ForetokenError, ModelError, PromptError
    from foretoken.sampling import SamplingParams
    from foretoken.tree import Draws, Law, TokenTree
    from foretoken.verify import VERIFIERS

__all__ = [
    "METHODS",
    "SHAPES",
    "VERIFIERS",
    "Completion",
    "ConfigError",
    "Draws",
    "Engine",
    "ForetokenError",
    "Law",
    "ModelError",
    "Piece",
    "PromptError",
    "Request",
    "SamplingParams",
    "Service",
    "ServiceOptions",
    "Stream",
    "Submission",
    "TokenTree",
    "Update",
    "speculative_config",
]
__version__ = "0.1.0"

_HOMES = {
    "METHODS": "engine.config",
    "SHAPES": "draft.shape",
    "VERIFIERS": "verify",
    "Completion": "engine.result",
    "ConfigError": "errors",
    "Draws": "tree",
    "Engine": "engine.engine",
    "ForetokenError": "errors",
    "Law": "tree",
    "ModelError": "errors",
    "Piece": "engine.state",
    "PromptError": "errors",
    "Request": "engine.engine",
    "SamplingParams": "sampling",
    "Service": "engine.service",
    "ServiceOptions": "engine.service",
    "Stream": "engine.engine",
    "Submission": "engine.submission",
    "TokenTree": "tree",
    "Update": "engine.submission",
    "speculative_config": "engine.config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value  # the next access finds it without this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
