"""Floor 1: what speculative decoding can and cannot reach. Pure mathematics: no models, no IO, no state.

``acceptance``: the exact one-step acceptance of each rule. ``optimum``: what no rule can exceed. ``length``: tokens a
step and the best number of guesses. ``shape``: the best tree of a size. All in float64; p is the target, q the draft.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretell.theory.rows import Bounds, Estimate

__all__ = ["Bounds", "Estimate"]


def __getattr__(name: str) -> Any:
    """The two are imported when they are first used: ``length`` needs no torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from foretell.theory import rows

    return getattr(rows, name)
