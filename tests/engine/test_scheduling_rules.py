"""Single rules of the loop, each by the smallest load that shows it; ``test_traffic.py`` has them all at random."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import foretell.engine.loop as loop_module
from foretell import Engine, SamplingParams, Submission, Update, speculative_config
from foretell.costs.table import CostTable
from foretell.engine.loop import HEADROOM, Limits, Loop
from foretell.engine.prefix import PrefixStore
from foretell.engine.speculation import Speculation
from foretell.methods.draft_model.drafter import DraftModel
from foretell.model.cache import KVCache
from foretell.planner.acceptance import Acceptance
from foretell.planner.observations import RowView, StepObservation
from foretell.planner.plan import StepPlan
from foretell.planner.planner import Planner
from tests.engine.harness import ToyTokenizer, table
from tests.engine.integrity import check_loop

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def audited() -> None:
    """The folder's audit wraps the static engine's steps alone; here ``check_loop`` runs after every round."""


class Stage:
    """A loop over table models, and what its requests were told."""

    def __init__(self, *, kv_tokens: int = 1000, max_rows: int = 4, prefixes: PrefixStore | None = None) -> None:
        self.engine = Engine(table(1), ToyTokenizer())
        config = speculative_config({"method": "draft_model", "num_speculative_tokens": 3})
        draft = DraftModel(table(2, blur=0.3))
        self.choice = Speculation(config, draft, config.load_verifier(self.engine.model))
        planner = Planner(CostTable({(1, 1): 1.0}, {}), Acceptance(16), mode="on")
        limits = Limits(max_rows, 100, kv_tokens, 192, 0.05)
        self.now = 0.0
        self.loop = Loop(self.engine.model, limits, planner, prefixes=prefixes, clock=lambda: self.now)
        self.told: dict[str, list[Update]] = {}

    def submit(self, name: str, prompt: Sequence[int], **options: Any) -> None:
        timeout_s, prepares = options.pop("timeout_s", None), options.pop("prepares", False)
        params = SamplingParams(seed=len(self.told), **options)
        submission = Submission(name, list(prompt), params, timeout_s=timeout_s, prepares=prepares)
        row = self.engine.row_of(len(self.told), submission, self.choice)
        self.told[name] = []
        self.loop.submit(row, self.told[name].append)

    def tick(self) -> None:
        with torch.inference_mode():
            self.loop.tick()
        check_loop(self.loop)
        self.now += 1.0

    def finish(self) -> None:
        while self.loop.has_work:
            self.tick()

    def completion(self, name: str) -> Any:
        assert self.told[name][-1].completion is not None
        return self.told[name][-1].completion

    def running(self) -> set[str]:
        return {job.row.submission.request_id for job in self.loop.running.values()}


def test_who_came_last_is_preempted_first() -> None:
    stage = Stage(kv_tokens=110, max_rows=3)
    for name in "abc":
        stage.submit(name, [1, 2, 3], max_new_tokens=60, ignore_eos=True)
        stage.tick()
    stage.finish()
    preempted = {name: stage.completion(name).num_preemptions for name in "abc"}
    assert preempted["a"] == 0
    assert preempted["c"] > 0
    assert [stage.completion(name).num_tokens for name in "abc"] == [60, 60, 60]


def test_a_request_waits_until_its_text_and_some_room_fit() -> None:
    slots = 20 + stage_nodes()
    short = Stage(kv_tokens=2 * slots + HEADROOM - 1)
    enough = Stage(kv_tokens=2 * slots + HEADROOM)
    for stage in (short, enough):
        for name in "ab":
            stage.submit(name, range(20), max_new_tokens=20, ignore_eos=True)
            stage.submit(name + "'", range(20), max_new_tokens=20, ignore_eos=True)
    # Two texts of 20 fit, and a third where its headroom does: counted before any of them has grown.
    for stage in (short, enough):
        with torch.inference_mode():
            stage.loop._admit()
    held = [stage.loop.used_tokens for stage in (short, enough)]
    each = 20 + stage_nodes()
    for stage, used in zip((short, enough), held, strict=True):
        count = len(stage.loop.running)
        assert used == count * each
        assert used + HEADROOM <= stage.loop.limits.kv_tokens
        assert used + each + HEADROOM > stage.loop.limits.kv_tokens or count == 4
    for stage in (short, enough):
        stage.finish()


def stage_nodes() -> int:
    """Slots behind a text that a step may write."""
    return Stage().choice.num_nodes


@pytest.mark.parametrize("ending", ["timeout", "cancelled"])
def test_text_that_was_held_back_is_told_when_a_request_is_cut(ending: str) -> None:
    """A stop text may begin with everything that is written, so all of it is held back until the end."""
    stage = Stage()
    stage.submit("a", [1, 2, 3], max_new_tokens=100, ignore_eos=True, timeout_s=4.5 if ending == "timeout" else None,
                 stop=("ab" * 40, "b" * 80, " " * 80, "\n" * 80, "c" * 80, ". " * 40, "the" * 40, "0" * 80, "1" * 80,
                       "x" * 80, "y" * 80, "z" * 80, "end" * 40, "!" * 80, "é" * 40, "€" * 40, "😀" * 40))  # fmt: skip
    for _ in range(4):
        stage.tick()
    if ending == "cancelled":
        stage.loop.cancel("a")
    stage.finish()
    completion, last = stage.completion("a"), stage.told["a"][-1]
    assert completion.finish_reason == ending
    assert last.tail, "something was held back"
    told = "".join(piece.text for update in stage.told["a"] for piece in update.pieces) + last.tail
    assert told == completion.text == ToyTokenizer().decode(completion.token_ids, skip_special_tokens=True)


def test_the_pending_token_is_not_remembered() -> None:
    """The last token of a text was emitted and never read: a prefix that had it would hold garbage in its slot."""
    store = PrefixStore(1 << 20)
    stage = Stage(prefixes=store)
    stage.submit("a", range(20), max_new_tokens=24, ignore_eos=True)
    stage.finish()
    text = [*range(20), *stage.completion("a").token_ids]
    assert sorted(prefix.ids for prefix in store._prefixes.values())[-1] == text[:-1]
    stage.submit("b", [*text, 5], max_new_tokens=10, ignore_eos=True)
    stage.finish()
    assert stage.completion("b").num_cached_tokens == len(text) - 1


def test_slots_are_moved_all_at_once() -> None:
    """Sources that are destinations too: every slot is read before any is written, in keys and values."""
    cache = KVCache(2, 6, [(2, 3)] * 2, torch.float32, [CPU] * 2)
    for layer, memory in enumerate((*cache.keys, *cache.values)):
        memory.copy_(torch.arange(2 * 2 * 6 * 3).view(2, 2, 6, 3) + 1000.0 * layer)
    before = [memory.clone() for memory in (*cache.keys, *cache.values)]
    cache.move(torch.tensor([[2, 1, 4], [0, 5, 3]]), torch.tensor([[1, 2, 3], [0, 3, 5]]))
    for old, new in zip(before, (*cache.keys, *cache.values), strict=True):
        assert torch.equal(new[0], old[0][:, [0, 2, 1, 4, 4, 5]])
        assert torch.equal(new[1], old[1][:, [0, 1, 2, 5, 4, 3]])


def test_the_figures_of_a_resumed_request_are_of_all_of_it() -> None:
    """It decodes in several stretches, and may find its own text, beyond its prompt, in the prefix store."""
    stage = Stage(kv_tokens=120, max_rows=6, prefixes=PrefixStore(1 << 24))
    for name in "abcdef":
        stage.submit(name, [1, 2, ord(name) % 20] * 6, max_new_tokens=60, ignore_eos=True)
        stage.tick()
    stage.finish()
    assert max(stage.completion(name).num_preemptions for name in "abcdef") > 1
    for name in "abcdef":
        made = stage.completion(name)
        assert made.num_cached_tokens < made.num_prompt_tokens
        assert made.seconds_decode == made.num_steps - 1 - made.num_preemptions, "a step a second, the first at once"


def test_the_only_one_that_decodes_may_lose_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows move as others end, so a long prompt may still be read while a later request decodes alone, and is preempted."""
    monkeypatch.setattr(loop_module, "PREFILL_CHUNK", 4)
    monkeypatch.setattr(loop_module, "MIN_CHUNK", 4)
    stage = Stage(kv_tokens=215)
    stage.submit("a", [1, 2, 3], max_new_tokens=8, ignore_eos=True)
    stage.submit("b", [1, 2], max_new_tokens=2, ignore_eos=True)
    stage.tick()
    stage.submit("long", [1, 2] * 80, max_new_tokens=4, ignore_eos=True)
    stage.submit("late", [1, 2] * 5, max_new_tokens=80, ignore_eos=True)
    alone = False
    while stage.loop.has_work:
        before = stage.loop.recorder.num_preemptions
        stage.tick()
        alone |= stage.loop.recorder.num_preemptions > before and not stage.loop.batch.members
    assert alone
    assert [stage.completion(name).num_tokens for name in ("long", "late")] == [4, 80]


