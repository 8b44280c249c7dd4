"""One loop for everybody: rows are refilled as they end, prefixes are reused, methods are mixed, observers are told."""

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from foretell import Engine, Request, SamplingParams, Service, ServiceOptions, Submission
from foretell.core.errors import ConfigError, ModelError
from foretell.core.noise import Noise
from foretell.core.tree import DrawMode, TokenTree
from foretell.draft.base import Context, Drafter, Method
from foretell.draft.native import tree_of
from foretell.draft.ngram import Ngram
from foretell.draft.shapes import Shape
from foretell.engine.batch import Batch
from foretell.engine.drafters.lazy import IDLE_STEPS
from foretell.engine.event import StepEvent
from foretell.model.target import Target
from foretell.planner.plan import StepPlan
from tests.engine.harness import ToyTokenizer, draft_engine, mixed_requests, outcomes, plain, prompts, started, table
from tests.engine.integrity import check_batch, check_service
from tests.service.test_service import Mailbox


def counted(engine: Engine) -> list[StepEvent]:
    """The steps that the engine will make."""
    events: list[StepEvent] = []
    engine.observers.append(events.append)
    return events


def of_lengths(lengths: list[int]) -> list[Request]:
    params = SamplingParams(ignore_eos=True)
    return [
        Request([1 + index % 5, 2], replace(params, seed=index, max_new_tokens=length))
        for index, length in enumerate(lengths)
    ]


def test_rows_are_refilled_as_they_end() -> None:
    engine = Engine(table(1), ToyTokenizer())
    lengths = [40, 4, 4, 4, 4, 4, 4, 4, 4, 4]
    found = engine.generate_batch(of_lengths(lengths), batch_size=2)
    assert [completion.num_tokens for completion in found] == lengths
    assert engine.recorder.num_steps == 40, "the long row's steps: the others shared them, one after the other"


def test_completions_come_as_they_end() -> None:
    engine = Engine(table(1), ToyTokenizer())
    asked = of_lengths([30, 5, 10])
    found = list(engine.completions(asked, batch_size=3))
    assert [index for index, _ in found] == [1, 2, 0]
    in_order = [completion for _, completion in sorted(found, key=lambda pair: pair[0])]
    assert outcomes(in_order) == outcomes(plain(table(1), asked))
    assert list(engine.completions([])) == []


def test_a_bad_request_is_refused_before_anything_is_decoded() -> None:
    engine = Engine(table(1), ToyTokenizer())
    with pytest.raises(ConfigError):
        engine.completions([*of_lengths([3, 3]), Request([1], speculative="ngrams")])
    assert engine.recorder.num_steps == 0


def test_a_batch_takes_no_more_passes_than_a_service() -> None:
    """On the same requests: both are one loop, and a batch knows all of its requests at the start."""
    asked = of_lengths([3 + (7 * index) % 40 for index in range(32)])
    engine = draft_engine(table(1), table(2, blur=0.3), 4)
    engine.generate_batch(asked, batch_size=8)
    box = Mailbox()
    options = ServiceOptions(max_num_seqs=8, max_model_len=200, speculation="on", prefix_reuse=False)
    service = Service(draft_engine(table(1), table(2, blur=0.3), 4), options)
    with started(service):
        for index, request in enumerate(asked):
            service.submit(Submission(str(index), request.prompt, request.params), box.hear)
        for index in range(len(asked)):
            box.last(str(index))
        steps = service.snapshot().num_steps
    assert engine.recorder.num_steps <= 1.02 * steps


def test_methods_are_mixed_in_a_batch() -> None:
    asked = mixed_requests()
    engine = draft_engine(table(1), table(2, blur=0.3), 3)
    exact = {"method": "suffix", "verify": "exact"}
    ways: list[Any] = [None, "ngram", "none", exact, None, "ngram", exact, "none"]
    events = counted(engine)
    found = engine.generate_batch([replace(one, speculative=way) for one, way in zip(asked, ways, strict=True)])
    assert outcomes(found) == outcomes(plain(table(1), asked))
    assert [completion.config["speculative"]["method"] for completion in found] == [
        "draft_model", "ngram", "none", "suffix", "draft_model", "ngram", "suffix", "none",
    ]  # fmt: skip
    assert {part.method for part in events[0].parts} == {"draft_model", "ngram", "none", "suffix"}
    for event in events:
        assert [part.start for part in event.parts[1:]] == [part.stop for part in event.parts[:-1]]
        assert event.parts[-1].stop == len(event.rows)


