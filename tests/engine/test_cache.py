"""The KV memory of target and draft model after every step: what a fresh prefill of the same text would hold."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from foretell import Request, SamplingParams
from foretell.core.tree import root_tree
from foretell.engine.state import State
from foretell.methods.draft_model.drafter import DraftModel, ModelDrafter
from foretell.model.llama.run.lean import LeanModel
from foretell.model.prefill import feed
from foretell.model.target import CausalModel, Target
from tests.engine.harness import ToyTokenizer, draft_engine, outcomes, plain, prompts, table, tree_engine
from tests.model.table import TableLM
from tests.model.tiny import VOCAB, tiny_module

NUMBERS = ToyTokenizer([f"w{i} ".encode() for i in range(VOCAB)], special=(2,))
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def target() -> CausalModel:
    return LeanModel.from_hf(tiny_module("qwen3", num_hidden_layers=2))


@pytest.fixture(scope="module")
def draft() -> CausalModel:
    return LeanModel.from_hf(tiny_module("qwen3", num_hidden_layers=1))


def assert_like_prefill(target: Target, state: State, filled: list[int]) -> None:
    for row, (ids, count) in enumerate(zip(state.history.ids, filled, strict=True)):
        if count == 0:
            continue
        fresh = Target(target.model, 1, target.cache.capacity)
        feed(fresh, [ids[:count]], [0], head=False)
        for layer in range(target.spec.num_layers):
            for ours, theirs in (
                (target.cache.keys[layer][row, :, :count], fresh.cache.keys[layer][0, :, :count]),
                (target.cache.values[layer][row, :, :count], fresh.cache.values[layer][0, :, :count]),
            ):
                torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


class KVAuditor:
    """Compares after every step; counts what kinds of steps it saw."""

    def __init__(self) -> None:
        self.steps = self.full = self.rejected = self.ragged = self.ended = 0

    def __call__(self, state: State, target: Target, drafter: Any, report: Any) -> None:
        assert_like_prefill(target, state, state.lengths)
        if isinstance(drafter, ModelDrafter):
            assert_like_prefill(drafter.target, state, drafter.filled)
            for length, filled, limit in zip(state.lengths, drafter.filled, drafter.limits, strict=True):
                if limit:
                    assert length - 1 <= filled <= length, "at most the last guess is missing"
        depth = report.commit.tree.num_nodes
        lengths = [len(path) for path in report.commit.path]
        self.steps += 1
        self.full += max(lengths) == depth > 1
        self.rejected += min(lengths) < depth
        self.ragged += len(set(lengths)) > 1
        self.ended += any(row.finish_reason for row in state.rows)


def ragged_requests() -> list[Request]:
    texts = [[3 + token % (VOCAB - 3) for token in ids] for ids in prompts()]
    return [
        Request(ids, SamplingParams(max_new_tokens=4 + 3 * i, seed=i, temperature=0.7, ignore_eos=True))
        for i, ids in enumerate(texts[:6])
    ]


@pytest.mark.parametrize("drafted_by", ["other", "itself"])
def test_cache_equals_prefill(drafted_by: str, target: CausalModel, draft: CausalModel, audited: list[Any]) -> None:
    auditor = KVAuditor()
    audited.append(auditor)
    guesser = target if drafted_by == "itself" else draft
    draft_engine(target, guesser, 3, tokenizer=NUMBERS).generate_batch(ragged_requests())
    assert auditor.ended >= 4, "rows end in different steps and are dropped"
    if drafted_by == "itself":
        assert auditor.full >= 3
    else:
        assert auditor.rejected >= 5
        assert auditor.ragged >= 2


def test_cache_after_side_branches(target: CausalModel, audited: list[Any]) -> None:
    auditor = KVAuditor()
    audited.append(auditor)
    moved: list[bool] = []
    audited.append(
        lambda state, target, drafter, report: moved.extend(p != [*range(len(p))] for p in report.commit.path)
    )
    requests = ragged_requests()
    known = [
        [*request.prompt, *completion.token_ids]
        for request, completion in zip(requests, plain(target, requests, tokenizer=NUMBERS), strict=True)
    ]

    def guess(ids: list[int], depth: int) -> list[tuple[int, int]]:
        text = next(text for text in known if text[: len(ids)] == ids)
        nodes, above = [], 0
        for token in text[len(ids) : len(ids) + min(depth, len(ids) % 4)]:
            nodes += [(above, (token + 1) % VOCAB), (above, token), (-1, 0)]
            above = len(nodes) - 1
        return nodes

    engine = tree_engine(target, guess)
    engine.generate_batch(requests)
    assert sum(moved) >= 10


def test_a_lagging_draft_model_catches_up(target: CausalModel, draft: CausalModel, audited: list[Any]) -> None:
    """The drafter sits out most steps (another method would run then): lags of many tokens, ragged ones."""
    lags: list[list[int]] = []

    class Lazy(ModelDrafter):
        calls = 0

        def propose(self, context: Any, shape: Any, probs: Any, noise: Any) -> Any:
            type(self).calls += 1
            if self.calls % 5:
                self.limits = [0] * context.num_rows
                return root_tree(context.pending)
            lags.append([length - filled for length, filled in zip(context.lengths, self.filled, strict=True)])
            turn = self.calls // 5  # half the rows in turn, so that the lags differ
            depth_limit = [
                0 if (turn + row.index) % 2 else depth_limit
                for row, depth_limit in zip(context.rows, context.depth_limit, strict=True)
            ]
            return super().propose(replace(context, depth_limit=depth_limit), shape, probs, noise)

    class LazyMethod(DraftModel):
        def open(self, context: Any, capacity: int, target: Any) -> Any:
            return Lazy(self.model, context, capacity)

    def check(state: State, target: Target, drafter: Any, report: Any) -> None:
        if isinstance(drafter, Lazy):
            assert_like_prefill(drafter.target, state, drafter.filled)

    audited.append(check)
    requests = [
        Request(r.prompt, SamplingParams(max_new_tokens=16 + i, seed=i)) for i, r in enumerate(ragged_requests())
    ]
    engine = draft_engine(target, draft, 4, tokenizer=NUMBERS)
    engine.method = LazyMethod(draft)
    found = engine.generate_batch(requests)
    assert max(max(lag) for lag in lags) >= 5
    assert any(len(set(lag)) > 1 for lag in lags[1:])
    assert [c.token_ids for c in found] == [c.token_ids for c in plain(target, requests, tokenizer=NUMBERS)]


def test_draft_model_with_a_shorter_context(audited: list[Any]) -> None:
    """Where its context ends the draft model stops guessing, and the text goes on."""
    target = table(max_positions=200)
    draft = table(blur=0.2, max_positions=24)
    requests = [
        Request(ids, SamplingParams(max_new_tokens=30, seed=i, ignore_eos=True)) for i, ids in enumerate(prompts())
    ]
    found = draft_engine(target, draft, 4).generate_batch(requests)
    assert outcomes(found) == outcomes(plain(target, requests))
    alone = draft_engine(target, draft, 4).generate_batch(requests, batch_size=1)
    assert outcomes(alone) == outcomes(found)
    assert alone[0].num_accepted_tokens > 0
    assert alone[0].pieces[-1].source == "plain"


def test_dropping_rows_keeps_the_right_ones() -> None:
    """Rows end in an order unlike that of the batch; the tables' caches (audited) hold each row's own text."""
    requests = [
        Request(ids, SamplingParams(max_new_tokens=count, seed=i, ignore_eos=True))
        for i, (ids, count) in enumerate(zip(prompts(), (9, 1, 30, 2, 17, 3, 25, 8), strict=True))
    ]
    target = table(num_layers=2)
    found = draft_engine(target, table(blur=0.3, num_layers=2), 3).generate_batch(requests)
    assert outcomes(found) == outcomes(plain(target, requests))


def test_the_audit_sees_a_wrong_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control: a commit that moves nothing is caught by the audit of the table's cache."""
    monkeypatch.setattr(Target, "commit", lambda self, src, dst: None)

    def guess(ids: list[int], depth: int) -> list[tuple[int, int]]:
        return [(0, 100 % 24), *((0, token) for token in range(4))] if depth else []

    engine = tree_engine(table(sharpness=0.5), guess)
    with pytest.raises(AssertionError):
        engine.generate_batch([Request([1, 2], SamplingParams(max_new_tokens=60, seed=i)) for i in range(4)])


def test_an_off_by_one_of_the_draft_cache_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classic bug of chain drafters: after full acceptance the last guess counts as fed."""
    observe = ModelDrafter.observe

    def wrong(self: ModelDrafter, commit: Any) -> None:
        observe(self, commit)
        self.filled = [int(length) + len(path) for length, path in zip(commit.length, commit.path, strict=True)]

    monkeypatch.setattr(ModelDrafter, "observe", wrong)
    target = table()
    assert isinstance(target, TableLM)
    with pytest.raises(AssertionError):
        draft_engine(target, target, 3).generate([1, 2, 3], max_new_tokens=20, seed=1, ignore_eos=True)
