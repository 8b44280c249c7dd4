"""Floor 1: what speculative decoding can and cannot reach. Pure mathematics: no models, no IO, no state.

``acceptance``: the exact one-step acceptance of each rule. ``optimum``: what no rule can exceed. ``length``: tokens a
step and the best number of guesses. ``shape``: the best tree of a size. All in float64; p is the target, q the draft.
"""

from foretell.analysis.theory import acceptance, length, optimum, shape
from foretell.analysis.theory.rows import Bounds, Estimate

__all__ = ["Bounds", "Estimate", "acceptance", "length", "optimum", "shape"]