def test_prefixes_are_reused_where_asked() -> None:
    head = [1, 2, 3, 4, 5, 6, 7, 8] * 8
    asked = [Request([*head, index], SamplingParams(max_new_tokens=6, seed=index)) for index in range(4)]
    fresh = Engine(table(1), ToyTokenizer()).generate_batch(asked, batch_size=1)
    engine = Engine(table(1), ToyTokenizer(), prefix_memory_gib=0.01)
    found = engine.generate_batch(asked, batch_size=1)
    assert outcomes(found) == outcomes(fresh)
    assert [one.num_cached_tokens for one in fresh] == [0] * 4
    assert found[0].num_cached_tokens == 0
    assert min(one.num_cached_tokens for one in found[1:]) >= len(head)
    for later in (engine, engine.with_method("ngram")):
        again = later.generate(asked[0].prompt, asked[0].params)
        assert again.num_cached_tokens >= len(head), "and by later calls"
        assert again.token_ids == fresh[0].token_ids
    with pytest.raises(ConfigError, match="prefix_memory_gib = -1"):
        Engine(table(1), prefix_memory_gib=-1)


def test_an_observer_is_told_what_happened() -> None:
    engine = draft_engine(table(1), table(2, blur=0.3), 3)
    engine.observes_draft_logits = True
    texts: list[list[int]] = []
    drafted: list[int] = []

    def observe(event: StepEvent) -> None:
        (row,) = event.rows
        texts.append(event.text(0))
        nodes = int((event.evidence.tree.parent[0] >= 0).sum())
        drafted.append(nodes)
        assert event.logits.shape[:2] == event.evidence.p.shape[:2] == event.evidence.tree.tokens.shape
        assert row.known == texts[-1] + event.commit.tokens[0]
        assert 0.0 <= event.seconds_draft_model <= event.seconds_draft <= event.seconds
        assert sum(logits.shape[1] for logits in event.draft_logits) == nodes, "the root and all but the leaf"
        assert event.depth_limit[0] >= nodes

    engine.observers.append(observe)
    found = engine.generate([1, 2, 3], seed=1, max_new_tokens=20, ignore_eos=True)
    assert texts[0] == [1, 2, 3]
    assert len(texts) == found.num_steps
    assert sum(drafted) == found.num_draft_tokens > 0


def test_a_service_tells_the_engines_observers() -> None:
    engine = Engine(table(1), ToyTokenizer())
    events = counted(engine)
    box = Mailbox()
    service = Service(engine, ServiceOptions(max_num_seqs=2, max_model_len=64))
    with started(service):
        service.submit(Submission("a", [1, 2], SamplingParams(max_new_tokens=5, ignore_eos=True)), box.hear)
        box.last("a")
    assert sum(len(tokens) for event in events for tokens in event.commit.tokens) == 5


def test_a_service_at_fixed_width() -> None:
    """The same tokens as a batch of that width, and guesses that do not fit are refused."""
    asked = mixed_requests()
    expected = plain(table(1), asked, width=6)
    service = Service(
        draft_engine(table(1), table(2, blur=0.3), 5, width=6),
        ServiceOptions(max_num_seqs=3, max_model_len=200, speculation="on"),
    )
    with started(service):
        box = Mailbox()
        for index, request in enumerate(asked):
            service.submit(Submission(str(index), request.prompt, request.params), box.hear)
        found = [box.last(str(index)).completion for index in range(len(asked))]
        deep = service.method({"method": "ngram", "num_speculative_tokens": 6})
        with pytest.raises(ConfigError, match="ask for at most 5"):
            service.submit(Submission("deep", [1], speculative=deep), box.hear)
    assert outcomes([one for one in found if one is not None]) == outcomes(expected)


class Repeats(Method):
    """A third party's, in a few lines: no ``join``, no ``keep``. It guesses that the last token comes again."""

    name, capabilities = "repeats", Ngram.capabilities

    def open(self, context: Context, capacity: int, target: Target) -> Drafter:
        return Repeating(context.num_rows)


class Repeating(Drafter):
    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> TokenTree:
        assert context.num_rows == self.num_rows == 1, "a drafter without join has one row"
        guesses = [
            [(depth, ids[-1]) for depth in range(min(depth_limit, 2))]
            for ids, depth_limit in zip(context.history.ids, context.depth_limit, strict=True)
        ]
        return tree_of(context, guesses)


class Refuses(Method):
    """A method that cannot be opened for some texts."""

    name, capabilities = "refuses", Ngram.capabilities

    def open(self, context: Context, capacity: int, target: Target) -> Drafter:
        if context.history.ids[0][0] == 9:
            raise ModelError("not for this text")
        return Repeating(context.num_rows)


