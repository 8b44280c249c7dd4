"""What steps by the light part tell of the whole method: the estimate, the mixture it makes, and where it decides."""

import numpy as np
import pytest

from foretell.planner import planner as planner_module
from foretell.planner.acceptance import Acceptance, Curves
from foretell.planner.observations import RowStep, RowView, StepObservation
from foretell.planner.plan import Option, StepPlan
from foretell.planner.planner import Planner
from foretell.planner.shares import FIRST, LightShares, mixed
from tests.planner.test_layered import Text, table


def test_a_row_is_shrunk_to_its_pool_and_a_pool_to_what_is_thought_first() -> None:
    shares = LightShares()
    assert shares.of("row", "m", 0) == (0.0, 0.0, 0.0), "of a method that tells nothing, nothing is mixed in"
    shares.observe("row", "m", 0, 4, 2)
    pool = [(value + first) / 2 for value, first in zip((1.0, 2.0, 4.0), FIRST, strict=True)]
    assert shares.of("other", "m", 0) == pytest.approx(pool)
    row = [(value + 4 * mean) / 5 for value, mean in zip((1.0, 2.0, 4.0), pool, strict=True)]
    assert shares.of("row", "m", 0) == pytest.approx(row)
    assert shares.of("row", "m", 1) == (0.0, 0.0, 0.0), "greedy text says nothing of text that is drawn"
    for _ in range(300):
        shares.observe("row", "m", 0, 0, 3)
    assert shares.of("row", "m", 0)[0] < 0.01
    assert shares.of("row", "m", 0)[1] < 0.01, "what the method's own guesses kept is not the light part's"
    shares.forget("row")
    assert shares.of("row", "m", 0) == shares.of("other", "m", 0)


def test_the_mixture_is_the_mean_over_both_kinds_of_steps() -> None:
    """Against a sum over a method whose light part proposes in a share of the steps and keeps one of two lengths."""
    kept = np.array([[0.6, 0.3, 0.1], [0.5, 0.2, 0.05]])
    drafted = np.array([[0.9, 0.8, 0.7], [1.0, 1.0, 1.0]])
    curves = Curves(kept, drafted, np.minimum(kept + 0.2, 1.0), drafted)
    ways = [((0.25, 4, 5), (0.15, 0, 3)), ((0.0, 0, 0),)]  # (P, kept, nodes) of the light part's proposals, by row
    shares = [
        (sum(p for p, _, _ in row), sum(p * kept for p, kept, _ in row), sum(p * nodes for p, _, nodes in row))
        for row in ways
    ]
    whole, own = mixed(curves, shares)
    assert own == pytest.approx([0.6, 1.0])
    for row, each in enumerate(ways):
        rest = 1.0 - sum(p for p, _, _ in each)
        for depth in range(1, 4):
            tokens = rest * kept[row, :depth].sum() + sum(p * length for p, length, _ in each)
            nodes = rest * drafted[row, :depth].sum() + sum(p * count for p, _, count in each)
            assert whole.kept[row, :depth].sum() == pytest.approx(tokens)
            assert whole.nodes[row, :depth].sum() == pytest.approx(nodes)
        assert whole.drafted[row, 0] == pytest.approx(rest * drafted[row, 0] + (1.0 - rest))
        hoped = rest * curves.optimistic[row].sum() + sum(p * length for p, length, _ in each)
        assert whole.optimistic[row].sum() == pytest.approx(hoped)


class Told(Text):
    """Each step says whose guess the whole method proposes: its light part's wherever that finds one."""

    tells_by_light = True


def test_steps_by_the_light_part_teach_neither_the_own_guesses_nor_their_cost() -> None:
    found = []
    for seed in range(24):
        text = Told(0.05, found=0.5, light=0.9, second=0.4, seed=seed, tells=True).steps(600)
        planner = text.planner
        (own,) = planner.acceptance.curve("whole", "row", 1)[0]
        shares = planner._shares.of("row", "whole", 0)
        found.append((text.share("whole", 600), own, *shares, planner.corrections.draft["whole"]))
    guessing, own, share, kept, nodes, drafting = np.mean(found, axis=0)
    assert guessing > 0.7
    assert own == pytest.approx(0.4, abs=0.06), "of its own guesses alone"
    assert share == pytest.approx(0.5, abs=0.06)
    assert kept == pytest.approx(0.5 * sum(0.9**k for k in range(1, 5)), rel=0.15)
    assert nodes == pytest.approx(4 * share, rel=0.01)
    assert drafting == pytest.approx(1.0, abs=0.1)


