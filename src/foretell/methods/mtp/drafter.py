"""Method ``mtp``: the target's own MTP module, called again on its own output for each further guess.

Verification gives the true hidden states, and ``EagleDrafter.begin`` computes the kept pairs again from those: the module's
cache never keeps what came of its own guesses.
"""

from dataclasses import dataclass

from foretell.checkpoints.directories import resolve
from foretell.checkpoints.gguf.file import open_gguf
from foretell.checkpoints.gguf.nextn import has_trunk
from foretell.core.errors import ConfigError, ModelError
from foretell.draft.base import Capabilities, Context, Drafter, Method
from foretell.draft.config import Loader
from foretell.heads.pair_head import PairHead
from foretell.methods.eagle.drafter import EagleDrafter
from foretell.methods.eagle.native import NativePair
from foretell.methods.head_method import GROWN, HeadMethod, HeadMethodConfig, WindowedMethodConfig
from foretell.methods.mtp import checkpoint
from foretell.model.target import CausalModel, Target


class MTP(HeadMethod):
    """``--method mtp``."""

    name = "mtp"
    called = "the MTP head"
    capabilities = Capabilities(
        "the multi-token prediction module of the target's own checkpoint", draws=True, reads_target=True, shapes=GROWN
    )
    head: PairHead
    kernels = NativePair

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


@dataclass(frozen=True)
class MTPConfig(WindowedMethodConfig, HeadMethodConfig):
    """The multi-token prediction module of the target's checkpoint."""

    method = MTP.name
    capabilities = MTP.capabilities

    num_speculative_tokens: int = 3  # a module is trained for one guess, and feeds on itself for the next ones
    model: str | None = None  # hub id, directory or GGUF file that holds the module; None: the target's own

    def load(self, loader: Loader) -> Method:
        """Read the module."""
        name, spec = self.model or loader.target.spec.name, loader.target.spec
        path = resolve(name)
        from foretell.methods.mtp.head import CheckpointMTPHead  # imported here, as transformers runs its layer
        from foretell.model.hf.one_layer import text_config

        tensors = checkpoint.read(path, name=name)
        alone = path.is_file() and not has_trunk(open_gguf(path, name=name))  # its layer is as the target's then
        of, called = (resolve(spec.name), spec.name) if alone else (path, name)
        head = CheckpointMTPHead(tensors, text_config(of, name=called), spec, name=name)
        return MTP(self.limited(head, loader.target), loader.target, weights=self.head_weights)
