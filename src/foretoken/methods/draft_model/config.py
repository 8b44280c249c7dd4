"""Settings of method ``draft_model``."""

from dataclasses import dataclass

from foretoken.core.errors import ConfigError
from foretoken.draft.base import Method
from foretoken.draft.config import Loader, MethodConfig
from foretoken.methods.acceptance.load import load_acceptance
from foretoken.methods.draft_model.drafter import DraftModel


@dataclass(frozen=True)
class DraftModelConfig(MethodConfig):
    """A smaller model of the same vocabulary."""

    method = DraftModel.name
    capabilities = DraftModel.capabilities

    model: str | None = None  # hub id, directory, or None for the bundled draft (of the bundled target alone)
    acceptance: str | None = None  # directory of the acceptance head for shape "specdec"; None: the bundled draft's

    def load(self, loader: Loader) -> Method:
        """Load the draft model, and its acceptance head where the shape needs one."""
        draft = loader.draft(self.model or "bundled/draft")
        if not self.proposal_shape.asks_acceptance:
            return DraftModel(draft)
        if self.acceptance is None and self.model not in (None, "bundled/draft"):
            raise ConfigError(
                f"shape 'specdec' needs an acceptance head, and none is given for draft {self.model}: train one with "
                "'foretoken train acceptance' and give its directory as 'acceptance', or choose shape 'adaptive'"
            )
        return DraftModel(draft, load_acceptance(self.acceptance or "bundled/acceptance", draft.spec))
