"""The engine's thread: many callers, one device; endings, refusals, failures, and what can be asked for."""

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from foretell import (
    Completion,
    Engine,
    Request,
    SamplingParams,
    Service,
    ServiceOptions,
    Submission,
    Update,
    speculative_config,
)  # fmt: skip
from foretell.core.errors import ConfigError, PromptError, QueueFullError, ServiceClosedError
from foretell.costs.table import CostTable
from foretell.engine.event import StepEvent
from foretell.methods.draft_model.drafter import DraftModel
from tests.engine.harness import VOCAB, ToyTokenizer, mixed_requests, outcome, plain, table
from tests.engine.integrity import check_service


class Mailbox:
    """Sinks by request, and waiting for their last word."""

    def __init__(self) -> None:
        self.updates: dict[str, list[Update]] = {}
        self.condition = threading.Condition()

    def hear(self, update: Update) -> None:
        with self.condition:
            self.updates.setdefault(update.request_id, []).append(update)
            self.condition.notify_all()

    def last(self, request_id: str, timeout_s: float = 30.0) -> Update:
        def ended() -> bool:
            return request_id in self.updates and self.updates[request_id][-1].is_last

        with self.condition:
            assert self.condition.wait_for(ended, timeout_s), f"{request_id} did not end"
            return self.updates[request_id][-1]


def answers(service: Service, requests: Sequence[Request]) -> list[Completion]:
    """What each of requests that are handed in at once is given."""
    box = Mailbox()
    for number, request in enumerate(requests):
        service.submit(Submission(str(number), list(request.prompt), request.params), box.hear)
    return [box.last(str(number)).completion for number in range(len(requests))]


def service(**options: Any) -> Service:
    """Over table models, with a draft model."""
    config = speculative_config({"method": "draft_model", "num_speculative_tokens": 4})
    engine = Engine(table(1), ToyTokenizer(), speculative=config, method=DraftModel(table(2, blur=0.3)))
    settings = {"speculation": "on", "max_num_seqs": 4, "max_model_len": 200, **options}
    made = Service(engine, ServiceOptions(**settings))
    made.start()
    return made


@pytest.fixture
def running() -> Iterator[Service]:
    made = service()
    yield made
    made.close()


ENDLESS = SamplingParams(max_new_tokens=150, ignore_eos=True, seed=3)


def test_a_watcher_sees_every_step_of_its_request_and_draft_logits_only_where_it_is_alone(running: Service) -> None:
    seen: list[tuple[int, bool, list[int]]] = []
    box = Mailbox()

    def watch(event: StepEvent, index: int) -> None:
        seen.append((len(event.rows), bool(event.draft_logits), list(event.commit.tokens[index])))

    params = SamplingParams(max_new_tokens=60, ignore_eos=True, seed=5)
    running.submit(Submission("watched", [1, 2, 3], params, watch=watch), box.hear)
    for _ in range(200):  # the other one joins after the first steps
        if seen:
            break
        time.sleep(0.01)
    running.submit(Submission("other", [3, 2, 1], ENDLESS), box.hear)
    done = box.last("watched").completion
    running.cancel("other")
    box.last("other")
    assert [token for _, _, tokens in seen for token in tokens] == done.token_ids
    assert all(has_logits == (rows == 1) for rows, has_logits, _ in seen)
    alone = Mailbox()
    running.submit(Submission("again", [1, 2, 3], params), alone.hear)
    again = alone.last("again").completion
    assert again.token_ids == done.token_ids, "watching changes no token"