class Watched(Planner):
    """A planner where no guess can pay, and which rows its last plan was for."""

    def __init__(self) -> None:
        costs = {(rows, rows * nodes): 1.0 + nodes for rows in (1, 2, 4) for nodes in (1, 4)}
        super().__init__(CostTable(costs, {"draft_model": {(1, 3): 90.0}}), Acceptance(4), mode="auto")
        self.rows: list[str] = []
        self.asked = False
        self.steps: list[tuple[bool, list[str], int]] = []  # (whether it was planned, for which rows, how many stepped)

    def plan(self, rows: Sequence[RowView], arriving: int = 0) -> StepPlan:
        self.rows, self.asked = [row.request_id for row in rows], True
        return super().plan(rows, arriving)

    def observe(self, plan: StepPlan, step: StepObservation) -> None:
        self.steps.append((self.asked, self.rows, step.batch))
        self.asked = False
        super().observe(plan, step)


def test_steps_are_not_planned_for_the_same_rows_alone() -> None:
    """Where nothing guesses a plan stands; a row that joins or ends is planned for at once."""
    stage = Stage()
    planner = stage.loop.planner = Watched()
    for name, length in (("a", 90), ("b", 30), ("c", 40)):
        stage.submit(name, [1, 2, 3], max_new_tokens=length, ignore_eos=True)
        for _ in range(20):
            stage.tick()
    stage.finish()
    assert all(len(rows) == batch for _, rows, batch in planner.steps)
    assert sum(not planned for planned, _, _ in planner.steps) > 60
    assert sum(planned for planned, _, _ in planner.steps) >= 5, "three came, and two left the others behind"


def test_the_planner_is_told_what_the_loop_takes_around_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that each reading puts forward by a second, the loop has two a step: one up to its end, and one behind
    the last one; behind a step that ended a request it has none. A plan takes one more, which sixteen steps share."""
    told: list[float] = []

    class Timed(Watched):
        def observe(self, plan: StepPlan, step: StepObservation) -> None:
            super().observe(plan, step)
            told.append(step.seconds)

    stage = Stage()
    planner = stage.loop.planner = Timed()
    planner.use(CostTable({(1, 1): 1.0, (2, 2): 1.0}, {}))  # nobody guesses, not even to try it
    monkeypatch.setattr(loop_module, "perf_counter", itertools.count().__next__)
    stage.submit("a", [1, 2, 3], max_new_tokens=90, ignore_eos=True)
    stage.submit("b", [1, 2, 3], max_new_tokens=50, ignore_eos=True)
    stage.finish()
    assert {planned for planned, _, _ in planner.steps} == {True, False}
    owed = 0.0
    for (planned, _, _), seconds, own in zip(planner.steps, told, [1.0] + [2.0] * 49 + [1.0] + [2.0] * 39, strict=True):
        owed += planned
        assert seconds == pytest.approx(own + owed / 16)
        owed *= 15 / 16
