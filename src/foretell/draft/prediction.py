"""The caller's guess of the output as draft, as in OpenAI's predicted outputs: an edit of a file mostly repeats it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foretell.core.noise import Noise
from foretell.core.tree import DrawMode, TokenTree
from foretell.draft.base import Capabilities, Context, Method, RowDrafter
from foretell.draft.config import Loader, MethodConfig
from foretell.draft.ngram import chain_of
from foretell.draft.shapes import Shape
from foretell.model.target import Target

MAX_ANCHOR = 8
"""Longest suffix of the output, in tokens, that is searched for in the prediction after a mismatch."""


class PredictionFollower:
    """A place in one predicted text. While the output agrees, the place advances; after a mismatch it is searched for.

    It is found where the longest suffix of the output (at most MAX_ANCHOR tokens) occurs in the prediction; of equally
    long ones the first after the last known place wins, since edits keep the order, else the last before it.
    """

    def __init__(self, prediction: Sequence[int]) -> None:
        self.prediction = list(prediction)
        self.output: list[int] = []
        self.place: int | None = 0  # index of the next expected token
        self.known = 0  # the last place that was right
        # All places by their token, and of one token in order: a search narrows the places of the output's last token.
        self._tokens: NDArray[np.int64] = np.array(self.prediction, dtype=np.int64)
        self._places: NDArray[np.int64] = np.argsort(self._tokens, kind="stable")
        self._sorted = self._tokens[self._places]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append emitted tokens to the output and move the place."""
        for token in tokens:
            self.output.append(token)
            if self.place is not None and self.place < len(self.prediction) and self.prediction[self.place] == token:
                self.place += 1
                self.known = self.place
            else:
                self.place = None
        if self.place is None:
            self.place = self._find()
            if self.place is not None:
                self.known = self.place

    def _find(self) -> int | None:
        """Where the prediction goes on after the longest suffix of the output that it has. O(len(prediction))."""
        if not self.output:
            return None
        first, last = np.searchsorted(self._sorted, [self.output[-1], self.output[-1] + 1])
        found = self._places[first:last]
        for back in range(1, min(MAX_ANCHOR, len(self.output))):
            longer = found[found >= back]
            longer = longer[self._tokens[longer - back] == self.output[-1 - back]]
            if not len(longer):
                break
            found = longer
        if not len(found):
            return None
        after = int(np.searchsorted(found, self.known - 1))  # a suffix that ends at a place goes on one after it
        return int(found[after if after < len(found) else -1]) + 1

    def guess(self, num_tokens: int) -> list[int]:
        """At most num_tokens of the prediction from the place on."""
        return [] if self.place is None else self.prediction[self.place : self.place + num_tokens]


class PredictionDrafter(RowDrafter):
    """One follower a row."""

    rows: list[PredictionFollower]

    def __init__(self, context: Context) -> None:
        self.rows = [PredictionFollower(prediction) for prediction in context.predictions]

    def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> TokenTree:
        """FIXED chains; a row whose place is lost gets the root alone."""
        wanted = context.depth_limit
        return chain_of(context, [follower.guess(most) for follower, most in zip(self.rows, wanted, strict=True)])


class Prediction(Method):
    """``--method prediction``."""

    name = "prediction"
    capabilities = Capabilities(
        "the caller's guess of the output text", draws=False, needs_prediction=True, by_request=True
    )

    def open(self, context: Context, capacity: int, target: Target) -> PredictionDrafter:
        """Index the predictions."""
        return PredictionDrafter(context)


@dataclass(frozen=True)
class PredictionConfig(MethodConfig):
    """The caller's guess of the output."""

    method = Prediction.name
    capabilities = Prediction.capabilities

    num_speculative_tokens: int = 7

    def load(self, loader: Loader) -> Method:
        """Nothing to load."""
        return Prediction()
