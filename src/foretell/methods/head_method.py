"""What the methods share whose guesses a trained head makes."""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from foretell.core.errors import check_choice, require
from foretell.draft.base import Method
from foretell.draft.config import Loader, MethodConfig
from foretell.draft.shapes import SHAPES, SpecDec
from foretell.heads.formats import load_head
from foretell.heads.head import AnyHead, Head
from foretell.heads.native import WEIGHTS, beside, runs_as
from foretell.heads.repacked import with_weights
from foretell.methods.features import MOST_BYTES
from foretell.model.target import CausalModel
from foretell.model.windows import DraftWindow

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
    kernels: ClassVar[Any]
    """The head as the native kernels run it."""
    head: Any

    def __init__(self, head: Any, model: CausalModel, *, weights: str = "auto") -> None:
        """head: on the model's device. weights: how a native head holds its matrices. Raises ModelError where head was made
        for a target of another size."""
        head.check_target(model.spec, name=self.called)
        self.head, self.model, self.weights = head.eval(), model, weights
        self.max_positions = head.max_positions
        self.native, self.not_native = self._natively()

    def _natively(self) -> tuple[Any, str | None]:
        """The head through the native kernels and None, or None and why not."""
        return beside(self.kernels, self.head, self.model, self.weights)

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


@dataclass(frozen=True)
class WindowedMethodConfig(MethodConfig):
    """What methods share whose drafters may read the ends of a text alone."""

    # Guesses read the text's last so many tokens and its first four alone; 0: all. -1: native heads as many as the texts
    # of their training had, where that is known, others all. The text is the same.
    draft_window: int = -1

    def __post_init__(self) -> None:
        """See ``MethodConfig``."""
        super().__post_init__()
        require(
            self.draft_window >= -1, "draft_window", self.draft_window, "-1 (as trained), 0 (all of the text) or more"
        )

    @property
    def window(self) -> DraftWindow | None:
        """What the drafter reads, as it was set; None: all, or as trained."""
        return DraftWindow(self.draft_window) if self.draft_window > 0 else None

    def limited(self, head: AnyHead, target: CausalModel) -> AnyHead:
        """A head that was loaded, and reads so much."""
        trained = head.trained_length if self.draft_window < 0 and target.spec.implementation == "native" else None
        window = self.window if trained is None else DraftWindow(trained)
        if window is not None:
            head.limit(window)
        return head


@dataclass(frozen=True)
class HeadMethodConfig(MethodConfig):
    """What methods with a trained head share."""

    made: ClassVar[Any]
    """The method."""
    kind: ClassVar[type[Head]]
    """Its heads."""

    model: str | None = None  # hub id or directory of the head; None: the bundled one (of the bundled target alone)
    # Of a head beside a native target: "same" as stored, "int8", "auto": int8 but for float32.
    head_weights: str = "auto"

    def __post_init__(self) -> None:
        """See ``MethodConfig``."""
        super().__post_init__()
        check_choice("head_weights", self.head_weights, WEIGHTS)

    @property
    def head_name(self) -> str:
        """Where the head is."""
        return self.model or f"bundled/{self.method}"

    def limited(self, head: AnyHead, target: CausalModel) -> AnyHead:
        """A head that was loaded: it reads all of a text."""
        return head

    def load(self, loader: Loader) -> Method:
        """Load the head."""
        head = load_head(self.head_name, loader.target.spec, self.kind, target=loader.target)
        made: Method = self.made(self.limited(head, loader.target), loader.target, weights=self.head_weights)
        return made
