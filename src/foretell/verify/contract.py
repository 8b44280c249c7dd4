"""What a rule of a package, or of the user's own, must keep to; foretell's own rules are tested for it, and not asked.

A rule may raise anything, and return anything. Whatever it is, the error is a ``VerifierError`` that names the rule, its
package and what is wrong, and not a failure of foretell in which nobody finds the rule.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from foretell.core.errors import ForetellError, VerifierError
from foretell.core.registry import registry_of
from foretell.verify.base import Evidence, Verdict, Verifier, VerifierLoader, Walk

_T = TypeVar("_T")
NEAR = 1e-3
"""By how much the sum of a distribution may differ from 1: that of float32 over a large vocabulary, and of tests."""


def checked(verifier: Verifier) -> Verifier:
    """The rule, or, where it is not foretell's own, one that calls it and checks what it returns."""
    return verifier if type(verifier).__module__.startswith("foretell.") else Checked(verifier)


class Checked(Verifier):
    """See the module's docstring. Raises VerifierError."""

    def __init__(self, inner: Verifier) -> None:
        self.inner = inner
        for name in ("name", "exact", "reads", "draws", "summary", "invariant", "chains_only"):
            setattr(self, name, getattr(inner, name))

    @property
    def taps(self) -> tuple[int, ...]:
        """See ``Verifier``."""
        return self.inner.taps

    def load(self, loader: VerifierLoader) -> Verifier:
        """See ``Verifier``."""
        found = self._call("load", lambda: self.inner.load(loader))
        if not isinstance(found, Verifier):
            raise self._error(f"load() returned {type(found).__name__}; expected a Verifier")
        return found

    def stops(self, evidence: Evidence) -> Walk:
        """See ``Verifier``."""
        walk = self._call("stops", lambda: self.inner.stops(evidence))
        if not isinstance(walk, Walk):
            raise self._error(f"stops() returned {type(walk).__name__}; expected a Walk")
        self._check_law("stops", walk.stops, tuple(evidence.tree.tokens.shape), evidence)
        sums = walk.stops.sum(1)
        if bool(((sums - 1).abs() > NEAR).any()) and _is_sound(evidence):
            raise self._error(f"stops() sum to {_farthest(sums):.6g} in a row; expected 1 in each")
        padding = ~evidence.tree.valid
        if bool((walk.stops.masked_fill(~padding, 0) > NEAR).any()):
            raise self._error("stops() gives nodes that are padding a probability; expected 0 there")
        return walk

    def residual(self, evidence: Evidence, walk: Walk, at: Tensor) -> Tensor:
        """See ``Verifier``."""
        left = self._call("residual", lambda: self.inner.residual(evidence, walk, at))
        self._check_law("residual", left, (len(at), evidence.shape[2]), evidence)
        return left

    def decide(self, evidence: Evidence) -> tuple[Tensor, Tensor] | None:
        """See ``Verifier``."""
        decided = self._call("decide", lambda: self.inner.decide(evidence))
        if decided is None:
            return None
        num_rows, num_nodes, vocab_size = evidence.shape
        if not isinstance(decided, tuple) or len(decided) != 2:
            raise self._error(f"decide() returned {type(decided).__name__}; expected (at [B], bonus [B]) or None")
        for name, found, below in (("at", decided[0], num_nodes), ("bonus", decided[1], vocab_size)):
            if not isinstance(found, Tensor) or found.shape != (num_rows,) or found.dtype != torch.int64:
                raise self._error(f"decide() returned {_shown(found)} as {name}; expected int64 {(num_rows,)}")
            if bool(((found < 0) | (found >= below)).any()):
                raise self._error(f"decide() returned {found.tolist()} as {name}; expected 0 to {below - 1}")
        return decided

    def walk(self, evidence: Evidence) -> Verdict | None:
        """See ``Verifier``."""
        verdict = self._call("walk", lambda: self.inner.walk(evidence))
        if verdict is not None and not isinstance(verdict, Verdict):
            raise self._error(f"walk() returned {type(verdict).__name__}; expected a Verdict or None")
        return verdict

    def _call(self, method: str, call: Callable[[], _T]) -> _T:
        try:
            return call()
        except ForetellError:  # it says itself what is wrong
            raise
        except Exception as error:
            text = str(error).strip().partition("\n")[0]
            raise self._error(f"{method}() raised {type(error).__name__}" + (f": {text}" if text else "")) from error

    def _check_law(self, method: str, found: object, shape: tuple[int, ...], evidence: Evidence) -> None:
        """Check that it is a tensor of this shape with numbers of at least 0."""
        if not isinstance(found, Tensor) or tuple(found.shape) != shape or not found.is_floating_point():
            raise self._error(f"{method}() returned {_shown(found)}; expected probabilities {shape}")
        least = float(found.min())
        if not least >= -NEAR and (least < 0 or _is_sound(evidence)):  # NaN is what comes of logits that are NaN
            raise self._error(
                f"{method}() returned {'NaN' if least != least else f'{least:.6g}'}; expected no less than 0"
            )
        if float(found.max()) == torch.inf:
            raise self._error(f"{method}() returned infinity; expected probabilities")

    def _error(self, what: str) -> VerifierError:
        name = registry_of("foretell.verifiers").called(self.inner.name)
        return VerifierError(
            f"{name} ({type(self.inner).__module__}) breaks the contract of verifiers: "
            f"{what}. Mend it, or choose another verifier"
        )


def _is_sound(evidence: Evidence) -> bool:
    """Whether every node that is no padding has a distribution p."""
    sums = evidence.p.sum(-1)[evidence.tree.valid]
    return bool(((sums - 1).abs() <= NEAR).all())


def _farthest(sums: Tensor) -> float:
    """The sum that is farthest from 1."""
    return float(sums[(sums - 1).abs().nan_to_num(nan=torch.inf).argmax()])


def _shown(found: object) -> str:
    return f"{found.dtype} {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
