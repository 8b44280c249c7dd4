"""What is recorded of guesses, on tables: every figure against what the tables say."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from benchmarks.theory.coupling import gumbel

from foretell.analysis.observer import RULES, Agreement, GuessRecord, observe
from foretell.core.noise import Noise
from foretell.core.tree import DrawMode, TokenTree
from foretell.draft.base import Context, Drafter, Method
from foretell.draft.shapes import Shape
from foretell.engine.engine import Engine
from foretell.methods.dflash.drafter import DFlash
from foretell.methods.draft_model.drafter import DraftModel, ModelDrafter
from foretell.methods.eagle.drafter import Eagle1, Eagle3
from foretell.methods.kangaroo.drafter import Kangaroo
from foretell.methods.kangaroo.head import KangarooHead
from foretell.methods.medusa.drafter import Medusa
from foretell.methods.medusa.head import MedusaHead
from foretell.model.hf.adapter import TransformersModel
from foretell.model.target import Target
from tests.methods.dflash import test_drafter as blocks
from tests.methods.eagle import eagles
from tests.model.table import TableLM
from tests.model.tiny import tiny_module

P, Q = (0.5, 0.3, 0.2, 0.0), (0.2, 0.2, 0.1, 0.5)


def constant(probs: tuple[float, ...]) -> TableLM:
    """Says the same after every text."""
    return TableLM(len(probs), probs=lambda context: probs, context=1, num_layers=1)


def record(engine: Engine, temperature: float, prompt: list[int], tokens: int) -> GuessRecord:
    config = replace(engine.speculative, verify="rejection" if temperature else "exact")
    observed, found = observe(engine, config, engine.method)
    observed.generate(prompt, temperature=temperature, max_new_tokens=tokens, seed=1)
    return found


def laws(found: GuessRecord) -> list[Agreement | None]:
    """Of every guess."""
    return [slot.agreement for step in found.steps for slot in step.slots if slot.made]


def test_acceptance_is_the_overlap_of_the_two_tables() -> None:
    engine = Engine(constant(P), speculative="draft_model", method=DraftModel(constant(Q)))
    found = laws(record(engine, 1.0, [0, 1], 24))
    probs = torch.tensor([P], dtype=torch.float64), torch.tensor([Q], dtype=torch.float64)
    assert len(found) > 5
    for law in found:
        assert law is not None
        assert RULES["rejection"](law) == pytest.approx(0.2 + 0.2 + 0.1, abs=1e-6)
        assert RULES["coupled"](law) == pytest.approx(float(gumbel(*probs)), abs=1e-6)
        assert RULES["exact"](law) == 0.0, "the drafter's first choice is the token that the target never says"
        assert (law.agrees, law.confidence) == (False, pytest.approx(0.5))


def test_slots_end_with_the_first_guess_that_was_not_kept() -> None:
    target = TableLM(8, seed=3, sharpness=2.0, num_layers=1)
    draft = TableLM(8, seed=3, sharpness=2.0, blur=0.4, num_layers=1)
    engine = Engine(target, speculative="draft_model", method=DraftModel(draft))
    for temperature in (0.0, 1.0):
        steps = record(engine, temperature, [2, 3], 40).steps
        assert len(steps) > 5
        for step in steps:
            kept = [slot.accepted for slot in step.slots]
            assert all(kept[:-1])
            assert step.num_tokens == sum(kept) + 1
            for slot in step.slots if temperature == 0 else ():
                assert slot.agreement is not None
                assert slot.agreement.agrees == slot.accepted
                assert 0 < slot.agreement.confidence < 1, "q at temperature 1: the greedy law says nothing of it"


def test_an_engine_is_left_as_it_was() -> None:
    engine = Engine(constant(P), speculative="draft_model", method=DraftModel(constant(Q)))
    before = engine.generate([1], temperature=1.0, seed=3, max_new_tokens=20).token_ids
    method, rule = dict(vars(engine.method)), engine.verifier
    record(engine, 1.0, [1], 8)
    assert (vars(engine.method), engine.verifier) == (method, rule)
    assert engine.generate([1], temperature=1.0, seed=3, max_new_tokens=20).token_ids == before


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

    found = record(Engine(constant(P), speculative="draft_model", method=Stubbornly(constant(Q))), 0.0, [1], 12)
    assert [step.num_tokens for step in found.steps] == [6, 6], "the target says 0 and nothing else"
    assert set(laws(found)) == {None}


LEARNED: dict[str, Callable[[TransformersModel], Method]] = {
    "medusa": lambda model: Medusa(MedusaHead.fresh(model, num_heads=3), model),
    "eagle1": lambda model: Eagle1(eagles.random_head(eagles.EAGLE1), model),
    "eagle3": lambda model: Eagle3(eagles.random_head(eagles.EAGLE3), model),
    "kangaroo": lambda model: Kangaroo(KangarooHead.fresh(model, exit_layer=1, head_dim=8), model),
    "dflash": lambda model: DFlash(blocks.random_head(model), model),
}


@pytest.mark.parametrize("name", LEARNED)
def test_laws_of_learned_drafters_are_seen(name: str) -> None:
    model = TransformersModel(tiny_module("qwen3"))
    engine = Engine(model, speculative={"method": name, "num_speculative_tokens": 2}, method=LEARNED[name](model))
    for temperature in (0.0, 1.0):
        found = laws(record(engine, temperature, [5, 9, 2], 6))
        assert found
        for law in found:
            assert law is not None, "at every context where it guessed, the drafter's distribution was seen"
            assert 0 < law.confidence < 1
