"""Settings of method ``hybrid``."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from foretell.core import builtin
from foretell.core.errors import ConfigError, check_choice
from foretell.core.registry import load_reference
from foretell.core.tree import DrawMode
from foretell.draft.base import Method
from foretell.draft.config import Loader, MethodConfig
from foretell.draft.legality import parse_draws, refusal
from foretell.draft.shapes import Adaptive, Chain, Shape, Sized, parse_shape
from foretell.draft.suffix import Suffix, SuffixConfig
from foretell.methods.hybrid.drafter import MOST_GRAFTED, Hybrid
from foretell.methods.hybrid.size import TOKENS, size_for

SECONDS = ("eagle3", "eagle1", "draft_model", "medusa", "dflash")
"""Methods that can stand behind suffix: their drafters join, and run no layer of the target themselves."""


@dataclass(frozen=True)
class HybridConfig(MethodConfig):
    """Suffix decoding, and a second method where it has nothing good."""

    method = Hybrid.name
    capabilities = Hybrid.capabilities

    num_speculative_tokens: int = 15  # by suffix; few matches are long enough to use them all
    second: str = "eagle3"  # the method that guesses where suffix has nothing good
    second_tokens: int = 3  # most guesses in a line of that method
    # What it grows; None: an EAGLE head a tree as large as pays here, a draft model a line that stops, others a chain.
    second_shape: str | None = None
    model: str | None = None  # its draft model or head; None: the bundled one (of the bundled target alone)
    draft_weights: str = "least"  # of method draft_model: as there
    draft_vocab_size: int = 0  # of method draft_model: as there
    draft_window: int = -1  # of the second method: as there
    discount: float = 0.92  # what a token by the second method is worth beside one by suffix, whose guesses are free

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        super().__post_init__()
        check_choice("second", self.second, SECONDS)
        if not 1 <= self.second_tokens <= 64:
            raise ConfigError(f"second_tokens = {self.second_tokens} must be between 1 and 64")
        takes: Any = load_reference(builtin.CONFIGS[self.second])
        if beyond := [name for name in self._options if name not in takes.key_names()]:
            raise ConfigError(
                f"{', '.join(beyond)} is no option of second = {self.second!r}: drop it, or choose another"
            )
        shape, draws = self.second_proposal, self.proposal_draws
        reason = self._refusal(shape)
        if reason is None and shape.asks_acceptance:
            reason = (
                f"second_shape {self.second_shape!r} needs an acceptance head, and hybrid loads none: give 'adaptive'"
            )
        is_grafted = draws == DrawMode.COUPLED and not shape.is_chain  # tokens of a suffix stand beside its children
        if reason is None and is_grafted and draws in self.verifier.counts_children:
            reason = (
                f"verifier {self.verifier.name!r} treats all children of a node together, and where a suffix's stand there "
                "how many there are depends on their tokens: give second_shape 'chain', or draws 'fixed'"
            )
        if reason is not None:
            raise ConfigError(reason)
        if not 0 <= self.discount <= 2:
            raise ConfigError(f"discount = {self.discount} must be between 0 (suffix wherever it has a guess) and 2")

    @cached_property
    def second_proposal(self) -> Shape:
        """The shape that ``second_shape`` names, its depth resolved; where it names none, the largest that is grown."""
        if self.second_shape is not None:
            return parse_shape(self.second_shape, self.second_tokens)
        tree = parse_shape(f"opt_tree/size={max(TOKENS)}", self.second_tokens)
        if self._draws_trees and self._refusal(tree) is None:
            return tree
        # A draft model's pass is dear: one fewer where a line is hardly kept is worth more than the look at q takes.
        line = Adaptive(self.second_tokens)
        return line if self.second == "draft_model" and self._refusal(line) is None else Chain(self.second_tokens)

    @property
    def weighs(self) -> bool:
        """See ``MethodConfig``: of the second method."""
        return self.second_proposal.weighs

    @property
    def weights(self) -> tuple[Any, ...]:
        """See ``MethodConfig``. A loaded method knows how it shall draw, not for which verifier: one that would grow trees
        that the verifier cannot have is another."""
        chain = self.second_shape is None and self._draws_trees and self.second_proposal.is_chain
        return *super().weights, chain

    @property
    def _draws_trees(self) -> bool:
        """Whether what nobody named may be a tree: ranked by how it was drawn, it is worth more than a chain if COUPLED."""
        return self.second.startswith("eagle") and self.proposal_draws == DrawMode.COUPLED

    def _refusal(self, shape: Shape) -> str | None:
        """Why the second method cannot grow this shape here."""
        kind: Any = load_reference(builtin.CONFIGS[self.second])
        return refusal(self.second, kind.capabilities, self.verifier, shape, parse_draws(self.draws))

    @property
    def branches(self) -> str | None:
        """See ``MethodConfig``. What nobody chose is a chain where the target reads no trees (``load``)."""
        named = self.second_shape is not None and not self.second_proposal.is_chain
        return self.second_shape if named else super().branches

    @property
    def max_nodes(self) -> int:
        """See ``MethodConfig``; by either method."""
        grafted = 0 if self.second_proposal.is_chain else MOST_GRAFTED
        return max(super().max_nodes, self.second_proposal.max_guesses + grafted + 1)

    @property
    def max_read(self) -> int:
        """See ``MethodConfig``; by either method."""
        return max(super().max_read, self.second_proposal.max_grown + 1)

    @property
    def light(self) -> SuffixConfig:
        """Suffix alone."""
        return SuffixConfig(self.num_speculative_tokens, self.verify)

    @cached_property
    def trained(self) -> MethodConfig:
        """The second method's."""
        kind: Any = load_reference(builtin.CONFIGS[self.second])
        config: MethodConfig = kind(self.second_tokens, self.verify, model=self.model, **self._options)
        return config

    @property
    def _options(self) -> dict[str, Any]:
        """What was set of the second method's own."""
        names = ("draft_weights", "draft_vocab_size", "draft_window")
        return {name: value for name in names if (value := getattr(self, name)) != getattr(HybridConfig, name)}

    def load(self, loader: Loader) -> Method:
        """Load the second method."""
        second = self.trained.load(loader)
        shape = self.second_proposal
        if self.second_shape is None and isinstance(shape, Sized):
            chains_only = loader.target.spec.chains_only
            shape = Chain(self.second_tokens) if chains_only else replace(shape, size=size_for(loader.target))
        return Hybrid(Suffix(), second, shape=shape, discount=self.discount, coupled=self.second_shape is None)
