"""The base of method configurations: a frozen dataclass whose fields are the keys of ``--speculative-config``."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

from foretell.core.errors import ConfigError, ModelError
from foretell.core.registry import check_draws, check_number
from foretell.core.settings import settle
from foretell.core.tree import DrawMode
from foretell.draft.base import Capabilities, Method
from foretell.draft.growing.frontier import NO_FORESIGHT
from foretell.draft.shapes import Shape, parse_shape
from foretell.heads.formats import load_kind
from foretell.heads.head import Head
from foretell.model.target import CausalModel
from foretell.verify import Verifier, parse_verifier
from foretell.verify.contract import checked

SHARED = frozenset({"num_speculative_tokens", "verify", "shape", "draws", "judge"})
"""Keys that all methods have: how a loaded method is used, not what is loaded."""


@dataclass(frozen=True)
class Loader:
    """Loading functions that a configuration may use."""

    target: CausalModel
    draft: Callable[..., CausalModel]
    """The draft model of a name or directory, its vocabulary compared with the target's, unless ``checked=False``; weights
    as a second argument where they are not "auto" (see ``load_model``)."""
    tokenizers: Callable[[str], tuple[Any, Any] | None] = lambda name: None
    """The tokenizers of target and of the draft model of this name, or of the target twice (``target.spec.name``); None
    where one is not known (models in memory)."""


@dataclass(frozen=True)
class RuleLoader:
    """Loading functions that a verifier may use: see ``verify.distribution.VerifierLoader``."""

    target: CausalModel
    guesses: bool  # False: plain decoding, nothing will ever be verified
    name: str | None  # hub id or directory that the user gave for the verifier's weights: the key ``judge``

    def head(self, kind: str) -> Head:
        """The trained head of this kind, in float32: the one that the user named, or the bundled one. Raises
        ModelError."""
        try:
            return load_kind(self.name or f"bundled/{kind}", self.target.spec, kind, dtype=torch.float32)
        except ModelError as error:
            if self.name is not None:
                raise
            raise ModelError(
                f"no {kind} is named, and the one that comes with foretell does not fit: {str(error).partition(': ')[2]}; "
                f"or name one (the key {kind!r})"
            ) from error


@dataclass(frozen=True)
class MethodConfig(ABC):
    """How a method is loaded and used: a frozen dataclass.

    A subclass sets ``method`` and ``capabilities``, adds a field with a default for every key of its own (of type bool,
    int, float, str, or ``str | None``), and says in ``load`` how the method is made. Whether parts compose is checked when
    a configuration is made, before anything is loaded. Configurations are values: hashable, compared by their fields.
    """

    method: ClassVar[str]
    """The name by which the command line and JSON configurations know it."""
    capabilities: ClassVar[Capabilities]
    """The capabilities of the method that ``load`` returns."""
    ranges: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Pairs of its keys, the lowest and the largest value of something."""
    guesses: ClassVar[bool] = True
    """False for plain decoding alone."""

    num_speculative_tokens: int = 5  # most tokens guessed in a line
    verify: str = "coupled"  # how guesses are checked, with options: "typical/epsilon=0.1"
    shape: str = "chain"  # of a proposal, with options: "sequoia/size=16"
    draws: str = "auto"  # how children are drawn; "auto": the verifier's preference
    judge: str | None = None  # directory of the head that verifier "judge" reads; None: the one of the bundled target

    def __post_init__(self) -> None:
        """Raise ConfigError for invalid values and parts that do not compose. A subclass that checks further keys calls
        this first."""
        settle(self)
        check_number(self.num_speculative_tokens)
        if self.guesses:
            check_combination(
                self.method, self.capabilities, self.verifier, self.proposal_shape, parse_draws(self.draws)
            )

    @classmethod
    def key_names(cls) -> tuple[str, ...]:
        """Names of its keys, those that all methods share first."""
        return tuple(field.name for field in dataclasses.fields(cls))

    @cached_property
    def verifier(self) -> Verifier:
        """The verifier that ``verify`` names."""
        return parse_verifier(self.verify)

    @cached_property
    def proposal_shape(self) -> Shape:
        """The shape that ``shape`` names, its depth resolved."""
        return parse_shape(self.shape, self.num_speculative_tokens)

    @cached_property
    def proposal_draws(self) -> DrawMode:
        """How the method must draw its children."""
        return parse_draws(self.draws) or self.verifier.draws

    @property
    def light(self) -> "MethodConfig | None":
        """The configuration of ``Method.light``."""
        return None

    @property
    def trained(self) -> "MethodConfig":
        """The configuration of ``Method.trained``: the part that key ``model`` names the weights of."""
        return self

    @property
    def max_nodes(self) -> int:
        """Most nodes of a step's tree, the root included."""
        return self.proposal_shape.max_guesses + 1 if self.guesses else 1

    @property
    def max_read(self) -> int:
        """Most nodes that growing a proposal looks at through the drafter, the root included."""
        return self.proposal_shape.max_grown + 1

    @property
    def branches(self) -> str | None:
        """The shape that the user chose and that may branch; None where no proposal does."""
        return None if self.proposal_shape.is_chain else self.shape

    @property
    def weighs(self) -> bool:
        """Whether its shape does: see ``Shape.weighs``."""
        return self.proposal_shape.weighs

    def measured(self) -> "MethodConfig":
        """As steps are timed: a chain of which every guess is made."""
        return dataclasses.replace(self, shape="chain") if self.proposal_shape.weighs else self

    @property
    def weights(self) -> tuple[Any, ...]:
        """What ``load`` reads: the method and its own keys. Equal for configurations that one loaded method serves, if
        it has the acceptance head that their shape may need (``Shape.asks_acceptance``)."""
        return self.method, *((key, getattr(self, key)) for key in sorted(self.key_names()) if key not in SHARED)

    @abstractmethod
    def load(self, loader: Loader) -> Method:
        """The method, with its weights where it has some. Called once for all configurations of equal ``weights``, on the
        thread that loads the engine. Raises ConfigError, ModelError."""

    def load_verifier(self, target: CausalModel) -> Verifier:
        """The verifier, with its weights where it reads some. Raises ModelError, VerifierError."""
        return checked(self.verifier).load(RuleLoader(target, self.guesses, self.judge))

    def resolved(self) -> dict[str, Any]:
        """The configuration as ``speculative_config`` would read it."""
        return {"method": self.method, **dataclasses.asdict(self)}


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

    FIXED nodes are sound under every verifier, so most combinations are; refused combinations would be undefined or
    biased.
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
        shapes = " or ".join(map(repr, capabilities.shapes))
        return f"method {method!r} cannot grow the shape {shape.name!r}: choose shape {shapes}, or another method"
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
