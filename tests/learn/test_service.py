"""A service that learns: the process beside it, its death, its commands, and what the HTTP routes answer."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from fastapi.testclient import TestClient

from foretell import ConfigError, Engine, LearnOptions, SamplingParams, Service, ServiceOptions, Submission
from foretell.learn import adapters as adapters_module
from foretell.learn.adapters import Adapters
from foretell.learn.learner import Learner
from foretell.learn.session import Session
from foretell.learn.training.texts import RawText
from foretell.server.app import build_app
from foretell.server.options import ServerOptions
from foretell.server.security import tenant_of
from tests.engine.integrity import check_service
from tests.learn.test_student import SECRET, engine_of, knows, secret
from tests.service.test_service import Mailbox


def service(learn: LearnOptions | None, **options: Any) -> Service:
    config = {"method": "draft_model", "num_speculative_tokens": 3}
    settings = {"speculation": "on", "max_num_seqs": 4, "max_model_len": 200, **options}
    made = Service(Engine.load("bundled", speculative=config), ServiceOptions(**settings), learn=learn)
    made.start()
    return made


def learner_of(made: Service) -> Learner:
    assert isinstance(made._learning, Learner)
    return made._learning


def until(done: Callable[[], bool], seconds: float = 300.0) -> None:
    """A bound for a busy machine, where the trainer process at idle priority waits for all others; the condition is what is
    asserted."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def give(learner: Learner, text: RawText) -> None:
    process = learner._process
    assert process is not None
    until(lambda: process.has_room or bool(process.failure))
    learner.add("/draft_model/0", text)


def ask(made: Service, number: int, *, store: bool = True) -> list[int]:
    box, name = Mailbox(), f"{number}-{store}-{time.monotonic_ns()}"
    params = SamplingParams(max_new_tokens=24, seed=number, ignore_eos=True)
    made.submit(Submission(name, [5 + number, 6, 7], params, store=store), box.hear)
    completion = box.last(name, 60.0).completion
    return completion.token_ids


@pytest.fixture
def learning() -> Iterator[Service]:
    made = service(LearnOptions(learn_share=1.0, learn_lr=3e-3))
    yield made
    made.close()


@pytest.fixture
def inline() -> Iterator[Service]:
    """For what does not depend on where it learns: a process imports for seconds."""
    made = service(LearnOptions(learn_share=1.0, learn_lr=3e-3, where="inline"))
    yield made
    made.close()


def test_the_process_learns_swaps_and_can_be_killed(learning: Service) -> None:
    """Texts are those of a service without learning before, between and after a swap and the death of the process;
    after it the learned version serves on, and nothing else is lost."""
    alone = service(None)
    expected = [ask(alone, number) for number in range(6)]
    alone.close()
    assert [ask(learning, number) for number in range(6)] == expected
    learner = learner_of(learning)
    for number in range(72):
        give(learner, secret(SECRET, number))
    until(lambda: learner.figures().num_swaps >= 1 or bool(learning._call(learner.swap)))
    assert [ask(learning, number) for number in range(6)] == expected
    version = learner.figures().version
    assert version >= 1
    pid = learner._process.pid
    assert pid is not None
    for number in range(72, 100):
        give(learner, secret(SECRET, number))
    os.kill(pid, signal.SIGKILL)
    until(lambda: learner.figures().num_failures == 1)
    assert [ask(learning, number) for number in range(6)] == expected
    assert learner.figures().version >= version
    check_service(learning)
    assert learning.healthy
    assert "has ended" in learning.learner()["failure"]


def test_nothing_is_kept_of_requests_that_ask_for_it(inline: Service) -> None:
    learner = learner_of(inline)
    for number in range(3):
        ask(inline, number, store=False)
    assert learner.figures().num_texts == 0
    assert learner.figures().num_skipped == 3
    ask(inline, 9)
    assert learner.figures().num_texts == 1
    assert learner.capture.held_bytes == 0


