"""Settings of method ``kangaroo``."""

from dataclasses import dataclass

from foretell.draft.base import Method
from foretell.draft.config import Loader
from foretell.heads.load import load_head
from foretell.methods.head_config import HeadMethodConfig
from foretell.methods.kangaroo.drafter import Kangaroo
from foretell.methods.kangaroo.head import KangarooHead


@dataclass(frozen=True)
class KangarooConfig(HeadMethodConfig):
    """The target's own lower layers and an adapter."""

    method = Kangaroo.name
    capabilities = Kangaroo.capabilities

    def load(self, loader: Loader) -> Method:
        """Load the adapter."""
        head = load_head(self.head_name, loader.target.spec, KangarooHead)
        return Kangaroo(head, loader.target, weights=self.head_weights)
