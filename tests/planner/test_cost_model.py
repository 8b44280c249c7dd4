"""The cost model: one pair of formulas, and the costs that steps of a run give."""

from dataclasses import dataclass

import pytest
from benchmarks.theory.length import expected_tokens, walltime_factor
from benchmarks.theory.pass_costs import PassCosts
from benchmarks.theory.sizes import choose_size

from foretell.core.errors import ConfigError
from foretell.costs.cost_model import speedup, step_cost
from foretell.costs.table import CostTable
from foretell.theory.run_costs import MeanCosts, mean_costs


@dataclass(frozen=True)
class Timed:
    """One step."""

    num_draft_tokens: int
    seconds_draft: float
    seconds_target: float
    seconds_rest: float


def test_the_cost_of_a_step_and_its_speedup() -> None:
    assert step_cost(1.2, 5.0, 0.1, 0.3) == pytest.approx(2.0)
    assert step_cost(1.0) == 1.0
    assert speedup(3.0, 1.5) == 2.0
    assert speedup(3.0, 1.5, 0.5) == 1.0
    for bad in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="positive"):
            speedup(1.0, bad)


def test_costs_of_a_run_predict_its_speedup() -> None:
    free = MeanCosts(draft=0.0, verify=1.0, overhead=0.0, plain_overhead=0.0)
    assert free.speedup(3.0, 5.0) == 3.0
    costs = MeanCosts(draft=0.1, verify=1.2, overhead=0.3, plain_overhead=0.1)
    assert costs.speedup(3.4, 5.0) == pytest.approx(3.4 / 1.7)
    assert costs.speedup(3.4, 5.0, overhead=True) == pytest.approx(3.4 * 1.1 / 2.0)


def test_mean_costs_are_medians_weighted_by_the_number_of_guesses() -> None:
    plain = [Timed(0, 0.0, 2.0, 0.2)] * 3
    steps = [Timed(4, 1.6, 3.0, 0.4)] * 3 + [Timed(0, 0.1, 2.0, 0.4)]
    unit, costs = mean_costs(plain, steps)
    assert unit == 2.0
    assert costs == MeanCosts(draft=pytest.approx(0.2), verify=pytest.approx(1.375), overhead=0.2, plain_overhead=0.1)
    assert mean_costs(plain, []) == (2.0, None)
    assert mean_costs([], steps) == (None, None)
    assert mean_costs([Timed(0, 0.0, 0.0, 0.0)], steps) == (0.0, None)


def test_theory_and_the_planner_s_table_agree() -> None:
    """One machine, described to theory in passes and to the planner in seconds: the same speedup of a chain of four."""
    passes = {1: 1.0, 2: 1.0, 3: 1.1, 5: 1.4}
    table = CostTable({(1, nodes): 0.03 * cost for nodes, cost in passes.items()}, {"m": {(1, 4): 0.03 * 0.4}})
    by_theory = walltime_factor(1.0, 4, 0.1, PassCosts.of(passes))
    by_table = speedup(5.0, step_cost(table.verify(1, 5), 1, table.draft("m", 1, 4)), table.verify(1, 1))
    assert by_theory == pytest.approx(by_table)
    assert table.best_case("m", 1) == pytest.approx(by_table)
    tree = choose_size([0.8], 0.1, passes, 5, 4)
    assert tree.speedup == pytest.approx(walltime_factor(0.8, tree.depth, 0.1, PassCosts.of(passes)))
    assert tree.expected_tokens == pytest.approx(expected_tokens(0.8, tree.depth))
