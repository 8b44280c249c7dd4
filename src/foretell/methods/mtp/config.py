"""Settings of method ``mtp``."""

from dataclasses import dataclass

from foretell.checkpoints.directories import resolve
from foretell.checkpoints.gguf.file import open_gguf
from foretell.checkpoints.gguf.nextn import has_trunk
from foretell.draft.base import Method
from foretell.draft.config import Loader
from foretell.methods.head_config import HeadMethodConfig
from foretell.methods.mtp import checkpoint
from foretell.methods.mtp.drafter import MTP
from foretell.methods.windowed import WindowedMethodConfig


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