def test_commands(learning: Service) -> None:
    assert learning.tell_learner("pause")["paused"] is True
    ask(learning, 1)
    assert learner_of(learning).figures().num_texts == 0
    assert learning.tell_learner("resume")["paused"] is False
    state = learning.tell_learner("revert")
    assert state["adapters"][0]["version"] == 0
    with pytest.raises(ConfigError, match="--learn-dir"):
        learning.tell_learner("save")
    with pytest.raises(ConfigError, match="did you mean 'pause'"):
        learning.tell_learner("pauze")
    assert [event["event"] for event in learning.learner()["events"]][:2] == ["pause", "resume"]


def test_a_service_that_does_not_learn_says_so() -> None:
    made = service(None)
    try:
        with pytest.raises(ConfigError, match="nothing learns here"):
            made.learner()
        assert made.snapshot().learn is None
        ask(made, 1)
        assert made.snapshot().recent_acceptance["draft_model"] is not None
    finally:
        made.close()


def test_methods_that_cannot_learn_are_refused_before_the_start() -> None:
    engine = Engine.load("bundled", speculative="ngram")
    with pytest.raises(ConfigError, match="ngram cannot learn while serving: choose one of draft_model"):
        Service(engine, ServiceOptions(speculation="on", max_model_len=200), learn=LearnOptions())


@pytest.mark.parametrize("given", [True, {"learn_every": 4}, LearnOptions])
def test_what_are_no_options_is_refused(given: Any) -> None:
    engine = Engine.load("bundled", speculative="draft_model")
    with pytest.raises(ConfigError, match=r"^learn = .*: expected foretell\.LearnOptions\(\.\.\.\), or None"):
        Service(engine, ServiceOptions(speculation="on", max_model_len=200), learn=given)


def test_http_state_commands_and_metrics_behind_the_key(inline: Service) -> None:
    with TestClient(build_app(inline, ServerOptions(api_keys=("one", "two")))) as client:
        first, second = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        assert client.get("/v1/foretell/learner").status_code == 401
        assert client.post("/v1/foretell/learner", json={"action": "pause"}).status_code == 401
        body = {"prompt": "def add(a, b):", "max_tokens": 16, "seed": 1, "ignore_eos": True}
        assert client.post("/v1/completions", json=body, headers=first).status_code == 200
        assert client.post("/v1/completions", json={**body, "store": False}, headers=first).status_code == 200
        mine = client.get("/v1/foretell/learner", headers=first).json()
        assert len(mine["history"]) == 2
        assert {one["adapter"] for one in mine["history"]} == {f"{tenant_of('one')}/draft_model/0"}
        assert [one["number"] for one in mine["history"]] == [1, 2]
        assert mine["figures"]["num_adapters"] == 1
        others = client.get("/v1/foretell/learner", headers=second).json()
        assert others["history"] == others["adapters"] == others["events"] == []
        assert others["figures"] == {
            "is_learning": True, "version": 0, "acceptance": None, "num_adapters": 0, "num_swaps": 0, "num_refused": 0,
            "num_reverts": 0, "num_drifts": 0,
        }  # fmt: skip
        client.post("/v1/completions", json={**body, "store": False}, headers=second)
        late = client.get("/v1/foretell/learner", headers=second).json()
        assert [one["number"] for one in late["history"]] == [1], "not the third of all"
        assert inline.learner()["figures"]["num_texts"] == 1, "the operator's view has them all"
        assert client.post("/v1/foretell/learner", json={"action": "pause"}, headers=first).json()["paused"] is True
        wrong = client.post("/v1/foretell/learner", json={"action": "burn"}, headers=first)
        assert wrong.status_code == 400
        assert "pause" in json.dumps(wrong.json())
        told = client.get("/metrics", headers=first).text
        for name in ("learn_version", "learn_texts_total", "learn_swaps_total", "acceptance_drifts_total"):
            assert f"foretell:{name}{{" in told
        assert client.get("/v1/foretell/learner", headers={"authorization": "Bearer three"}).status_code == 401


