"""A drafter that fails in a service: its requests go on without guesses, the text stays right, others notice nothing."""

from typing import Any

import pytest
import torch

from foretell import Engine, Request, SamplingParams, Service, ServiceOptions, Submission
from foretell.core.noise import Noise
from foretell.core.tree import DrawMode, TokenTree
from foretell.draft.base import Commit, Context, Drafter, Method
from foretell.draft.ngram import Ngram, NgramDrafter
from foretell.draft.shapes import Shape
from foretell.engine.batch import Batch
from foretell.engine.guarded import GuardedDrafter
from foretell.model.target import Target
from tests.engine.harness import ToyTokenizer, outcome, plain, table
from tests.engine.test_service import Mailbox

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
        return max(len(index.ids) for index in self.indices) > 12

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
        self.indices += other.indices

    def num_unread(self, context: Context) -> list[int]:
        self._check("num_unread", self.is_late)
        return super().num_unread(context)


class Broken(Method):
    name, capabilities = "broken", Ngram.capabilities

    def __init__(self, call: str) -> None:
        self.call = call

    def open(self, context: Context, capacity: int, target: Target) -> Drafter:
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
    made.check_integrity()
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


def test_an_engine_of_ones_own_raises_as_ever() -> None:
    engine = Engine(table(1), ToyTokenizer(), speculative="ngram", method=Broken("propose"))
    with pytest.raises(RuntimeError, match="a secret of the machine"):
        engine.generate([1, 2, 3], max_new_tokens=30, ignore_eos=True)


def test_who_has_failed_is_not_joined() -> None:
    engine = Engine(table(1), ToyTokenizer(), speculative="ngram")
    row = engine.make_row(0, Request([1, 2, 1], SamplingParams(seed=1)))

    context = Batch(table(1), max_rows=1, capacity=64)._open_state([row])
    one, other = (GuardedDrafter(Failing(context, "observe"), "broken") for _ in range(2))
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
    batch = Batch(table(1), max_rows=2, capacity=200, guard=True)
    params = SamplingParams(max_new_tokens=60, seed=1, ignore_eos=True, temperature=0.0)
    first, second = (engine.make_row(k, Request([1, 2, 3], params)) for k in range(2))
    with torch.inference_mode():
        batch.arrive(first, engine.choice())
        batch.read(64, catch_up=True, whole=True)
        for _ in range(14):
            batch.step()
        assert first.draft_error == "RuntimeError"
        batch.arrive(second, engine.choice())
        batch.read(64, catch_up=True, whole=True)
        batch.check_integrity()
        assert len(batch.groups) == 2
        for _ in range(3):
            batch.step()
    assert second.draft_error == ""
    assert second.num_steps == 3
    assert first.token_ids[: len(second.token_ids)] == second.token_ids
