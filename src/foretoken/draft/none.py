"""Plain decoding as a drafter: no guesses, one node a row. Baseline of every benchmark, oracle of every test."""

from foretoken.draft.base import Capabilities, Context, Drafter, Method
from foretoken.draft.shape import Shape
from foretoken.model.target import Target
from foretoken.noise import Noise
from foretoken.tree import Draws, TokenTree, root_tree


class NoDrafter(Drafter):
    """Proposes the root alone."""

    def propose(self, context: Context, shape: Shape, draws: Draws, noise: Noise) -> TokenTree:
        """One node a row."""
        return root_tree(context.pending)

    def join(self, other: Drafter, context: Context) -> None:
        """Nothing to remember."""


class NoMethod(Method):
    """``--method none``."""

    name = "none"
    capabilities = Capabilities("plain decoding: one token a pass", draws=False)

    def open(self, context: Context, capacity: int, target: Target) -> Drafter:
        """Nothing to remember."""
        return NoDrafter()
