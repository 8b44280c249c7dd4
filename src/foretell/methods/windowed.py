"""The setting of methods whose drafters may read the ends of a text alone."""

from dataclasses import dataclass

from foretell.core.errors import ConfigError
from foretell.draft.config import MethodConfig
from foretell.methods.common.head import AnyHead
from foretell.model.windows import DraftWindow


@dataclass(frozen=True)
class WindowedMethodConfig(MethodConfig):
    """What such methods share."""

    draft_window: int = 0  # guesses read the text's last so many tokens and its first four alone; 0: all. No text changes

    def __post_init__(self) -> None:
        """See ``MethodConfig``."""
        super().__post_init__()
        if self.draft_window < 0:
            raise ConfigError(f"draft_window = {self.draft_window} must be 0 (all of the text) or more")

    @property
    def window(self) -> DraftWindow | None:
        """What the drafter reads; None: all."""
        return DraftWindow(self.draft_window) if self.draft_window else None

    def limited(self, head: AnyHead) -> AnyHead:
        """A head that was loaded, and reads so much."""
        if self.window is not None:
            head.limit(self.window)
        return head
