"""What decoding steps cost on this machine by how many guesses they make, in plain steps: from short runs of an engine."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from foretoken.engine.engine import Engine, Request
from foretoken.engine.recorder import StepTime
from foretoken.theory.cost import CostTable

LEAST = 1e-9  # seconds: a clock that did not tick
LEAST_STEPS = 3  # of one number of guesses; fewer say nothing, unless no number has more


@dataclass(frozen=True)
class StepCosts:
    """Medians over steps. Keys are guesses a step; on an accelerator, where the host clock cannot tell the parts of a step
    apart, draft and verify are empty."""

    seconds_plain_pass: float
    seconds_plain_step: float
    num_steps: dict[int, int]
    draft: dict[int, float]  # c_total: drafting so many guesses, in plain passes
    verify: dict[int, float]  # v: the target's pass over them and the root, in plain passes
    step: dict[int, float]  # the whole step, laws and bookkeeping too, in whole plain steps

    @property
    def per_guess(self) -> float | None:
        """c: one drafting step in plain passes, at the most guesses that were made."""
        most = max((count for count in self.draft if count), default=0)
        return self.draft[most] / most if most else None

    def of_pass(self, shares: Mapping[int, float]) -> float | None:
        """c_total + v of steps that make each number of guesses with this share; None where it was not measured."""
        return _mean(shares, self.draft, self.verify)

    def of_step(self, shares: Mapping[int, float]) -> float | None:
        """The whole step's cost in the same way."""
        return _mean(shares, self.step)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "per_guess": self.per_guess}


def _mean(shares: Mapping[int, float], *tables: Mapping[int, float]) -> float | None:
    if not shares or any(not table or max(shares) > max(table) for table in tables):
        return None
    costs = [CostTable.of({count + 1: cost for count, cost in table.items()}) for table in tables]
    return sum(share * sum(cost(count + 1) for cost in costs) for count, share in shares.items())


def step_times(engine: Engine, request: Request) -> list[StepTime]:
    """Times of one decoding's steps but the first, in which a drafter may read the prompt (where there are others)."""
    with engine.recorder.timing() as steps:
        engine.generate_batch([request])
    return steps[1:] or steps


def step_costs(plain: Sequence[StepTime], steps: Sequence[StepTime], *, split: bool) -> StepCosts:
    """Costs from steps of plain decoding and of a method. split: whether the parts of a step can be told apart."""
    unit = max(LEAST, median(step.seconds_target for step in plain))
    whole = max(LEAST, median(step.seconds for step in plain))
    by_count: dict[int, list[StepTime]] = {}
    for step in steps:
        by_count.setdefault(step.num_draft_tokens, []).append(step)
    enough = min(LEAST_STEPS, max(map(len, by_count.values())))
    groups = {count: group for count, group in sorted(by_count.items()) if len(group) >= enough}

    def medians(name: str, plain_seconds: float) -> dict[int, float]:
        return {
            count: max(LEAST, median(getattr(step, name) for step in group)) / plain_seconds
            for count, group in groups.items()
        }

    return StepCosts(
        seconds_plain_pass=unit,
        seconds_plain_step=whole,
        num_steps={count: len(group) for count, group in groups.items()},
        draft=medians("seconds_draft", unit) if split else {},
        verify=medians("seconds_target", unit) if split else {},
        step=medians("seconds", whole),
    )