def test_where_the_light_part_finds_much_the_whole_method_is_not_taken_for_what_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """New text first: the whole method pays. Then the text repeats itself: its light part alone pays more than the whole
    method did, and the whole method more than both. Untold (the control), the planner leaves it in more steps."""

    def attained(*, tell: bool) -> float:
        monkeypatch.setattr(Told, "tells_by_light", tell)
        shares = []
        for seed in range(12):
            text = Told(0.05, found=0.0, light=0.95, second=0.45, seed=seed, tells=True).steps(300)
            text.found = 0.5
            shares.append(text.steps(300).share("whole", 300))
        return float(np.mean(shares))

    told, untold = attained(tell=True), attained(tell=False)
    assert told > 0.78
    assert untold < 0.75


def test_steps_of_the_light_part_alone_speak_for_the_whole_method() -> None:
    """While the whole method does not guess: what it is expected to bring follows what its light part keeps."""
    text = Told(0.3, found=0.0, light=0.95, second=0.1, tells=True).steps(200)
    planner = text.planner

    def expected() -> float:
        question = planner._offers.several([RowView("row", "whole", 4, 99)], 1.0)
        assert question is not None
        return float(question.problem.kept[0].sum())

    before, seen = expected(), planner.acceptance.seen("whole")
    for _ in range(120):
        row = RowStep("row", "whole", 4, 4, 3, light=(4, 4, 3), by_light=True)
        planner._learn(StepPlan([4], [0], Option.LIGHT), StepObservation(1, [row], 0.0, 1.0, 0.0))
    assert before < 2.0
    assert expected() > 0.75 * 3, "three in each, and little beside"
    assert planner.acceptance.seen("whole") == seen


def test_a_batch_is_planned_with_its_rows_own_shares() -> None:
    """Of two rows one follows its light part in most steps: drafting is counted as often as the rows guess by themselves,
    and each row's expected tokens are its own. Alone, each row's problem is the same as in the batch."""
    planner = Planner(table(0.1), Acceptance(4), {"whole": "light"})
    for step in range(200):
        rows = []
        for name, by_light in (("often", step % 4 > 0), ("never", False)):
            drafted, kept = (4, 3) if by_light else (2, step % 2)
            rows.append(RowStep(name, "whole", 4, drafted, kept, light=(4, 0, 0), by_light=by_light))
        planner._learn(StepPlan([4, 4]), StepObservation(2, rows, 0.2, 1.1, 0.1))
    views = [RowView(name, "whole", 4, 99) for name in ("often", "never")]
    both = planner._offers.several(views, 1.0)
    tokens = 1.0 + both.problem.kept.sum(axis=1)
    assert tokens[0] > 1.0 + 0.7 * 3 > tokens[1] + 0.8
    for row, view in enumerate(views):
        alone = planner._offers.several([view], 1.0)
        assert alone.problem.kept[0] == pytest.approx(both.problem.kept[row])
        own = 1.0 - planner._shares.of(view.request_id, "whole", 0)[0]
        grid = planner._offers._grid("whole", 1)[:, 1] * planner.corrections.draft["whole"]
        assert alone.problem.draft[0, :, 1] == pytest.approx(grid[: len(alone.problem.draft[0])] * own)
    own = [1.0 - planner._shares.of(view.request_id, "whole", 0)[0] for view in views]
    grid = planner._offers._grid("whole", 2) * planner.corrections.draft["whole"]
    assert both.problem.draft[0] == pytest.approx(grid[: both.problem.draft.shape[1]] * np.mean(own))
    planner.forget("often")
    assert planner._shares.of("often", "whole", 0)[0] == pytest.approx(planner._shares.of("another", "whole", 0)[0])


@pytest.mark.parametrize("found", [0.0, 0.6])
def test_learning_from_a_few_told_steps_together_changes_no_plan(found: float, monkeypatch: pytest.MonkeyPatch) -> None:
    together = Told(0.05, found=found, light=0.7, second=0.6, tells=True).steps(800)
    together.planner._flush()
    monkeypatch.setattr(planner_module, "TOGETHER", 1)
    each = Told(0.05, found=found, light=0.7, second=0.6, tells=True).steps(800)
    assert together.kinds == each.kinds
    assert together.planner.state == each.planner.state
    assert together.planner._shares.of("row", "whole", 0) == each.planner._shares.of("row", "whole", 0)


def test_a_view_alone_tells_nothing() -> None:
    """Before a method has told anything, its curves are those of its own guesses, to the last bit."""
    planner = Planner(table(0.1), Acceptance(4), {"whole": "light"})
    question = planner._offers.several([RowView("row", "whole", 4, 99)], 1.0)
    assert np.array_equal(question.problem.kept, planner.acceptance.curves(["row"], ["whole"]).kept)
