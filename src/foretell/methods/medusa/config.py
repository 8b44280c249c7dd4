"""Settings of method ``medusa``."""

from dataclasses import dataclass

from foretell.draft.base import Method
from foretell.draft.config import Loader
from foretell.heads.load import load_head
from foretell.methods.head_config import HeadMethodConfig
from foretell.methods.medusa.drafter import Medusa
from foretell.methods.medusa.head import MedusaHead


@dataclass(frozen=True)
class MedusaConfig(HeadMethodConfig):
    """Heads on the last hidden state."""

    method = Medusa.name
    capabilities = Medusa.capabilities

    num_speculative_tokens: int = 4  # the bundled head has 4; larger values are cut to the number of heads

    def load(self, loader: Loader) -> Method:
        """Load the heads."""
        head = load_head(self.head_name, loader.target.spec, MedusaHead)
        return Medusa(head, loader.target, weights=self.head_weights)
