"""Speeds of stopping policies on recorded steps: by hand, in order, and the oracle against every choice of lengths."""

import itertools
import math

import pytest
import torch
from benchmarks.stopping_speed import oracle_speed, policy_speed

from foretell.core.errors import ConfigError

ACCEPTED = torch.tensor([0, 3, 1, 4, 0, 2])


def test_by_hand() -> None:
    """Tokens: kept guesses and one each; costs: a fifth of a pass a guess, and a pass."""
    assert policy_speed(ACCEPTED, torch.full((6,), 2), 0.2) == pytest.approx((0 + 2 + 1 + 2 + 0 + 2 + 6) / (6 * 1.4))
    assert policy_speed(ACCEPTED, torch.zeros(6, dtype=torch.int64), 0.2) == 1.0
    drafted = torch.tensor([1, 4, 1, 2, 0, 2])
    assert policy_speed(ACCEPTED, drafted, 0.5) == pytest.approx((0 + 3 + 1 + 2 + 0 + 2 + 6) / (0.5 * 10 + 6))
    passes, cost = drafted + 1, {1: 1.0, 2: 1.1, 3: 1.2, 5: 2.0}
    assert policy_speed(ACCEPTED, drafted, 0.5, passes=passes, target_cost=cost.__getitem__) == pytest.approx(
        14 / (0.5 * 16 + 2 * 1.1 + 2.0 + 2 * 1.2 + 1.0)
    )


@pytest.mark.parametrize("draft_cost", [0.05, 0.3, 0.8, 1.5])
@pytest.mark.parametrize("slope", [0.0, 0.2])
def test_the_oracle_is_the_best_choice_of_lengths(draft_cost: float, slope: float) -> None:
    def target_cost(nodes: int) -> float:
        return 1.0 + slope * (nodes - 1)

    best = max(
        policy_speed(ACCEPTED, torch.tensor(lengths), draft_cost, target_cost=target_cost)
        for lengths in itertools.product(*(range(int(most) + 1) for most in ACCEPTED))
    )
    found = oracle_speed(ACCEPTED, draft_cost, target_cost=target_cost)
    assert found == pytest.approx(best)
    if slope == 0 and draft_cost < 1:
        assert found == pytest.approx((10 + 6) / (6 + 10 * draft_cost)), "every guess that will be kept"


@pytest.mark.parametrize(("accepted", "cost"), [([], 0.1), ([1], math.nan), ([1], -0.5), ([1], math.inf)])
def test_the_oracle_of_no_steps_or_of_no_cost_is_an_error_and_ends(accepted: list[int], cost: float) -> None:
    with pytest.raises(ConfigError, match="given"):
        oracle_speed(torch.tensor(accepted, dtype=torch.int64), cost)
