"""Steps that the planner rests in: drafters are told of them later, and nothing that anybody sees depends on it."""

from typing import Any

import pytest
import torch

from foretell import Engine, Request, SamplingParams
from foretell.costs.table import CostTable
from foretell.draft.base import Commit
from foretell.draft.suffix import Suffix, SuffixDrafter
from foretell.engine.batch import Batch
from foretell.engine.calibrate import Calibration
from foretell.engine.drafters.lazy import MOST_COMMITS
from foretell.engine.failures import Failures
from foretell.methods.eagle.drafter import Eagle3, EagleDrafter
from foretell.planner.observations import RowView
from foretell.planner.plan import StepPlan
from foretell.planner.planner import Planner
from tests.draft.test_join import tiny
from tests.engine.harness import ToyTokenizer, table
from tests.engine.integrity import check_batch
from tests.methods.eagle.eagles import EAGLE3, random_head


@pytest.fixture(autouse=True)
def guesses_hardly_pay(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path))

    def dear(self: Calibration) -> CostTable:
        verify = {(b, b * n): 1.0 for b in (1, self.max_batch) for n in (1, 8)}
        return CostTable(verify, {name: {(1, 1): 0.75, (1, 4): 3.0} for name in self.choices})

    monkeypatch.setattr(Calibration, "table", dear)


def auto() -> Engine:
    return Engine(table(1), ToyTokenizer(), speculative="suffix", method=Suffix(), speculation="auto")


def request(seed: int, count: int = 60) -> Request:
    return Request([1, 2, 3, 1, 2], SamplingParams(max_new_tokens=count, seed=seed, temperature=1.0, ignore_eos=True))


@pytest.mark.parametrize("waits", [True, False])
def test_a_drafter_is_told_a_few_times_where_it_can_wait(monkeypatch: pytest.MonkeyPatch, *, waits: bool) -> None:
    calls: list[int] = []
    observe, observe_all = SuffixDrafter.observe, SuffixDrafter.observe_all

    def one(self: SuffixDrafter, commit: Commit) -> None:
        calls.append(1)
        observe(self, commit)

    def several(self: SuffixDrafter, commits: list[Commit]) -> None:
        calls.append(len(commits))
        observe_all(self, commits)
        calls.pop()  # the last of them came through ``observe``

    monkeypatch.setattr(SuffixDrafter, "observe", one)
    monkeypatch.setattr(SuffixDrafter, "observe_all", several)
    monkeypatch.setattr(SuffixDrafter, "can_wait", waits)
    plans = [StepPlan([])]

    def plan(self: Planner, rows: list[RowView], arriving: int = 0) -> StepPlan:
        plans.append(StepPlan([0] * len(rows), members=tuple(row.request_id for row in rows)))
        return plans[-1]

    monkeypatch.setattr(Planner, "plan", plan)
    monkeypatch.setattr(Planner, "again", lambda self, depth_limit, *, lagging: plans[-1])
    made, texts = auto(), []
    for seed in (5, 6):
        (completion,) = made.generate_batch([request(seed)])
        texts.append(completion.token_ids)
        method: Any = made.method
        held = sum(automaton.num_tokens for automaton in method.library.automata)
        assert held == sum(map(len, texts)), "what ended is there for the next request"
    steps = made.recorder.num_steps
    assert sum(calls) == steps == 120
    assert len(calls) == (2 if waits else steps), "at the end of each request"
    plain = auto().with_method("none")
    assert texts == [plain.generate_batch([request(seed)])[0].token_ids for seed in (5, 6)]


def test_a_drafter_that_fails_when_it_is_told_at_last_is_closed_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: SuffixDrafter, commits: list[Commit]) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr(SuffixDrafter, "observe_all", broken)
    made = auto()
    row = made.make_row(0, request(1, count=MOST_COMMITS + 20))
    batch = Batch(made.model, max_rows=1, capacity=256, failures=Failures())
    batch.arrive(row)
    batch.read(64, catch_up=True, whole=True)
    failed_at = None
    while row.finish_reason is None:
        batch.step([0], [0])
        if row.draft_error and failed_at is None:
            failed_at = len(row.token_ids)
    assert failed_at == MOST_COMMITS
    assert row.draft_error == "suffix failed (RuntimeError)"
    (right,) = auto().with_method("none").generate_batch([request(1, count=MOST_COMMITS + 20)])
    assert row.token_ids == right.token_ids


def test_a_guess_after_rests_finds_the_drafter_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rests and guesses by turns, beside a batch that never rests: the same guesses."""
    guesses = []
    for rests in (True, False):
        monkeypatch.setattr(SuffixDrafter, "can_wait", rests)
        made = auto()
        row = made.make_row(0, request(3, count=90))
        batch = Batch(made.model, max_rows=1, capacity=256)
        batch.arrive(row)
        batch.read(64, catch_up=True, whole=True)
        step, found = 0, []
        while row.finish_reason is None:
            step += 1
            event = batch.step([4], None) if step % 7 == 0 else batch.step([0], [0])
            found.append(event.commit.tree.tokens.tolist())
            check_batch(batch)
        guesses.append(found)
    assert guesses[0] == guesses[1]
    assert sum(len(tokens[0]) > 1 for tokens in guesses[0]) > 3, "control: some guesses were made"


def test_a_row_waits_beside_rows_of_another_group_that_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits that wait then hold padding nodes, where the others have guesses: the same trees as told at once."""
    model, head, found = tiny(), random_head(EAGLE3), []
    for waits in (True, False):
        monkeypatch.setattr(EagleDrafter, "can_wait", waits)
        rows = []
        for number, verify in enumerate(("coupled", "rejection")):
            config = {"method": "eagle3", "num_speculative_tokens": 3, "verify": verify}
            made = Engine(model, None, speculative=config, method=Eagle3(head, model))
            params = SamplingParams(max_new_tokens=100, seed=number, ignore_eos=True)
            rows.append(made.make_row(number, Request([1, 2, 3, number], params)))
        batch, trees, beside = Batch(model, max_rows=2, capacity=160), [], 0
        with torch.inference_mode():
            for row in rows:
                batch.arrive(row)
            batch.read(64, catch_up=True, whole=True)
            assert len(batch.groups) == 2
            for step in range(24):
                guesses = step % 6 == 0
                tree = batch.step([3 if guesses else 0, 3]).commit.tree
                trees.append((tree.tokens.tolist(), tree.parent.tolist()))
                beside += not guesses and tree.parent[1].tolist() != [-1] * tree.num_nodes
        assert beside == 20, "control: the second row guessed while the first one waited"
        assert all(parent[0] == [-1, 0, 1, 2] for _, parent in trees[::6]), "control: the first row guessed"
        found.append((trees, [row.token_ids for row in rows]))
    assert found[0] == found[1]
