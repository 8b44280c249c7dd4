"""Method ``mtp``: the target's own MTP module, called again on its own output for each further guess.

Verification gives the true hidden states, and ``EagleDrafter.begin`` computes the kept pairs again from those: the module's
cache never keeps what came of its own guesses.
"""

from foretell.core.errors import ConfigError, ModelError
from foretell.draft.base import Capabilities, Context, Drafter
from foretell.heads.pair_head import PairHead
from foretell.methods.eagle.drafter import EagleDrafter
from foretell.methods.eagle.native import NativePair, native_pair
from foretell.methods.head_method import GROWN, HeadMethod
from foretell.model.target import CausalModel, Target


class MTP(HeadMethod):
    """``--method mtp``."""

    name = "mtp"
    called = "the MTP head"
    capabilities = Capabilities(
        "the multi-token prediction module of the target's own checkpoint",
        draws=True,
        reads_target=True,
        shapes=GROWN,
    )
    head: PairHead

    def __init__(self, head: PairHead, model: CausalModel, *, weights: str = "auto") -> None:
        """See ``HeadMethod``; the head must read the last layer. Raises ModelError, and ConfigError for a window where the
        head runs by transformers."""
        super().__init__(head, model, weights=weights)
        last = model.spec.num_layers - 1
        if head.taps != (last,):
            raise ModelError(
                f"the MTP head reads the output of target layer {head.taps[0]}, and must read the last one, {last} in "
                f"{model.spec.name!r}"
            )
        if head.window is not None and self.native is None:
            raise ConfigError(
                f"draft_window = {head.window.size}: the MTP head runs by transformers, which has no windows for drafts: "
                f"{self.not_native}; drop it"
            )

    def _natively(self) -> tuple[NativePair | None, str | None]:
        return native_pair(self.head, self.model, self.weights)

    @property
    def runs_as(self) -> str:
        """What the module is."""
        head = self.head
        if self.native is not None:
            return f"native, {self.native.label}: {head.module}"
        blocks = f"; its {head.dequantised} matrices are dequantised" if head.dequantised else ""
        return f"torch: {self.not_native}; {head.module}{blocks}"

    def open(self, context: Context, capacity: int, target: Target) -> Drafter:
        """A fresh cache for these rows."""
        return EagleDrafter(self.head, self.model, context, capacity, native=self.native)
