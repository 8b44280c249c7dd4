"""Suffix and a second method in one: the text stays, and each row takes the guess that has been worth more."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foretell import VERIFIERS, ConfigError, Engine, Request, SamplingParams, speculative_config
from foretell.core import measured
from foretell.core.tree import DrawMode, DrawnBy, TokenTree
from foretell.doctor.candidates import Candidate
from foretell.doctor.examine import Predicted
from foretell.doctor.predict import predictions
from foretell.draft.base import Probe
from foretell.draft.chances import PRIOR, Mean
from foretell.draft.config import Loader
from foretell.draft.ngram import Ngram
from foretell.draft.prediction import Prediction
from foretell.draft.shapes import Adaptive, Chain, parse_shape
from foretell.draft.suffix import Suffix
from foretell.engine.batch import Batch
from foretell.engine.calibrate import Calibration
from foretell.engine.speculation import check_branching
from foretell.methods.draft_model.drafter import DraftModel
from foretell.methods.draft_model.vocabulary.narrow import NarrowModel
from foretell.methods.eagle.drafter import Eagle3
from foretell.methods.hybrid import config as hybrid_config, config as size
from foretell.methods.hybrid.config import LEAST_BYTES, MORE_ROUNDS, WIDTHS, best_size, pass_seconds, tree_size
from foretell.methods.hybrid.drafter import MOST_GRAFTED, SHARED_SIZE, Hybrid, Worth, shape_of
from foretell.methods.hybrid.graft import by_row
from foretell.methods.medusa.drafter import Medusa
from foretell.model.hf.adapter import TransformersModel
from foretell.model.target import CausalModel
from foretell.planner.planner import Planner
from foretell.verify import Coupled
from tests.draft.test_join import tiny
from tests.engine.harness import ToyTokenizer, cycle, mixed_requests, outcomes, own, plain, sure, table
from tests.extend.thirdparty.foretell_echo.drafter import Echo
from tests.methods.eagle.eagles import EAGLE3, random_head
from tests.methods.medusa.test_drafter import trained as medusa_head
from tests.model.table import TableLM
from tests.model.tiny import tiny_module

TARGET = table()
KEYS = {"method": "hybrid", "second": "draft_model", "second_tokens": 3}


def engine(
    target: TableLM = TARGET, draft: TableLM | None = None, discount: float = 0.85, shape: str = "chain", **keys: Any
) -> Engine:
    method = Hybrid(Suffix(), DraftModel(draft or table(blur=0.3)), shape=parse_shape(shape, 3), discount=discount)
    keys = {"second_shape": shape, **keys}
    speculative = {**KEYS, "discount": discount, **keys}
    return Engine(target, ToyTokenizer(), speculative=speculative, method=method, drafter_errors="raise")


@pytest.mark.parametrize("verify", ["coupled", "exact"])
@pytest.mark.parametrize("discount", [0.0, 0.85, 2.0])
@pytest.mark.parametrize("shape", ["chain", "opt_tree/size=6", "static/branching=3x2x1", "dyspec/size=20"])
def test_the_text_is_that_of_plain_decoding(verify: str, discount: float, shape: str) -> None:
    """Mixed temperatures and lengths, batches in which some rows follow a suffix and some the draft."""
    expected = outcomes(plain(TARGET, mixed_requests(), verify=verify))
    running = engine(discount=discount, verify=verify, shape=shape)
    for batch_size in (3, 8, 1):
        found = running.generate_batch(mixed_requests(), batch_size=batch_size)
        assert outcomes(found) == expected
        assert sum(one.num_accepted_tokens for one in found) > 0


def test_room_is_kept_for_the_trees_of_the_second_method() -> None:
    """Trees of 20 guesses behind suffix chains of two: what a step may write, and what a service takes."""
    config = speculative_config({**KEYS, "num_speculative_tokens": 2, "second_shape": "opt_tree/size=20"})
    assert config.max_nodes == 25
    assert config.max_read > 21
    running = engine(num_speculative_tokens=2, shape="opt_tree/size=20")
    seen: list[int] = []
    running.observers.append(lambda event: seen.append(event.commit.tree.num_nodes))
    expected = outcomes(plain(TARGET, mixed_requests()))
    assert outcomes(running.generate_batch(mixed_requests(), batch_size=3)) == expected
    assert max(seen) > 3


def test_a_tree_of_few_deep_guesses_keeps_to_its_room() -> None:
    """Asked for less depth than its own, a tree of fewer guesses than that has no more of them."""
    running = engine(discount=2.0, shape="opt_tree/size=2/depth=40/threshold=0", num_speculative_tokens=12)
    seen: list[int] = []
    running.observers.append(lambda event: seen.append(event.commit.tree.num_nodes))
    running.generate_batch(mixed_requests(), batch_size=3)
    assert max(seen) <= running.speculative.max_nodes


def test_which_shape_the_second_method_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(Coupled):
        name = "counting"
        counts_children = frozenset({DrawMode.COUPLED})

    def shape(**keys: Any) -> str:
        config: Any = speculative_config({"method": "hybrid", **keys})
        return str(config.second_proposal.name)

    assert shape() == shape(second="eagle1") == "opt_tree"
    assert shape(verify="rejection") == shape(second="medusa") == "chain"
    assert shape(second="draft_model") == "adaptive"
    assert shape(second="draft_model", second_shape="eagle2") == "eagle2"
    with pytest.raises(ConfigError, match="cannot grow the shape 'specdec'"):
        shape(second="medusa", second_shape="specdec")
    with pytest.raises(ConfigError, match="defined on chains"):
        shape(verify="block", second_shape="opt_tree")
    with pytest.raises(ConfigError, match="shape"):
        shape(second_shape="oak")
    with pytest.raises(ConfigError, match="acceptance head"):
        shape(second="draft_model", second_shape="specdec")
    monkeypatch.setitem(VERIFIERS, "counting", Counting())
    for draws in ("auto", "coupled"):
        with pytest.raises(ConfigError, match="treats all children of a node together"):
            shape(verify="counting", second_shape="static/branching=2x1", draws=draws)
    assert shape(verify="counting", second_shape="static/branching=2x1", draws="fixed") == "static"


@pytest.mark.parametrize("shape", ["adaptive/threshold=0.3", "specdec"])
def test_lines_that_stop_by_themselves_are_not_planned_and_are_timed_whole(shape: str) -> None:
    """A guess that was not made would be timed as one that costs nothing."""
    stops = speculative_config({"method": "draft_model", "shape": shape})
    chain = speculative_config({"method": "draft_model"})
    dear = speculative_config({"method": "hybrid", "second": "draft_model"})
    assert (stops.weighs, chain.weighs, dear.weighs, speculative_config("hybrid").weighs) == (True, False, True, False)
    assert stops.measured() == chain == chain.measured()
    made = Hybrid(Suffix(), DraftModel(table(2)), shape=Adaptive(3), discount=1.0)
    assert made.measured().shape == Chain(3)


def test_greedy_text_under_rejection() -> None:
    requests = [Request([3, 4, 5, 3, 4, k], SamplingParams(temperature=0.0, max_new_tokens=25)) for k in range(4)]
    expected = outcomes(plain(TARGET, requests))
    running = engine(verify="rejection")
    for _ in range(2):
        assert outcomes(running.generate_batch(requests)) == expected


def test_one_batch_holds_both_kinds_of_guesses(audited: list[Callable[..., None]]) -> None:
    """Under sampled rejection a tree has FIXED rows without q and drawn rows with it."""
    kinds: set[frozenset[int]] = set()

    def auditor(state: Any, target: Any, drafter: Any, report: Any) -> None:
        tree = report.commit.tree
        tree.check()
        rows = [set(tree.drawn_by[row, 1:][tree.valid[row, 1:]].tolist()) for row in range(len(tree.tokens))]
        kinds.update(frozenset(found) for found in rows if found)
        if len({frozenset(found) for found in rows if found}) > 1:
            kinds.add(frozenset({-1}))

    audited.append(auditor)
    requests = [Request([1, k], SamplingParams(temperature=1.0, max_new_tokens=60, seed=k)) for k in range(6)]
    engine(verify="rejection").generate_batch(requests)
    fixed, drawn = frozenset({int(DrawnBy.FIXED)}), frozenset({int(DrawnBy.IID)})
    assert kinds == {fixed, drawn, frozenset({-1})}


def steps(config: dict[str, Any] | None, draft: TableLM) -> int:
    target = cycle()
    running = engine(target, draft) if config is None else Engine(target, ToyTokenizer(), speculative=config)
    completion = running.generate([0], max_new_tokens=120, temperature=0.0)
    assert completion.token_ids == [(k + 1) % 12 for k in range(120)]
    return completion.num_steps


def test_the_better_of_both_is_taken() -> None:
    """A perfect draft of three guesses is taken until suffix has longer ones; a wrong draft costs suffix nothing."""
    backwards = sure(lambda text: (text[-1] - 1) % 12)
    alone = steps({"method": "suffix"}, cycle())
    assert steps(None, backwards) <= alone
    assert steps(None, cycle()) <= alone - 6, "the draft has guessed while suffix had nothing"
    assert steps(None, cycle()) < 120 / 4, "and suffix goes beyond the draft's three"


def test_suffix_guesses_alone_where_the_plan_pays_for_nothing_else() -> None:
    """A row that may spend no time follows any suffix, and asks no draft model; one that may is as ever."""
    method = Hybrid(Suffix(), DraftModel(table(blur=0.3)), shape=Chain(3), discount=2.0)
    passes: list[int] = []
    made = Engine(TARGET, ToyTokenizer(), speculative=KEYS, method=method)
    batch = Batch(TARGET, max_rows=1, capacity=200)
    row = made.make_row(0, Request([3, 4, 5, 6, 3, 4, 5, 6, 3, 4], SamplingParams(temperature=0.0, max_new_tokens=40)))
    batch.arrive(row)
    while batch.arrivals:
        batch.read(64, catch_up=True)
    guessed = []
    preferred: list[tuple[bool, bool | None]] = []
    for number in range(12):
        before = row.num_draft_tokens
        # A guess that the whole method would not take is made where that may spend nothing, and told apart.
        method.worth_at(0.0).second.value = 9.0 if number % 2 else 0.0
        event = batch.step([3], [0], Probe())
        preferred += [(one.proposed, one.preferred) for one in batch.grouped.light_steps if one is not None]
        passes.append(int(event.seconds_draft_model > 0.0))
        guessed.append(row.num_draft_tokens - before)
        drawn = event.commit.tree.drawn_by[0, 1:][event.commit.tree.valid[0, 1:]]
        assert set(drawn.tolist()) <= {int(DrawnBy.FIXED)}
    assert not any(passes)
    assert any(guessed)
    assert set(preferred) == {(True, True), (True, False), (False, False)}
    before = row.num_draft_tokens
    batch.step([3], [3])
    assert row.num_draft_tokens > before


@pytest.mark.parametrize("discount", [0.0, 0.85, math.inf])
def test_every_step_says_what_suffix_alone_would_have_kept(discount: float) -> None:
    """Its guess of each step against the text that came in the end, whichever part guessed. (By a discount of inf the
    second method always does, here badly, so that a step's tokens do not reach to the end of what suffix had found.)"""
    target = TARGET if discount < 2 else cycle()
    method = Hybrid(Suffix(), DraftModel(table(blur=0.3)), shape=Chain(3), discount=discount)
    made = Engine(target, ToyTokenizer(), speculative=KEYS, method=method)
    rows = [
        made.make_row(
            k,
            Request(
                [3, 4, 5, 6, 3, 4, 5, k], SamplingParams(seed=k, max_new_tokens=60, temperature=0.3, ignore_eos=True)
            ),
        )
        for k in range(3)
    ]
    batch = Batch(target, max_rows=3, capacity=200)
    for row in rows:
        batch.arrive(row)
    batch.read(64, catch_up=True, whole=True)
    (group,) = batch.groups
    told: list[tuple[int, int, list[int], Any]] = []
    proposed: set[bool] = set()
    while all(row.finish_reason is None for row in rows):
        starts = [len(row.token_ids) for row in rows]
        drafter: Any = own(group.drafter)
        limits = [min(5, row.depth_limit) for row in rows]
        found = [rest._guess(one, made.choice().shape, most)[0] for rest in [drafter.suffix]
                 for one, most in zip(rest.rows, limits, strict=True)]  # fmt: skip
        drafted = [row.num_draft_tokens for row in rows]
        batch.step([5] * len(rows))
        light = batch.grouped.light_steps
        if not any(limits):
            assert light == [None] * len(rows), "nobody may guess before the last token"
            continue
        for row, before, guess, one in zip(rows, drafted, found, light, strict=True):
            if one.proposed:
                assert row.num_draft_tokens - before == len(guess)
            assert one.preferred is one.proposed, "where the whole method guesses, they are one"
            proposed.add(one.proposed)
        told += [(k, starts[k], [token for _, token in found[k]], light[k]) for k in range(len(rows))]
    sure = partly = 0
    for k, start, guess, light in told:
        text = rows[k].token_ids[start:]
        right = next(
            (at for at, (a, b) in enumerate(zip(guess, text, strict=False)) if a != b), min(len(guess), len(text))
        )
        if light.drafted == len(guess):
            assert light.accepted == right
            sure += bool(guess)
        else:
            assert light.allowed == light.drafted == light.accepted <= right
            partly += 1
    assert sure > 5
    assert partly or discount < 2
    assert proposed == ({False} if discount > 2 else {False, True})


def test_the_doctor_tells_steps_of_both_methods_apart() -> None:
    """Of a text that suffix follows, and of its times: no step that made suffix's guesses counts as one of the other."""
    target = cycle()
    own = engine(target, table(blur=0.3))
    params = SamplingParams(temperature=0.0, max_new_tokens=36, seed=0, ignore_eos=True)
    exam = Predicted(own, Candidate("hybrid", own.speculative.resolved(), None), params)
    for k in (2, 20):
        exam.look(Request([5, 1, 9, *range(8), k], params), timed=True)
    texts, times = exam.texts, exam.times
    assert all(set(text.guesses) <= {0, 1, 2, 3} for text in texts)
    assert max(count for text in texts for count in text.light) > 3
    assert all(step.num_draft_tokens <= 3 for one in times for step in one.steps)
    assert max(step.num_draft_tokens for one in times for step in one.light) > 3
    (found,) = predictions(texts, times, [own.speculative.num_speculative_tokens], num_tokens=36)
    assert found.speedup.low <= found.speedup.value <= found.speedup.high


def test_costs_are_measured_where_the_second_method_guesses() -> None:
    method = Hybrid(Suffix(), DraftModel(table(blur=0.3)), shape=Chain(3), discount=0.85)
    method.suffix.library.add(list(range(10)))
    timed = method.measured()
    assert not timed.worth_at(1.0).prefers_suffix(60.0)
    assert timed.suffix.learned_bytes < method.suffix.learned_bytes
    assert timed.worth_at(1.0) is not method.worth_at(1.0)
    assert method.isolated().measured().by_row is False
    asked = [Calibration(TARGET, choice, [replace(choice, method=method)], [], max_batch=1, time_limit_s=1.0)
             for choice in [engine().choice()]]  # fmt: skip
    held = asked[0].choices["hybrid"].method
    assert isinstance(held, Hybrid)
    assert held is not method
    assert held.discount == float("inf")


def test_worth_is_learned() -> None:
    worth = Worth(0.85)
    assert worth.prefers_suffix(3.0)
    assert not worth.prefers_suffix(0.0)
    for _ in range(100):
        worth.of(3.0).add(0.0)
        worth.second.add(3.0)
    assert not worth.prefers_suffix(3.0)
    assert worth.prefers_suffix(7.9), "other scores are judged by themselves"
    worth = Worth(0.85)
    for _ in range(100):
        worth.of(0.3).add(0.0)
        worth.of(0.8).add(0.9)
        worth.second.add(0.5)
    assert worth.prefers_suffix(0.8), "a likely guess of one token"
    assert not worth.prefers_suffix(0.3), "and an unlikely one"
    mean = Mean(0.0)
    for value in [1.0] * 3000 + [5.0] * 3000:
        mean.add(value)
    assert mean.value == pytest.approx(5.0, abs=0.01), "old observations are forgotten"


def test_what_is_kept_at_one_temperature_says_nothing_of_another() -> None:
    method = Hybrid(Suffix(), DraftModel(table(blur=0.3)), shape=Chain(3), discount=0.85)
    made = Engine(TARGET, ToyTokenizer(), speculative=KEYS, method=method)
    made.generate([1, 2, 3], SamplingParams(temperature=0.0, max_new_tokens=60, ignore_eos=True))
    assert method.worth_at(0.0).second.weight > PRIOR
    for other in (0.01, 0.5, 1.0, 9.0):
        assert method.worth_at(other).second.weight == PRIOR
    made.generate([1, 2, 3], SamplingParams(temperature=1.0, max_new_tokens=60, ignore_eos=True))
    assert method.worth_at(1.0).second.weight > PRIOR
    assert method.worth_at(1.0) is method.worth_at(0.9)
    assert method.worth_at(0.5).second.weight == PRIOR
    assert method.worth_at(9.0) is method.worth_at(1.7e308), "however large"


def test_rows_of_two_trees() -> None:
    none, label = torch.zeros(2, 2, dtype=torch.int64), int(DrawnBy.IID)
    fixed = TokenTree(torch.tensor([[7, 1], [8, 2]]), torch.tensor([[-1, 0], [-1, 0]]), none, max_children=1)
    tokens, parent = torch.tensor([[7, 0, 0], [8, 3, 4]]), torch.tensor([[-1, -1, -1], [-1, 0, 1]])
    labels = torch.tensor([[0, 0, 0], [0, label, label]])
    drawn = TokenTree(tokens, parent, labels, torch.ones(2, 3, 5), max_children=1)
    both = by_row(fixed, drawn, torch.tensor([True, False]))
    both.check()
    assert both.tokens.tolist() == [[7, 1, 0], [8, 3, 4]]
    assert both.q[0].abs().max() == 0
    assert both.q[1].min() == 1
    other = replace(drawn, q=torch.full((2, 3, 5), 0.5), drawn_by=torch.tensor([[0, label, label]] * 2))
    mixed = by_row(drawn, other, torch.tensor([False, True]))
    assert mixed.q is not None
    assert [set(row.flatten().tolist()) for row in mixed.q] == [{0.5}, {1.0}], (
        "each row has the q that it was drawn from"
    )


def several(discount: float = 0.85, shape: str = "chain", **keys: Any) -> tuple[Engine, Any]:
    """Two draft models and two ways to look up, behind suffix."""
    others = [Ngram(), DraftModel(table(blur=0.6)), Prediction()]
    made = Hybrid(Suffix(), DraftModel(table(blur=0.3)), shape=parse_shape(shape, 3), discount=discount, others=others)
    speculative = {
        **KEYS,
        "second": "draft_model+ngram+prediction",
        "second_shape": shape,
        "discount": discount,
        **keys,
    }
    return Engine(TARGET, ToyTokenizer(), speculative=speculative, method=made, drafter_errors="raise"), made


@pytest.mark.parametrize("verify", ["coupled", "exact"])
@pytest.mark.parametrize("shape", ["chain", "opt_tree/size=6", "static/branching=3x2x1"])
def test_the_text_of_several_members_is_that_of_plain_decoding(
    verify: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take turns, rows of one step by different ones, and what each is worth is learned."""
    expected = outcomes(plain(TARGET, mixed_requests(), verify=verify))
    running, method = several(shape=shape, verify=verify)
    chosen: list[int] = []
    best = Worth.best

    def noted(self: Worth, found: Any) -> tuple[int, float]:
        able = [member for member, one in enumerate(found) if one is not False]
        chosen.append(able[len(chosen) % len(able)])
        return chosen[-1], best(self, found)[1]

    monkeypatch.setattr(Worth, "best", noted)
    for batch_size in (3, 8):
        found = running.generate_batch(mixed_requests(), batch_size=batch_size)
        assert outcomes(found) == expected
        assert sum(one.num_accepted_tokens for one in found) > 0
    assert set(chosen) >= {0, 1, 2}
    means = [method.worth_at(1.0).second, *method.worth_at(1.0).others[:2]]
    assert all(mean.weight > PRIOR for mean in means)


def test_the_member_that_promises_most_guesses() -> None:
    worth = Worth(0.5, others=[Mean(1.0), Mean(1.0)])
    assert worth.best([None, False, None]) == (0, 1.0), "of equal ones the first"
    assert worth.best([None, True, None]) == (1, 2.0), "what is looked up costs nothing"
    worth.others[1].value = 3.5
    assert worth.best([None, True, None]) == (2, 2.25)
    worth.others[0].value = 1.5
    assert worth.best([None, True, None]) == (1, 2.5)
    assert worth.best([False, False, False]) == (0, 0.0)
    assert [worth.prefers_suffix(3.0, promised) for promised in (4.1, 4.3)] == [True, False]


def test_of_several_the_main_one_is_timed() -> None:
    _, method = several()
    timed = method.measured()
    assert timed.worth_at(1.0).best([None, True, None, True])[0] == 0
    assert [type(one) for one in timed.members] == [type(one) for one in method.members]
    fresh = method.fresh()
    assert (fresh.members, len(fresh.worth_at(1.0).others)) == (method.members, 3)


def test_a_member_that_cannot_be_joined_has_rows_of_its_own() -> None:
    others = [Echo(64)]
    made = Hybrid(Suffix(), DraftModel(table(blur=0.3)), shape=Chain(3), discount=0.85, others=others)
    running = Engine(TARGET, ToyTokenizer(), speculative=KEYS, method=made, drafter_errors="raise")
    groups: list[int] = []
    running.observers.append(lambda event: groups.append(len(event.parts)))
    assert outcomes(running.generate_batch(mixed_requests(), batch_size=3)) == outcomes(plain(TARGET, mixed_requests()))
    assert max(groups) > 1


@pytest.mark.parametrize("heads", ["eagle3, medusa", "medusa, eagle3"])
def test_each_head_reads_its_own_layers(heads: str) -> None:
    """Where the main one always guesses: its trees are those that it grows without another head beside it."""
    model = tiny()
    made: dict[str, Any] = {"eagle3": Eagle3(random_head(EAGLE3), model), "medusa": Medusa(medusa_head(model), model)}  # type: ignore[arg-type]
    first, second = heads.split(", ")
    found = []
    for others in ([], [made[second]]):
        method = Hybrid(Suffix(), made[first], shape=Chain(3), discount=math.inf, others=others)
        running = Engine(model, None, speculative=KEYS, method=method, drafter_errors="raise")
        trees: list[Any] = []
        running.observers.append(
            lambda event, trees=trees: trees.append(
                (event.commit.tree.tokens.tolist(), event.commit.tree.parent.tolist())
            )
        )
        prompts = [[3, 4, 5, 6, 7], [9]]
        running.generate_batch(
            [Request(ids, SamplingParams(max_new_tokens=12, seed=1, ignore_eos=True)) for ids in prompts]
        )
        found.append((method.taps == made[first].taps, trees))
    assert (found[0][0], found[1][0]) == (True, set(made[second].taps) <= set(made[first].taps))
    assert found[0][1] == found[1][1]
    assert any(len(tokens[0]) > 2 for tokens, _ in found[0][1])


def test_fresh_shares_no_store() -> None:
    method = Hybrid(Suffix(), DraftModel(table()), shape=Chain(3), discount=0.9)
    fresh = method.fresh()
    assert fresh.suffix is not method.suffix
    assert fresh.second is method.second
    assert fresh.worth_at(1.0) is not method.worth_at(1.0)


def test_rows_that_share_nothing_share_a_pass_and_no_estimate() -> None:
    """Each row's proposals are worth what they were to this row, through rows that join and leave."""
    method = Hybrid(Suffix(), DraftModel(table(blur=0.3)), shape=Chain(3), discount=0.85).isolated()
    made = Engine(TARGET, ToyTokenizer(), speculative=KEYS, method=method)
    requests = mixed_requests()
    expected = outcomes(plain(TARGET, requests))
    held: list[list[Worth]] = []
    groups: list[int] = []

    def watch(event: Any) -> None:
        groups.append(len(event.parts))

    made.observers.append(watch)
    opened = method.open

    def remembered(*given: Any) -> Any:
        drafter: Any = opened(*given)
        held.append([row.worth for row in drafter.rows])
        return drafter

    method.open = remembered  # type: ignore[method-assign, assignment]
    assert outcomes(made.generate_batch(requests, batch_size=3)) == expected
    assert set(groups) == {1}
    assert len({id(worth) for worths in held for worth in worths}) == len(requests)
    assert method.worth_at(1.0).second.value == 1.0, "nothing was learned for all"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"second": "kangaroo"}, "second = 'kangaroo' must be one of eagle3, eagle1, draft_model"),
        ({"second_tokens": 0}, "second_tokens = 0 must be between 1 and 64"),
        ({"discount": -1.0}, "discount = -1.0 must be between"),
        ({"second": "eagle3", "draft_vocab_size": 9}, "draft_vocab_size is no option of second = 'eagle3'"),
        ({"second": "medusa", "draft_window": 9}, "draft_window is no option of second = 'medusa'"),
        ({"second": "ngram", "draft_window": 0}, "draft_window is no option of second = 'ngram'"),
        ({"second": "ngram", "model": "x"}, "model is no option of second = 'ngram'"),
        ({"second": "eagle3+kangaroo"}, "second = 'kangaroo' must be one of eagle3, eagle1, draft_model"),
        ({"second": "suffix+eagle3"}, "second = 'suffix' must be one of"),
        ({"second": "eagle3+"}, "second = '' must be one of"),
        ({"second": "eagle3+ngram+eagle3"}, r"methods joined by '\+', each once"),
        ({"second": "eagle3=x+ngram"}, "names weights of 'eagle3', whose are the key model, or none"),
        ({"second": "eagle3+ngram=x"}, "names weights of 'ngram'"),
        ({"second": "ngram", "draws": "coupled"}, "'ngram' draws from no distribution"),
        ({"second": "medusa+eagle3", "second_shape": "specdec"}, "cannot grow the shape 'specdec'"),
    ],
)
def test_wrong_keys(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        speculative_config({"method": "hybrid", **keys})


def test_several_by_their_names() -> None:
    def read(**keys: Any) -> Any:
        return speculative_config({"method": "hybrid", **keys})

    config = read(second="ngram + medusa+draft_model=bundled/draft")
    assert config.members == {"medusa": None, "ngram": None, "draft_model": "bundled/draft"}
    assert (config.trained.method, config.second_proposal) == ("medusa", Chain(3))
    assert read(second="ngram+eagle3").second_proposal == read().second_proposal, "the main one's shape"
    assert read(second="eagle3+ngram", draws="coupled").proposal_draws == DrawMode.COUPLED
    assert read(second="ngram+prediction").trained.method == "ngram"
    assert read(second="medusa+draft_model", draft_vocab_size=1024).trained.method == "medusa"
    assert len({read(second=one).weights for one in ("eagle3", "eagle3+ngram", "eagle3+medusa")}) == 3


def test_several_of_the_bundled_target() -> None:
    expected = Engine.load("bundled").generate("def f(x):", max_new_tokens=24, temperature=0.0, seed=1)
    keys = {"method": "hybrid", "second": "ngram+eagle3+medusa+draft_model", "draft_vocab_size": 1024}
    loaded = Engine.load("bundled", speculative=keys)
    method: Any = loaded.method
    assert [one.name for one in method.members] == ["eagle3", "ngram", "medusa", "draft_model"]
    assert set(method.taps) == {*method.second.taps, *method.others[1].taps}
    assert method.bytes_per_token == sum(one.bytes_per_token for one in method.members) > method.second.bytes_per_token
    assert isinstance(method.others[2].model, NarrowModel)
    found = loaded.generate("def f(x):", max_new_tokens=24, temperature=0.0, seed=1)
    assert found.token_ids == expected.token_ids
    assert found.num_accepted_tokens > 0


def test_bundled_pair() -> None:
    """Loaded by its keys: a head behind suffix, natively where that runs."""
    plain_text = Engine.load("bundled").generate("def f(x):", max_new_tokens=24, temperature=0.0, seed=1)
    for second in ("eagle3", "draft_model"):
        loaded = Engine.load("bundled", speculative={"method": "hybrid", "second": second})
        found = loaded.generate("def f(x):", max_new_tokens=24, temperature=0.0, seed=1)
        assert found.token_ids == plain_text.token_ids
        assert found.num_accepted_tokens > 0


def test_the_draft_of_the_second_method_is_held_as_told() -> None:
    keys = {"method": "hybrid", "second": "draft_model", "draft_vocab_size": 1024}
    loaded = Engine.load("bundled", speculative=keys)
    assert isinstance(loaded.method, Hybrid)
    assert isinstance(loaded.method.second, DraftModel)
    assert isinstance(loaded.method.second.model, NarrowModel)
    assert len(loaded.method.second.model.tokens) < 1040


def test_auto_plans_both_parts_and_keeps_the_text() -> None:
    expected = outcomes(plain(TARGET, mixed_requests()))
    method = Hybrid(Suffix(), DraftModel(table(blur=0.3)), shape=Chain(3), discount=0.85)
    running = Engine(TARGET, ToyTokenizer(), speculative=KEYS, method=method, speculation="auto")
    assert outcomes(running.generate_batch(mixed_requests(), batch_size=4)) == expected
    planning = running._planning
    assert isinstance(planning._planner, Planner)
    assert planning._planner.parts == {"hybrid": "suffix"}


def test_trees_are_small_where_several_rows_guess() -> None:
    tree = parse_shape("opt_tree/size=6", 3)
    assert [shape_of(tree, depth, 1).max_guesses for depth in (1, 2, 3, 9)] == [6, 6, 6, 6]
    assert [shape_of(tree, depth, 1).depth for depth in (1, 2, 3, 9)] == [1, 2, 3, 3]
    assert [shape_of(tree, depth, 2).max_guesses for depth in (1, 2, 3, 9)] == [1, 2, 2, 2]
    assert shape_of(parse_shape("opt_tree/size=1", 3), 2, 5).max_guesses == 1
    assert shape_of(Chain(3), 2, 4) == Chain(2)
    assert shape_of(parse_shape("static/branching=2x1", 3), 1, 1).depth == 2  # rows are cut by their own limits
    sizes: dict[int, int] = {}
    prompts = [Request([3, 4, k], SamplingParams(max_new_tokens=9, ignore_eos=True)) for k in range(4)]
    for chosen in (True, False):
        running = engine(discount=2.0, shape="opt_tree/size=6")
        running.method.coupled = not chosen  # type: ignore[attr-defined]
        for count in (1, 4):
            sizes.clear()
            running.observers[:] = [
                lambda event: sizes.update({len(sizes): int(event.commit.tree.valid.sum(1).max()) - 1})
            ]
            running.generate_batch(prompts[:count], batch_size=4)
            small = count > 1 and not chosen
            assert sizes[0] <= SHARED_SIZE + MOST_GRAFTED if small else sizes[0] >= 6


def test_position_one_is_kept_as_often_at_any_depth() -> None:
    """What ``auto`` assumes: trees that shrank with the depth that was asked for held it at one guess, kept least often."""
    rates = []
    for depth in (1, 3):
        running = engine(discount=2.0, shape="opt_tree/size=6", num_speculative_tokens=depth)
        kept: list[bool] = []
        running.observers.append(lambda event, kept=kept: kept.append(len(event.commit.path[0]) > 1))
        for seed in range(12):
            params = SamplingParams(max_new_tokens=40, ignore_eos=True, seed=seed)
            running.generate_batch([Request([3, 4, 5, seed], params)])
        rates.append(sum(kept) / len(kept))
    assert abs(rates[0] - rates[1]) < 0.12


def test_the_size_of_a_tree_follows_what_wide_passes_cost() -> None:
    flat = {1: 1.0, 4: 1.0, 5: 1.0, 6: 1.0, 8: 1.0}
    assert best_size(flat) == 6
    assert best_size({1: 1.0, 4: 1.1, 5: 1.2, 6: 1.6, 8: 2.0}) == 2  # AVX2 alone
    assert best_size({1: 1.0, 4: 1.02, 5: 1.03, 6: 1.3, 8: 1.5}) == 3
    assert best_size({width: 7.0 * seconds for width, seconds in flat.items()}) == 6


def test_passes_are_timed_and_small_targets_are_not() -> None:
    target = TransformersModel(tiny_module("llama"))
    seconds = pass_seconds(target)
    assert set(seconds) == {1, 4, 5, 6, 8}
    assert all(0 < each < 10 for each in seconds.values())
    assert tree_size(target) == 2


def test_methods_of_one_model_grow_trees_of_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside each other they are compared: what the machine did while each was loaded must not be part of that."""
    asked: list[CausalModel] = []

    def tree_size(model: CausalModel) -> int:
        asked.append(model)
        return 4 if len(asked) == 1 else 6

    monkeypatch.setattr(size, "tree_size", tree_size)
    one, other = TransformersModel(tiny_module("llama")), TransformersModel(tiny_module("llama"))
    assert [size.size_for(model) for model in (one, one, other, one, other)] == [4, 4, 6, 4, 6]
    assert asked == [one, other]


def test_a_later_start_finds_the_size_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path))
    monkeypatch.setattr(size, "LEAST_BYTES", 0)
    monkeypatch.setattr(measured, "preemptions", lambda: 0)
    timed = []

    def pass_seconds(model: CausalModel, rounds: int) -> dict[int, float]:
        timed.append(rounds)
        return dict.fromkeys(WIDTHS, 1e-4) if len(timed) <= 2 else dict(zip(WIDTHS, (1, 3, 4, 5, 6), strict=True))

    monkeypatch.setattr(size, "pass_seconds", pass_seconds)
    assert [tree_size(TransformersModel(tiny_module("llama"))) for _ in range(2)] == [6, 6]
    assert timed == [MORE_ROUNDS] * 2
    (path,) = (tmp_path / "costs").iterdir()
    path.unlink()
    assert tree_size(TransformersModel(tiny_module("llama"))) == 2, "what is deleted is measured again"


@pytest.mark.parametrize("leaders", [LEAST_BYTES - 1, LEAST_BYTES])
def test_processes_of_one_model_time_the_same_passes(leaders: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of uneven parts one may be large enough to be timed and another not: the leader's counts."""
    timed: list[Any] = []

    def pass_seconds(*given: Any) -> dict[int, float]:
        timed.append(given)
        return dict.fromkeys((1, 4, 5, 6, 8), 1.0)

    monkeypatch.setattr(size, "pass_seconds", pass_seconds)
    other = LEAST_BYTES if leaders < LEAST_BYTES else LEAST_BYTES - 1
    asked = iter([leaders, 3])
    part: Any = SimpleNamespace(
        spec=replace(TARGET.spec, weight_bytes=other, max_positions=200),
        is_shared=True,
        share=lambda value: next(asked),
    )
    assert tree_size(part) == (2 if leaders < LEAST_BYTES else 3)
    assert len(timed) == 2 * (leaders >= LEAST_BYTES)


def _note_parents(parents: list[list[int]], event: Any) -> None:
    parents += event.commit.tree.parent.tolist()


def _note_kept(kept: list[int], event: Any) -> None:
    kept += [node for path in event.commit.path for node in path]


class Second:
    """The configuration of a second method that can have trees."""

    capabilities = Eagle3.capabilities

    def __init__(self, *given: Any, **options: Any) -> None: ...

    def load(self, loader: Any) -> Any:
        return DraftModel(table(blur=0.3))


def test_one_loaded_method_grows_what_each_verifier_can_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of a service choose their verifiers, and share what was loaded for the first: trees where children are drawn
    COUPLED, chains elsewhere, since some verifiers are defined on nothing else."""
    loaded = speculative_config({"method": "hybrid"})
    with monkeypatch.context() as patch:
        patch.setattr(hybrid_config, "load_reference", lambda name: Second)
        method = loaded.load(Loader(TARGET, lambda *given, **options: TARGET))
    assert isinstance(method, Hybrid)
    for one in (method, method.fresh(), method.isolated(), method.measured()):
        for keys in ({}, {"verify": "block"}, {"verify": "rejection"}, {"draws": "fixed"}):
            config: Any = speculative_config({"method": "hybrid", **keys})
            assert config.weights == loaded.weights
            assert config.second_proposal.is_chain == bool(keys)
            running = Engine(TARGET, ToyTokenizer(), speculative=config, method=one, drafter_errors="raise")
            parents: list[list[int]] = []
            running.observers.append(partial(_note_parents, parents))
            running.generate_batch(mixed_requests(), batch_size=3)
            shared = [len(found) != len(set(found)) for found in ([a for a in row if a >= 0] for row in parents)]
            assert any(shared) == (not keys)
    config = speculative_config({"method": "hybrid", "verify": "block", "draws": "coupled"})
    assert config.second_proposal == Chain(3), "nobody asked for a tree"
    assert config.weights != loaded.weights, "COUPLED, and no trees"


def test_what_nobody_chose_is_a_chain_where_the_target_reads_no_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    class Target:
        spec = replace(TARGET.spec, chains_only="its layers are recurrent")

    def loaded(**keys: Any) -> Hybrid:
        config: Any = speculative_config({"method": "hybrid", **keys})
        with monkeypatch.context() as patch:
            patch.setattr(hybrid_config, "load_reference", lambda name: Second)
            return config.load(Loader(Target(), lambda *given, **options: TARGET))  # type: ignore[arg-type, no-any-return]

    assert loaded().shape == Chain(3)
    config = speculative_config({"method": "hybrid", "second_shape": "opt_tree/size=6"})
    check_branching(speculative_config({"method": "hybrid"}), DraftModel(table()), Target.spec)
    with pytest.raises(ConfigError, match=r"opt_tree/size=6.*recurrent"):
        check_branching(config, DraftModel(table()), Target.spec)


def test_a_recurrent_draft_behind_suffix_grows_no_trees() -> None:
    """What the second method cannot do and what it holds is asked of both in one, too."""

    class Recurrent(DraftModel):
        chains_only = "its draft model is recurrent"
        bytes_per_row = 12

    method = Hybrid(Suffix(), Recurrent(table()), shape=parse_shape("opt_tree/size=6", 3), discount=0.9)
    config = speculative_config({**KEYS, "second_shape": "opt_tree/size=6"})
    with pytest.raises(ConfigError, match=r"opt_tree/size=6.*its draft model is recurrent"):
        check_branching(config, method, TARGET.spec)
    assert method.bytes_per_row == 12


def test_what_is_kept_of_a_graft_is_read_by_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that knows nothing, and greedy text that repeats: kept nodes are a suffix's, which the draft did not grow and
    has yet to read."""
    monkeypatch.setattr(Worth, "prefers_suffix", lambda *_: False)
    requests = [
        Request([3, 4, 5, 3, 4, k], SamplingParams(temperature=0.0, max_new_tokens=60, ignore_eos=True))
        for k in range(4)
    ]
    for draft in (table(seed=77), table(blur=0.3)):
        running = engine(draft=draft, discount=2.0, shape="opt_tree/size=3")
        kept: list[int] = []
        running.observers.append(partial(_note_kept, kept))
        expected = outcomes(plain(TARGET, requests))
        for batch_size in (1, 4):
            assert outcomes(running.generate_batch(requests, batch_size=batch_size)) == expected
        assert max(kept) > 3, "nodes behind those of the draft"
