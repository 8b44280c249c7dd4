"""Requests in the form that coding programs send, unmodified: they are answered, and what they share stays shared."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.clients.structure import Sent, bodies, equal, fixture, table

pytest.importorskip("fastapi", reason="of the extra serve")
FIXTURES = Path(__file__).parents[1] / "fixtures" / "clients"
ALL = ("aider", "claude", "codex", "opencode")
TAKEN = ALL


def recorded(client: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FIXTURES / f"{client}.json").read_text())
    return found


@pytest.mark.parametrize("client", TAKEN)
def test_each_request_is_answered_and_its_beginning_is_that_of_the_turn_before(client: str, serve: Any) -> None:
    from tests.server.test_thoughts import scripted

    service = scripted("A text.")
    model = service.engine.model
    model.spec = replace(model.spec, max_positions=2**22)
    given = recorded(client)
    server = serve(service, served_model_name=bodies(given)[0][0]["model"])
    prompts = list[list[str]]()
    for turns, told in zip(bodies(given), given["conversations"], strict=True):
        prompts.append([])
        for body, turn in zip(turns, told, strict=True):
            answer = server.post(turn["path"], json=body)
            assert answer.status_code == 200, answer.text[:500]
            prompts[-1].append(service.engine.tokenizer.decode(list(service.submitted[-1].prompt_ids)))
    for texts, told in zip(prompts, given["conversations"], strict=True):
        for before, text, turn in zip(texts, texts[1:], told[1:], strict=False):
            grows = turn["as_before"] > 0.95 * turn["prompt"]  # all that was there before, and the new turn
            assert (equal(before, text) > 0.9 * len(before)) == grows


@pytest.mark.parametrize("client", ALL)
def test_a_fixture_holds_no_text_and_gives_the_lengths_again(client: str) -> None:
    given = recorded(client)
    words = set(json.dumps([given["parts"], given["texts"]]).replace("\\", "").split('"'))
    assert not [word for word in words if " " in word.strip(" ,:[]{}0123456789.-truefalsn")]
    made = [[Sent(turn["path"], body, json.dumps(body)) for body, turn in zip(*pair, strict=True)]
            for pair in zip(bodies(given), given["conversations"], strict=True)]  # fmt: skip
    again = fixture(client, given["version"], made)
    sizes = [turn["prompt"] for turns in again["conversations"] for turn in turns]
    assert sizes == [len(json.dumps(body)) for turns in bodies(again) for body in turns]
    assert len(again["texts"]) == pytest.approx(len(given["texts"]), abs=20)


def test_structure_of_a_session_that_is_known() -> None:
    def sent(*texts: str) -> Sent:
        return Sent(
            "/v1/x", {"model": "a", "messages": [{"role": "user", "content": one} for one in texts]}, "".join(texts)
        )

    head = "The beginning of every conversation. "
    given = fixture("c", "1", [[sent(head + "one"), sent(head + "one", "two")], [sent(head + "other")]])
    assert given["texts"] == [1, 40, 3, [1, 38, 4, 0]]
    (first, second), (other,) = given["conversations"]
    assert (first["prompt"], second["as_before"], other["as_first"]) == (40, 40, 38)
    (one, two), (three,) = bodies(given)
    assert two["messages"][0] == one["messages"][0]
    before, after = one["messages"][0]["content"], three["messages"][0]["content"]
    assert (len(before), len(after), equal(before, after)) == (40, 42, 38)
    assert "beginning" not in json.dumps([given, one, two, three])
    assert list(table("c", "1", [[sent("ab")]])) == ["| c | 1 | A1 | 2 |  |  |"]
