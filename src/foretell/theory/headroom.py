"""How fast the best possible guesses would have been on the same texts at the same costs, and what keeps a method from it.

``replayed`` decodes known texts anew with guesses that are all right: no drafter of that shape and cost can be faster.
``advise`` makes one part of a method's steps perfect after the other, and names the part that would bring most. Numbers
only; costs are in plain steps of the target.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from foretell.core.errors import ConfigError
from foretell.costs.cost_model import speedup
from foretell.theory.shape import check_rates

LEAST_GAIN = 1.03
"""Parts that would bring less, each by itself, are not worth a sentence."""
NEAR = 0.95
"""Of what is possible: from there on better guesses are not what is missing."""
MOST_GUESSES = 32
"""Of a longer line that is weighed."""


def line_costs(at: Sequence[float]) -> list[float]:
    """Costs of steps by the number of right guesses, for lines: at[n] is the cost of a step with n guesses, at[0] a plain
    one. A line of which more is asked never costs less."""
    costs = [float(cost) for cost in at]
    if not costs or not all(0.0 < cost < float("inf") for cost in costs):
        raise ConfigError(f"steps have positive costs, a plain one first; given {costs}")
    return [max(costs[: count + 1]) for count in range(len(costs))]


def least_costs(longest: int, costs: Sequence[float]) -> list[float]:
    """[longest + 1] least cost of texts of 0, 1, ... tokens, where a step of costs[n] makes n right guesses and writes
    n + 1 tokens; the last one of a text may have fewer to write. By recursion over the tokens that are left."""
    found = [0.0]
    for left in range(1, longest + 1):
        found.append(min(cost + found[max(0, left - 1 - count)] for count, cost in enumerate(costs)))
    return found


def replayed(lengths: Iterable[int], costs: Sequence[float]) -> float:
    """Speedup over plain decoding of texts of these lengths, if every guess were right: an upper bound. 1 without texts."""
    known = [length for length in lengths if length > 0]
    if not known:
        return 1.0
    least = least_costs(max(known), costs)
    return speedup(sum(known), sum(least[length] for length in known), costs[0])


@dataclass(frozen=True)
class MeanStep:
    """A method's steps on average. Costs are what they take beyond a plain step, in plain steps."""

    tokens: float  # written a step, the bonus counted
    found: float  # share of steps with a guess
    rates: Sequence[float]  # of each place of a proposal: kept, given that all before it were
    guesses: float  # of a step that has any
    depth: float  # of these in a line
    draft: float  # proposing
    width: float  # the target's pass over all nodes, beyond that over one
    rest: float  # distributions, verification, commit and bookkeeping, beyond those of a plain step

    @property
    def speed(self) -> float:
        """Over plain decoding."""
        return speedup(self.tokens, max(1e-9, 1.0 + self.draft + self.width + self.rest))

    @property
    def _expected(self) -> float:
        """Tokens a step by the rates."""
        total = 1.0
        for rate in reversed(self.rates):
            total = 1.0 + rate * total
        return 1.0 + self.found * (total - 1.0)

    def with_rates(self, rates: Sequence[float], found: float | None = None) -> "MeanStep":
        """With other chances, the tokens a step changed in proportion to what rates say."""
        other = replace(self, rates=rates, found=self.found if found is None else found)
        return replace(other, tokens=self.tokens * other._expected / self._expected)


@dataclass(frozen=True)
class Headroom:
    """What is possible, what was reached, and what is missing."""

    possible: float
    reached: float
    cause: str  # one of CAUSES, or "" where no part by itself would bring much
    says: str  # a clause: what to improve
    gains: dict[str, float]  # of each cause: the speed with that part perfect, over the speed as it is

    @property
    def line(self) -> str:
        """For people."""
        return f"possible {self.possible:.1f}, reached {self.reached:.2f}: {self.says}"


CAUSES = ("found", "first", "later", "draft", "width", "overhead", "length")
"""Parts of a step that may keep a method from what is possible."""
COSTS = ("draft", "width", "overhead", "length")
"""Those that limit perfect guesses, too."""


def advise(possible: float, reached: float, step: MeanStep) -> Headroom:
    """What would bring most, each by itself perfect: guesses in every step, the first place, the worst of the later ones, a
    draft that costs nothing, passes as cheap as those of one node, no work around them, or the best length of a line.

    possible: by ``replayed``. reached: as measured. Where nearly all that is possible was reached, only costs are named.
    Raises ConfigError for rates that are no probabilities.
    """
    check_rates(step.rates, "rates")
    tried = dict(_perfect(step))
    gains = {cause: made.speed / step.speed for cause, (made, _) in tried.items()}
    near = reached >= NEAR * possible
    named = {cause: gain for cause, gain in gains.items() if not near or cause in COSTS}
    cause = max(named, key=lambda one: named[one], default="")
    if not cause or named[cause] < LEAST_GAIN:
        return Headroom(possible, reached, "", "no part by itself would bring much more", gains)
    return Headroom(possible, reached, cause, tried[cause][1], gains)


def _perfect(step: MeanStep) -> Iterable[tuple[str, tuple[MeanStep, str]]]:
    """Of each cause: the steps without it, and how it is said."""
    rates, found = list(step.rates), step.found
    if 0.0 < found < 1.0 and rates:
        every = replace(step.with_rates(rates, 1.0), width=step.width / found)
        yield "found", (every, f"guesses in more steps are what is missing: {found:.0%} of them have any")
    if rates:
        first = step.with_rates([1.0, *rates[1:]])
        yield "first", (first, f"acceptance at the first place is what is missing: {rates[0]:.2f}")
    later = [step.with_rates([*rates[:at], 1.0, *rates[at + 1 :]]) for at in range(1, len(rates))]
    if later:
        at = max(range(len(later)), key=lambda one: later[one].speed)
        said = f"acceptance at place {at + 2} is what is missing: {rates[at + 1]:.2f}"
        yield "later", (later[at], said)
    said = f"a cheaper draft is what is missing: guessing takes {step.draft:.2f} plain steps in each step"
    yield "draft", (replace(step, draft=0.0), said)
    said = (
        f"cheaper passes over several nodes are what is missing: one over {1 + step.guesses:.0f} takes "
        f"{1 + step.width / max(found, 1e-9):.2f} plain steps"
    )
    yield "width", (replace(step, width=0.0), said)
    said = f"less work around the passes is what is missing: {step.rest:.2f} plain steps in each step"
    yield "overhead", (replace(step, rest=min(step.rest, 0.0)), said)
    if rates and step.guesses == step.depth:  # a line
        count, best = max(_lengths(step), key=lambda one: one[1].speed)
        longer = "longer" if count > len(rates) else "shorter"
        yield "length", (best, f"{longer} proposals are what is missing: {count} guesses in place of {len(rates)}")


def _lengths(step: MeanStep) -> Iterable[tuple[int, MeanStep]]:
    """Lines of other lengths: costs in proportion, and places beyond the last kept as often as that."""
    rates, most = list(step.rates), len(step.rates)
    for count in range(1, min(2 * most, max(most, MOST_GUESSES)) + 1):
        known = rates[:count] + [rates[-1]] * max(0, count - most)
        share = count / most
        yield count, replace(step.with_rates(known), draft=step.draft * share, width=step.width * share)
