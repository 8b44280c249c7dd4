"""Configurations of the methods that read a trained head. Without ``model`` each takes the head bundled for the bundled
target."""

from dataclasses import dataclass

from foretoken.draft.base import Method
from foretoken.draft.config import Loader, MethodConfig
from foretoken.draft.dflash import DFlash
from foretoken.draft.eagle import Eagle1, Eagle2, Eagle3
from foretoken.draft.kangaroo import EarlyExit, Kangaroo
from foretoken.draft.medusa import Medusa
from foretoken.errors import ConfigError
from foretoken.heads.acceptance import AcceptanceHead
from foretoken.heads.dflash import DFlashHead
from foretoken.heads.eagle1 import Eagle1Head
from foretoken.heads.eagle3 import Eagle3Head
from foretoken.heads.kangaroo import KangarooHead
from foretoken.heads.load import load_acceptance, load_head
from foretoken.heads.medusa import MedusaHead


@dataclass(frozen=True)
class HeadMethodConfig(MethodConfig):
    """What methods with a trained head share."""

    model: str | None = None  # hub id or directory of the head; None: the bundled one (of the bundled target alone)

    @property
    def head_name(self) -> str:
        """Where the head is."""
        return self.model or f"bundled/{self.method}"


@dataclass(frozen=True)
class StepwiseMethodConfig(HeadMethodConfig):
    """Common keys of methods whose head guesses token by token, so that an acceptance head can stop them."""

    acceptance: str | None = None  # directory of the acceptance head for shape "specdec"; none is bundled

    def load_acceptance(self, loader: Loader) -> AcceptanceHead | None:
        """The acceptance head, where the shape needs one. Raises ConfigError where none is given."""
        if not self.proposal_shape.asks_acceptance:
            return None
        if self.acceptance is None:
            raise ConfigError(
                f"shape 'specdec' needs an acceptance head, and none is given for {self.head_name}: train one with "
                f"'foretoken train acceptance --init {self.head_name}' and give its directory as 'acceptance', or choose "
                "shape 'adaptive'"
            )
        return load_acceptance(self.acceptance, loader.target.spec)


@dataclass(frozen=True)
class MedusaConfig(HeadMethodConfig):
    """Heads on the last hidden state."""

    method = Medusa.name
    capabilities = Medusa.capabilities

    num_speculative_tokens: int = 4  # the bundled head has 4; larger values are cut to the number of heads

    def load(self, loader: Loader) -> Method:
        """Load the heads."""
        return Medusa(load_head(self.head_name, loader.target.spec, MedusaHead), loader.target)


@dataclass(frozen=True)
class Eagle1Config(StepwiseMethodConfig):
    """One layer over the target's last features."""

    method = Eagle1.name
    capabilities = Eagle1.capabilities

    def load(self, loader: Loader) -> Method:
        """Load the head."""
        acceptance = self.load_acceptance(loader)
        return Eagle1(load_head(self.head_name, loader.target.spec, Eagle1Head), loader.target, acceptance)


@dataclass(frozen=True)
class Eagle2Config(StepwiseMethodConfig):
    """EAGLE-1's weights on a dynamic tree that follows the draft probabilities."""

    method = Eagle2.name
    capabilities = Eagle2.capabilities

    shape: str = "eagle2"

    def load(self, loader: Loader) -> Method:
        """Load EAGLE-1's head."""
        acceptance = self.load_acceptance(loader)
        return Eagle2(load_head(self.head_name, loader.target.spec, Eagle1Head), loader.target, acceptance)


@dataclass(frozen=True)
class Eagle3Config(StepwiseMethodConfig):
    """One layer over fused features of three target layers."""

    method = Eagle3.name
    capabilities = Eagle3.capabilities

    def load(self, loader: Loader) -> Method:
        """Load the head."""
        acceptance = self.load_acceptance(loader)
        return Eagle3(load_head(self.head_name, loader.target.spec, Eagle3Head), loader.target, acceptance)


@dataclass(frozen=True)
class KangarooConfig(StepwiseMethodConfig):
    """The target's own lower layers and an adapter."""

    method = Kangaroo.name
    capabilities = Kangaroo.capabilities

    def load(self, loader: Loader) -> Method:
        """Load the adapter."""
        acceptance = self.load_acceptance(loader)
        return Kangaroo(load_head(self.head_name, loader.target.spec, KangarooHead), loader.target, acceptance)


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


@dataclass(frozen=True)
class DFlashConfig(HeadMethodConfig):
    """A block of guesses in one pass."""

    method = DFlash.name
    capabilities = DFlash.capabilities

    num_speculative_tokens: int = 7

    def load(self, loader: Loader) -> Method:
        """Load the head."""
        return DFlash(load_head(self.head_name, loader.target.spec, DFlashHead), loader.target)
