"""Settings of method ``draft_model``."""

from dataclasses import dataclass

from foretoken.core.errors import ConfigError, nearest
from foretoken.draft.base import Method
from foretoken.draft.config import Loader, MethodConfig
from foretoken.methods.acceptance.load import load_acceptance
from foretoken.methods.draft_model.drafter import DraftModel
from foretoken.model.packed import WEIGHTS


@dataclass(frozen=True)
class DraftModelConfig(MethodConfig):
    """A smaller model of the same vocabulary."""

    method = DraftModel.name
    capabilities = DraftModel.capabilities

    model: str | None = None  # hub id, directory, or None for the bundled draft (of the bundled target alone)
    draft_weights: str = "auto"  # how its matrices are held, as load_model has it; the text does not depend on it
    acceptance: str | None = None  # directory of the acceptance head for shape "specdec"; None: the bundled draft's

    def __post_init__(self) -> None:
        """Raise ConfigError for invalid values."""
        super().__post_init__()
        if self.draft_weights not in WEIGHTS:
            raise ConfigError(
                f"draft_weights = {self.draft_weights!r} must be one of {', '.join(WEIGHTS)}"
                f"{nearest(self.draft_weights, WEIGHTS)}"
            )

    def load(self, loader: Loader) -> Method:
        """Load the draft model, and its acceptance head where the shape needs one."""
        name = self.model or "bundled/draft"
        draft = loader.draft(name) if self.draft_weights == "auto" else loader.draft(name, self.draft_weights)
        if not self.proposal_shape.asks_acceptance:
            return DraftModel(draft)
        if self.acceptance is None and self.model not in (None, "bundled/draft"):
            raise ConfigError(
                f"shape 'specdec' needs an acceptance head, and none is given for draft {self.model}: train one with "
                "'foretoken train acceptance' and give its directory as 'acceptance', or choose shape 'adaptive'"
            )
        return DraftModel(draft, load_acceptance(self.acceptance or "bundled/acceptance", draft.spec))
