"""What the configurations of methods with a trained head share."""

from dataclasses import dataclass

from foretell.core.errors import ConfigError, nearest
from foretell.draft.config import Loader, MethodConfig
from foretell.heads.native import WEIGHTS
from foretell.methods.acceptance.head import AcceptanceHead
from foretell.methods.acceptance.load import load_acceptance


@dataclass(frozen=True)
class HeadMethodConfig(MethodConfig):
    """What methods with a trained head share."""

    model: str | None = None  # hub id or directory of the head; None: the bundled one (of the bundled target alone)
    # Of a head beside a native target: "same" as stored, "int8", "auto": int8 but for float32.
    head_weights: str = "auto"

    def __post_init__(self) -> None:
        """See ``MethodConfig``."""
        super().__post_init__()
        if self.head_weights not in WEIGHTS:
            raise ConfigError(
                f"head_weights = {self.head_weights!r} must be one of {', '.join(WEIGHTS)}"
                f"{nearest(self.head_weights, WEIGHTS)}"
            )

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
                f"'foretell train acceptance --init {self.head_name}' and give its directory as 'acceptance', or choose "
                "shape 'adaptive'"
            )
        return load_acceptance(self.acceptance, loader.target.spec)
