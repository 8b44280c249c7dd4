"""A planner for an engine's own calls: how deep each row guesses before every step, or not at all."""

from collections.abc import Mapping, Sequence

from foretell.draft.none import NoMethod, NoneConfig
from foretell.engine.calibrate import Calibration
from foretell.engine.groups import Choice
from foretell.model.target import CausalModel
from foretell.planner.acceptance import Acceptance
from foretell.planner.costs import CostTable
from foretell.planner.measure import grid
from foretell.planner.planner import Planner

MIN_DEPTH = 16  # least number of depths the planner models, for requests with longer drafts than the first ones
COST_TIME_LIMIT_S = 20.0


class Planning:
    """One planner, and what it knows: made anew when a request brings a method or a batch that was not measured yet."""

    def __init__(self, model: CausalModel) -> None:
        self._model = model
        self._plain = Choice(NoneConfig(), NoMethod(), NoneConfig().load_verifier(model))
        self._choices: dict[str, Choice] = {}
        self._max_batch = 0
        self._planner: Planner | None = None
        self._hopeless: set[str] = set()

    def planner(self, choices: Sequence[Choice], num_rows: int) -> Planner | None:
        """The planner for these choices, with costs measured (seconds, remembered on disk); None where none guesses."""
        guessing: Mapping[str, Choice] = {one.config.method: one for one in choices if one.config.guesses}
        if not guessing:
            return None
        if self._planner is None or num_rows > self._max_batch or not guessing.keys() <= self._choices.keys():
            self._choices = {**self._choices, **guessing}
            self._max_batch = max(num_rows, self._max_batch)
            known = list(self._choices.values())
            costs = Calibration(
                self._model, self._plain, known, (), max_batch=self._max_batch, time_limit_s=COST_TIME_LIMIT_S
            ).table()
            self._hopeless = {name for name in self._choices if cannot_pay(costs, name, self._max_batch)}
            depth = max([MIN_DEPTH, *(choice.depth for choice in known)])
            self._planner = Planner(costs, Acceptance(depth), mode="auto")
        return self._planner

    def used(self, choice: Choice) -> Choice:
        """The choice itself, or plain decoding for a method that cannot win here at any acceptance."""
        return self._plain if choice.config.method in self._hopeless else choice


def cannot_pay(costs: CostTable, method: str, max_rows: int) -> bool:
    """Whether a method is slower than plain decoding at every batch even if all its guesses are kept."""
    return all(costs.best_case(method, batch) <= 1.0 for batch in grid(max_rows))
