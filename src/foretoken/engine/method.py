"""What every method's configuration is: a frozen dataclass, whose fields are the keys of ``--speculative-config``."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

from foretoken.draft.base import Capabilities, Method
from foretoken.draft.none import NoMethod
from foretoken.draft.shape import Shape, parse_shape
from foretoken.engine.legality import check_combination, parse_draws
from foretoken.errors import ConfigError
from foretoken.heads.judge import JudgeWeights
from foretoken.heads.load import load_head
from foretoken.model.target import CausalModel
from foretoken.tree import Draws
from foretoken.verify import Judge, Verifier, parse_verifier


@dataclass(frozen=True)
class Loader:
    """What a configuration may load its method with."""

    target: CausalModel
    draft: Callable[
        [str], CausalModel
    ]  # the draft model of a name or directory, its vocabulary compared with the target's


@dataclass(frozen=True)
class MethodConfig:
    """What all methods share."""

    method: ClassVar[str]
    capabilities: ClassVar[Capabilities]

    num_speculative_tokens: int = 5  # most tokens guessed in a line
    verify: str = "coupled"  # how guesses are checked, with options: "typical/epsilon=0.1"
    shape: str = "chain"  # of a proposal, with options: "sequoia/size=16"
    draws: str = "auto"  # how children are drawn; "auto": as the verifier asks for
    judge: str | None = None  # directory of the head that verifier "judge" reads; None: the one of the bundled target

    def __post_init__(self) -> None:
        """Refuse values that cannot be, and parts that do not compose."""
        if not 1 <= self.num_speculative_tokens <= 64:
            raise ConfigError(f"num_speculative_tokens = {self.num_speculative_tokens} must be between 1 and 64")
        if self.method != NoMethod.name:
            check_combination(
                self.method, self.capabilities, self.verifier, self.proposal_shape, parse_draws(self.draws)
            )

    @cached_property
    def verifier(self) -> Verifier:
        """The verifier that ``verify`` names."""
        return parse_verifier(self.verify)

    @cached_property
    def proposal_shape(self) -> Shape:
        """The shape that ``shape`` names, its depth resolved."""
        return parse_shape(self.shape, self.num_speculative_tokens)

    @property
    def proposal_draws(self) -> Draws:
        """How the method is asked to draw."""
        return parse_draws(self.draws) or self.verifier.draws

    @property
    def max_nodes(self) -> int:
        """Most nodes of a step's tree, the root included."""
        return 1 if self.method == NoMethod.name else self.proposal_shape.max_guesses + 1

    def load(self, loader: Loader) -> Method:
        """The method, with its weights where it has some."""
        raise RuntimeError(f"{type(self).__name__} has no load")  # every configuration in METHODS overrides it

    def load_verifier(self, target: CausalModel) -> Verifier:
        """The verifier, with its head where it reads one. Raises ModelError."""
        verifier = self.verifier
        if not isinstance(verifier, Judge):
            return verifier
        if self.method == NoMethod.name:  # guesses nothing: there is nothing to judge
            return dataclasses.replace(verifier, threshold=1.0)
        head = load_head(self.judge or "bundled/judge", target.spec, JudgeWeights, dtype=torch.float32)
        return head.verifier(verifier)

    def resolved(self) -> dict[str, Any]:
        """The configuration as ``speculative_config`` would read it."""
        return {"method": self.method, **dataclasses.asdict(self)}
