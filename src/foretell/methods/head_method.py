"""What the methods share whose guesses a trained head makes."""

from abc import abstractmethod
from collections.abc import Mapping
from copy import copy
from typing import Any, ClassVar

from torch import Tensor

from foretell.draft.base import Method
from foretell.draft.shapes import SHAPES, SpecDec
from foretell.heads.native import runs_as
from foretell.heads.repacked import with_weights
from foretell.methods.features import MOST_BYTES
from foretell.model.target import CausalModel

GROWN = tuple(name for name in SHAPES.builtin if name != SpecDec.name)
"""Shapes of methods for which no acceptance head is trained."""


class HeadMethod(Method):
    """A head, and the target whose hidden states, embeddings and possibly output head it uses."""

    called: ClassVar[str] = "the draft head"
    """As messages name the head."""
    can_learn: ClassVar[bool] = False
    """Whether ``rebuilt`` makes it of other weights."""
    buffers: ClassVar[bool] = True
    """Whether its drafters keep taps of which no feature has been made."""
    head: Any

    def __init__(self, head: Any, model: CausalModel, *, weights: str = "auto") -> None:
        """head: on the model's device. weights: how a native head holds its matrices. Raises ModelError where head was made
        for a target of another size."""
        head.check_target(model.spec, name=self.called)
        self.head, self.model, self.weights = head.eval(), model, weights
        self.max_positions = head.max_positions
        self.native, self.not_native = self._natively()

    @abstractmethod
    def _natively(self) -> tuple[Any, str | None]:
        """The head through the native kernels and None, or None and why not."""

    def rebuilt(self, weights: Mapping[str, Tensor]) -> Method:
        """See ``Method``."""
        if not self.can_learn:
            return super().rebuilt(weights)
        made = copy(self)
        made.head = with_weights(self.head, weights)
        made.native, made.not_native = made._natively()
        return made

    @property
    def runs_as(self) -> str:
        """See ``Method``."""
        return runs_as(self.not_native, self.head)

    @property
    def taps(self) -> tuple[int, ...]:
        """The head's."""
        return tuple(self.head.taps)

    @property
    def bytes_per_token(self) -> int:
        """The head's keys and values, and a feature."""
        return int(self.head.bytes_per_token)

    @property
    def bytes_per_row(self) -> int:
        """Taps of which no feature has been made."""
        return MOST_BYTES if self.buffers else 0
