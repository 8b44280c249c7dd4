"""Settings of methods ``eagle1``, ``eagle2`` and ``eagle3``."""

from dataclasses import dataclass
from typing import ClassVar

from foretell.draft.base import Method
from foretell.draft.config import Loader
from foretell.heads.load import load_head
from foretell.methods.eagle.drafter import Eagle1, Eagle2, Eagle3
from foretell.methods.eagle.eagle1 import Eagle1Head
from foretell.methods.eagle.eagle3 import Eagle3Head
from foretell.methods.head_config import HeadMethodConfig
from foretell.methods.windowed import WindowedMethodConfig


@dataclass(frozen=True)
class Eagle1Config(WindowedMethodConfig, HeadMethodConfig):
    """One layer over the target's last features."""

    method = Eagle1.name
    capabilities = Eagle1.capabilities
    made: ClassVar[type[Eagle1]] = Eagle1

    def load(self, loader: Loader) -> Method:
        """Load the head, EAGLE-1's."""
        head = self.limited(load_head(self.head_name, loader.target.spec, Eagle1Head), loader.target)
        return self.made(head, loader.target, weights=self.head_weights)


@dataclass(frozen=True)
class Eagle2Config(Eagle1Config):
    """EAGLE-1's weights on a dynamic tree that follows the draft probabilities."""

    method = Eagle2.name
    capabilities = Eagle2.capabilities
    made: ClassVar[type[Eagle1]] = Eagle2

    shape: str = "eagle2"


@dataclass(frozen=True)
class Eagle3Config(WindowedMethodConfig, HeadMethodConfig):
    """One layer over fused features of three target layers."""

    method = Eagle3.name
    capabilities = Eagle3.capabilities

    def load(self, loader: Loader) -> Method:
        """Load the head."""
        head = self.limited(
            load_head(self.head_name, loader.target.spec, Eagle3Head, target=loader.target), loader.target
        )
        return Eagle3(head, loader.target, weights=self.head_weights)
