"""Weights that change while texts are written: no token changes under ``coupled``, no law under ``rejection``.

Hundreds of steps here, 10,000 in ``tests/stress/test_learn.py``: before every third of them on average a swap, a revert,
learning switched off (back to the base) or on. The negative control, and the planted bug ``learn-q-of-new-weights``, give
the q of new weights for guesses of old ones.
"""

import random
from dataclasses import replace

import pytest
import torch

from foretell import Engine, Request, SamplingParams
from foretell.core.noise import Noise
from foretell.core.tree import DrawMode, TokenTree
from foretell.draft.base import Context, Drafter
from foretell.draft.shapes import Shape
from foretell.engine.event import StepEvent
from foretell.learn.adapters import LearnedDrafter, LearnedMethod
from foretell.methods.draft_model.drafter import DraftModel
from foretell.model.target import Target
from tests.engine.harness import VOCAB, ToyTokenizer, mixed_requests, outcome, prompts, table
from tests.engine.test_rejection import ALPHA, p_value, toy
from tests.model.table import TableLM


def versions() -> list[DraftModel]:
    """Drafts that differ much: near the target, far from it, another table, a model of a shorter context."""
    target = [table(1, blur=blur, blur_seed=seed) for blur, seed in ((0.1, 5), (0.5, 6), (0.9, 7))]
    return [DraftModel(model) for model in (*target, table(2), table(1, blur=0.2, max_positions=24))]


class Swaps:
    """An observer that swaps, reverts, or switches learning off or on, with a chance of one in three after each step."""

    def __init__(self, method: LearnedMethod, seed: int) -> None:
        self.method, self.random = method, random.Random(seed)
        self.made, self.number, self.is_on = versions(), 0, True
        self.steps = self.swaps = self.reverts = self.switches = 0

    def __call__(self, event: StepEvent) -> None:
        self.steps += 1
        kind = self.random.random()
        if kind > 0.93 if self.is_on else kind > 0.6:
            self.is_on = not self.is_on
            self.switches += 1
            if not self.is_on:
                self.method.revert(0)
        elif not self.is_on:
            return
        elif kind < 0.25:
            self.number += 1
            self.swaps += 1
            self.method.serve(self.number, self.random.choice(self.made))
        elif kind < 0.34:
            self.reverts += 1
            self.method.revert()


@pytest.mark.parametrize(("shape", "gamma", "steps"), [("chain", 4, 400), ("static/branching=2x1x1", 3, 250)])
def test_no_token_changes_whatever_is_swapped_in_mid_text(shape: str, gamma: int, steps: int) -> None:
    no_token_changes(shape, gamma, steps)


def no_token_changes(shape: str, gamma: int, steps: int) -> None:
    """Every text of ragged requests is plain decoding's, through so many steps under ``coupled``."""
    target = table(1)
    alone = Engine(target, ToyTokenizer(), speculative="none")
    requests = mixed_requests(40)
    expected = [outcome(one) for one in alone.generate_batch(requests)]
    method = LearnedMethod(versions()[0])
    config = {"method": "draft_model", "num_speculative_tokens": gamma, "shape": shape}
    engine = Engine(target, ToyTokenizer(), speculative=config, method=method)
    swaps = Swaps(method, seed=gamma)
    engine.observers.append(swaps)
    rounds = 0
    while swaps.steps < steps:
        rounds += 1
        got = engine.generate_batch(requests, batch_size=1 + rounds % 4)
        assert [outcome(one) for one in got] == expected
        assert sum(one.num_accepted_tokens for one in got) > 20, "nothing was guessed"
    assert swaps.swaps > steps // 8
    assert swaps.reverts > steps // 30
    assert swaps.switches > steps // 30


class Swapping(LearnedMethod):
    """Weights alternate before every proposal: each step of a text comes from other weights than the one before."""

    def __init__(self, first: DraftModel, second: DraftModel) -> None:
        super().__init__(first)
        self.pair = (first, second)

    def open(self, context: Context, capacity: int, target: Target) -> Drafter:
        return SwappingDrafter(self, context, capacity, target)


class SwappingDrafter(LearnedDrafter):
    def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> TokenTree:
        assert isinstance(self.method, Swapping)
        number = self.method.serving[0] + 1
        self.method.serve(number, self.method.pair[number % 2])
        return super().propose(context, shape, draws, noise)


class Mixed(LearnedMethod):
    """The fault: guesses of the old weights, reported with the q of the new ones."""

    def __init__(self, first: DraftModel, second: DraftModel) -> None:
        super().__init__(first)
        self.second = second

    def open(self, context: Context, capacity: int, target: Target) -> Drafter:
        return MixedDrafter(self, context, capacity, target)


class MixedDrafter(LearnedDrafter):
    def __init__(self, method: Mixed, context: Context, capacity: int, target: Target) -> None:
        super().__init__(method, context, capacity, target)
        self.open_new = lambda context: method.second.open(context, capacity, target)

    def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> TokenTree:
        tree = super().propose(context, shape, draws, noise)
        if tree.q is None:
            return tree
        return replace(tree, q=self.open_new(context).propose(context, shape, draws, noise).q)


