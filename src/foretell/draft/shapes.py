"""The shape of a proposal, independent of the drafter and the verifier.

A shape is a value: how deep, how many nodes, by which rule they are admitted. ``growing/grow.py`` and its neighbours make
the trees, each shape once, for all drafters that return logits of a frontier.

Three properties decide what a shape composes with. ``is_chain``: no node ever has two children. ``fixed``: nodes
are ranked after they were found, so none can be a draw that a verifier corrects for (under COUPLED draws exact match does
not need to). ``template``: the number of a node's children does not depend on their tokens, which rules that treat
siblings jointly need.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar

from foretell.core import builtin
from foretell.core.errors import Checks, ConfigError, between, check_fields, require
from foretell.core.registry import Registry, part_of
from foretell.core.settings import settle
from foretell.core.spec import parse_spec, spec_of

MAX_DEPTH, MAX_SIZE, MAX_WIDTH = 64, 512, 64
MAX_ACCEPTANCE = 16
"""Children of a node that a measured acceptance may rank: the dynamic program takes time in proportion."""


@dataclass(frozen=True)
class Shape:
    """Base class of shapes."""

    name: ClassVar[str]
    summary: ClassVar[str]
    is_chain: ClassVar[bool] = False
    fixed: ClassVar[bool] = False
    template: ClassVar[bool] = True
    asks_acceptance: ClassVar[bool] = False  # stops where the drafter expects a rejection: see ``Method.foresees``
    weighs: ClassVar[bool] = False  # makes the guesses that pay: its depth need not be planned
    checks: ClassVar[Checks] = {"depth": between(0, MAX_DEPTH)}  # of fields

    depth: int = 0  # largest depth; 0 in a configuration: its num_speculative_tokens

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        settle(self)
        check_fields(self, self.checks)

    @property
    def max_guesses(self) -> int:
        """Most nodes a proposal can have, the root not counted."""
        return self.depth

    @property
    def max_grown(self) -> int:
        """Most nodes that growing it looks at through the drafter, those dropped by a later ranking included."""
        return self.max_guesses

    @property
    def spec(self) -> str:
        """The text that ``parse_shape`` reads as this shape."""
        return spec_of(self, self.name)


def _max_read(size: int, width: int, depth: int) -> int:
    """Most nodes read while the best ``size`` are found depth by depth: at each depth, leaves aside, no more than lie there
    in a tree of that size."""
    total, level = 0, 1
    for at in range(1, depth):
        level = min(level * width, size)
        total += min(level, max(size - at + 1, 1))
    return max(size, total)


_WIDTH: Checks = {"width": between(1, MAX_WIDTH)}
_THRESHOLD: Checks = {"threshold": (lambda value: value >= 0, "a finite number of at least 0")}


@dataclass(frozen=True)
class Chain(Shape):
    """One line of ``depth`` guesses."""

    name = "chain"
    summary = "one line of guesses"
    is_chain = True


@dataclass(frozen=True)
class Adaptive(Shape):
    """A chain that stops where the drafter is unsure, decided from q before the token is drawn.

    rule "path": stop where the product of max q of the guesses so far < threshold, which is the chance that the target
    comes so far, as EAGLE-2 (2406.16858) and OPT-Tree (2406.17276) estimate it for trees; decided before the pass that the
    next guess would take. "probability": stop where max q < threshold (transformers' assistant_confidence_threshold;
    Kangaroo 2404.18911). The first guess is always made.
    """

    name = "adaptive"
    summary = "a chain that stops where the drafter is unsure, decided before the token is drawn"
    is_chain = True
    weighs = True
    checks: ClassVar[Checks] = {
        **Shape.checks,
        "rule": (("path", "probability").__contains__, "path or probability"),
        **_THRESHOLD,
    }

    rule: str = "path"
    threshold: float = 0.5


@dataclass(frozen=True)
class SpecDec(Shape):
    """A chain that stops where some guess of it was probably rejected, predicted by a trained acceptance head.

    SpecDec++ (2405.19715): stop when 1 - (product of the guesses' predicted acceptances) > threshold, after at least
    ``min`` guesses. The guess that crosses the threshold was drawn already and stays: dropping it because of its token
    would bias the text. Needs a drafter with an acceptance head: see ``Expander.chance``.
    """

    name = "specdec"
    summary = "a chain that stops where a trained head expects a rejection; the guess that crossed the threshold stays"
    is_chain = True
    asks_acceptance = True
    weighs = True
    checks: ClassVar[Checks] = {**Shape.checks, "threshold": between(0, 1), "min": between(1, MAX_DEPTH)}

    threshold: float = 0.3
    min: int = 1


@dataclass(frozen=True)
class Static(Shape):
    """branching[d] children for every node at depth d (SpecInfer 2305.09781)."""

    name = "static"
    summary = "the same number of children for every node of a depth, e.g. branching=4x2x1"
    checks: ClassVar[Checks] = {
        "branching": (
            lambda counts: 1 <= len(counts) <= MAX_DEPTH and all(1 <= count <= 64 for count in counts),
            f"1 to {MAX_DEPTH} numbers between 1 and 64",
        )
    }

    depth: int = field(init=False, default=0)  # the length of branching
    branching: tuple[int, ...] = (3, 2, 1, 1)

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        super().__post_init__()
        object.__setattr__(self, "depth", len(self.branching))
        require(self.max_guesses <= MAX_SIZE, "branching", self.branching, f"a tree of at most {MAX_SIZE} nodes")

    @property
    def max_guesses(self) -> int:
        """Sum of the products."""
        total, level = 0, 1
        for count in self.branching:
            level *= count
            total += level
        return total


@dataclass(frozen=True)
class Sized(Shape):
    """Shapes of at most ``size`` guesses."""

    checks: ClassVar[Checks] = {**Shape.checks, "size": between(1, MAX_SIZE)}

    size: int = 16

    @property
    def max_guesses(self) -> int:
        """Size."""
        return self.size


@dataclass(frozen=True)
class Sequoia(Sized):
    """The tree of ``size`` guesses that accepts most if the k-th child is the right one with probability acceptance[k].

    Chen et al. 2402.12374: a dynamic program over a measured vector (``benchmarks.theory shape`` measures it). The default
    is about that of the bundled pair under ``coupled`` at temperature 0.6 to 1.
    """

    name = "sequoia"
    summary = "the best fixed tree for a measured acceptance of first, second, ... children"
    checks: ClassVar[Checks] = {
        **Sized.checks,
        "acceptance": (
            lambda rates: len(rates) <= MAX_ACCEPTANCE and min(rates, default=-1) >= 0 and 0 < sum(rates) <= 1 + 1e-9,
            f"1 to {MAX_ACCEPTANCE} probabilities that sum to at most 1",
        ),
    }

    acceptance: tuple[float, ...] = (0.6, 0.11, 0.06, 0.04, 0.02)


@dataclass(frozen=True)
class DySpec(Sized):
    """Grown greedily by draft probability, every admission decided before the token is seen (2410.11744).

    A place for a child is worth the probability, under q, that the walk comes to it; the most valuable places are filled
    first, depth by depth (one pass of the drafter a depth). threshold > 0 also refuses places worth less.
    """

    name = "dyspec"
    summary = "the places most likely to be reached, each admitted before its token is drawn"
    template = False
    checks: ClassVar[Checks] = {**Sized.checks, "threshold": (lambda value: 0 <= value < 1, "in [0, 1)"), **_WIDTH}

    threshold: float = 0.0
    width: int = 8  # most children of a node

    @property
    def max_grown(self) -> int:
        """Nodes that the drafter reads."""
        return _max_read(self.size, self.width, self.depth)


@dataclass(frozen=True)
class Eagle2Shape(Sized):
    """Expand the ``width`` best nodes of each depth by their ``width`` best children, then keep the ``size`` best of all.

    Li et al. 2406.16858. Ranked after they were found: FIXED.
    """

    name = "eagle2"
    summary = "a beam by path probability, re-ranked to the best nodes of all depths"
    fixed = True
    template = False
    checks: ClassVar[Checks] = {**Sized.checks, **_WIDTH}

    width: int = 4

    @property
    def max_grown(self) -> int:
        """The beams of all depths but the last."""
        return max(self.size, self.width * (self.depth - 1))


@dataclass(frozen=True)
class OptTree(Sized):
    """The ``size`` nodes of largest path probability, deepened while a depth adds at least ``threshold`` to their sum.

    Wang et al. 2406.17276: threshold is what one more pass of the drafter costs, in passes of the target. FIXED.
    """

    name = "opt_tree"
    summary = "the nodes of largest path probability; deepened while that pays for the drafter's pass"
    fixed = True
    template = False
    checks: ClassVar[Checks] = {**Sized.checks, **_THRESHOLD, **_WIDTH}

    threshold: float = 0.02
    width: int = 8  # most children of a node that are looked at

    @property
    def max_grown(self) -> int:
        """Nodes that the drafter reads."""
        return _max_read(self.size, self.width, self.depth)


SHAPES: Registry[Shape] = Registry(
    "shape", builtin.SHAPES, "foretell.shapes", lambda name, found: part_of(name, found, Shape, ("summary",))
)
"""Names, as the CLI and JSON configurations spell them, to shapes with their default options. Those of packages come from
entry points of the group "foretell.shapes"; only methods that name such a shape in their capabilities can grow it."""


def parse_shape(text: str, num_speculative_tokens: int) -> Shape:
    """The shape of ``name[/option=value]...``, e.g. "sequoia/size=32"; depth 0 becomes num_speculative_tokens.

    Raises ConfigError.
    """
    shape = parse_spec(text, SHAPES, "shape")
    if not shape.depth:
        try:
            shape = replace(shape, depth=num_speculative_tokens)
        except ConfigError as error:
            raise ConfigError(
                f"shape {text!r} with num_speculative_tokens = {num_speculative_tokens}: {error}"
            ) from None
    if not type(shape).__module__.startswith("foretell."):
        _check_contract(shape)
    return shape


def _check_contract(shape: Shape) -> None:
    """Raise ConfigError, which names the package, where a shape's sizes are none: memory is set apart by them."""
    for size in ("max_guesses", "max_grown"):
        try:
            found = getattr(shape, size)
        except Exception as error:
            what = f"{size} raised {type(error).__name__}: {error}"
        else:
            if isinstance(found, int) and 1 <= found <= MAX_SIZE:
                continue
            what = f"{size} is {found!r}; expected a whole number from 1 to {MAX_SIZE}"
        raise ConfigError(
            f"{SHAPES.called(shape.name)} ({type(shape).__module__}) breaks the contract of shapes: {what}. Mend it, or "
            "choose another shape"
        )
