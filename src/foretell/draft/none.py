"""Plain decoding as a drafter: no guesses, one node a row. Baseline of every benchmark, reference of every test."""

from dataclasses import dataclass

from foretell.core.noise import Noise
from foretell.core.tree import DrawMode, TokenTree, root_tree
from foretell.draft.base import Capabilities, Context, Drafter, Method
from foretell.draft.config import Loader, MethodConfig
from foretell.draft.shapes import Shape
from foretell.model.target import Target


class NoDrafter(Drafter):
    """Proposes the root alone."""

    can_join = can_wait = True

    def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> TokenTree:
        """One node a row."""
        return root_tree(context.pending)

    def join(self, other: Drafter, context: Context) -> None:
        """Nothing to remember."""


class NoMethod(Method):
    """``--method none``."""

    name = "none"
    capabilities = Capabilities("plain decoding: one token a pass", draws=False, by_request=True)

    def open(self, context: Context, capacity: int, target: Target) -> Drafter:
        """Nothing to remember."""
        return NoDrafter()


@dataclass(frozen=True)
class NoneConfig(MethodConfig):
    """Plain decoding."""

    method = NoMethod.name
    capabilities = NoMethod.capabilities
    guesses = False

    def load(self, loader: Loader) -> Method:
        """Nothing to load."""
        return NoMethod()
