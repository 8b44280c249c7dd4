"""The method and verifier of a request, and which of them may share a batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from foretell.core.errors import ConfigError
from foretell.draft.base import Method
from foretell.draft.config import MethodConfig
from foretell.draft.none import NoMethod
from foretell.draft.shapes import Shape
from foretell.model.target import ModelSpec
from foretell.verify.base import Verifier


@dataclass(frozen=True)
class Speculation:
    """The method and verifier of a request: a configuration and the objects loaded for it."""

    config: MethodConfig
    method: Method
    verifier: Verifier
    rests: bool = False  # no drafter is opened: those of its method have failed (``Failures``)

    @property
    def depth(self) -> int:
        """Largest depth."""
        return min(self.config.num_speculative_tokens, self.shape.depth) if self.config.max_nodes > 1 else 0

    @property
    def shape_depth(self) -> int:
        """Largest depth without a planner: the depth of the shape."""
        return 0 if self.method.name == NoMethod.name else self.shape.depth

    @property
    def shape(self) -> Shape:
        """The proposal's shape, its depth resolved."""
        return self.config.proposal_shape

    @property
    def key(self) -> tuple[Any, ...]:
        """Grouping key: equal for rows that one drafter can serve in one call. Chains may differ in depth."""
        shape = replace(self.shape, depth=0) if self.shape.is_chain else self.shape
        return id(self.method), shape, self.config.proposal_draws, self.verifier, self.rests

    @property
    def num_nodes(self) -> int:
        """Cache slots after the text that a step may write."""
        return max(self.config.max_nodes, self.config.max_read)


def check_branching(config: MethodConfig, method: Method, spec: ModelSpec) -> None:
    """Raise ConfigError where the configuration's shape branches and the target, or the method's own model, reads lines
    alone."""
    reason = spec.chains_only or method.chains_only
    if reason and config.guesses and config.branches is not None:
        raise ConfigError(f"shape {config.branches!r} branches, and {reason}: choose shape 'chain'")


def check_together(methods: Sequence[Method], exits: Sequence[int]) -> None:
    """Raise ConfigError for methods that cannot share a batch. exits: the layers below which self-drafters run the
    target themselves, so that the outputs of those layers are not available to other methods in a step."""
    lowest = max(exits, default=0)
    for method in methods:
        if any(layer < lowest for layer in method.taps):
            raise ConfigError(
                f"method {method.name!r} reads target layers {method.taps}, and a self-drafter loaded beside it runs the "
                f"layers below {lowest} itself: load one of the two"
            )
