"""A planner for an engine's own calls: how deep each row guesses before every step, or not at all."""

from collections.abc import Iterable, Mapping, Sequence

from foretell.draft.none import NoMethod, NoneConfig
from foretell.engine.calibrate import Calibration
from foretell.engine.config import speculative_config
from foretell.engine.groups import Choice
from foretell.model.target import CausalModel
from foretell.planner.acceptance import Acceptance
from foretell.planner.costs import CostTable
from foretell.planner.layered import AnyPlanner, LayeredPlanner
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
        self._planner: AnyPlanner | None = None
        self._hopeless: set[str] = set()

    def planner(self, choices: Sequence[Choice], num_rows: int) -> AnyPlanner | None:
        """The planner for these choices, with costs measured (seconds, remembered on disk); None where none guesses."""
        guessing: Mapping[str, Choice] = {one.config.method: one for one in choices if one.config.guesses}
        if not guessing:
            return None
        if self._planner is None or num_rows > self._max_batch or not guessing.keys() <= self._choices.keys():
            self._choices = {**self._choices, **guessing}
            self._max_batch = max(num_rows, self._max_batch)
            known = list(self._choices.values())
            costs = Calibration(
                self._model, self._plain, known, light_choices(known), max_batch=self._max_batch,
                time_limit_s=COST_TIME_LIMIT_S,
            ).table()  # fmt: skip
            parts = light_parts(known)
            self._hopeless = {
                name
                for name in self._choices
                if all(cannot_pay(costs, one, self._max_batch) for one in (name, parts.get(name, name)))
            }
            depth = max([MIN_DEPTH, *(choice.depth for choice in known)])
            self._planner = plan_with(costs, Acceptance(depth), parts, depth)
        return self._planner

    def used(self, choice: Choice) -> Choice:
        """The choice itself, or plain decoding for a method that cannot win here at any acceptance."""
        return self._plain if choice.config.method in self._hopeless else choice


def light_choice(choice: Choice) -> Choice | None:
    """The light part of a method that declares one (``Method.light``): with the options that its configuration names
    (``MethodConfig.light``), else with that method's own. None for others."""
    method = choice.method.light
    if method is None:
        return None
    config = choice.config.light
    if config is None:
        config = speculative_config({
            "method": method.name, "verify": choice.config.verify,
            "num_speculative_tokens": choice.config.num_speculative_tokens,
        })  # fmt: skip
    return Choice(config, method, choice.verifier)


def light_parts(choices: Iterable[Choice]) -> dict[str, str]:
    """Of each method that has one, the name of its light part."""
    pairs = [(one.config.method, light_choice(one)) for one in choices]
    return {method: part.config.method for method, part in pairs if part is not None}


def light_choices(choices: Sequence[Choice]) -> list[Choice]:
    """The light parts that are not among these choices themselves, once each."""
    found = {one.config.method for one in choices}
    parts = [part for one in choices if (part := light_choice(one)) is not None]
    return list({part.config.method: part for part in reversed(parts) if part.config.method not in found}.values())


def plan_with(costs: CostTable, acceptance: Acceptance, parts: Mapping[str, str], depth: int) -> AnyPlanner:
    """The planner for mode "auto". parts: see ``LayeredPlanner``."""
    parts = {method: part for method, part in parts.items() if {method, part} <= set(costs.methods)}
    return LayeredPlanner(costs, acceptance, parts, depth=depth) if parts else Planner(costs, acceptance, mode="auto")


def cannot_pay(costs: CostTable, method: str, max_rows: int) -> bool:
    """Whether a method is slower than plain decoding at every batch even if all its guesses are kept."""
    return all(costs.best_case(method, batch) <= 1.0 for batch in grid(max_rows))
