"""Settings of method ``dflash``."""

from dataclasses import dataclass

from foretell.draft.base import Method
from foretell.draft.config import Loader
from foretell.heads.load import load_head
from foretell.methods.dflash.drafter import DFlash
from foretell.methods.dflash.head import DFlashHead
from foretell.methods.head_config import HeadMethodConfig
from foretell.methods.windowed import WindowedMethodConfig


@dataclass(frozen=True)
class DFlashConfig(WindowedMethodConfig, HeadMethodConfig):
    """A block of guesses in one pass."""

    method = DFlash.name
    capabilities = DFlash.capabilities

    num_speculative_tokens: int = 7

    def load(self, loader: Loader) -> Method:
        """Load the head."""
        head = self.limited(load_head(self.head_name, loader.target.spec, DFlashHead), loader.target)
        return DFlash(head, loader.target, weights=self.head_weights)
