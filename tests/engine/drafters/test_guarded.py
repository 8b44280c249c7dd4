"""A drafter that fails in a service: its requests go on without guesses, the text stays right, others notice nothing."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from foretell import Engine, Request, SamplingParams, Service, ServiceOptions, Submission
from foretell.bench import run_bench
from foretell.core.errors import ConfigError, DrafterError
from foretell.core.noise import Noise
from foretell.core.tree import DrawMode, TokenTree
from foretell.draft.base import Commit, Context, Drafter, Method
from foretell.draft.ngram import Ngram, NgramDrafter
from foretell.draft.shapes import Shape
from foretell.engine import failures as policy
from foretell.engine.batch import Batch
from foretell.engine.drafters.guarded import GuardedDrafter
from foretell.engine.failures import Failures
from foretell.model.target import Target
from tests.engine.harness import ToyTokenizer, outcome, outcomes, plain, table
from tests.engine.integrity import check_batch, check_service
from tests.service.test_service import Mailbox

CALLS = ("propose", "observe", "keep", "join", "num_unread", "tree")


class Failing(NgramDrafter):
    """Fails at one of its calls once a text has 12 tokens, or rows come and go."""

    can_join = True

    def __init__(self, context: Context, call: str) -> None:
        super().__init__(context, 1, 3)
        self.call = call

    def _check(self, call: str, is_late: bool = True) -> None:
        if call == self.call and is_late:
            raise RuntimeError("a secret of the machine")

    @property
    def is_late(self) -> bool:
        return max(len(index.ids) for index in self.rows) > 12

    def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> TokenTree:
        self._check("propose", self.is_late)
        tree = super().propose(context, shape, draws, noise)
        if self.call == "tree" and self.is_late and tree.num_nodes > 1:
            tree.tokens[:, 1] = 10**6
        return tree

    def observe(self, commit: Commit) -> None:
        super().observe(commit)
        self._check("observe", self.is_late)

    def keep(self, rows: Any) -> None:
        self._check("keep")
        super().keep(rows)

    def join(self, other: Drafter, context: Context) -> None:
        self._check("join")
        assert isinstance(other, NgramDrafter)
        self.rows += other.rows

    def num_unread(self, context: Context) -> list[int]:
        self._check("num_unread", self.is_late)
        return super().num_unread(context)


class Broken(Method):
    name, capabilities = "broken", Ngram.capabilities

    def __init__(self, call: str) -> None:
        self.call = call

    def open(self, context: Context, capacity: int, target: Target) -> Drafter:
        if self.call == "open":
            raise RuntimeError("a secret of the machine")
        return Failing(context, self.call)


@pytest.mark.parametrize("call", CALLS)
def test_the_text_is_right_and_the_service_goes_on(call: str) -> None:
    engine = Engine(table(1), ToyTokenizer(), speculative="ngram", method=Broken(call))
    made = Service(engine, ServiceOptions(speculation="on", max_num_seqs=3, max_model_len=96))
    made.start()
    box = Mailbox()
    asked = {
        f"{kind}{seed}": Submission(
            f"{kind}{seed}", [1, 2, 3, 1, 2, 3 + seed],
            SamplingParams(max_new_tokens=12 + 9 * seed, seed=seed, temperature=0.5, ignore_eos=True),
            speculative=made.method("suffix") if kind == "other" else None,
        )
        for kind in ("mine", "other")
        for seed in range(3)
    }  # fmt: skip
    for submission in asked.values():
        made.submit(submission, box.hear)
    ends = {name: box.last(name).completion for name in asked}
    check_service(made)
    assert made.healthy
    late = Submission("late", [1, 2, 1, 2], SamplingParams(max_new_tokens=4, seed=1, ignore_eos=True))
    made.submit(late, box.hear)
    assert box.last("late").completion is not None, "the next request gets a drafter of its own"
    made.close()
    reasons = []
    for name, submission in asked.items():
        found = ends[name]
        assert found is not None
        (right,) = plain(table(1), [Request(submission.prompt_ids, submission.params)])
        assert outcome(found) == outcome(right)
        if name.startswith("other"):
            assert found.plain_reason is None or "failed" not in found.plain_reason
        elif found.plain_reason is not None:
            reasons.append(found.plain_reason)
    if call != "num_unread":  # asked for by a planner that measures alone
        assert any("broken failed (" in reason for reason in reasons)
    assert not any("secret" in reason for reason in reasons)


@pytest.mark.parametrize("call", [*CALLS, "open"])
def test_an_engine_of_ones_own_goes_on_too(call: str, caplog: pytest.LogCaptureFixture) -> None:
    """No text is lost: neither the one that was half done, nor those of the same call."""
    engine = Engine(table(1), ToyTokenizer(), speculative="ngram", method=Broken(call))
    requests = [
        Request([1, 2, 3, 1, 2, 3 + k], SamplingParams(max_new_tokens=14 + 9 * k, seed=k, ignore_eos=True))
        for k in range(4)
    ]
    found = engine.generate_batch(requests, batch_size=2)
    assert outcomes(found) == outcomes(plain(table(1), requests))
    if call == "num_unread":  # asked for by a planner alone
        return
    assert any("broken failed (" in (one.plain_reason or "") for one in found)
    assert any("the drafter of method broken failed" in one.getMessage() for one in caplog.records)
    stream = engine.stream([1, 2, 3], max_new_tokens=30, ignore_eos=True, seed=1)
    assert len(list(stream)) == 30
    assert call in ("keep", "join") or "broken" in (stream.completion.plain_reason or "")


@pytest.mark.parametrize("call", ["propose", "observe", "open"])
def test_who_measures_is_told(call: str) -> None:
    """Plain decoding must not pass for a method that was to be measured or checked."""
    engine = Engine(table(1), ToyTokenizer(), speculative="ngram", method=Broken(call), drafter_errors="raise")
    with pytest.raises(
        DrafterError, match=r"the drafter of method 'broken' failed .*drafter_errors = 'plain'"
    ) as caught:
        engine.generate([1, 2, 3, 1, 2, 3], max_new_tokens=30, ignore_eos=True, seed=1)
    assert isinstance(caught.value.__cause__, RuntimeError)
    own, text = Engine(table(1), ToyTokenizer()), ToyTokenizer().decode([1, 2, 3, 1, 2, 3])
    with pytest.raises(DrafterError):
        run_bench(own.with_method("ngram", method=Broken(call)), [text], ["ngram"], max_new_tokens=30)
    with pytest.raises(ConfigError, match="'plain' or 'raise'"):
        Engine(table(1), ToyTokenizer(), drafter_errors="ignore")


def test_a_method_that_works_again_does_not_rest() -> None:
    """Each call ends its loop and its batch with it: what has worked there counts all the same."""
    method = Broken("propose")
    engine = Engine(table(1), ToyTokenizer(), speculative="ngram", method=method)
    for _ in range(3):
        method.call = "propose"
        failed = engine.generate([1, 2, 3, 1, 2, 3], max_new_tokens=30, ignore_eos=True, seed=1)
        assert failed.plain_reason is not None
        assert "rests" not in failed.plain_reason
        method.call = "nothing"
        assert engine.generate([1, 2, 3, 1, 2, 3], max_new_tokens=30, ignore_eos=True, seed=1).plain_reason is None


def test_who_has_failed_is_not_joined() -> None:
    engine = Engine(table(1), ToyTokenizer(), speculative="ngram")
    row = engine.make_row(0, Request([1, 2, 1], SamplingParams(seed=1)))

    context = Batch(table(1), max_rows=1, capacity=64)._open_state([row])
    one, other = (GuardedDrafter(Failing(context, "observe"), "broken", Failures(), 4) for _ in range(2))
    assert one.can_join
    other.inner, other.failure = None, "MemoryError"
    one.join(other, context)
    assert (one.can_join, one.failure) == (False, "MemoryError")
    assert one.num_unread(context) == [0]
    assert one.propose(context, engine.choice().shape, DrawMode.FIXED, noise()).num_nodes == 1


def noise() -> Noise:
    return Noise(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))


def test_a_request_after_a_failure_is_guessed_for() -> None:
    """Beside one that is still being decoded without guesses."""
    engine = Engine(table(1), ToyTokenizer(), speculative="ngram", method=Broken("propose"))
    batch = Batch(table(1), max_rows=2, capacity=200, failures=Failures())
    params = SamplingParams(max_new_tokens=60, seed=1, ignore_eos=True, temperature=0.0)
    first, second = (engine.make_row(k, Request([1, 2, 3], params)) for k in range(2))
    with torch.inference_mode():
        batch.arrive(first)
        batch.read(64, catch_up=True, whole=True)
        for _ in range(14):
            batch.step()
        assert first.draft_error == "broken failed (RuntimeError)"
        batch.arrive(second)
        batch.read(64, catch_up=True, whole=True)
        check_batch(batch)
        assert len(batch.groups) == 2
        for _ in range(3):
            batch.step()
    assert second.draft_error == ""
    assert second.num_steps == 3
    assert first.token_ids[: len(second.token_ids)] == second.token_ids


# -- a method that keeps failing ---------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def fail(failures: Failures, times: int = 1) -> None:
    for _ in range(times):
        failures.failed("broken", RuntimeError("a secret of the machine"))


def test_rests_begin_after_failures_in_a_row_and_grow(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    failures = Failures(["broken", "other"], clock=clock)
    fail(failures, policy.MOST_IN_A_ROW - 1)
    failures.worked("broken")
    fail(failures, policy.MOST_IN_A_ROW - 1)
    assert failures.rests() == {"broken": 0, "other": 0}, "a request that ended well stood between them"
    fail(failures)
    assert failures.rests() == {"broken": policy.FIRST_REST_S, "other": 0}
    assert failures.why_rests("broken") == "broken rests after 3 failures in a row (RuntimeError)"
    fail(failures, 5)  # of drafters that were opened before the rest
    failures.worked("broken")
    assert failures.rests()["broken"] == policy.FIRST_REST_S
    lengths = []
    for _ in range(8):
        clock.now += failures.rests()["broken"]
        assert failures.why_rests("broken") == ""
        fail(failures)
        lengths.append(failures.rests()["broken"])
    assert lengths == [20, 40, 80, 160, 320, 640, 640, 640]
    assert failures.totals() == {"broken": 2 * policy.MOST_IN_A_ROW - 1 + 5 + 8, "other": 0}
    told = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(told) == 9, "one line a rest"
    clock.now += 640
    failures.worked("broken")
    fail(failures, policy.MOST_IN_A_ROW)
    assert failures.rests()["broken"] == policy.FIRST_REST_S, "it had worked: all begins anew"


class Opening(Broken):
    """Cannot even be opened; counts how often that was tried."""

    num_opened = 0
    capabilities = replace(Ngram.capabilities, opens_late=False)

    def open(self, context: Context, capacity: int, target: Target) -> Drafter:
        self.num_opened += 1
        if self.call == "open":
            raise MemoryError("a secret of the machine")
        return super().open(context, capacity, target)


def test_a_resting_method_is_not_opened_and_its_rows_share_a_group() -> None:
    clock, method = Clock(), Opening("open")
    failures = Failures(clock=clock)
    engine = Engine(table(1), ToyTokenizer(), speculative="ngram", method=method)
    batch = Batch(table(1), max_rows=6, capacity=200, failures=failures)
    params = [SamplingParams(max_new_tokens=20, seed=k, ignore_eos=True) for k in range(6)]
    rows = [engine.make_row(k, Request([1, 2, 3, 1, 2], params[k])) for k in range(6)]
    with torch.inference_mode():
        for row in rows[:5]:
            batch.arrive(row)
        assert method.num_opened == policy.MOST_IN_A_ROW
        clock.now += policy.FIRST_REST_S
        method.call = ""
        batch.arrive(rows[5])
        assert method.num_opened == policy.MOST_IN_A_ROW + 1
        batch.read(64, catch_up=True, whole=True)
        check_batch(batch)
        assert [group.stop - group.start for group in batch.groups] == [5, 1]
        while all(row.finish_reason is None for row in rows):
            event = batch.step()
            assert event.depth_limit[:5] == [0] * 5
        assert rows[5].num_draft_tokens > 0
        batch.leave([row for row in rows if row.finish_reason is not None], remember=True)
    fail(failures, policy.MOST_IN_A_ROW - 1)
    assert failures.rests()["broken"] == 0, "the last row has worked"
    for row in rows:
        (right,) = plain(table(1), [Request(row.prompt_ids, row.params)])
        assert row.token_ids == right.token_ids[: len(row.token_ids)]
    assert [row.draft_error.split(" ")[1] for row in rows[:5]] == ["failed"] * 3 + ["rests"] * 2


@pytest.mark.parametrize("call", ["open", "propose", "observe"])
def test_a_service_whose_method_always_fails_loses_no_token(call: str) -> None:
    method = Opening(call)
    made = Service(
        Engine(table(1), ToyTokenizer(), speculative="ngram", method=method),
        ServiceOptions(speculation="on", max_num_seqs=2, max_model_len=96),
    )
    made.start()
    box = Mailbox()
    asked = {
        f"r{seed}": Submission(
            f"r{seed}", [1, 2, 3, 1, 2], SamplingParams(max_new_tokens=25, seed=seed, ignore_eos=True)
        )
        for seed in range(10)
    }
    for submission in asked.values():
        made.submit(submission, box.hear)
    ends = {name: box.last(name).completion for name in asked}
    check_service(made)
    now, resting = made.snapshot(), made.resting
    made.close()
    for name, submission in asked.items():
        (right,) = plain(table(1), [Request(submission.prompt_ids, submission.params)])
        found = ends[name]
        assert outcome(found) == outcome(right)
        assert "secret" not in (found.plain_reason or "")
    assert policy.MOST_IN_A_ROW <= now.drafter_failures["broken"] <= method.num_opened < len(asked)
    assert 0 < resting["broken"] <= policy.FIRST_REST_S
    assert any("broken rests after 3 failures" in (end.plain_reason or "") for end in ends.values() if end is not None)
