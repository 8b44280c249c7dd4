"""The client's own guess of the output: chosen as the method, and counted separately."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from foretell.core.errors import ConfigError
from foretell.draft.config import MethodConfig
from foretell.draft.prediction import Prediction
from foretell.engine.request.row import Piece

if TYPE_CHECKING:
    from foretell.service.service import Service

SOURCE = f"draft:{Prediction.name}"


def prediction_method(service: "Service") -> MethodConfig | None:
    """The method that reads predictions; None, the service's own choice, where it is not loaded."""
    try:
        return service.method(Prediction.name)
    except ConfigError:
        return None


def count_prediction(pieces: Iterable[Piece], num_predicted: int) -> tuple[int, int]:
    """(accepted, rejected) tokens of the client's prediction. Tokens of other drafters count as neither."""
    accepted = sum(piece.source == SOURCE for piece in pieces)
    return accepted, max(0, num_predicted - accepted)
