"""What a light part would have guessed by itself, judged by tokens that another part's guesses brought: without bias."""

from itertools import product

import pytest

from foretell import LightStep
from foretell.core.errors import ConfigError
from foretell.costs.table import CostTable
from foretell.draft.ngram import Ngram
from foretell.draft.none import NoMethod, NoneConfig
from foretell.engine.config import speculative_config
from foretell.engine.planning import light_choices, light_parts, plan_with
from foretell.engine.speculation import Speculation
from foretell.methods.draft_model.drafter import DraftModel
from foretell.planner.acceptance import Acceptance
from foretell.planner.planner import Planner
from tests.engine.harness import table


@pytest.mark.parametrize(
    ("guess", "emitted", "expected"),
    [
        ([], [1], (4, 0, 0)),
        ([7], [1], (4, 1, 0)),
        ([1], [1], (4, 1, 1)),
        ([1, 2, 3], [1, 9], (4, 3, 1)),
        ([1, 2, 3], [1, 2, 3, 4], (4, 3, 3)),
        ([1, 2, 3], [1, 2], (2, 2, 2)),  # the third is neither right nor wrong
        ([1, 2], [], (0, 0, 0)),  # a row that failed
    ],
)
def test_what_is_known_of_a_guess(guess: list[int], emitted: list[int], expected: tuple[int, int, int]) -> None:
    step = LightStep.of(4, guess, emitted)
    assert (step.allowed, step.drafted, step.accepted) == expected


@pytest.mark.parametrize("other", [(0, 0, 0), (1, 1, 1), (0, 1, 1), (1, 0, 0)])
def test_the_rates_are_those_of_the_light_part_alone(other: tuple[int, ...]) -> None:
    """Exactly, over all texts: position k's tries and hits, where the other part guesses ``other``."""
    chance, guess = (0.7, 0.3), (0, 0, 1)
    tries, hits = [0.0] * 3, [0.0] * 3
    for text in product(range(2), repeat=4):
        weight = 1.0
        for token in text:
            weight *= chance[token]
        kept = next((k for k in range(3) if text[k] != other[k]), 3)
        step = LightStep.of(3, guess, text[: kept + 1])
        for k in range(3):
            tried = step.drafted > k and step.accepted >= k
            tries[k] += weight * tried
            hits[k] += weight * (tried and step.accepted > k)
    rates = [hit / tried for hit, tried in zip(hits, tries, strict=True) if tried]
    assert rates == pytest.approx([chance[token] for token in guess[: len(rates)]], abs=1e-12)
    assert rates


class Beside(DraftModel):
    """Another package's method: a draft model, and prompt lookup, of which its configuration says nothing."""

    def __init__(self) -> None:
        super().__init__(table(2))
        self.lookup = Ngram(min_ngram=2, max_ngram=3)

    @property
    def light(self) -> Ngram:
        return self.lookup


def test_any_method_may_declare_a_light_part() -> None:
    target = table(1)
    config = speculative_config({"method": "draft_model", "num_speculative_tokens": 6, "verify": "exact"})
    method = Beside()
    choice = Speculation(config, method, config.load_verifier(target))
    plain = Speculation(NoneConfig(), NoMethod(), choice.verifier)
    assert light_parts([plain, choice]) == {"draft_model": "ngram"}
    (light,) = light_choices([plain, choice])
    assert light.method is method.lookup
    assert (light.config.method, light.config.num_speculative_tokens, light.depth) == ("ngram", 6, 6)
    other = speculative_config("ngram")
    asked = Speculation(other, Ngram(), choice.verifier)
    assert light_choices([choice, asked]) == [], "it is measured already"
    costs = CostTable({(1, 1): 1.0}, {"draft_model": {(1, 1): 0.3}, "ngram": {(1, 1): 0.0}})
    planner = plan_with(costs, Acceptance(6), light_parts([choice]))
    assert isinstance(planner, Planner)
    assert planner.parts == {"draft_model": "ngram"}


def test_a_light_part_of_an_unknown_name_is_refused() -> None:
    class Nameless(Beside):
        @property
        def light(self) -> Ngram:
            made = Ngram()
            made.name = "nobody"
            return made

    config = speculative_config({"method": "draft_model"})
    with pytest.raises(ConfigError, match="nobody"):
        light_parts([Speculation(config, Nameless(), config.load_verifier(table(1)))])
