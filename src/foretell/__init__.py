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

_NAMES = {
    "core.errors": "CapacityError ConfigError DrafterError EngineError ForetellError ModelError PromptError QueueFullError"
    " ServiceClosedError TrainError UnreadableError VerifierError VocabularyMismatchError",
    "core.noise": "Noise",
    "core.params": "SamplingParams",
    "core.probs": "History Processors",
    "core.tree": "DrawMode DrawnBy Plan TokenTree chain_tree root_tree",
    "draft.base": "Capabilities Commit Context Drafter LightStep Method PromptChunk choose",
    "draft.config": "Loader MethodConfig",
    "draft.growing.frontier": "Expander Grown",
    "draft.growing.grow": "grow",
    "draft.ngram": "chain_of",
    "draft.shapes": "SHAPES Shape",
    "engine.config": "METHODS speculative_config",
    "engine.engine": "Engine Stream",
    "engine.event": "Observer StepEvent",
    "engine.request.request": "Request",
    "engine.request.result": "Completion Update",
    "engine.request.row": "Piece Submission",
    "heads.formats": "HEADS load_head",
    "heads.head": "Head HeadConfig",
    "heads.layout": "FlatLayout Layout",
    "heads.teacher": "LossSlot Objective Outcome",
    "learn.options": "LearnOptions",
    "model.target": "CausalModel ModelSpec Target",
    "service.options": "ServiceOptions",
    "service.service": "Service",
    "verify": "VERIFIERS",
    "verify.base": "Evidence Verdict Verifier VerifierLoader Walk stops_from_edges",
}
"""The public names by the file that has them; for type checkers the same stands below."""
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_HOMES)
__version__ = "0.1.0"

if TYPE_CHECKING:
    from foretell.core.errors import (
        CapacityError as CapacityError,
        ConfigError as ConfigError,
        DrafterError as DrafterError,
        EngineError as EngineError,
        ForetellError as ForetellError,
        ModelError as ModelError,
        PromptError as PromptError,
        QueueFullError as QueueFullError,
        ServiceClosedError as ServiceClosedError,
        TrainError as TrainError,
        UnreadableError as UnreadableError,
        VerifierError as VerifierError,
        VocabularyMismatchError as VocabularyMismatchError,
    )
    from foretell.core.noise import Noise as Noise
    from foretell.core.params import SamplingParams as SamplingParams
    from foretell.core.probs import History as History, Processors as Processors
    from foretell.core.tree import (
        DrawMode as DrawMode,
        DrawnBy as DrawnBy,
        Plan as Plan,
        TokenTree as TokenTree,
        chain_tree as chain_tree,
        root_tree as root_tree,
    )
    from foretell.draft.base import (
        Capabilities as Capabilities,
        Commit as Commit,
        Context as Context,
        Drafter as Drafter,
        LightStep as LightStep,
        Method as Method,
        PromptChunk as PromptChunk,
        choose as choose,
    )
    from foretell.draft.config import Loader as Loader, MethodConfig as MethodConfig
    from foretell.draft.growing.frontier import Expander as Expander, Grown as Grown
    from foretell.draft.growing.grow import grow as grow
    from foretell.draft.ngram import chain_of as chain_of
    from foretell.draft.shapes import SHAPES as SHAPES, Shape as Shape
    from foretell.engine.config import METHODS as METHODS, speculative_config as speculative_config
    from foretell.engine.engine import Engine as Engine, Stream as Stream
    from foretell.engine.event import Observer as Observer, StepEvent as StepEvent
    from foretell.engine.request.request import Request as Request
    from foretell.engine.request.result import Completion as Completion, Update as Update
    from foretell.engine.request.row import Piece as Piece, Submission as Submission
    from foretell.heads.formats import HEADS as HEADS, load_head as load_head
    from foretell.heads.head import Head as Head, HeadConfig as HeadConfig
    from foretell.heads.layout import FlatLayout as FlatLayout, Layout as Layout
    from foretell.heads.teacher import LossSlot as LossSlot, Objective as Objective, Outcome as Outcome
    from foretell.learn.options import LearnOptions as LearnOptions
    from foretell.model.target import CausalModel as CausalModel, ModelSpec as ModelSpec, Target as Target
    from foretell.service.options import ServiceOptions as ServiceOptions
    from foretell.service.service import Service as Service
    from foretell.verify import VERIFIERS as VERIFIERS
    from foretell.verify.base import (
        Evidence as Evidence,
        Verdict as Verdict,
        Verifier as Verifier,
        VerifierLoader as VerifierLoader,
        Walk as Walk,
        stops_from_edges as stops_from_edges,
    )


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value  # the next access finds it without this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