def test_a_drafter_that_cannot_be_opened_leaves_no_row_behind() -> None:
    """Where a row stayed in the pool, the next requests would read each other's keys."""
    asked = [[3, 4, 5], [9, 1], [6, 7], [9, 2], [8, 1, 2]]
    expected = plain(table(1), [Request(ids, SamplingParams(max_new_tokens=20, seed=1)) for ids in asked])
    engine = Engine(table(1), ToyTokenizer(), speculative="ngram", method=Refuses())
    batch = Batch(table(1), max_rows=3, capacity=64)
    for ids in ([3, 4], [6, 7, 8]):
        batch.arrive(engine.make_row(0, Request(ids)))
        with pytest.raises(ModelError, match="not for this text"):
            batch.arrive(engine.make_row(1, Request([9, 1])))
        check_batch(batch)
    service = Service(engine, ServiceOptions(speculation="on", max_num_seqs=4, max_model_len=64))
    service.start()
    box, together = Mailbox(), threading.Event()
    service._inbox.append(together.wait)  # type: ignore[arg-type]  # all are admitted in one round
    for number, ids in enumerate(asked):
        service.submit(Submission(str(number), ids, SamplingParams(max_new_tokens=20, seed=1)), box.hear)
    together.set()
    ends = [box.last(str(number)) for number in range(len(asked))]
    check_service(service)
    service.close()
    assert [str(end.error) for end in ends if end.error] == ["not for this text"] * 2
    for end, right, ids in zip(ends, expected, asked, strict=True):
        if ids[0] != 9:
            assert end.completion.token_ids == right.token_ids


def test_a_drafter_without_join_has_one_for_each_row() -> None:
    asked = mixed_requests()
    engine = Engine(table(1), ToyTokenizer(), speculative="ngram", method=Repeats())
    found = engine.generate_batch(asked, batch_size=3)
    assert outcomes(found) == outcomes(plain(table(1), asked))
    assert sum(one.num_draft_tokens for one in found) > 0


def test_an_error_of_one_row_ends_the_call() -> None:
    """As before there was one loop: a call that cannot give all completions says why."""

    def nothing(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return torch.full_like(logits, -torch.inf) if len(ids) > 6 else logits

    params = SamplingParams(max_new_tokens=20, ignore_eos=True, logits_processor=nothing)
    engine = Engine(table(1), ToyTokenizer(), method=None)
    with pytest.raises(ModelError, match="request 1: no token is possible"):
        engine.generate_batch([Request([1], SamplingParams(max_new_tokens=5)), Request([1], params)])
    assert engine.generate(prompts()[0], max_new_tokens=3, ignore_eos=True).num_tokens == 3


def test_prompts_of_all_lengths_are_read_before_the_first_step() -> None:
    """Long ones in several passes, those of one token in none, mixed."""
    lengths = [700, 1, 3, 1, 600, 1, 520, 2]
    asked = [
        Request([1 + (index + at) % 20 for at in range(length)], SamplingParams(max_new_tokens=6, seed=index))
        for index, length in enumerate(lengths)
    ]
    expected = plain(table(1), asked)
    for rows in (8, 3):
        engine = draft_engine(table(1), table(2, blur=0.3), 3)
        found = engine.generate_batch(asked, batch_size=rows)
        assert outcomes(found) == outcomes(expected)


def test_a_draft_model_that_is_closed_in_a_step_leaves_no_negative_time() -> None:
    """A service closes an idle drafter while it observes a step: the step's own draft time is 0, not what went before."""
    engine = draft_engine(table(1), table(2, blur=0.3), 3)
    events = counted(engine)
    service = Service(engine, ServiceOptions(max_num_seqs=1, max_model_len=200, speculation="on"))
    service.start()
    box = Mailbox()
    planner = service._costs.planner  # type: ignore[union-attr]
    plan = planner.plan
    steps = iter(range(10_000))
    planner.plan = lambda rows, *rest: plan(rows, *rest) if next(steps) < 2 else StepPlan([0] * len(rows))  # type: ignore
    try:
        service.submit(Submission("a", [1, 2], SamplingParams(max_new_tokens=40, ignore_eos=True, seed=1)), box.hear)
        box.last("a")
    finally:
        service.close()
    assert len(events) > 2 + IDLE_STEPS, "long enough for the drafter to be closed"
    assert events[0].seconds_draft_model > 0
    assert min(event.seconds_draft_model for event in events) >= 0
