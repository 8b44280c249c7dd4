"""Random requests by every method, whole and streamed, against plain decoding of the same server; random conversations by
every door."""

import argparse
import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from foretell import Engine, Service, ServiceOptions
from foretell.server.app import build_app
from foretell.server.protocol.requests import ChatRequest
from tests.server.live import live
from tests.stress import answers, differ, doors, minutes, size


@pytest.fixture
def url() -> Iterator[str]:
    """A server in this process, whose code may be a planted bug's."""
    engine = Engine.load("bundled", speculative={"method": "draft_model", "num_speculative_tokens": 4})
    service = Service(engine, ServiceOptions(speculation="on", max_num_seqs=8, max_model_len=1000))
    service.start()
    with live(build_app(service)) as address:
        yield address
    service.close()


def run(url: str, *arguments: object) -> int:
    return differ.main(["--url", url, *map(str, arguments)])


def test_a_few_requests(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(url, "--requests", 4, "--seed", 12) == 0
    assert '"seed": 12' in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_differ(seed: int) -> None:
    assert differ.main(["--minutes", str(minutes(0.2)), "--seed", str(seed)]) == 0


@pytest.mark.parametrize("spoilt", ["ids", "text", "calls", "end", "values", "likeliest", "usage", "status"])
def test_control_what_differs_is_found_and_the_seed_is_told(
    spoilt: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def read(client: Any, path: str, body: dict[str, Any]) -> answers.Seen:
        said = answers.Said("ab", [1, 2], [["f", "{}"]], "stop", ["a", "b"], [-0.5, -1.0], [{"a": -0.5}, {"b": -1.0}])
        seen = answers.Seen(choices={0: said}, usage=(1, 2, 3))
        if body.get("speculative") == {"method": "ngram"}:
            if spoilt in ("usage", "status"):
                setattr(seen, spoilt, (1, 3, 4) if spoilt == "usage" else 500)
            else:
                value = {"text": "ba", "end": "length", "values": [-0.5, -1.1]}.get(spoilt, [])
                setattr(said, spoilt, [{"a": -0.5}, {"c": -0.5}] if spoilt == "likeliest" else value)
        return seen

    monkeypatch.setattr(differ, "read", read)
    tally, client = differ.Tally(), httpx.AsyncClient()
    ask = differ.Ask(differ.TEXT, {"prompt": "a"}, {})
    asyncio.run(differ.compare(client, ask, 3, ["none", "suffix", "ngram"], 7, tally))
    assert [line.partition(": ")[0] for line in tally.wrong] == [
        f"--seed 7 --only 3, /v1/completions, ngram, {how}" for how in ("whole", "streamed")
    ]
    assert differ.judged(tally, argparse.Namespace(seed=7)) == 1
    assert tally.wrong[0] in capsys.readouterr().out


def test_requests_are_a_function_of_the_seed_and_have_every_parameter() -> None:
    asks = [differ.request(1, number, "toy", 8192) for number in range(300)]
    assert asks == [differ.request(1, number, "toy", 8192) for number in range(300)]
    assert asks[:20] != [differ.request(2, number, "toy", 8192) for number in range(20)]
    names = {name for ask in asks for name in ask.body}
    assert names >= {
        "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
        "logit_bias", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "max_tokens", "max_output_tokens", "n",
        "logprobs", "top_logprobs", "echo", "seed", "stream_options", "response_format", "regex", "grammar", "tools",
        "tool_choice", "continue_final_message", "provenance",
    }  # fmt: skip


# -- one conversation through every door ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def opened() -> Iterator[doors.Doors]:
    with doors.opened() as found:
        yield found


def conversation(template: str) -> doors.Case:
    """Calls with what spellings differ in, results in another order, and a thought."""
    given = {"b": "Zürich", "a": 2**53 + 1, "漢": [10**30, 0.5, None]}
    calls = [("call00001", "now", given), ("call00002", "look", {}), ("call00003", "other", {"b": 1, "a": "\n"})]
    turns = [
        doors.Turn("system", "be brief"),
        doors.Turn("user", "When?\nAnd where?"),
        doors.Turn("assistant", "I look.", "hm", calls),
        *(doors.Turn("tool", f"of {name}", call=name) for name in ("call00003", "call00001", "call00002")),
        doors.Turn("assistant", "noon"),
        doors.Turn("user", "ok"),
    ]
    return doors.Case(template, turns, [], doors.TENANT, 40, random.Random(template))


@pytest.mark.parametrize("template", [name for name in doors.TEMPLATES if name != "loses results"])
def test_one_conversation_is_one_prompt_by_every_door(opened: doors.Doors, template: str) -> None:
    for tools in ([], doors.TOOLS):
        one, tally = conversation(template), Counter[str]()
        one.tools = tools
        answered = template in ("guard", "qwen")
        assert not list(doors.differences(opened, one, tally, answered=answered))
        assert tally["served"] == 1
        asked = [tally[path] for path in (doors.CHAT, doors.MESSAGES, doors.RESPONSES, doors.OLLAMA)]
        assert asked == ([2] * 4 if answered else [1] * 4)
        prompt = opened.tokenizer.decode(opened.prompt(doors.CHAT, doors.as_chat(one), one).ids)
        assert all(
            text in prompt for text in ("Zürich", "9007199254740993", "be brief", "And where?", "I look.", "noon")
        )
        assert prompt.index("of call00001") < prompt.index("of call00002") < prompt.index("of call00003")


def test_a_few_conversations(opened: doors.Doors) -> None:
    tally = Counter[str]()
    assert not doors.differ(opened, 5, range(24), tally, each=12)
    assert tally["served"] > 15
    assert doors.case(5, 3).turns == doors.case(5, 3).turns
    assert doors.case(5, 3).turns != doors.case(6, 3).turns


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--decode"]])
def test_conversations(more: list[str]) -> None:
    cases = size(150, 10_000) // (10 if more else 1)
    assert doors.main(["--cases", str(cases), "--seed", "2", *more]) == 0


def without_options(messages: list[dict[str, Any]]) -> ChatRequest:
    """A conversation as ``/api/chat`` would read it if it looked at its messages alone."""
    return ChatRequest.model_validate({"messages": messages})


@pytest.mark.parametrize(
    ("name", "fault", "door"),
    [
        ("protocol.anthropic.tojson", lambda given: "{}", doors.MESSAGES),
        ("protocol.responses._text", lambda content: "", doors.RESPONSES),
        ("protocol.ollama.tojson", lambda given: json.dumps(given, sort_keys=True), doors.OLLAMA),
        ("protocol.ollama._conversation", lambda body, messages: without_options(messages), doors.OLLAMA),
        ("routes.chat._delta", lambda one, is_old: {"content": ""}, f"{doors.CHAT}, streamed"),
        ("routes.ollama._ending", lambda answer, completion: {"done_reason": "never"}, doors.OLLAMA),
    ],
)
def test_control_a_door_that_differs_is_found(
    opened: doors.Doors, monkeypatch: pytest.MonkeyPatch, name: str, fault: Any, door: str
) -> None:
    monkeypatch.setattr(f"foretell.server.{name}", fault)
    answered = not name.startswith("protocol.")
    found = list(doors.differences(opened, conversation("qwen"), Counter[str](), answered=answered))
    assert found
    assert all(line.startswith(door) for line in found)
