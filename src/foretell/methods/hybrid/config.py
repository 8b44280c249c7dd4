"""Settings of method ``hybrid``."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from foretell.core import builtin
from foretell.core.errors import ConfigError, check_choice, require
from foretell.core.measured import measured_now, of_passes
from foretell.core.registry import load_reference, names_of, registry_of
from foretell.core.tree import DrawMode, chain_parent, layout
from foretell.costs.table import isotonic
from foretell.draft.base import Method
from foretell.draft.config import Loader, MethodConfig, parse_draws, refusal
from foretell.draft.shapes import Adaptive, Chain, Shape, Sized, parse_shape
from foretell.draft.suffix import Suffix, SuffixConfig
from foretell.kernels.build import loaded_files
from foretell.methods.hybrid.drafter import MOST_GRAFTED, Hybrid
from foretell.model.target import CausalModel
from foretell.model.trained import default_draft

TOKENS = {2: 1.0, 3: 1.05, 4: 1.08, 6: 1.125}
"""Tokens a step by the guesses of an opt_tree, three deep; the smallest tree's are 1: SmolLM2-135M with its EAGLE-3 head
after suffix, ten prompts of the bundled suite, mean of temperatures 0 and 1 (docs/performance.md)."""
BESIDE = 0.2
"""What stands beside the target's pass in a step with guesses, in plain passes: the head, verification, bookkeeping."""
LEAST_BYTES = 64 << 20
"""Of weights: a smaller target stays in the caches, where every node costs what it computes."""
FEW_BYTES = 512 << 20
"""Of weights: a smaller target is timed in more rounds, which take no longer."""
CONTEXT, ROUNDS, MORE_ROUNDS = 64, 2, 6  # rounds of each of two measurements
WIDTHS = (1, *(size + 2 for size in TOKENS))
"""Nodes of the passes that are timed: a plain one's, and those of each size with the root and one token of a suffix."""

_known: WeakKeyDictionary[CausalModel, int] = WeakKeyDictionary()


def size_for(model: CausalModel) -> int:
    """``tree_size``, asked once of a model: methods that are loaded for it side by side grow trees of one size, whatever
    the machine did in between."""
    size = _known.get(model)
    if size is None:
        size = _known[model] = tree_size(model)
    return size


def tree_size(model: CausalModel) -> int:
    """Guesses of a tree that pay best where wide passes cost what they cost here: measured in 20 to 60 passes, or
    recalled from an earlier start.

    It changes no text. On an accelerator, where a pass reads weights for as long as several nodes compute, the largest.
    """
    spec = model.spec
    if spec.device.type != "cpu":
        return max(TOKENS)
    # Of a model that several processes share each holds another part, and all must make the same passes.
    weight_bytes = model.share(spec.weight_bytes)
    if weight_bytes < LEAST_BYTES or spec.max_positions < CONTEXT + 16:
        return min(TOKENS)
    rounds = MORE_ROUNDS if weight_bytes < FEW_BYTES else ROUNDS
    if model.is_shared:  # and none may find measured what another has not
        return model.share(best_size(measured_now(WIDTHS, partial(pass_seconds, model, rounds))))
    subject = {"of": "tree_size", "kernels": loaded_files(), "model": spec.described}
    return best_size(of_passes(subject, WIDTHS, partial(pass_seconds, model, rounds), partial(plain_seconds, model)))


def best_size(seconds: Mapping[int, float]) -> int:
    """seconds: of passes by their nodes, those of ``WIDTHS``."""
    smooth = dict(zip(seconds, isotonic(list(seconds.values())), strict=True))  # a wider pass is never cheaper
    return max(TOKENS, key=lambda size: TOKENS[size] / (smooth[size + 2] / smooth[1] + BESIDE))


@torch.inference_mode()
def pass_seconds(model: CausalModel, rounds: int = ROUNDS) -> dict[int, float]:
    """Least seconds of passes over 1 node and over those that ``best_size`` asks for, in interleaved rounds; ascending."""
    cache, length = model.new_cache(1, CONTEXT + 16), torch.tensor([CONTEXT])
    tokens = torch.arange(CONTEXT)[None] % model.spec.vocab_size
    model.forward(tokens, layout(chain_parent(CONTEXT, length.device)[None], torch.tensor([0]), CONTEXT + 16), cache)
    plans = {width: layout(_two_branches(width)[None], length, CONTEXT + 16) for width in WIDTHS}
    least = dict.fromkeys(WIDTHS, float("inf"))
    for _ in range(rounds):
        for width, plan in plans.items():
            begun = perf_counter()
            model.forward(tokens[:, :width], plan, cache)
            least[width] = min(least[width], perf_counter() - begun)
    return least


def _two_branches(width: int) -> Tensor:
    """[width] a parent vector: a recurrent model reads a tree otherwise than a line."""
    parent = (torch.arange(width) - 2).clamp(min=0)
    parent[0] = -1
    return parent


@torch.inference_mode()
def plain_seconds(model: CausalModel) -> dict[int, float]:
    """The lesser of two passes over one node, without a text before it: what ``pass_seconds`` may not be far above."""
    cache, seconds = model.new_cache(1, 16), []
    plan = layout(chain_parent(1, torch.device("cpu"))[None], torch.tensor([0]), 16)
    for _ in range(2):
        begun = perf_counter()
        model.forward(torch.zeros(1, 1, dtype=torch.int64), plan, cache)
        seconds.append(perf_counter() - begun)
    return {1: min(seconds)}


