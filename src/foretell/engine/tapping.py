"""Which hidden states of the target a step keeps, and which of them the drafter and the verifier get."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from foretell.verify.base import pick_layers


@dataclass(frozen=True)
class Tapping:
    """Layers tapped in every step: the drafter's and the verifier's, each layer once."""

    drafter: tuple[int, ...] = ()
    verifier: tuple[int, ...] = ()

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """The layers passed to ``Target.forward``."""
        return tuple(dict.fromkeys((*self.drafter, *self.verifier)))

    def for_drafter(self, taps: Tensor | None) -> Tensor | None:
        """[B, N, T * H] of the drafter's layers, in its order."""
        return pick_layers(taps, self.layers, self.drafter)

    def for_verifier(self, taps: Tensor | None) -> Tensor | None:
        """[B, N, T * H] of the verifier's layers, in its order."""
        return pick_layers(taps, self.layers, self.verifier)

    def pick(self, taps: Tensor, wanted: Sequence[int]) -> Tensor:
        """[B, N, T * H] of some of ``layers``, from the outputs of all."""
        picked = pick_layers(taps, self.layers, wanted)
        assert picked is not None
        return picked
