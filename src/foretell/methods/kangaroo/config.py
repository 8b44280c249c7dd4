"""Settings of methods ``kangaroo`` and ``early_exit``."""

from dataclasses import dataclass

from foretell.core.errors import ConfigError
from foretell.draft.base import Method
from foretell.draft.config import Loader, MethodConfig
from foretell.heads.load import load_head
from foretell.methods.head_config import HeadMethodConfig
from foretell.methods.kangaroo.drafter import EarlyExit, Kangaroo
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


@dataclass(frozen=True)
class EarlyExitConfig(MethodConfig):
    """The target's own lower layers and its head, nothing trained."""

    method = EarlyExit.name
    capabilities = EarlyExit.capabilities

    exit_layer: int = 0  # how many layers run; 0: half of them

    def load(self, loader: Loader) -> Method:
        """Nothing to load. Raises ConfigError for an exit layer out of range."""
        num_layers = loader.target.spec.num_layers
        exit_layer = self.exit_layer or max(1, num_layers // 2)
        if not 0 < exit_layer < num_layers:
            raise ConfigError(
                f"exit_layer = {self.exit_layer} must be between 1 and {num_layers - 1}: {loader.target.spec.name!r} has "
                f"{num_layers} layers"
            )
        return EarlyExit(loader.target, exit_layer)
