"""Every legal combination of method, verifier, shape and draws runs; every other is refused with its reason.

Rules under which the text cannot depend on the drafter must give plain decoding's tokens. Exact rules that read q are
held to the target's joint distribution by a chi-square test at a false-alarm rate of ALPHA a case (fixed seeds: no
flicker).
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.stats import chi2, ncx2

from foretell import METHODS, SHAPES, VERIFIERS, ConfigError, DrawMode, Engine, Request, SamplingParams
from foretell.core.tree import DrawnBy
from foretell.draft.base import Method
from foretell.draft.config import refusal
from foretell.methods.draft_model.drafter import DraftModel
from foretell.verify import Evidence, Rejection, Walk
from tests.engine.harness import ToyTokenizer, foresight, outcome, outcomes, plain, prompts, table
from tests.engine.test_rejection import ALPHA, law, toy
from tests.model.table import TableLM
from tests.pairwise import covering

SIZES = {"static": "static/branching=2x2x1", "sequoia": "sequoia/size=5", "dyspec": "dyspec/size=5/width=3"}
SIZES |= {"eagle2": "eagle2/size=5/width=2", "opt_tree": "opt_tree/size=5/threshold=0"}
DRAWS = [None, *DrawMode]
INVARIANT = {name for name, rule in VERIFIERS.items() if rule.invariant}
READS_Q = [name for name, rule in VERIFIERS.items() if rule.exact and "q" in rule.reads]
NEEDS_MORE = {"judge"}  # its head reads hidden states, and a table has none worth reading: test_judge.py
READS_TARGET = {name for name, kind in METHODS.items() if kind.capabilities.needs_head} | {
    "mtp"
}  # the same of these: tests/draft has tiny models for each, all shapes
SAMPLES = 2000


def settings(method: str, verify: str, shape: str, draws: DrawMode | None) -> dict[str, Any]:
    return {
        "method": method, "verify": verify, "shape": SIZES.get(shape, shape), "draws": draws or "auto",
        "num_speculative_tokens": 3,
    }  # fmt: skip


def engine_of(method: str, verify: str, shape: str, draws: DrawMode | None) -> Engine:
    loaded: Method | None = DraftModel(table(2), foresight(table(2))) if method == "draft_model" else None
    return Engine(table(), ToyTokenizer(), speculative=settings(method, verify, shape, draws), method=loaded)


def test_what_is_invariant() -> None:
    assert {"coupled", "exact"} == INVARIANT


def requests() -> list[Request]:
    """Two rows in a batch, one greedy, one that ends at another step."""
    tokens = prompts()
    return [
        Request(tokens[3], SamplingParams(seed=1, max_new_tokens=7, ignore_eos=True), prediction=[1, 2, 3, 1, 2]),
        Request(tokens[2], SamplingParams(seed=2, max_new_tokens=4, temperature=0.0), prediction=[1]),
    ]


def combinations(method: str) -> Iterator[tuple[str, str, DrawMode | None]]:
    yield from itertools.product(sorted(set(VERIFIERS) - NEEDS_MORE), SHAPES, DRAWS)


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    return outcomes(plain(table(), requests()))


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["pairs", "whole"])
@pytest.mark.parametrize("method", [name for name in METHODS if name != "none" and name not in READS_TARGET])
def test_legal_ones_run_and_the_others_are_refused(method: str, whole: bool, expected: list[Any]) -> None:
    legal = []
    for verify, shape, draws in combinations(method):
        reason = refusal(method, METHODS[method].capabilities, VERIFIERS[verify], SHAPES[shape], draws)
        if reason is None:
            legal.append((verify, shape, draws))
            continue
        with pytest.raises(ConfigError) as caught:
            engine_of(method, verify, shape, draws)
        assert str(caught.value) == reason
        assert "choose" in reason.lower(), "the nearest legal one is named"
    for verify, shape, draws in legal if whole else covering(legal, 2):
        found = engine_of(method, verify, shape, draws).generate_batch(requests())
        assert [len(completion.token_ids) for completion in found] == [7, 4], (verify, shape, draws)
        if verify in INVARIANT:
            assert outcomes(found) == expected, (verify, shape, draws)
        if VERIFIERS[verify].exact:  # greedy text is the target's under every exact rule
            assert outcome(found[1]) == expected[1], (verify, shape, draws)
    assert len(legal) >= len(VERIFIERS) - 2


def drawn_cases() -> Iterator[tuple[str, str, DrawMode | None]]:
    """The shapes that draw, as the rule asks; under ``rejection`` every shape, and one drawn in every way."""
    for verify in READS_Q:
        cases: list[tuple[str, DrawMode | None]] = [
            (shape, None) for shape in ("chain", "adaptive", "static", "dyspec")
        ]
        if verify == "rejection":
            cases = [(shape, None) for shape in SHAPES] + [("static", draws) for draws in DrawMode]
        for shape, draws in cases:
            if refusal("draft_model", DraftModel.capabilities, VERIFIERS[verify], SHAPES[shape], draws) is None:
                yield verify, shape, draws


def test_every_rule_has_cases() -> None:
    counts = Counter(verify for verify, _, _ in drawn_cases())
    assert min(counts[verify] for verify in READS_Q) >= 2


def sampled(verify: str, shape: str, draws: DrawMode | None = None) -> tuple[Engine, TableLM]:
    """An engine of small tables, and its target."""
    target, draft = toy(3, seed=3), DraftModel(toy(3, seed=8), foresight(toy(3, seed=8)))
    config = settings("draft_model", verify, shape, draws)
    return Engine(target, None, speculative=config, method=draft), target


@pytest.mark.parametrize(("verify", "shape", "draws"), list(drawn_cases()))
def test_rules_that_read_q_keep_the_joint_law(verify: str, shape: str, draws: DrawMode | None) -> None:
    assert law(*sampled(verify, shape, draws), SAMPLES) > ALPHA


@pytest.mark.parametrize("verify", ["rejection", "traversal"])
def test_draws_without_replacement_at_length(verify: str) -> None:
    """Races cannot be enumerated by intervals as other draws are (tests/verify/test_two_steps.py), so production keys over
    several steps are tested at length: power 0.99 against a distribution that differs by 7 % in every one of 27 cells."""
    many, size, wanted = 20_000, 27, 0.07
    critical = chi2.isf(ALPHA, size - 1)
    assert ncx2.sf(critical, size - 1, many * wanted**2) > 0.99
    engine, target = sampled(verify, "static/branching=2x2", DrawMode.WITHOUT_REPLACEMENT)
    assert law(engine, target, many, batch_size=5000) > ALPHA


class Mislabelled(Rejection):
    """The acceptance of draws without replacement as if they were independent ones."""

    def stops(self, evidence: Evidence) -> Walk:
        return super().stops(self._lie(evidence))

    def residual(self, evidence: Evidence, walk: Walk, at: torch.Tensor) -> torch.Tensor:
        return super().residual(self._lie(evidence), walk, at)

    def _lie(self, evidence: Evidence) -> Evidence:
        tree = evidence.tree
        label = torch.where(tree.drawn_by == DrawnBy.WITHOUT_REPLACEMENT, int(DrawnBy.IID), tree.drawn_by)
        return replace(evidence, tree=replace(tree, drawn_by=label))


def test_a_sampled_tree_under_the_wrong_label_is_caught_by_the_same_test() -> None:
    engine, target = sampled("rejection", "static/branching=3x1")
    engine.verifier = Mislabelled()
    assert law(engine, target, SAMPLES) < ALPHA
