"""``evaluate`` on tables: every figure against what the tables say."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from foretell.analysis.drafter import DrafterFigures, DrafterReport, _report, calibration, evaluate, mean
from foretell.analysis.observer import Agreement, GuessSlot, Step
from foretell.analysis.theory.coupling import gumbel
from foretell.bench import first_loop
from foretell.cli.output import as_json
from foretell.core.errors import ConfigError
from foretell.core.noise import Noise
from foretell.core.tree import DrawMode, TokenTree
from foretell.draft.base import Context, Drafter, Method
from foretell.draft.shapes import Shape
from foretell.engine.engine import Engine, Request
from foretell.engine.recorder import StepTime
from foretell.methods.dflash.drafter import DFlash
from foretell.methods.draft_model.drafter import DraftModel, ModelDrafter
from foretell.methods.eagle.drafter import Eagle1, Eagle3
from foretell.methods.kangaroo.drafter import EarlyExit, Kangaroo
from foretell.methods.kangaroo.head import KangarooHead
from foretell.methods.medusa.drafter import Medusa
from foretell.methods.medusa.head import MedusaHead
from foretell.model.hf.adapter import TransformersModel
from foretell.model.table import TableLM
from foretell.model.target import Target
from foretell.planner.run_costs import StepCosts, step_costs
from tests.methods.dflash import test_drafter as blocks
from tests.methods.eagle import eagles
from tests.model.tiny import tiny_module

VOCAB = 4
P, Q = (0.5, 0.3, 0.2, 0.0), (0.2, 0.2, 0.1, 0.5)
OVERLAP = 0.2 + 0.2 + 0.1


def constant(probs: Sequence[float]) -> TableLM:
    """Says the same after every text."""
    return TableLM(len(probs), probs=lambda context: probs, context=1, num_layers=1)


def run(target: TableLM, draft: TableLM, prompts: Sequence[Any] = ([0, 1], [2]), **options: Any) -> DrafterReport:
    """The report of a draft model."""
    config = {"method": "draft_model", "num_speculative_tokens": options.pop("gamma", 3)}
    engine = Engine(target, speculative=config, method=DraftModel(draft))
    return evaluate(engine, prompts, **{"max_new_tokens": 24, "num_timed": 1, **options})


def test_acceptance_is_the_overlap_of_the_two_tables() -> None:
    (at,) = run(constant(P), constant(Q), temperatures=(1.0,), max_new_tokens=48).temperatures
    assert [slot.slot for slot in at.slots] == [1, 2, 3]
    probs = torch.tensor([P], dtype=torch.float64), torch.tensor([Q], dtype=torch.float64)
    for slot in at.slots:
        assert slot.by_rule["rejection"].value == pytest.approx(OVERLAP, abs=1e-6)
        assert slot.by_rule["rejection"].standard_error == pytest.approx(0.0, abs=1e-6)
        assert slot.by_rule["coupled"].value == pytest.approx(float(gumbel(*probs)), abs=1e-6)
        assert slot.by_rule["exact"].value == 0.0, "the drafter's first choice is the token that the target never says"
        assert slot.agreement is not None
        assert (slot.agreement.value, slot.confidence) == (0.0, pytest.approx(0.5))
    coupled = float(gumbel(*probs))
    assert at.rule == "coupled", "the configured rule"
    assert at.expected_length == pytest.approx(1 + coupled + coupled**2 + coupled**3, abs=1e-5)
    assert at.lengths[0].expected_tokens == pytest.approx(1 + coupled, abs=1e-6)
    # Told with confidence 0.5 that a token comes which never does.
    assert at.calibration_error == pytest.approx(0.5)


def test_counts_are_those_of_contexts_whose_path_was_kept() -> None:
    target = TableLM(8, seed=3, sharpness=2.0, num_layers=1)
    draft = TableLM(8, seed=3, sharpness=2.0, blur=0.4, num_layers=1)
    for at in run(target, draft, prompts=[[1], [2, 3], [4, 5, 6]]).temperatures:
        first, *others = at.slots
        assert first.num_contexts <= at.num_steps, "a step without room has no slot"
        before = first
        for slot in others:
            assert slot.num_contexts <= before.num_accepted <= before.num_guesses == before.num_contexts
            before = slot
        for slot in at.slots:
            assert slot.acceptance is not None
            assert slot.acceptance.value == slot.num_accepted / slot.num_guesses
            if at.temperature == 0:  # greedy: kept iff both have the same first choice
                assert slot.agreement == slot.acceptance
                assert slot.by_rule == {}
                assert slot.confidence is not None
                assert 0 < slot.confidence < 1, (
                    "q at temperature 1: the greedy distribution says nothing of its confidence"
                )


def test_every_context_is_looked_at_as_the_tables_say_it() -> None:
    target, draft = TableLM(6, seed=1, num_layers=1), TableLM(6, seed=2, num_layers=1)
    made = Engine(target, speculative={"method": "draft_model", "num_speculative_tokens": 4}, method=DraftModel(draft))
    prompt = [3, 1]
    (at,) = evaluate(made, [prompt], temperatures=(0.0,), max_new_tokens=20).temperatures
    text = [*prompt, *made.generate(prompt, temperature=0.0, max_new_tokens=20, seed=0).token_ids]
    place, kept, confidences = len(prompt), [], []
    while place < len(text):  # the steps, by the oracle of both tables
        depth_limit = min(4, len(text) - place - 1)
        accepted = 0
        for slot in range(depth_limit + 1):
            q = draft.probs_after(text[: place + slot])
            guess = int(q.argmax())
            if slot < depth_limit:
                confidences.append(float(q.max()))
            if slot == depth_limit or guess != text[place + slot]:
                break
            accepted += 1
        kept.append((depth_limit, accepted))
        place += accepted + 1
    for slot in at.slots:
        k = slot.slot
        reached = [a for depth_limit, a in kept if depth_limit >= k and a >= k - 1]
        assert (slot.num_contexts, slot.num_accepted) == (len(reached), sum(a >= k for a in reached))
    total = sum(slot.num_guesses for slot in at.slots)
    weighted = sum((slot.confidence or 0.0) * slot.num_guesses for slot in at.slots)
    assert total == len(confidences)
    assert weighted == pytest.approx(sum(confidences), abs=1e-5)
    assert at.mean_acceptance_length == pytest.approx(
        1 + sum(a for depth_limit, a in kept if depth_limit == 4) / sum(depth_limit == 4 for depth_limit, _ in kept)
    )


def test_calibration_of_a_drafter_that_is_too_sure() -> None:
    planted = [Agreement(0.95, True, 0.6, 0.6, 0.6)] * 30 + [Agreement(0.25, False, 0.25, 0.5, 0.4)] * 10
    error, bins = calibration(planted)
    assert error == pytest.approx(0.75 * 0.35)
    assert [(b.num_contexts, b.confidence, b.observed) for b in bins] == [
        (10, pytest.approx(0.25), pytest.approx(0.25)), (30, pytest.approx(0.95), pytest.approx(0.6)),
    ]  # fmt: skip
    # Within one bin too much and too little cancel: that is what binning means.
    assert calibration([Agreement(0.91, True, 1.0, 1, 1), Agreement(0.99, True, 0.9, 1, 1)])[0] == pytest.approx(0.0)
    assert calibration([Agreement(1.0, True, 1.0, 1, 1)])[0] == 0.0, "a confidence of 1 lies in the last bin"
    assert calibration([]) == (None, [])

    def probs(first: float) -> Sequence[float]:
        return (first, *((1 - first) / 3 for _ in range(3)))

    (at,) = run(constant(probs(0.5)), constant(probs(0.9)), temperatures=(1.0,)).temperatures
    assert at.calibration_error == pytest.approx(0.4, abs=1e-6)
    (honest,) = run(constant(probs(0.5)), constant(probs(0.5)), temperatures=(1.0,)).temperatures
    assert honest.calibration_error == pytest.approx(0.0, abs=1e-6)
    assert {slot.acceptance.value for slot in honest.slots if slot.acceptance} == {1.0}


def test_a_prompt_of_one_token_and_one_token_to_write() -> None:
    (at,) = run(constant(P), constant(Q), prompts=[[1]], temperatures=(1.0,), max_new_tokens=1).temperatures
    assert (at.num_steps, at.num_contexts, at.slots, at.lengths) == (1, 0, [], []), "no room for a guess"
    assert (at.mean_acceptance_length, at.expected_length, at.calibration_error, at.best) == (1.0, 1.0, None, 0)
    (at,) = run(constant(P), constant(Q), prompts=[[1]], temperatures=(0.0,), max_new_tokens=2).temperatures
    assert at.slots[0].acceptance is not None
    assert at.slots[0].acceptance.standard_error is None, "one text has no spread"


def test_a_method_without_a_law_has_counts_alone() -> None:
    engine = Engine(TableLM(4, seed=5, sharpness=6.0, num_layers=1), speculative={"method": "ngram"})
    report = evaluate(engine, [[0, 1, 2, 3] * 4, [2]], max_new_tokens=40, num_timed=1)
    for at in report.temperatures:
        assert at.measured_with == "exact, draws fixed"
        assert (at.rule, at.calibration_error, at.bins) == ("measured", None, [])
        assert at.slots[0].num_guesses < at.slots[0].num_contexts, "nothing to look up in the first step"
        for slot in at.slots:
            assert (slot.by_rule, slot.agreement, slot.confidence) == ({}, None, None)
        rates = [slot.num_accepted / slot.num_contexts for slot in at.slots]
        expected = 1 + sum(torch.tensor(rates[: k + 1]).double().prod().item() for k in range(len(rates)))
        assert at.expected_length == pytest.approx(expected), "steps that found nothing count"
    json.loads(as_json(report.to_dict()))


def test_predictions_are_given_to_the_method_that_reads_them() -> None:
    engine = Engine(constant((0.0, 0.0, 1.0, 0.0)), speculative={"method": "prediction", "num_speculative_tokens": 4})
    (at,) = evaluate(
        engine, [Request([1, 3], prediction=[2] * 20)], temperatures=(0.0,), max_new_tokens=20
    ).temperatures
    assert at.mean_acceptance_length == 5.0


def test_what_does_not_count() -> None:
    whole = run(constant(P), constant(Q), temperatures=(0.0,), max_new_tokens=60).temperatures[0]
    cut = run(constant(P), constant(Q), temperatures=(0.0,), max_new_tokens=60, until=first_loop).temperatures[0]
    assert cut.num_steps == 1 * 2, "one token again and again: it loops at once"
    assert whole.num_steps > 20


def test_an_engine_is_left_as_it_was() -> None:
    engine = Engine(constant(P), speculative="draft_model", method=DraftModel(constant(Q)))
    before = engine.generate([1], temperature=1.0, seed=3, max_new_tokens=20).token_ids
    method, rule = dict(vars(engine.method)), engine.verifier
    evaluate(engine, [[1]], max_new_tokens=8)
    assert (vars(engine.method), engine.verifier) == (method, rule)
    assert engine.generate([1], temperature=1.0, seed=3, max_new_tokens=20).token_ids == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prompts": []}, "0 prompts"),
        ({"temperatures": ()}, "0 temperatures"),
        ({"temperatures": (-1.0,)}, "temperature = -1.0"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens = 0"),
    ],
)
def test_mistakes(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run(constant(P), constant(Q), **options)
    with pytest.raises(ConfigError, match="nothing to evaluate"):
        evaluate(Engine(constant(P)), [[1]])


def test_errors_are_over_texts() -> None:
    assert mean([]) is None
    found = mean([(0, 1.0)] * 50 + [(1, 0.0)] * 50)
    assert found is not None
    assert found.value == 0.5
    assert found.standard_error == pytest.approx(0.5), "two texts, however many contexts of each"


def step_time(guesses: int, draft: float, target: float, rest: float) -> StepTime:
    return StepTime(0.0, draft, target, rest, guesses, 0, 1)


PLAIN = [step_time(0, 0.0, 1.0, 0.25)] * 3
TIMES = [step_time(n, 0.1 * n, 1.0 + 0.1 * n, 0.5) for n in (1, 3) for _ in range(3)] + [step_time(2, 9.0, 9.0, 9.0)]


def test_costs_are_medians_in_plain_steps() -> None:
    costs = step_costs(PLAIN, TIMES, split=True)
    assert costs.num_steps == {1: 3, 3: 3}, "one step of two guesses says nothing"
    assert costs.draft == pytest.approx({1: 0.1, 3: 0.3})
    assert costs.verify == pytest.approx({1: 1.1, 3: 1.3})
    assert costs.step == pytest.approx({1: 1.7 / 1.25, 3: 2.1 / 1.25})
    assert costs.per_guess == pytest.approx(0.1)
    assert costs.of_pass({2: 1.0}) == pytest.approx(0.2 + 1.2), "between the measured ones"
    assert costs.of_pass({1: 0.5, 3: 0.5}) == pytest.approx(0.5 * 1.2 + 0.5 * 1.6)
    assert costs.of_pass({4: 1.0}) is None
    whole = step_costs(PLAIN, TIMES, split=False)
    assert (whole.draft, whole.per_guess, whole.of_pass({1: 1.0})) == ({}, None, None)
    assert whole.of_step({1: 1.0}) == pytest.approx(1.7 / 1.25)


def report(rate: float, costs: StepCosts | None) -> DrafterFigures:
    """Of a drafter whose guesses are all accepted with chance rate."""
    probs = Agreement(0.5, True, 0.5, rate, rate)
    steps = [Step(0, 0, 1, 3, 3, [GuessSlot(True, True, probs)] * 3)]
    return _report(1.0, "", "coupled", steps, 3, costs, drawn=True)


def test_predictions_are_tokens_over_costs() -> None:
    costs = step_costs(PLAIN, TIMES, split=True)
    good = report(0.9, costs)
    assert [length.expected_tokens for length in good.lengths] == pytest.approx([1.9, 2.71, 3.439])
    assert [length.predicted_speedup for length in good.lengths] == pytest.approx([1.9 / 1.2, 2.71 / 1.4, 3.439 / 1.6])
    assert good.lengths[2].predicted_speedup_with_overhead == pytest.approx(3.439 / (2.1 / 1.25))
    assert (good.best, good.best_speedup) == (3, good.lengths[2].predicted_speedup_with_overhead)
    assert (report(0.1, costs).best, report(0.1, costs).best_speedup) == (0, 1.0), "plain decoding is faster"
    unknown = report(0.9, None)
    assert (unknown.best, unknown.lengths[0].predicted_speedup) == (0, None)


def test_a_law_that_is_not_the_guess_s_own_is_not_believed() -> None:
    class Stubborn(ModelDrafter):
        """Computes a distribution and guesses another token."""

        def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> TokenTree:
            tree = super().propose(context, shape, draws, noise)
            tokens = tree.tokens.clone()
            tokens[:, 1:] = 0
            return replace(tree, tokens=tokens)

    class Stubbornly(DraftModel):
        def open(self, context: Context, capacity: int, target: Target) -> Drafter:
            return Stubborn(self.model, context, capacity)

    engine = Engine(constant(P), speculative="draft_model", method=Stubbornly(constant(Q)))
    (at,) = evaluate(engine, [[1]], temperatures=(0.0,), max_new_tokens=12).temperatures
    assert at.mean_acceptance_length == 6.0, "the target says 0 and nothing else"
    assert (at.calibration_error, at.slots[0].confidence) == (None, None)


LEARNED: dict[str, Callable[[TransformersModel], Method]] = {
    "medusa": lambda model: Medusa(MedusaHead.fresh(model, num_heads=3), model),
    "eagle1": lambda model: Eagle1(eagles.random_head(eagles.EAGLE1), model),
    "eagle3": lambda model: Eagle3(eagles.random_head(eagles.EAGLE3), model),
    "kangaroo": lambda model: Kangaroo(KangarooHead.fresh(model, exit_layer=1, head_dim=8), model),
    "early_exit": lambda model: EarlyExit(model, 1),
    "dflash": lambda model: DFlash(blocks.random_head(model), model),
}


@pytest.mark.parametrize("name", LEARNED)
def test_laws_of_learned_drafters_are_seen(name: str) -> None:
    model = TransformersModel(tiny_module("qwen3"))
    engine = Engine(model, speculative={"method": name, "num_speculative_tokens": 2}, method=LEARNED[name](model))
    greedy, sampled = evaluate(engine, [[5, 9, 2], [7]], max_new_tokens=6, num_timed=0).temperatures
    for at in (greedy, sampled):
        first = at.slots[0]
        assert first.confidence is not None
        assert 0 < first.confidence < 1
        assert first.agreement is not None, "at every context where it guessed, the drafter's distribution was seen"
        assert sum(b.num_contexts for b in at.bins) == at.num_contexts
    assert greedy.slots[0].agreement == greedy.slots[0].acceptance
    assert set(sampled.slots[0].by_rule) == {"rejection", "coupled", "exact"}
