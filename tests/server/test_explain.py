"""``/v1/foretell/explain``: what it shows is what the engine does, it keeps its bounds, and it needs the key."""

import threading
from typing import Any

import httpx
import pytest

from foretell import Engine, Service
from foretell.analysis.explain import explain
from foretell.core.params import SamplingParams
from foretell.engine.request.row import Submission
from foretell.server.replies.explain import ExplainReply
from foretell.server.routes.explain import MOST_STEPS, MOST_TOKENS
from tests.engine.integrity import check_service
from tests.server.conftest import Serve
from tests.server.fake import FakeService
from tests.service.test_service import Mailbox

PATH = "/v1/foretell/explain"
PROMPT = "def add(a, b):\n    return"


@pytest.fixture(scope="module")
def told(url: str) -> dict[str, Any]:
    answer = httpx.post(url + PATH, json={"prompt": PROMPT, "seed": 3}, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_it_is_as_described_and_within_its_bounds(told: dict[str, Any]) -> None:
    ExplainReply.model_validate(told, strict=True)
    assert 1 <= len(told["steps"]) <= MOST_STEPS
    assert sum(len(step["emitted"]) for step in told["steps"]) <= MOST_TOKENS
    assert 0 <= told["chosen"] < len(told["steps"])
    assert [step["number"] for step in told["steps"]] == list(range(1, len(told["steps"]) + 1))


def test_its_steps_are_those_of_the_engine_alone(told: dict[str, Any], bundled: Service) -> None:
    """The same tree, laws and races as ``foretell explain`` computes without a server."""
    engine: Engine = bundled.engine
    for step in told["steps"][:3]:
        alone = explain(engine, PROMPT, temperature=0.7, seed=3, step=step["number"])
        assert step["emitted"] == alone.emitted
        assert [guess["text"] for guess in step["guesses"]] == [guess.text for guess in alone.guesses]
        for mine, other in zip(step["places"], alone.places, strict=True):
            assert mine["winner"] == other.winner
            assert [one["p"] for one in mine["runners"]] == pytest.approx([one.p for one in other.runners], rel=1e-3)
            for one, same in zip(mine["runners"], other.runners, strict=True):
                assert (one["q"] is None) == (same.q is None)
    assert all(runner["q"] is not None for runner in told["steps"][0]["places"][0]["runners"])


def test_a_users_message_is_put_into_the_template(bundled: Service, url: str) -> None:
    engine, shown = bundled.engine, dict[bool, str]()
    for chat in (False, True):
        asked = {"prompt": "Hello", "chat": chat, "seed": 3, "max_tokens": 4}
        shown[chat] = httpx.post(url + PATH, json=asked, timeout=60).json()["steps"][0]["text"]
    ids = engine.chat_prompt([{"role": "user", "content": "Hello"}])
    assert shown[True].startswith(engine.tokenizer.decode(ids, skip_special_tokens=False)[-400:])
    assert not shown[False].startswith(shown[True][:20])


def test_each_place_has_its_words(told: dict[str, Any]) -> None:
    for step in told["steps"]:
        assert len(step["words"]["verdicts"]) == len(step["places"])
        assert str(step["num_kept"]) in step["words"]["kept"]


def test_a_step_shared_with_others_is_shown_without_the_drafters_law(bundled: Service, url: str) -> None:
    """Only the steps of the request alone have the copies of the draft's logits: others do not pay for them."""
    box, stop = Mailbox(), threading.Event()

    def keep_busy() -> None:
        number = 0
        while not stop.is_set():
            name, number = f"other-{number}", number + 1
            params = SamplingParams(max_new_tokens=120, seed=number, ignore_eos=True)
            bundled.submit(Submission(name, [5, 6, 7], params), box.hear)
            box.last(name)

    thread = threading.Thread(target=keep_busy)
    thread.start()
    try:
        found = httpx.post(url + PATH, json={"prompt": PROMPT, "seed": 3}, timeout=60).json()
    finally:
        stop.set()
        thread.join()
    laws = [runner["q"] for step in found["steps"] for place in step["places"] for runner in place["runners"]]
    assert None in laws
    check_service(bundled)


def test_it_needs_the_key(serve: Serve) -> None:
    client = serve(api_keys=("right",))
    assert client.post(PATH, json={"prompt": "a"}).status_code == 401
    assert client.post(PATH, json={"prompt": "a"}, headers={"authorization": "Bearer right"}).status_code == 200


def test_one_at_a_time_and_others_are_told_when_to_come_again(serve: Serve) -> None:
    service = FakeService(held=True)
    client = serve(service)
    answers: list[int] = []
    first = threading.Thread(target=lambda: answers.append(client.post(PATH, json={"prompt": "a"}).status_code))
    first.start()
    assert service.begun.acquire(timeout=30)
    second = client.post(PATH, json={"prompt": "a"})
    assert (second.status_code, second.headers["retry-after"]) == (429, "1")
    assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200  # others go on
    service.cancel(service.submitted[0].request_id)
    first.join()
    assert len(answers) == 1
    service.held = False
    assert client.post(PATH, json={"prompt": "a"}).status_code == 200, "the place is free again"


def test_the_request_is_bounded_and_not_kept(serve: Serve) -> None:
    service = FakeService()
    serve(service).post(PATH, json={"prompt": "a", "max_tokens": 5})
    serve(service).post(PATH, json={"prompt": "a"})
    assert [one.params.max_new_tokens for one in service.submitted] == [5, MOST_TOKENS]
    for one in service.submitted:
        assert one.watch is not None
        assert one.always
        assert not one.store


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt": ""}, "prompt", "at least 1 character"),
        ({"prompt": "a", "speculative": {"method": "none"}}, "speculative", "nothing is guessed"),
        ({"prompt": "a", "max_tokens": 65}, "max_tokens", "64"),
        ({"prompt": "a", "temperature": 3.0}, "temperature", "2"),
        ({"prompt": "a", "top_k": 3}, "top_k", "unknown field"),
        ({"prompt": "a" * 5000}, "prompt", "shorten"),
    ],
)
def test_mistakes(fake: httpx.Client, body: dict[str, Any], param: str, words: str) -> None:
    answer = fake.post(PATH, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


def test_the_nucleus_that_was_asked_for_is_the_one_shown(url: str) -> None:
    """The page's top p was left out: the step taken apart was of another text than the run beside it."""
    asked = {"prompt": PROMPT, "seed": 3, "temperature": 1.5, "top_p": 0.3}
    found = httpx.post(url + PATH, json=asked, timeout=60).json()
    written = "".join(token for step in found["steps"] for token in step["emitted"])
    whole = httpx.post(f"{url}/v1/completions", json={**asked, "max_tokens": MOST_TOKENS}, timeout=60).json()
    text = whole["choices"][0]["text"]
    assert text.startswith(written)
    assert written
    wide = httpx.post(url + PATH, json={**asked, "top_p": 1.0}, timeout=60).json()
    assert written != "".join(token for step in wide["steps"] for token in step["emitted"])
