"""What the configurations of methods with a trained head share."""

from dataclasses import dataclass

from foretell.core.errors import check_choice
from foretell.draft.config import MethodConfig
from foretell.heads.native import WEIGHTS


@dataclass(frozen=True)
class HeadMethodConfig(MethodConfig):
    """What methods with a trained head share."""

    model: str | None = None  # hub id or directory of the head; None: the bundled one (of the bundled target alone)
    # Of a head beside a native target: "same" as stored, "int8", "auto": int8 but for float32.
    head_weights: str = "auto"

    def __post_init__(self) -> None:
        """See ``MethodConfig``."""
        super().__post_init__()
        check_choice("head_weights", self.head_weights, WEIGHTS)

    @property
    def head_name(self) -> str:
        """Where the head is."""
        return self.model or f"bundled/{self.method}"
