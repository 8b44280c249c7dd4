"""foretell: speculative decoding that you can trust.

>>> import foretell
>>> engine = foretell.Engine.load("bundled", speculative="draft_model")
>>> completion = engine.generate("def fibonacci(n):", temperature=0.7, seed=1)
>>> print(completion.text, completion.mean_acceptance_length)

Names are imported when they are first used: torch and transformers take seconds, and ``foretell --help`` needs neither.

The classes that a package needs to add a method or a verifier (Method, Drafter, Verifier, Shape and their arguments)
are public too, and found by entry points: docs/extend.md.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretell.core.errors import (
        CapacityError,
        ConfigError,
        DrafterError,
        EngineError,
        ForetellError,
        ModelError,
        PromptError,
        QueueFullError,
        ServiceClosedError,
        TrainError,
        VerifierError,
        VocabularyMismatchError,
    )
    from foretell.core.noise import Noise
    from foretell.core.params import SamplingParams
    from foretell.core.probs import History, Processors
    from foretell.core.tree import DrawMode, DrawnBy, Plan, TokenTree, chain_tree, root_tree
    from foretell.draft.base import Capabilities, Commit, Context, Drafter, LightStep, Method, PromptChunk, choose
    from foretell.draft.config import Loader, MethodConfig
    from foretell.draft.growing.frontier import Expander, Grown
    from foretell.draft.growing.grow import grow
    from foretell.draft.ngram import chain_of
    from foretell.draft.shapes import SHAPES, Shape
    from foretell.engine.config import METHODS, speculative_config
    from foretell.engine.engine import Engine, Request, Stream
    from foretell.engine.event import Observer, StepEvent
    from foretell.engine.request.result import Completion, Update
    from foretell.engine.request.row import Piece
    from foretell.engine.request.submission import Submission
    from foretell.learn.options import LearnOptions
    from foretell.model.target import CausalModel, ModelSpec, Target
    from foretell.service.options import ServiceOptions
    from foretell.service.service import Service
    from foretell.verify import VERIFIERS
    from foretell.verify.base import Evidence, Verdict, Verifier, VerifierLoader, Walk, stops_from_edges

__all__ = [
    "METHODS",
    "SHAPES",
    "VERIFIERS",
    "Capabilities",
    "CapacityError",
    "CausalModel",
    "Commit",
    "Completion",
    "ConfigError",
    "Context",
    "Drafter",
    "DrafterError",
    "DrawMode",
    "DrawnBy",
    "Engine",
    "EngineError",
    "Evidence",
    "Expander",
    "ForetellError",
    "Grown",
    "History",
    "LearnOptions",
    "LightStep",
    "Loader",
    "Method",
    "MethodConfig",
    "ModelError",
    "ModelSpec",
    "Noise",
    "Observer",
    "Piece",
    "Plan",
    "Processors",
    "PromptChunk",
    "PromptError",
    "QueueFullError",
    "Request",
    "SamplingParams",
    "Service",
    "ServiceClosedError",
    "ServiceOptions",
    "Shape",
    "StepEvent",
    "Stream",
    "Submission",
    "Target",
    "TokenTree",
    "TrainError",
    "Update",
    "Verdict",
    "Verifier",
    "VerifierError",
    "VerifierLoader",
    "VocabularyMismatchError",
    "Walk",
    "chain_of",
    "chain_tree",
    "choose",
    "grow",
    "root_tree",
    "speculative_config",
    "stops_from_edges",
]
__version__ = "0.1.0"

_HOMES = {
    "CapacityError": "core.errors",
    "DrafterError": "core.errors",
    "EngineError": "core.errors",
    "QueueFullError": "core.errors",
    "ServiceClosedError": "core.errors",
    "TrainError": "core.errors",
    "VerifierError": "core.errors",
    "VocabularyMismatchError": "core.errors",
    "METHODS": "engine.config",
    "SHAPES": "draft.shapes",
    "VERIFIERS": "verify",
    "Capabilities": "draft.base",
    "CausalModel": "model.target",
    "Commit": "draft.base",
    "Completion": "engine.request.result",
    "ConfigError": "core.errors",
    "Context": "draft.base",
    "Drafter": "draft.base",
    "DrawMode": "core.tree",
    "Engine": "engine.engine",
    "Evidence": "verify.base",
    "Expander": "draft.growing.frontier",
    "ForetellError": "core.errors",
    "Grown": "draft.growing.frontier",
    "History": "core.probs",
    "DrawnBy": "core.tree",
    "LearnOptions": "learn.options",
    "LightStep": "draft.base",
    "Loader": "draft.config",
    "Method": "draft.base",
    "MethodConfig": "draft.config",
    "ModelError": "core.errors",
    "ModelSpec": "model.target",
    "Noise": "core.noise",
    "Observer": "engine.event",
    "Piece": "engine.request.row",
    "Plan": "core.tree",
    "Processors": "core.probs",
    "PromptChunk": "draft.base",
    "PromptError": "core.errors",
    "Request": "engine.request.request",
    "SamplingParams": "core.params",
    "Service": "service.service",
    "ServiceOptions": "service.options",
    "Shape": "draft.shapes",
    "StepEvent": "engine.event",
    "Stream": "engine.engine",
    "Submission": "engine.request.submission",
    "Target": "model.target",
    "TokenTree": "core.tree",
    "Update": "engine.request.result",
    "Verdict": "verify.base",
    "Verifier": "verify.base",
    "VerifierLoader": "verify.base",
    "Walk": "verify.base",
    "chain_of": "draft.ngram",
    "chain_tree": "core.tree",
    "choose": "draft.base",
    "grow": "draft.growing.grow",
    "root_tree": "core.tree",
    "speculative_config": "engine.config",
    "stops_from_edges": "verify.base",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value  # the next access finds it without this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