def test_a_start_with_other_keys_gives_no_client_the_weights_of_another(tmp_path: Path) -> None:
    """Two keys; the first one's drafter learns a secret and is written. After a start with the keys in another order, and a
    new one before them, it serves the first key again, and nobody else."""
    options = LearnOptions(where="inline", learn_share=1.0, learn_dir=str(tmp_path), learn_lr=3e-3, learn_every=4,
                           held_out=3)  # fmt: skip
    session = Session(engine_of("draft_model"), options, max_rows=1)
    learner = session.learner
    tenant = tenant_of("alice")
    _, state = learner.assign(session.choice, Submission("first", [1, 2], tenant=tenant))
    for number in range(40):
        learner.add(state.adapter, secret(SECRET, number))  # type: ignore[union-attr]
        session.learn()
    known = knows(session, tenant)
    session.close()
    assert known > 0.1
    for keys in (("alice", "bob"), ("carol", "bob", "alice")):
        again = Session(engine_of("draft_model"), options, max_rows=1)
        assert len({tenant_of(key) for key in keys}) == len(keys)
        for key in keys:
            if key == "alice":
                assert abs(knows(again, tenant_of(key)) - known) < 0.02
            else:
                assert knows(again, tenant_of(key)) < 0.01
        assert knows(again, "") < 0.01
        again.close()


def test_http_without_learning_is_a_clear_error() -> None:
    made = service(None)
    with TestClient(build_app(made)) as client:
        reply = client.get("/v1/foretell/learner")
        assert reply.status_code == 400
        assert "--learn" in reply.json()["error"]["message"]
    made.close()


class Opened:
    """Trainers of adapters, by name: which are open."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def open(self, name: str, origin: Any) -> None:
        self.names.append(name)

    def close(self, name: str) -> None:
        self.names.remove(name)


@pytest.mark.parametrize("most", [1, 3])
def test_the_tenant_that_asked_longest_ago_goes_first(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever came first went first, however often it came again: the busiest began anew with each stranger."""
    engine = Engine.load("bundled", speculative={"method": "draft_model", "num_speculative_tokens": 3})
    choice, trainers, random = engine.choice(), Opened(), Random(most)
    monkeypatch.setattr(adapters_module, "MAX_TENANTS", most)
    adapters = Adapters(engine, [choice], LearnOptions(where="inline"), trainers, lambda *_: None)  # type: ignore[arg-type]
    adapters.open_all()
    recent: list[str] = []  # the slow twin
    held = {"": adapters.find("", choice)}
    for _ in range(60):
        tenant = random.choice(("", "busy", "busy", "a", "b", "c", "d"))
        found = adapters.find(tenant, choice)
        assert found.tenant == tenant
        assert (found is held.get(tenant)) == (tenant in ("", *recent))
        if tenant:
            recent = [*(one for one in recent if one != tenant), tenant][-most:]
        held = {name: one for name, one in {**held, tenant: found}.items() if name in ("", *recent)}
        assert set(adapters.by_tenant) == {"", *recent}
        assert sorted(trainers.names) == sorted(one.name for one in held.values()) == sorted(adapters.by_name)
        assert {one.tenant for one in adapters.of(None)} == set(adapters.by_tenant)


def test_owners_come_and_go_and_a_fault_in_learning_does_not_end_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters_module, "MAX_TENANTS", 1)
    made = service(LearnOptions(learn_share=1.0, where="inline"))
    learner = learner_of(made)
    box = Mailbox()
    params = SamplingParams(max_new_tokens=30, ignore_eos=True, seed=1)
    for number in range(12):
        prompt = [5 + 300 * number, 6, 7 + number]
        made.submit(Submission(f"o{number}", prompt, params, tenant=f"key-{number % 3}"), box.hear)
    assert all(box.last(f"o{number}", 60.0).completion for number in range(12))
    assert learner.figures().num_failures == 0
    assert len(learner.adapters.by_tenant) == 2
    before = ask(made, 3)
    learner.capture.observe = None  # type: ignore[method-assign, assignment]
    assert ask(made, 3) == before
    assert learner.figures().num_failures == 1
    assert made.healthy
    assert ask(made, 3) == before
    check_service(made)
    made.close()
