"""The setting of methods whose drafters may read the ends of a text alone."""

from dataclasses import dataclass

from foretell.core.errors import ConfigError
from foretell.draft.config import MethodConfig
from foretell.heads.head import AnyHead
from foretell.model.target import CausalModel
from foretell.model.windows import DraftWindow


@dataclass(frozen=True)
class WindowedMethodConfig(MethodConfig):
    """What such methods share."""

    # Guesses read the text's last so many tokens and its first four alone; 0: all. -1: native heads as many as the texts
    # of their training had, where that is known, others all. The text is the same.
    draft_window: int = -1

    def __post_init__(self) -> None:
        """See ``MethodConfig``."""
        super().__post_init__()
        if self.draft_window < -1:
            raise ConfigError(
                f"draft_window = {self.draft_window} must be -1 (as trained), 0 (all of the text) or more"
            )

    @property
    def window(self) -> DraftWindow | None:
        """What the drafter reads, as it was set; None: all, or as trained."""
        return DraftWindow(self.draft_window) if self.draft_window > 0 else None

    def limited(self, head: AnyHead, target: CausalModel) -> AnyHead:
        """A head that was loaded, and reads so much."""
        trained = head.trained_length if self.draft_window < 0 and target.spec.implementation == "native" else None
        window = self.window if trained is None else DraftWindow(trained)
        if window is not None:
            head.limit(window)
        return head
