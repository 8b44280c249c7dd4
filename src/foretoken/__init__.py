"""foretoken: speculative decoding that you can trust.

>>> import foretoken
>>> engine = foretoken.Engine.load("bundled", speculative="draft_model")
>>> completion = engine.generate("def fibonacci(n):", temperature=0.7, seed=1)
>>> print(completion.text, completion.mean_acceptance_length)
"""

from foretoken.engine.config import METHODS, speculative_config
from foretoken.engine.engine import Engine, Request, Stream
from foretoken.engine.result import Completion
from foretoken.engine.state import Piece
from foretoken.errors import ConfigError, ForetokenError, ModelError, PromptError
from foretoken.sampling import SamplingParams
from foretoken.tree import Law, TokenTree
from foretoken.verify import VERIFIERS

__all__ = [
    "METHODS",
    "VERIFIERS",
    "Completion",
    "ConfigError",
    "Engine",
    "ForetokenError",
    "Law",
    "ModelError",
    "Piece",
    "PromptError",
    "Request",
    "SamplingParams",
    "Stream",
    "TokenTree",
    "speculative_config",
]
__version__ = "0.1.0"
