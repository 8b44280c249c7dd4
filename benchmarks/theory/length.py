"""Tokens per step, the resulting speedup, and the best length of a chain of drafts. Numbers, not tensors.

Leviathan et al. (2211.17192), sections 3.1 to 3.5. Acceptance is either one rate a for every position, taken as
independent, or a sequence of rates, each conditional on the positions before it being accepted. Prefer measured
rates: real streams of acceptance are autocorrelated, and one rate over-predicts both tokens a step and the best length.
Tokens a step count the bonus; accepted drafts are one less.
"""

from collections.abc import Sequence

from benchmarks.theory.pass_costs import PassCosts, check_cost

from foretell.core.errors import ConfigError
from foretell.costs.cost_model import speedup, step_cost
from foretell.theory.shape import check_rates

Acceptance = float | Sequence[float]
MAX_LENGTH = 32
LONGEST = 1000
"""Of a chain of guesses that is computed with: a scan takes the square of it, and no step guesses a tenth of it."""


def conditional_rates(acceptance: Acceptance, num_speculative_tokens: int) -> list[float]:
    """The rate of each of the first num_speculative_tokens positions, given that all before it were accepted."""
    if num_speculative_tokens < 0:
        raise ConfigError(f"num_speculative_tokens is not negative; given {num_speculative_tokens}")
    if num_speculative_tokens > LONGEST:
        raise ConfigError(f"num_speculative_tokens is {LONGEST} at most; given {num_speculative_tokens}")
    if isinstance(acceptance, Sequence):
        rates = check_rates(acceptance)
        if len(rates) < num_speculative_tokens:
            raise ConfigError(f"{num_speculative_tokens} positions need as many rates; given {len(rates)}")
        return rates[:num_speculative_tokens]
    return check_rates([acceptance]) * num_speculative_tokens


def expected_tokens(acceptance: Acceptance, num_speculative_tokens: int) -> float:
    """E[tokens a step] = 1 + sum over k of the product of the first k rates; (1 - a^(g+1)) / (1 - a) for one rate a."""
    total = 1.0
    for rate in reversed(conditional_rates(acceptance, num_speculative_tokens)):
        total = 1.0 + rate * total  # Horner: exact at a = 1, where the closed form is 0 / 0
    return total


def walltime_factor(
    acceptance: Acceptance, num_speculative_tokens: int, cost_draft: float, cost_target: PassCosts | None = None
) -> float:
    """Speed relative to plain decoding: E[tokens] / (g c + v(g + 1)).

    c = cost_draft: time of one draft step in units of one plain step of the target. v: cost of the target's pass over
    g + 1 nodes, relative to one node's; 1 where cost_target is None.
    """
    check_cost(cost_draft, "cost_draft")
    verify = cost_target(num_speculative_tokens + 1) / cost_target(1) if cost_target else 1.0
    tokens = expected_tokens(acceptance, num_speculative_tokens)
    return speedup(tokens, step_cost(verify, num_speculative_tokens, cost_draft))


def best_length(
    acceptance: Acceptance,
    cost_draft: float,
    cost_target: PassCosts | None = None,
    *,
    max_length: int = MAX_LENGTH,
) -> int:
    """num_speculative_tokens that makes ``walltime_factor`` largest, by a scan; 0: do not speculate. Of equals the least.

    Lengths beyond the known rates or the measured widths are not considered.
    """
    if max_length < 0:
        raise ConfigError(f"max_length is not negative; given {max_length}")
    if max_length > LONGEST:
        raise ConfigError(f"max_length is {LONGEST} at most; given {max_length}")
    longest = min(max_length, len(acceptance)) if isinstance(acceptance, Sequence) else max_length
    if cost_target:
        longest = min(longest, cost_target.max_nodes - 1)
    return max(
        range(longest + 1), key=lambda length: (walltime_factor(acceptance, length, cost_draft, cost_target), -length)
    )


def operations_factor(acceptance: Acceptance, num_speculative_tokens: int, ratio: float) -> float:
    """Arithmetic operations relative to plain decoding: (g r + g + 1) / E[tokens], at least 1: faster, never thriftier.

    r = ratio: operations of a draft step over those of the target on one token.
    """
    check_cost(ratio, "ratio")
    passed = num_speculative_tokens * ratio + num_speculative_tokens + 1
    return passed / expected_tokens(acceptance, num_speculative_tokens)
