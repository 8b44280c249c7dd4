"""What the best possible guesses would have brought on the texts of a bench, and what a method lacks."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from foretell.bench.stats import conditional_rates
from foretell.theory.headroom import Headroom, MeanStep, advise, line_costs, replayed
from foretell.theory.run_costs import MeanCosts, StepCosts, step_costs

if TYPE_CHECKING:
    from foretell.engine.recorder import StepTime


def possible_costs(costs: StepCosts, depth: int, *, is_chain: bool) -> list[float]:
    """Costs of steps by the number of right guesses, at most as many in a line as the method makes. depth: of its shape.
    A tree's step costs what its usual number of nodes does, however many of them are in a line."""
    counts = Counter({count: steps for count, steps in costs.num_steps.items() if count})
    if not counts:
        return [1.0]
    usual = 0 if is_chain else counts.most_common(1)[0][0]
    deepest = max(counts) if is_chain else min(max(counts), depth)
    return line_costs([1.0, *(costs.at(max(count, usual)) for count in range(1, deepest + 1))])


def headroom(
    plain: Sequence["StepTime"],
    steps: Sequence["StepTime"],
    lengths: Iterable[int],
    mean: MeanCosts | None,
    reached: float,
    *,
    depth: int,
    is_chain: bool,
) -> Headroom | None:
    """Of a method by its steps and those of plain decoding. lengths: tokens of each text. mean: its costs; None where the
    clock cannot tell them: then so is the result, as where it never guessed. reached: its speedup. depth, is_chain: of its
    shape."""
    guessed = [step for step in steps if step.num_draft_tokens]
    if mean is None or not guessed or not plain:
        return None
    usual = sum(step.num_draft_tokens for step in guessed) / len(guessed)
    rates = conditional_rates((step.num_draft_tokens, step.num_accepted_tokens) for step in guessed)
    unit = 1.0 + mean.plain_overhead  # a plain step in plain passes
    found = len(guessed) / len(steps)
    made = MeanStep(
        tokens=1.0 + sum(step.num_accepted_tokens for step in steps) / len(steps),
        found=found,
        rates=rates if is_chain else rates[:depth],
        guesses=usual,
        depth=usual if is_chain else depth,
        draft=mean.draft * usual * found / unit,
        width=(mean.verify - 1.0) / unit,
        rest=(mean.overhead - mean.plain_overhead) / unit,
    )
    costs = step_costs(plain, steps, split=True)
    return advise(replayed(lengths, possible_costs(costs, depth, is_chain=is_chain)), reached, made)
