"""Settings of methods ``eagle1``, ``eagle2``, ``eagle3`` and ``peagle``."""

from dataclasses import dataclass

from foretell.core.errors import ConfigError
from foretell.draft.base import Method
from foretell.draft.config import Loader
from foretell.heads.load import load_head
from foretell.methods.eagle.drafter import Eagle1, Eagle2, Eagle3
from foretell.methods.eagle.eagle1 import Eagle1Head
from foretell.methods.eagle.eagle3 import Eagle3Head
from foretell.methods.eagle.parallel import PEagle, PEagleHead
from foretell.methods.head_config import HeadMethodConfig, StepwiseMethodConfig
from foretell.methods.windowed import WindowedMethodConfig


@dataclass(frozen=True)
class Eagle1Config(WindowedMethodConfig, StepwiseMethodConfig):
    """One layer over the target's last features."""

    method = Eagle1.name
    capabilities = Eagle1.capabilities

    def load(self, loader: Loader) -> Method:
        """Load the head."""
        acceptance = self.load_acceptance(loader)
        head = self.limited(load_head(self.head_name, loader.target.spec, Eagle1Head), loader.target)
        return Eagle1(head, loader.target, acceptance, weights=self.head_weights)


@dataclass(frozen=True)
class Eagle2Config(WindowedMethodConfig, StepwiseMethodConfig):
    """EAGLE-1's weights on a dynamic tree that follows the draft probabilities."""

    method = Eagle2.name
    capabilities = Eagle2.capabilities

    shape: str = "eagle2"

    def load(self, loader: Loader) -> Method:
        """Load EAGLE-1's head."""
        acceptance = self.load_acceptance(loader)
        head = self.limited(load_head(self.head_name, loader.target.spec, Eagle1Head), loader.target)
        return Eagle2(head, loader.target, acceptance, weights=self.head_weights)


@dataclass(frozen=True)
class Eagle3Config(WindowedMethodConfig, StepwiseMethodConfig):
    """One layer over fused features of three target layers."""

    method = Eagle3.name
    capabilities = Eagle3.capabilities

    def load(self, loader: Loader) -> Method:
        """Load the head."""
        acceptance = self.load_acceptance(loader)
        head = self.limited(
            load_head(self.head_name, loader.target.spec, Eagle3Head, target=loader.target), loader.target
        )
        return Eagle3(head, loader.target, acceptance, weights=self.head_weights)


@dataclass(frozen=True)
class PEagleConfig(HeadMethodConfig):
    """An EAGLE-3 head that makes all guesses in one pass."""

    method = PEagle.name
    capabilities = PEagle.capabilities

    def load(self, loader: Loader) -> Method:
        """Load the head; none is bundled, and none is trained here."""
        if self.model is None:
            raise ConfigError("method 'peagle' needs a trained head: give the directory or hub id of one as 'model'")
        return PEagle(load_head(self.model, loader.target.spec, PEagleHead), loader.target)