@pytest.mark.parametrize(("size", "gamma", "temperature"), [(3, 1, 1.0), (4, 2, 1.0), (3, 3, 0.7)])
def test_the_law_is_the_targets_when_every_step_has_other_weights(size: int, gamma: int, temperature: float) -> None:
    method = Swapping(DraftModel(toy(size, seed=8)), DraftModel(toy(size, seed=9)))
    assert p_value(toy(size, seed=3), method, gamma, temperature=temperature) > ALPHA


def test_control_the_q_of_new_weights_for_old_guesses_is_found() -> None:
    target = toy(3, seed=3)
    method = Mixed(DraftModel(toy(3, seed=8)), DraftModel(toy(3, seed=9)))
    assert p_value(target, method, 1) < ALPHA


@pytest.mark.parametrize(
    ("verify", "shape"), [("rejection", "chain"), ("block", "chain"), ("traversal", "static/branching=2x2x1")]
)
def test_under_a_rule_that_reads_q_a_swap_of_the_same_weights_changes_no_token(verify: str, shape: str) -> None:
    """The text is a function of every guess and its q. A drafter opened anew mid-text must guess what the one before it
    would have guessed: from the row's own text, at its own place. In batches that rows leave, with swaps before steps."""
    target, draft = table(1), DraftModel(table(1, blur=0.5, blur_seed=6))
    config = {"method": "draft_model", "num_speculative_tokens": 3, "shape": shape, "verify": verify}
    alone = Engine(target, ToyTokenizer(), speculative=config, method=draft)
    requests = mixed_requests(30)
    expected = [outcome(alone.generate(one.prompt, one.params)) for one in requests]
    method = LearnedMethod(draft)
    engine = Engine(target, ToyTokenizer(), speculative=config, method=method)
    swaps = Swaps(method, seed=5)
    swaps.made = [DraftModel(table(1, blur=0.5, blur_seed=6)) for _ in range(3)]
    engine.observers.append(swaps)
    for batch_size in (1, 3, 8):
        assert [outcome(one) for one in engine.generate_batch(requests, batch_size=batch_size)] == expected
    assert swaps.swaps > 20


@pytest.mark.parametrize("verify", ["rejection", "traversal"])
def test_under_a_rule_that_reads_q_rows_of_a_batch_have_their_solo_texts_through_other_weights(verify: str) -> None:
    """Weights alternate by the step: a row's q is of the weights that guessed for it, whoever stands beside it."""
    target = table(1)
    pair = DraftModel(table(1, blur=0.5, blur_seed=6)), DraftModel(table(2))
    config = {"method": "draft_model", "num_speculative_tokens": 3, "verify": verify}
    params = [SamplingParams(max_new_tokens=24, seed=seed, ignore_eos=True) for seed in range(6)]
    requests = [Request(ids, one) for ids, one in zip(prompts(VOCAB), params, strict=False)]

    def texts(batch_size: int) -> list[list[int]]:
        engine = Engine(target, ToyTokenizer(), speculative=config, method=Swapping(*pair))
        if batch_size > 1:
            return [one.token_ids for one in engine.generate_batch(requests, batch_size=batch_size)]
        return [
            Engine(target, ToyTokenizer(), speculative=config, method=Swapping(*pair))
            .generate(one.prompt, one.params)
            .token_ids
            for one in requests
        ]

    together, alone = texts(6), texts(1)
    assert together == alone
    assert alone != [
        one.token_ids
        for one in Engine(target, ToyTokenizer(), speculative=config, method=pair[0]).generate_batch(requests)
    ], "other weights, other texts: else equality shows nothing"


def test_rows_that_join_after_a_swap_share_the_newest_weights() -> None:
    """Ragged requests come and go while weights change; the audit of each text is equality with plain decoding."""
    target, method = table(1), LearnedMethod(versions()[0])
    engine = Engine(target, ToyTokenizer(), speculative={"method": "draft_model"}, method=method)
    engine.observers.append(Swaps(method, seed=3))
    requests = [
        Request(ids, SamplingParams(max_new_tokens=5 + 7 * (index % 4), seed=index, ignore_eos=True))
        for index, ids in enumerate(prompts(VOCAB) * 4)
    ]
    alone = Engine(target, ToyTokenizer(), speculative="none").generate_batch(requests)
    together = engine.generate_batch(requests, batch_size=5)
    assert [outcome(one) for one in together] == [outcome(one) for one in alone]


def test_versions_the_base_and_the_last_two_are_kept() -> None:
    made = versions()
    method = LearnedMethod(made[0])
    for number in (1, 2, 3, 4):
        method.serve(number, made[number])
    assert method.versions == [0, 3, 4]
    assert method.serving == (4, made[4])
    assert method.revert() == 3
    assert method.versions == [0, 3]
    assert method.revert() == 0
    assert method.revert() == 0
    assert method.serving == (0, made[0])
    assert method.changes == 7


def test_a_method_without_weights_says_that_it_cannot_learn() -> None:
    from foretell.core.errors import ConfigError
    from foretell.draft.ngram import Ngram

    with pytest.raises(ConfigError, match=r"ngram.*cannot learn while it serves"):
        Ngram().rebuilt({})


def test_a_table_model_cannot_take_other_weights_and_says_so() -> None:
    from foretell.core.errors import ModelError

    with pytest.raises(ModelError, match="cannot take other weights"):
        TableLM(4).rebuilt({"x": torch.zeros(1)})
