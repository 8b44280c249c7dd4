"""A drafter whose failure ends its guesses, not the service: its rows go on without any, and their text stays right.

Guesses change a text's speed alone, so a drafter that raises (no memory, a third party's mistake) can be left out at any
point between two passes of the target. It is closed for good: what it remembers of its rows may be half written.
"""

from collections.abc import Callable
from typing import TypeVar

import torch

from foretell.core.errors import ModelError
from foretell.core.noise import Noise
from foretell.core.tree import DrawMode, TokenTree, root_tree
from foretell.draft.base import Context, Drafter
from foretell.draft.forwarding import Forwarding
from foretell.draft.shapes import Shape
from foretell.engine.failures import Failures
from foretell.engine.state import depth_of
from foretell.kernels.bounds import check_tree

_T = TypeVar("_T")


class GuardedDrafter(Forwarding):
    """Forwards to a drafter until one of its calls raises; from then on it proposes the root alone."""

    def __init__(self, inner: Drafter, name: str, failures: Failures, num_nodes: int) -> None:
        """name: the method's, by which a failure is counted. num_nodes: slots of a row that its trees may use."""
        super().__init__(inner)
        self._num_nodes = num_nodes
        self.name, self._failures = name, failures
        self.failure = ""  # the error's name; "" while it works. (Its text may tell what clients need not know.)

    def _read(self, read: Callable[[Drafter], _T], instead: _T) -> _T:
        inner = self.inner
        if inner is None:
            return instead
        try:
            return read(inner)
        except Exception as error:
            self.inner = None
            self.failure = type(error).__name__
            self._failures.failed(self.name, error)
            return instead

    def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> TokenTree:
        """The drafter's proposal, or the root alone; a tree that is none counts as a failure."""

        def checked(inner: Drafter) -> TokenTree | None:
            tree = inner.propose(context, shape, draws, noise)
            check_proposal(tree, context, self._num_nodes)
            return tree

        found = self._call(checked, None)
        return root_tree(context.pending) if found is None else found

    def join(self, other: Drafter, context: Context) -> None:
        """See ``Drafter``. Where one of both has failed, or joining fails, no row of either is guessed for."""
        assert isinstance(other, GuardedDrafter)
        if other.inner is None:
            self.inner, self.failure = None, self.failure or other.failure
        else:
            super().join(other, context)

    def num_unread(self, context: Context) -> list[int]:
        """See ``Drafter``."""

        def checked(inner: Drafter) -> list[int]:
            found = inner.num_unread(context)
            if len(found) != context.num_rows:
                raise ModelError(
                    f"num_unread has {len(found)} numbers; expected one for each of {context.num_rows} rows"
                )
            return found

        return self._call(checked, [0] * context.num_rows)


def check_proposal(tree: TokenTree, context: Context, num_nodes: int) -> None:
    """Check that a tree continues the rows of context, within the room that they have: at most num_nodes nodes, none deeper
    than its row's ``depth_limit``. Another root would be read as text; nodes beyond the room would be written over other
    memory. Raises as ``check_tree`` does; on an accelerator values are not read."""
    tokens, shape = tree.tokens, tree.tokens.shape
    alone = shape == tree.parent.shape == (context.num_rows, 1) and tree.hidden is None and not tree.hidden_layer
    if alone and tokens.data_ptr() == context.pending.data_ptr():
        return  # the pending tokens themselves: in most steps without guesses
    check_tree(tree, context.processors.vocab_size)
    if shape[0] != context.num_rows or shape[1] > num_nodes:
        raise ModelError(
            f"a proposal has {shape[0]} rows of {shape[1]} nodes; expected {context.num_rows} rows of at most {num_nodes}"
        )
    if (tree.hidden is None) != (tree.hidden_layer == 0):
        raise ModelError(
            f"a proposal's hidden_layer is {tree.hidden_layer}, and hidden is {type(tree.hidden).__name__}"
        )
    if context.device.type != "cpu":
        return
    if not torch.equal(tree.tokens[:, 0], context.pending):
        raise ModelError(
            f"the roots of a proposal are {tree.tokens[:, 0].tolist()}; expected the pending tokens, "
            f"{context.pending.tolist()}"
        )
    if shape[1] - 1 <= min(context.depth_limit):
        return
    for row, (most, parent) in enumerate(zip(context.depth_limit, tree.parent.tolist(), strict=True)):
        deepest = depth_of(parent)
        if deepest > max(most, 0):
            raise ModelError(f"row {row} of a proposal is {deepest} deep; its depth_limit is {most}")