def test_many_threads_each_get_their_solo_tokens(running: Service) -> None:
    requests, box = mixed_requests(), Mailbox()
    wanted = plain(running.engine.model, requests)

    def send(index: int) -> None:
        running.submit(Submission(str(index), requests[index].prompt, requests[index].params), box.hear)

    threads = [threading.Thread(target=send, args=(index,)) for index in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, want in enumerate(wanted):
        completion = box.last(str(index)).completion
        assert completion is not None
        assert outcome(completion) == outcome(want)
        told = [piece.token_id for update in box.updates[str(index)] for piece in update.pieces]
        assert told == want.token_ids
    check_service(running)
    figures = running.snapshot()
    assert sum(figures.num_finished.values()) == len(requests)
    assert figures.num_generated_tokens == sum(want.num_tokens for want in wanted)
    assert figures.methods["draft_model"].num_accepted_tokens > 0
    assert figures.num_running == figures.num_waiting == figures.num_prefilling == figures.kv_used_tokens == 0


def test_mixed_methods_in_one_batch(running: Service) -> None:
    box = Mailbox()
    requests = mixed_requests()
    ways = ["none", "ngram", "draft_model", "suffix", "prediction", "draft_model", "none", "ngram"]
    for index, (request, way) in enumerate(zip(requests, ways, strict=True)):
        running.submit(
            Submission(str(index), request.prompt, request.params, speculative=running.method({"method": way})),
            box.hear,
        )
    for index, want in enumerate(plain(running.engine.model, requests)):
        completion = box.last(str(index)).completion
        assert outcome(completion) == outcome(want)
        assert completion.config["speculative"]["method"] == ways[index]
    check_service(running)


@pytest.mark.parametrize("speculation", ["on", "off", "auto"])
def test_a_speedup_is_told_only_while_it_is_measured(speculation: str) -> None:
    """With "on" it was once computed from a table that nobody had measured, and an idle service kept its last one."""
    made, box = service(speculation=speculation), Mailbox()
    try:
        assert made.snapshot().speedup is None
        made.measure()
        seen: list[float | None] = []
        lines: list[str] = []

        def hear(update: Update) -> None:
            now = made.snapshot()  # on the engine's thread, with the row still there
            seen.append(now.speedup)
            lines.extend([now.possible.line] if now.possible is not None else [])
            box.hear(update)

        made.submit(Submission("a", [1, 2, 3], ENDLESS), hear)
        assert box.last("a").completion is not None
        told = [figure for figure in seen[1:-1] if figure is not None]
        assert bool(told) == (speculation == "auto")
        assert all(0.01 < figure < 100 for figure in told)
        assert made.snapshot().speedup is None, "it is idle"
        assert made.snapshot().possible is None
        assert (lines[-1] == "possible here: not known, plain steps are not measured") == (speculation != "auto")
        assert not made.snapshot().internal_errors["figures"]
    finally:
        made.close()


def test_a_request_that_asks_guesses_in_every_step_that_it_has_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where guessing can never pay, nothing was guessed even for who only wanted to see it."""
    cells = {(batch, batch * (1 + depth)): 1.0 + depth for batch in (1, 4) for depth in (0, 1, 4)}
    hopeless = CostTable(cells, {"draft_model": {(1, 1): 9.0, (1, 4): 36.0, (4, 4): 99.0}})
    monkeypatch.setattr("foretell.engine.planning.Calibration.kept", lambda self: hopeless)
    made, box = service(speculation="auto"), Mailbox()
    try:
        submission = Submission("a", [1, 2, 3], ENDLESS)
        made.submit(submission, box.hear)
        made.submit(replace(submission, request_id="b", always=True), box.hear)
        planned, _ = box.last("a").completion, box.last("b")
        made.submit(replace(submission, request_id="c", always=True, speculative=made.method("ngram")), box.hear)
        box.last("c")
        made.submit(replace(submission, request_id="d", always=True), box.hear)
        asked = box.last("d").completion
        assert planned.num_draft_tokens == 0
        assert all(depth == 4 for depth, _ in asked.steps[:-3])
        assert asked.token_ids == planned.token_ids
        check_service(made)
    finally:
        made.close()


def test_cancel_ends_a_request_and_frees_its_slots(running: Service) -> None:
    box = Mailbox()
    running.submit(Submission("a", [1, 2, 3], ENDLESS), box.hear)
    with box.condition:
        assert box.condition.wait_for(lambda: "a" in box.updates, 30)
    running.cancel("a")
    running.cancel("a")
    running.cancel("never seen")
    last = box.last("a")
    assert last.completion.finish_reason == "cancelled"
    check_service(running)
    assert running.snapshot().kv_used_tokens == 0


def test_cancelling_among_others_moves_rows_and_harms_nobody(running: Service) -> None:
    box = Mailbox()
    for name in "abcd":
        running.submit(Submission(name, [1, 2, ord(name) % 20], ENDLESS), box.hear)
    with box.condition:
        assert box.condition.wait_for(lambda: set("abcd") <= set(box.updates), 30)
    running.cancel("a")
    running.cancel("c")
    for name in "bd":
        completion = box.last(name).completion
        assert (
            completion.token_ids
            == Engine(running.engine.model, ToyTokenizer()).generate([1, 2, ord(name) % 20], ENDLESS).token_ids
        )
    check_service(running)


def test_a_timeout_returns_what_was_written(running: Service) -> None:
    box = Mailbox()
    running.submit(Submission("a", [1, 2, 3], ENDLESS, timeout_s=0.05), box.hear)
    last = box.last("a")
    assert last.completion.finish_reason == "timeout"
    assert last.completion.num_tokens < 150


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    made, box = service(max_num_seqs=1, max_queue=2), Mailbox()

    def fill() -> None:
        for index in range(10):
            made.submit(Submission(str(index), [1, 2], ENDLESS), box.hear)

    try:
        with pytest.raises(QueueFullError, match="try again") as refused:
            fill()
        assert refused.value.retry_after_s > 0
        assert made.snapshot().num_rejected == 1
    finally:
        made.close()
    assert box.last("0").is_last
    assert box.last("1").is_last


def test_who_drains_is_not_overtaken(running: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that was being looked at while the last one ended is refused, not taken and then cut off."""
    choice, box = running._tenants.choice, Mailbox()

    def slow(*given: Any, **named: Any) -> Any:
        assert running.drain(30), "nobody is left"
        return choice(*given, **named)

    monkeypatch.setattr(running._tenants, "choice", slow)
    with pytest.raises(ServiceClosedError):
        running.submit(Submission("late", [1, 2], ENDLESS), box.hear)
    assert not box.updates


def test_draining_takes_nothing_new_and_finishes_the_rest() -> None:
    made, box = service(), Mailbox()
    made.submit(Submission("a", [1, 2], SamplingParams(max_new_tokens=20, seed=1, ignore_eos=True)), box.hear)
    assert made.drain(30)
    assert not made.ready
    completion = box.last("a").completion
    assert completion.num_tokens == 20
    with pytest.raises(ServiceClosedError):
        made.submit(Submission("b", [1, 2]), box.hear)
    made.close()
    assert not made.healthy


def test_closing_tells_everybody() -> None:
    made, box = service(), Mailbox()
    for index in range(6):
        made.submit(Submission(str(index), [1, 2], ENDLESS), box.hear)
    made.close()
    for index in range(6):
        assert isinstance(box.last(str(index)).error, ServiceClosedError)


@pytest.mark.parametrize(
    ("submission", "error"),
    [
        (Submission("x", []), PromptError),
        (Submission("x", [VOCAB]), PromptError),
        (Submission("x", [1] * 200), PromptError),
        (Submission("x", [1], SamplingParams(logit_bias={VOCAB: 1.0})), ConfigError),
        (Submission("x", [1], num_prompt_logprobs=-1), ConfigError),
    ],
)
def test_what_cannot_be_is_refused_at_once(running: Service, submission: Submission, error: type[Exception]) -> None:
    box = Mailbox()
    with pytest.raises(error):
        running.submit(submission, box.hear)
    check_service(running)
    assert box.updates == {}


def test_a_request_id_in_use_is_refused(running: Service) -> None:
    box = Mailbox()
    running.submit(Submission("a", [1, 2], ENDLESS), box.hear)
    with pytest.raises(ConfigError, match="in use"):
        running.submit(Submission("a", [1, 2]), box.hear)


def test_one_request_that_cannot_go_on_ends_alone(running: Service) -> None:
    def broken(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        if len(ids) > 6:
            raise ValueError("a user's own mistake")
        return logits

    box = Mailbox()
    running.submit(Submission("good", [1, 2], SamplingParams(max_new_tokens=20, seed=1, ignore_eos=True)), box.hear)
    running.submit(
        Submission("bad", [1, 2], SamplingParams(max_new_tokens=20, seed=1, logits_processor=broken)), box.hear
    )
    error = box.last("bad").error
    assert error is not None
    assert "no token is possible" in str(error)
    completion = box.last("good").completion
    assert completion.num_tokens == 20
    check_service(running)
    assert running.healthy


def test_logprobs_are_plain_decodings_own(running: Service) -> None:
    box, made = Mailbox(), {}
    for way in ("none", "draft_model"):
        running.submit(
            Submission(
                way,
                [1, 2, 3],
                SamplingParams(max_new_tokens=25, seed=4, temperature=0.7, ignore_eos=True, logprobs=3),
                speculative=running.method(way),
            ),
            box.hear,
        )
        completion = box.last(way).completion
        assert completion is not None
        made[way] = completion
    for one, other in zip(made["none"].pieces, made["draft_model"].pieces, strict=True):
        assert one.token_id == other.token_id
        assert one.logprob is not None
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert [token for token, _ in one.top_logprobs] == [token for token, _ in other.top_logprobs]
    ids = [1, 2, 3]
    model = running.engine.model
    for piece in made["none"].pieces:
        probs = model.probs_after(ids)  # type: ignore[attr-defined]
        assert piece.logprob == pytest.approx(float(probs[piece.token_id].log()), abs=1e-5)
        assert piece.top_logprobs[0][0] == int(probs.argmax())
        ids.append(piece.token_id)


def test_a_trace_adds_up(running: Service) -> None:
    box = Mailbox()
    running.submit(
        Submission("a", [1, 2, 3], SamplingParams(max_new_tokens=25, seed=4, ignore_eos=True), trace=True), box.hear
    )
    completion = box.last("a").completion
    traces = [update.trace for update in box.updates["a"] if update.trace is not None]
    assert len(traces) == completion.num_steps
    emitted = []
    for trace in traces:
        assert len(trace.tokens) == len(trace.parent) == len(trace.probability)
        assert all(0 <= chance <= 1 for chance in trace.probability)
        emitted += [trace.tokens[node] for node in trace.path[1:]]
        emitted += [] if trace.bonus is None else [trace.bonus]
    assert emitted == completion.token_ids


def test_what_is_not_loaded_cannot_be_asked_for(running: Service) -> None:
    with pytest.raises(ConfigError, match="not loaded"):
        running.method({"method": "eagle3"})
    with pytest.raises(ConfigError, match="not loaded"):
        running.method({"method": "draft_model", "model": "another"})
    assert running.method({"num_speculative_tokens": 2}).num_speculative_tokens == 2
    assert running.method({"verify": "rejection"}).verify == "rejection"
    assert set(running.methods) >= {"none", "ngram", "suffix", "prediction", "draft_model"}
    off = service(speculation="off")
    with pytest.raises(ConfigError, match="off"):
        off.method({"method": "ngram"})
    assert off.method("none").method == "none"
    off.close()


def test_costs_that_cannot_be_measured_again_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    made = service(speculation="on")
    planning = made._costs

    class Broken:
        def measure(self, **options: Any) -> CostTable:
            raise RuntimeError("no memory")

    costs = planning.planner.costs
    monkeypatch.setattr(planning, "_calibration", Broken())
    monkeypatch.setattr(type(planning.planner), "contradiction", "they are wrong")
    planning.measure_again(must_stop=lambda: False)
    assert planning.planner.costs is costs
    assert planning._next_measuring > time.monotonic() + 100
    made.close()


def test_who_serves_one_request_at_a_time_keeps_its_text_too() -> None:
    """A quarter of the one row's memory would hold a quarter of its conversation, and nothing would be kept."""
    made, box = service(prefix_reuse=True, max_num_seqs=1), Mailbox()
    for name, cached in (("first", 0), ("again", 179)):
        made.submit(
            Submission(name, [1 + index % 6 for index in range(180)], SamplingParams(max_new_tokens=4)), box.hear
        )
        completion = box.last(name).completion
        assert completion.num_cached_tokens == cached
    made.close()


def test_what_drafters_read_of_prompts_counts_against_the_speedup(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float] = []
    monkeypatch.setattr(
        "foretell.planner.planner.Planner.observe_reading", lambda planner, seconds: told.append(seconds)
    )
    made, box = service(), Mailbox()
    made.submit(Submission("one", [1 + index % 6 for index in range(90)], SamplingParams(max_new_tokens=4)), box.hear)
    assert box.last("one").completion is not None
    made.close()
    assert sum(told) > 0.0


def test_what_is_expected_is_read_while_nobody_is_there() -> None:
    made, box = service(prefix_reuse=True), Mailbox()
    text = [1 + index % 6 for index in range(120)]
    params = SamplingParams(max_new_tokens=4, ignore_eos=True, seed=1)
    made.prepare(Submission("ahead", text[:100], SamplingParams(max_new_tokens=1)))
    deadline = time.monotonic() + 30
    while not made.is_idle and time.monotonic() < deadline:
        time.sleep(0.01)
    before = made.snapshot()
    assert (dict(before.num_finished), before.num_prompt_tokens, before.num_running) == ({}, 0, 0)
    made.submit(Submission("asked", text, params), box.hear)
    completion = box.last("asked").completion
    assert completion.num_cached_tokens == 99
    assert sum(made.snapshot().num_finished.values()) == 1
    check_service(made)
    made.close()


def test_who_comes_ends_what_is_read_ahead_and_is_not_held_up_by_it() -> None:
    made, box = service(prefix_reuse=True, max_model_len=2000, kv_memory_gib=0.1), Mailbox()
    text = [1 + index % 6 for index in range(1800)]
    for number in range(3):
        made.prepare(Submission(f"ahead {number}", text, SamplingParams(max_new_tokens=1)))
        made.submit(Submission(f"asked {number}", [2, 3], SamplingParams(max_new_tokens=4, seed=1)), box.hear)
        made.prepare(Submission(f"busy {number}", text, SamplingParams(max_new_tokens=1)))
        assert box.last(f"asked {number}").completion is not None
    check_service(made)
    assert sum(made.snapshot().num_finished.values()) == 3
    made.close()
