"""The time of a grammar is its own request's: a step's, and that of a whole request, are limited."""

from collections.abc import Iterator
from time import monotonic, thread_time

import pytest
import torch

from foretell import Request, SamplingParams, Service, Submission
from foretell.service.processors import GuardedProcessor, StepBudget
from tests.engine.harness import plain
from tests.service.test_service import Mailbox, service


class Slow:
    """A processor that changes nothing and takes so many CPU seconds a call."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.error, self.num_calls = seconds, "", 0

    def stop(self, reason: str) -> None:
        self.error = reason

    def __call__(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        end = thread_time() + self.seconds
        while thread_time() < end:
            pass
        return logits


def test_within_a_step_those_above_their_share_are_ended() -> None:
    budget = StepBudget(limit_s=1.0)
    assert budget.spend(1, 0.2)
    assert budget.spend(2, 0.7)
    assert budget.spend(1, 0.05)
    assert not budget.spend(2, 0.4), "1.35 s in all, of which half may be its own"
    assert budget.spend(1, 0.1), "others go on"
    assert budget.spend(3, 0.3)
    budget.begin()
    assert budget.spend(2, 0.9), "a step begins anew"


def test_a_request_has_a_budget_that_grows_with_its_output() -> None:
    slow = Slow(0.0)
    guarded = GuardedProcessor(slow)
    logits, ids = torch.zeros(4), torch.zeros(10, dtype=torch.int64)
    assert torch.equal(guarded(ids, logits), logits)
    guarded.seconds = 1.5
    assert torch.equal(guarded(torch.zeros(40, dtype=torch.int64), logits), logits), "1 s, and 0.02 s for each of 30"
    assert guarded.error == ""
    guarded.seconds = 1.7
    assert bool((guarded(torch.zeros(40, dtype=torch.int64), logits) == -torch.inf).all())
    assert "1.60 s are allowed" in guarded.error
    called = slow.num_calls
    assert bool((guarded(ids, logits) == -torch.inf).all())
    assert slow.num_calls == called, "it is not called again"


def test_processors_of_the_operator_have_no_limit() -> None:
    class Own:
        def __call__(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            return logits

    budget = StepBudget(limit_s=0.0)
    logits = torch.zeros(4)
    assert torch.equal(GuardedProcessor(Own(), budget)(torch.zeros(2, dtype=torch.int64), logits), logits)


@pytest.fixture
def running() -> Iterator[Service]:
    made = service()
    yield made
    made.close()


def test_a_slow_grammar_ends_its_own_request_and_its_neighbour_goes_on(running: Service) -> None:
    params = SamplingParams(max_new_tokens=60, ignore_eos=True, seed=3)
    box = Mailbox()
    running.submit(Submission("neighbour", [1, 2, 3], params), box.hear)
    slow = SamplingParams(max_new_tokens=60, seed=4, logits_processor=Slow(0.1))
    began = monotonic()
    running.submit(Submission("slow", [1, 2, 3], slow), box.hear)
    error = box.last("slow").error
    assert error is not None
    assert "share of a step's 0.15 s" in str(error)
    assert monotonic() - began < 10.0, "sixty tokens of several masks each would take longer"
    found = box.last("neighbour").completion
    (alone,) = plain(running.engine.model, [Request([1, 2, 3], params)])
    assert found.token_ids == alone.token_ids