SECONDS = ("eagle3", "eagle1", "draft_model", "medusa", "dflash")
FREE = ("ngram", "prediction")
"""Methods that can stand behind suffix, with weights and without: they run no layer of the target themselves."""


def _kind(name: str) -> Any:
    """The configuration of a method that stands behind suffix, a package's too. Raises ConfigError."""
    if name in builtin.CONFIGS or name not in names_of((), "foretell.methods"):
        check_choice("second", name, (*SECONDS, *FREE))
        return load_reference(builtin.CONFIGS[name])
    return registry_of("foretell.methods")[name]


@dataclass(frozen=True)
class HybridConfig(MethodConfig):
    """Suffix decoding, and other methods where it has nothing good."""

    method = Hybrid.name
    capabilities = Hybrid.capabilities

    num_speculative_tokens: int = 15  # by suffix; few matches are long enough to use them all
    # What guesses where suffix has nothing good; of several, "eagle3+ngram", for each row the one that promises most. The
    # key model names weights of the first that has some; those of others: "eagle3+draft_model=DIR".
    second: str = "eagle3"
    second_tokens: int = 3  # most guesses in a line that are computed
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
        require(1 <= self.second_tokens <= 64, "second_tokens", self.second_tokens, "between 1 and 64")
        kinds = {name: _kind(name) for name in self.members}
        taken = {key for kind in kinds.values() for key in kind.key_names()}
        asked = [*(["model"] if self.model else []), *self._options]
        if beyond := [name for name in asked if name not in taken]:
            raise ConfigError(
                f"{', '.join(beyond)} is no option of second = {self.second!r}: drop it, or choose another"
            )
        idle = {self._main, *(name for name, kind in kinds.items() if "model" not in kind.key_names())}
        if wrong := sorted(name for name in idle if self.members[name]):
            raise ConfigError(
                f"second = {self.second!r} names weights of {wrong[0]!r}, whose are the key model, or none"
            )
        shape, draws = self.second_proposal, self.proposal_draws
        reason = next((why for name in self.members if (why := self._refusal(shape, name))), None)
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
        require(0 <= self.discount <= 2, "discount", self.discount, "between 0 (suffix wherever it has a guess) and 2")

    @cached_property
    def second_proposal(self) -> Shape:
        """The shape that ``second_shape`` names, its depth resolved; where it names none, the largest that is grown."""
        if self.second_shape is not None:
            return parse_shape(self.second_shape, self.second_tokens)
        tree = parse_shape(f"opt_tree/size={max(TOKENS)}", self.second_tokens)
        if self._draws_trees and self._refusal(tree, self._main) is None:
            return tree
        # A draft model's pass is dear: one fewer where a line is hardly kept is worth more than the look at q takes.
        line = Adaptive(self.second_tokens)
        dear = self._main == "draft_model" and self._refusal(line, self._main) is None
        return line if dear else Chain(self.second_tokens)

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
        return self._main.startswith("eagle") and self.proposal_draws == DrawMode.COUPLED

    @cached_property
    def members(self) -> dict[str, str | None]:
        """The methods behind suffix and the weights that ``second`` names of each; first the first one that reads some.
        Raises ConfigError."""
        parts = [part.strip().partition("=") for part in self.second.split("+")]
        named = {name: weights or None for name, _, weights in parts}
        require(len(named) == len(parts), "second", self.second, "methods joined by '+', each once")
        first = next((name for name in named if "model" in _kind(name).key_names()), parts[0][0])
        return {first: named.pop(first), **named}

    @property
    def _main(self) -> str:
        return next(iter(self.members))

    def _refusal(self, shape: Shape, name: str) -> str | None:
        """Why a member cannot grow this shape here; one that is not the main one may grow a chain instead."""
        can, is_main = _kind(name).capabilities, name == self._main
        shape = shape if is_main or shape.name in can.shapes else Chain(shape.depth)
        draws = parse_draws(self.draws) if is_main or can.draws else None
        return refusal(name, can, self.verifier, shape, draws)

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
        """The main method's."""
        return self._config(self._main, self.model)

    def _config(self, name: str, model: str | None) -> MethodConfig:
        kind = _kind(name)
        options = {key: value for key, value in self._options.items() if key in kind.key_names()}
        given = {} if model is None else {"model": model}
        config: MethodConfig = kind(self.second_tokens, self.verify, **given, **options)
        return config

    @property
    def _options(self) -> dict[str, Any]:
        """What was set of the second method's own."""
        names = ("draft_weights", "draft_vocab_size", "draft_window")
        return {name: value for name in names if (value := getattr(self, name)) != getattr(HybridConfig, name)}

    def load(self, loader: Loader) -> Method:
        """Load the methods behind suffix."""
        target, members = loader.target.spec.name, list[Method]()
        for name, weights in self.members.items():
            model = self.model if name == self._main else weights or default_draft(target, name)
            members.append(self._config(name, model).load(loader))
            if members[-1].exit_layer:
                raise ConfigError(f"method {name!r} runs layers of the target itself: it cannot stand behind suffix")
        second, *others = members
        shape = self.second_proposal
        if self.second_shape is None and isinstance(shape, Sized):
            chains_only = loader.target.spec.chains_only
            shape = Chain(self.second_tokens) if chains_only else replace(shape, size=size_for(loader.target))
        coupled = self.second_shape is None
        return Hybrid(Suffix(), second, shape=shape, discount=self.discount, coupled=coupled, others=others)
