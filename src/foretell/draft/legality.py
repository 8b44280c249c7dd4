"""What composes with what: every method, shape, way of drawing and verifier that is legal, and why the rest is not.

FIXED nodes are sound under every verifier, so most combinations are; refused combinations would be undefined or biased.
"""

from foretell.core.errors import ConfigError
from foretell.core.registry import check_draws
from foretell.core.tree import DrawMode
from foretell.draft.base import Capabilities, Method
from foretell.draft.growing.frontier import NO_FORESIGHT
from foretell.draft.shapes import Shape
from foretell.verify import Verifier

SAMPLED = (DrawMode.IID, DrawMode.WITHOUT_REPLACEMENT, DrawMode.GREEDY)
"""Draws whose distribution a verifier has to correct for."""


def parse_draws(text: str) -> DrawMode | None:
    """The way of drawing; None for "auto". Raises ConfigError."""
    check_draws(text)
    return None if text == "auto" else DrawMode(text)


def can_stop(method: Method, shape: Shape) -> bool:
    """Whether the method, as it was loaded, has the acceptance head that the shape stops by, if it stops by one."""
    return not shape.asks_acceptance or method.foresees


def check_stop(method: Method, shape: Shape) -> None:
    """Raise ConfigError where ``can_stop`` says no."""
    if not can_stop(method, shape):
        raise ConfigError(NO_FORESIGHT)


def check_combination(
    method: str, capabilities: Capabilities, verifier: Verifier, shape: Shape, draws: DrawMode | None
) -> None:
    """Raise ConfigError, with the reason and the nearest legal choice, where the parts do not compose.

    draws is None where the user left it to the verifier.
    """
    reason = refusal(method, capabilities, verifier, shape, draws)
    if reason is not None:
        raise ConfigError(reason)


def refusal(
    method: str, capabilities: Capabilities, verifier: Verifier, shape: Shape, draws: DrawMode | None
) -> str | None:
    """Why a combination is not legal; None where it is."""
    asked = draws or verifier.draws
    if shape.name not in capabilities.shapes:
        return (
            f"method {method!r} cannot grow the shape {shape.name!r}: choose shape {_either(capabilities.shapes)}, "
            "or another method"
        )
    if draws is not None and draws != DrawMode.FIXED and not capabilities.draws:
        return f"method {method!r} draws from no distribution: choose draws 'auto' or 'fixed', not {draws.value!r}"
    if verifier.chains_only and not shape.is_chain:
        return (
            f"verifier {verifier.name!r} is defined on chains, and shape {shape.name!r} branches: "
            "choose verifier 'traversal' (the same rule on trees), or shape 'chain'"
        )
    if shape.fixed and draws in SAMPLED:
        return (
            f"shape {shape.name!r} ranks its nodes after they were found, so none is a draw of distribution "
            f"{asked.value!r} "
            "(verified as one, the text would be biased): choose draws 'fixed' or 'auto', or shape 'dyspec'"
        )
    # A shape that ranks afterwards uses FIXED nodes where sampled ones were requested: no draws are counted.
    drawn = capabilities.draws and not (shape.fixed and asked in SAMPLED)
    if drawn and not shape.template and asked in verifier.counts_children:
        return (
            f"verifier {verifier.name!r} treats all children of a node together, and in shape {shape.name!r} with draws "
            f"{asked.value!r} how many there are depends on their tokens: the text would be biased. Choose shape "
            "'static' or 'sequoia', draws 'fixed', or verifier 'rejection'"
        )
    return None


def _either(names: tuple[str, ...]) -> str:
    return " or ".join(map(repr, names))
