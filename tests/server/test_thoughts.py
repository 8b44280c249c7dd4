"""Thoughts apart from answers, on every route: whole and streamed, by template, with a budget and formats behind them."""

import json
import random
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tokenizers import AddedToken

from foretell import Engine
from foretell.core.errors import ConfigError
from foretell.engine.request.row import Piece
from foretell.engine.request.text import TextStream
from foretell.engine.structured.constraint import Constraints
from foretell.engine.structured.thinking import GOVERNS, ThinkingProcessor
from foretell.engine.structured.thoughts import Thinking, Thoughts, family_named
from foretell.model.load import load_tokenizer
from foretell.server.app import build_app
from foretell.server.options import ServerOptions
from foretell.server.texts.reading import TextReading, whole
from foretell.server.texts.tools import ToolUse
from foretell.service.service import Service
from tests.server.conftest import Serve
from tests.server.fake import EOS, VOCAB, ByteTokenizer, FakeService
from tests.server.live import live
from tests.stress import size

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
USER: Any = {"role": "user", "content": "a"}
NOW: Any = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


class Thinker(ByteTokenizer):
    """Writes <think> and </think> itself; enable_thinking false closes the thought at once."""

    chat_template = "<think> and </think>; reads enable_thinking and m.reasoning_content; tools as <tool_call>"

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        if options.pop("opens", False):
            return super().apply_chat_template(messages, **options) + "<think>\n"
        if options.get("enable_thinking") is False:
            return super().apply_chat_template(messages, **options) + "<think>\n\n</think>\n\n"
        return super().apply_chat_template(messages, **options)


def thinking(text: str, tokenizer: Any = None) -> FakeService:
    """A service that writes this."""
    service = FakeService(lambda _: [*text.encode(), EOS])
    service.engine.tokenizer = tokenizer or Thinker()
    return service


def scripted(
    *texts: str, template: str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
) -> FakeService:
    """A service whose n-th answer is the n-th text, with a tokenizer that grammars can be made of."""
    service = FakeService()
    tokenizer = service.engine.tokenizer = load_tokenizer("bundled")
    tokenizer.chat_template = LOOP + "{{ m.content }}{% endfor %}{# <think> #}"
    model = service.engine.model
    model.spec = replace(model.spec, vocab_size=8200, eos_token_ids=(EOS, 2))
    said = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    assert EOS not in {token for ids in said for token in ids}
    service.script = lambda _: [*said[min(len(service.submitted), len(said)) - 1], EOS]
    return service


def chat(client: httpx.Client, **more: Any) -> Any:
    answer = client.post(CHAT, json={"messages": [USER], **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(client: httpx.Client, **more: Any) -> tuple[str, str, list[str]]:
    """(thought, content, what came in turn) of a stream."""
    answer = client.post(CHAT, json={"messages": [USER], "stream": True, **more})
    thought, content, order = "", "", list[str]()
    for line in answer.text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                thought += choice["delta"].get("reasoning_content") or ""
                content += choice["delta"].get("content") or ""
                kinds = [kind for kind in ("reasoning_content", "content", "tool_calls") if choice["delta"].get(kind)]
                order += [kind for kind in kinds if [kind] != order[-1:]]
    return thought, content, order


TEXT = "<think>\nIt is é.\n</think>\n\nHello <think>"


def test_a_thought_stands_apart_whole_and_streamed(serve: Serve) -> None:
    client = serve(thinking(TEXT))
    reply = chat(client)
    message = reply["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("It is é.", "Hello <think>")
    assert streamed(client) == ("It is é.", "Hello <think>", ["reasoning_content", "content"])
    details = reply["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == len("\nIt is é.\n".encode())
    assert chat(client, separate_reasoning=False)["choices"][0]["message"]["content"] == TEXT


def test_a_thought_that_the_prompt_opened(serve: Serve) -> None:
    client = serve(thinking("hm</think>Hi"))
    opened: Any = {"chat_template_kwargs": {"opens": True}}
    assert chat(client, **opened)["choices"][0]["message"]["reasoning_content"] == "hm"
    assert streamed(client, **opened)[:2] == ("hm", "Hi")
    assert chat(client)["choices"][0]["message"] == {"role": "assistant", "content": "hm</think>Hi", "refusal": None}
    closed = chat(client, enable_thinking=False)["choices"][0]["message"]
    assert closed == {"role": "assistant", "content": "hm</think>Hi", "refusal": None}


def test_a_thought_that_a_limit_cut_off(serve: Serve) -> None:
    reply = chat(serve(thinking("<think>hm and more")), max_tokens=9)["choices"][0]
    assert (reply["message"]["reasoning_content"], reply["message"]["content"]) == ("hm", "")
    assert reply["finish_reason"] == "length"


def test_calls_are_looked_for_behind_the_thought_alone(serve: Serve) -> None:
    client = serve(scripted(f"<think>{CALL}</think>\nSo: {CALL}"))
    choice = chat(client, tools=[NOW])["choices"][0]
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == (CALL, "So:")
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["now"]
    assert choice["finish_reason"] == "tool_calls"
    assert streamed(client, tools=[NOW]) == (CALL, "So:", ["reasoning_content", "content", "tool_calls"])


def test_the_parser_can_be_chosen_or_turned_off(serve: Serve) -> None:
    off = serve(thinking(TEXT), reasoning_parser="none")
    assert chat(off)["choices"][0]["message"]["content"] == TEXT
    other = serve(thinking("[THINK]hm[/THINK]Hi"), reasoning_parser="mistral")
    assert chat(other)["choices"][0]["message"]["reasoning_content"] == "hm"
    plain = serve(thinking(TEXT, ByteTokenizer()))
    assert chat(plain, separate_reasoning=True)["choices"][0]["message"]["content"] == TEXT
    assert chat(plain)["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    with pytest.raises(
        ConfigError, match="'hm' is not known; there are auto, none, gpt-oss, mistral, gemma, seed, think"
    ):
        ServerOptions(reasoning_parser="hm")
    none = FakeService()
    none.engine.tokenizer = None
    with pytest.raises(ConfigError, match="has none"):
        build_app(none, ServerOptions(reasoning_parser="think"))  # type: ignore[arg-type]


def test_responses_have_an_item_of_what_was_thought(serve: Serve) -> None:
    client = serve(thinking(TEXT))
    asked: Any = {"input": "a", "include": ["message.output_text.logprobs"]}
    reply = client.post(RESPONSES, json=asked).json()
    assert [item["type"] for item in reply["output"]] == ["reasoning", "message"]
    assert reply["output"][0]["content"] == [{"type": "reasoning_text", "text": "It is é."}]
    (part,) = reply["output"][1]["content"]
    assert part["text"] == "Hello <think>"
    assert "".join(one["token"] for one in part["logprobs"]).strip() == "Hello <think>"
    assert reply["usage"]["output_tokens_details"] == {"reasoning_tokens": len("\nIt is é.\n".encode())}
    lines = client.post(RESPONSES, json={**asked, "stream": True}).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    thought = "".join(one["delta"] for one in events if one["type"] == "response.reasoning_text.delta")
    assert thought == "It is é."
    assert events[-1]["response"]["output"][1]["content"] == reply["output"][1]["content"]


# -- the budget, and what holds an answer --------------------------------------------------------------------------------


def permitted(service: FakeService, text: str) -> set[int]:
    """The bytes that the last submission's processor permits after a text."""
    submission = service.submitted[-1]
    ids = torch.tensor([*submission.prompt_ids, *text.encode()])
    made = submission.params.logits_processor(ids, torch.zeros(258))
    return set(torch.nonzero(made > -torch.inf)[:, 0].tolist())


@pytest.mark.parametrize(
    ("path", "given"),
    [
        (CHAT, {"messages": [USER], "thinking_budget": 2}),
        (RESPONSES, {"input": "a", "thinking_budget": 2}),
        ("/v1/messages", {"messages": [USER], "thinking": {"type": "enabled", "budget_tokens": 2}}),
    ],
)
def test_a_budget_forces_the_end_of_the_thought(serve: Serve, path: str, given: Any) -> None:
    service = thinking(TEXT)
    assert serve(service).post(path, json=given).status_code == 200
    assert len(permitted(service, "<think>a")) == 258
    for done in range(len("</think>")):
        assert permitted(service, "<think>ab" + "</think>"[:done]) == {b"</think>"[done]}
    assert len(permitted(service, "<think>ab</think>")) == 258


def test_a_thought_that_the_template_cannot_turn_off_is_ended_at_once(serve: Serve) -> None:
    class Stubborn(Thinker):
        chat_template = "<think>"

        def apply_chat_template(self, messages: Any, **options: Any) -> str:
            return ByteTokenizer.apply_chat_template(self, messages, **options) + "<think>"

    for given in ({"enable_thinking": False}, {"reasoning_effort": "none"}):
        service = thinking("</think>Hi", Stubborn())
        chat(serve(service), **given)
        assert permitted(service, "") == {ord("<")}


def test_a_template_that_reads_the_budget_is_told_of_it(serve: Serve) -> None:
    from tests.server.test_turns import Asked

    asked = Asked(serve, LOOP + "{{ m.content }}{% endfor %}{% if thinking_budget == 0 %}no {% endif %}<seed:think>")
    assert asked(USER, thinking_budget=0) == "<user>ano <seed:think>"
    assert asked(USER, enable_thinking=False) == "<user>ano <seed:think>"
    assert asked(USER, thinking_budget=7) == "<user>a<seed:think>"


def test_what_has_no_effect_is_said(serve: Serve) -> None:
    body: Any = {"messages": [USER], "thinking_budget": 3, "enable_thinking": True}
    answer = serve(thinking("a", ByteTokenizer())).post(CHAT, json=body)
    assert answer.headers["x-foretell-without-effect"] == "enable_thinking, thinking_budget"
    assert "x-foretell-without-effect" not in serve(thinking("a")).post(CHAT, json=body).headers
    both = serve(thinking("a")).post(CHAT, json={**body, "reasoning_effort": "none"})
    assert (both.status_code, both.json()["error"]["param"]) == (400, "enable_thinking")


# -- what governs the answer alone -----------------------------------------------------------------------------------------

QUOTING = "<think>\na STOP b\n\nc</think>\n\nHello STOP x"


def stopped(client: httpx.Client, path: str, stream: bool, *stops: str) -> tuple[str, str, str]:
    """(thought, answer, why it ended) by a route."""
    from tests.stress.doors import READ, Said  # which reads templates of tests that import this file

    if path == CHAT:
        body: Any = {"messages": [USER], "stop": list(stops)}
    elif path == RESPONSES:
        body = {"input": "a", "stop": list(stops)}
    elif path == "/v1/messages":
        body = {"messages": [USER], "max_tokens": 99, "stop_sequences": list(stops)}
    else:
        asked: Any = {"prompt": "a"} if path == "/api/generate" else {"messages": [USER]}
        body = {**asked, "options": {"stop": list(stops)}}
    answer = client.post(path, json={**body, "stream": stream})
    assert answer.status_code == 200, answer.text
    parts = [line.removeprefix("data: ") for line in answer.text.splitlines()] if stream else [answer.text]
    said = Said()
    READ[path]([json.loads(part) for part in parts if part.startswith("{")], said)
    return said.thought, said.text, said.end


@pytest.mark.parametrize("path", [CHAT, RESPONSES, "/v1/messages", "/api/chat", "/api/generate"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_ends_the_answer_and_no_thought(serve: Serve, path: str, stream: bool) -> None:
    client = serve(thinking(QUOTING))
    assert stopped(client, path, stream, "STOP") == ("a STOP b\n\nc", "Hello ", "stop")
    assert stopped(client, path, stream, "\n\n", "ello") == ("a STOP b\n\nc", "H", "stop")  # blanks are the form's
    assert stopped(client, path, stream, "c</think>", "\n\nHello", "</think>") == (
        "a STOP b\n\nc",
        "Hello STOP x",
        "stop",
    )
    cut = serve(thinking("<think>\na STOP b"))
    assert stopped(cut, path, stream, "STOP") == ("a STOP b", "", "stop")  # by the model's own end


def test_stop_texts_of_a_thought_that_the_prompt_opened_and_of_texts_without_thoughts(serve: Serve) -> None:
    opened: Any = {"chat_template_kwargs": {"opens": True}, "stop": ["STOP"]}
    client = serve(thinking("a STOP b</think>\nHello STOP x"))
    assert chat(client, **opened)["choices"][0]["message"]["reasoning_content"] == "a STOP b"
    assert chat(client, **opened)["choices"][0]["message"]["content"] == "Hello "
    assert streamed(client, **opened)[:2] == ("a STOP b", "Hello ")
    assert chat(client, stop="STOP")["choices"][0]["message"]["content"] == "a "
    assert (
        chat(client, stop="STOP", separate_reasoning=False, chat_template_kwargs={"opens": True})["choices"][0][
            "message"
        ]["content"]
        == "a "
    )
    raw = client.post("/v1/completions", json={"prompt": "a", "stop": ["STOP"], "max_tokens": 99}).json()
    assert raw["choices"][0]["text"] == "a "
    generated = {"prompt": "a", "raw": True, "stream": False, "options": {"stop": "STOP"}}
    assert client.post("/api/generate", json=generated).json()["response"] == "a "
    for text, stop in (("\n", "\n"), ("<thi", "<t")):  # of which it is never known whether it would have been a mark
        assert chat(serve(thinking(text)), stop=stop)["choices"][0]["message"]["content"] == ""
        assert streamed(serve(thinking(text)), stop=stop)[:2] == ("", "")
    off = serve(thinking(QUOTING), reasoning_parser="none")
    assert chat(off, stop="STOP")["choices"][0]["message"]["content"] == "<think>\na "


@pytest.mark.parametrize("stream", [False, True])
def test_stop_tokens_end_the_answer_and_the_models_own_end_everything(serve: Serve, stream: bool) -> None:
    def said(client: httpx.Client, **more: Any) -> tuple[str, str]:
        if stream:
            return streamed(client, **more)[:2]
        message = chat(client, **more)["choices"][0]["message"]
        return message.get("reasoning_content", ""), message["content"]

    client, star = serve(thinking("<think>a*b</think>\n\nc*d")), ord("*")
    assert said(client, stop_token_ids=[star]) == ("a*b", "c")
    assert said(client, stop_token_ids=[ord("\n")]) == ("a*b", "c*d")
    assert said(client, stop_token_ids=[ord(">")]) == ("a*b", "c*d")  # a mark's
    raw = client.post("/v1/completions", json={"prompt": "a", "stop_token_ids": [star], "max_tokens": 99}).json()
    assert raw["choices"][0]["text"] == "<think>a"
    assert said(client, stop_token_ids=[star], separate_reasoning=False)[1] == "<think>a"
    assert said(serve(thinking("a*b")), stop_token_ids=[star]) == ("", "a")
    over = FakeService(lambda _: [*b"<think>a", EOS, *b"b</think>c", EOS])
    over.engine.tokenizer = Thinker()
    assert said(serve(over)) == ("a", "")
    assert said(serve(over), ignore_eos=True, max_tokens=18, stop_token_ids=[ord("a"), ord("c")]) == ("ab", "")


def test_least_tokens_forbid_stop_tokens_in_the_answer_alone(serve: Serve) -> None:
    service, star = thinking("<think>a*b</think>\n\nc*d"), ord("*")
    client = serve(service)
    chat(client, stop_token_ids=[star], min_tokens=22)
    everything = set(range(VOCAB))
    for text in ("<think>a", "<think>a</think", "<think>a</thi"):
        assert permitted(service, text) == everything, text
    for text in ("<thi", "<think>a</think>", "<think>a</think>\n", "<think>a</think>\nb"):
        assert permitted(service, text) == everything - {star}, text
    assert permitted(service, "<think>aaaaa</think>\nb") == everything
    assert permitted(service, "") == everything - {star}  # an answer without a thought would begin with it
    chat(client, stop_token_ids=[star], min_tokens=22, separate_reasoning=False)
    assert service.submitted[-1].params.logits_processor is None
    chat(client, stop_token_ids=[star])
    assert service.submitted[-1].params.logits_processor is None


def test_allowed_tokens_hold_the_answer_alone(serve: Serve) -> None:
    service = thinking("<think>hm</think>Hi")
    client = serve(service)
    allowed = [ord("H"), ord("i"), EOS]
    assert chat(client, allowed_token_ids=allowed)["choices"][0]["message"]["reasoning_content"] == "hm"
    assert permitted(service, "<think>h") == set(range(VOCAB)) - {EOS}
    assert permitted(service, "<think>hm</think>") == set(allowed)
    assert permitted(service, "") == {*allowed, ord("<")}
    chat(client, allowed_token_ids=allowed, thinking_budget=1)
    assert permitted(service, "<think>h") == {ord("<")}
    assert permitted(service, "<think>h</think>") == set(allowed)
    client.post("/v1/completions", json={"prompt": "a", "allowed_token_ids": allowed, "max_tokens": 9})
    assert permitted(service, "<think>h") == set(allowed)


def test_log_probabilities_are_of_the_answer(serve: Serve) -> None:
    for text, content in (
        (TEXT, "Hello <think>"),
        ("\n Hi", "\n Hi"),
        ("\n", "\n"),
        ("<thi", "<thi"),
        ("<think>hm", ""),
    ):
        client = serve(thinking(text))
        choice = chat(client, logprobs=True)["choices"][0]
        assert choice["message"]["content"] == content
        told = bytes(byte for one in choice["logprobs"]["content"] for byte in one["bytes"])
        assert told.decode() == content
        lines = client.post(CHAT, json={"messages": [USER], "logprobs": True, "stream": True}).text.splitlines()
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        told_so = [each["logprobs"] for chunk in chunks for each in chunk["choices"] if each["logprobs"]]
        found = [one for each in told_so for one in each["content"]]
        assert found == choice["logprobs"]["content"]
    everything = chat(serve(thinking(TEXT)), logprobs=True, separate_reasoning=False)["choices"][0]["logprobs"][
        "content"
    ]
    assert len(everything) == len(TEXT.encode())


WORDS = {
    "think": ("<think>", "</think>", "<thi", "</th", "\n", " ", "S", "ST", "OP", "STOP", "a", "é", "TO"),
    "gpt-oss": (
        "<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|end|>", "<|start|>assistant", "\n", "S", "ST",
        "OP", "STOP", "a", "é", "<", "<|",
    ),
}  # fmt: skip


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", sorted(WORDS))
def test_an_answer_is_cut_where_the_client_would_cut_it(name: str, special: bool) -> None:
    """Random outputs: with a stop text the thoughts are the same, and the answer ends before its first one."""
    family = family_named(name)
    marks = sorted(
        {mark for marks in family.marks.values() for mark, _ in marks} | {"<|channel|>", "<|start|>", "<|end|>"}
    )

    class Marked(ByteTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return [300 + marks.index(text)] if special and text in marks else list(text.encode())

        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
            made = b"".join(
                bytes([one]) if one < 256 else b"" if skip_special_tokens or one < 300 else marks[one - 300].encode()
                for one in token_ids
            )
            return made.decode("utf-8", "replace")

    tokenizer = Marked()
    thoughts, rng, seen = Thoughts(family, tokenizer), random.Random(3), 0

    def read_whole(tokens: Sequence[int], start: Any, *stops: str) -> tuple[str, str, bool]:
        how = Thinking(thoughts, start)
        stream, reading = TextStream(tokenizer, stops, how), TextReading(how, None)
        deltas = []
        for left, token in zip(range(len(tokens) - 1, -1, -1), tokens, strict=True):
            offset = len(stream.text)
            stream.push(token)
            if not left or stream.stopped:
                stream.finish()
            deltas += reading.push([Piece(token, "", "plain", offset=offset)], stream.take())
            if stream.stopped:
                break
        thought, content, _ = whole([*deltas, *reading.finish()])
        return thought, content or "", stream.stopped

    opener, closer, other, *_ = WORDS[name]
    for _ in range(size(200, 3000)):
        words = rng.choices(WORDS[name], k=rng.randrange(1, 12))
        words = [*(opener, "STOP", closer, "a", other, "STOP") * rng.randrange(2), *words]
        tokens = [token for word in words for token in tokenizer.encode(word)]
        start: Any = rng.choice(("before", "thought", "answer"))
        stops = rng.sample(("STOP", "TO", "aS", "éa", *(("\n", " a") if family.is_bare else ())), rng.randrange(1, 3))
        thought, content, _ = read_whole(tokens, start)
        first, cut, was_stopped = read_whole(tokens, start, *stops)
        places = [(content.find(stop) + len(stop), content.find(stop)) for stop in stops if stop in content]
        assert was_stopped == bool(places), (words, start, stops, thought, content, cut)
        wanted = content[: min(places)[1]] if places else content
        assert cut == wanted or cut + "\n\n" == wanted, (words, start, stops)  # before a message of its own
        assert thought.startswith(first) if places else thought == first
        seen += bool(places) and "STOP" in thought
    assert seen > 1


def test_stops_of_an_answer_with_and_without_guesses(bundled: Service) -> None:
    """Thoughts of the bundled pair that a budget ends: a stop text of both is met in the answer, at the same token."""
    begun = {"role": "assistant", "content": "<think>Let me see"}

    def asked(url: str, seed: int = 7, **more: Any) -> Any:
        given = {"messages": [USER, begun], "continue_final_message": True, "max_tokens": 40, "thinking_budget": 9}
        with httpx.Client(base_url=url, timeout=120) as client:
            choice = client.post(CHAT, json={**given, "seed": seed, "return_token_ids": True, **more}).json()[
                "choices"
            ][0]
        message = choice["message"]
        return message.get("reasoning_content", ""), message["content"], choice["token_ids"], choice["finish_reason"]

    with live(build_app(bundled, ServerOptions(reasoning_parser="think"))) as url:
        thought, content, ids, _ = asked(url)
        stop = next(word for word in re.findall(r"\w{4,}", content) if word in thought)
        token = next(one for place, one in enumerate(ids) if place > len(ids) // 2 and one in ids[:8])
        for more in ({"stop": stop}, {"stop_token_ids": [token]}, {"stop_token_ids": [token], "min_tokens": 33}):
            found = asked(url, **more)
            assert found == asked(url, **more, speculative=False), more
            assert found[0] == thought, more
            assert (found[3], len(found[2]) > 33) == ("stop", "min_tokens" in more), more
        assert asked(url, stop=stop)[1] == content[: content.index(stop)]
        assert asked(url, stop_token_ids=[token])[2] == ids[: ids.index(token, 20) + 1]


def test_the_page_says_what_governs_what() -> None:
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| the (thought|answer|output) \| ([^|]+) \|", page, flags=re.MULTILINE)
    told = {name: kind for kind, names in rows for name in re.findall(r"`([a-z_]+)`", re.sub(r"\(.*?\)", "", names))}
    assert told == GOVERNS


# -- marks that the text leaves out --------------------------------------------------------------------------------------


@pytest.mark.parametrize("special", [False, True])
def test_marks_that_decoding_skips_are_put_back_where_they_stood(special: bool) -> None:
    tokenizer = load_tokenizer("bundled")
    backend, texts = tokenizer.backend_tokenizer, ("<|channel|>", "<|message|>", "<|end|>", "<|start|>")
    add = backend.add_special_tokens if special else backend.add_tokens
    add([AddedToken(text, special=special, normalized=False) for text in texts])
    thoughts = Thoughts(family_named("gpt-oss"), tokenizer)
    assert len(thoughts.hidden) == 4 * special
    text = "<|channel|>analysis<|message|>hm é<|end|><|start|>assistant<|channel|>final<|message|>Grüße, STOP here"
    stream, pieces = TextStream(tokenizer, ("STOP it",)), list[Piece]()
    for token in tokenizer.encode(text, add_special_tokens=False):
        offset = len(stream.text)
        stream.push(token)
        pieces.append(Piece(token, stream.take(), "plain", offset=offset))
    stream.finish()
    reading = TextReading(Thinking(thoughts, "before"), None)
    deltas = [delta for piece in pieces for delta in reading.push([piece], piece.text)]
    assert whole([*deltas, *reading.push([], stream.take()), *reading.finish()])[:2] == ("hm é", "Grüße, STOP here")


# -- earlier thoughts ----------------------------------------------------------------------------------------------------

SCHEMA: Any = {
    "type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"],
    "additionalProperties": False,
}  # fmt: skip
LOOP = "{% for m in messages %}<{{ m.role }}>"
SAID: Any = {"role": "assistant", "content": "b", "reasoning_content": "hm"}


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (LOOP + "{{ m.reasoning_content }}|{{ m.content }}{% endfor %}", "hm|b"),
        (LOOP + "{{ m.thinking }}|{{ m.content }}<|channel|>{% endfor %}", "hm|b"),
        (LOOP + "{{ m['reasoning'] }}|{{ m.content }}{% endfor %}", "hm|b"),
        (LOOP + "{{ m.content.split('</think>')[-1] }}{% endfor %}", "\n\nb"),
        (LOOP + "{{ m.content.split('</think>')[0] }}{% endfor %}", "<think>\nhm\n"),
        (
            LOOP + "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
            "{% if c.type == 'thinking' %}[THINK]{{ c.thinking }}[/THINK]{% else %}{{ c.text }}{% endif %}"
            "{% endfor %}{% endif %}{% endfor %}",
            "[THINK]hm[/THINK]b",
        ),
        (LOOP + "{{ m.content }}{% endfor %}", "b"),
    ],
    ids=["by name", "gpt-oss", "another name", "cut off", "cut out", "mistral", "unread"],
)  # fmt: skip
def test_earlier_thoughts_stand_where_the_template_reads_them(serve: Serve, template: str, shown: str) -> None:
    from tests.server.test_turns import Asked

    assert (
        Asked(serve, template)(USER, SAID, USER).split("<assistant>")[1].split("<user>")[0].replace("<|channel|>", "")
        == shown
    )


def test_a_format_begins_behind_the_thought(serve: Serve) -> None:
    """With a tokenizer that grammars can be made of: in the thought anything but an end, then the schema alone."""
    from tests.server.test_turns import Asked

    asked = Asked(serve, LOOP + "{{ m.content }}{% endfor %}<think>{# </think> #}")
    shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
    assert asked.post(USER, response_format=shape).status_code == 200
    submission = asked.service.submitted[-1]

    def after(text: str) -> set[int]:
        ids = [*submission.prompt_ids, *asked.tokenizer.encode(text, add_special_tokens=False)]
        made = submission.params.logits_processor(torch.tensor(ids), torch.zeros(8200))  # type: ignore[misc]
        return set(torch.nonzero(made > -torch.inf)[:, 0].tolist())

    brace, word = asked.tokenizer.encode("{")[-1], asked.tokenizer.encode("Hello")[-1]
    assert {brace, word} <= after("Let me see")
    assert not {EOS, 2} & after("Let me see")
    assert brace in after("Let me see.</think>")
    assert word not in after("Let me see.</think>")
    assert after('Let me see.</think>{"a": 1}') <= {EOS, 2}


def test_use_without_thoughts_is_as_before() -> None:
    assert TextReading(None, None).push([], "") == []
    reading = TextReading(None, ToolUse.of([NOW]))
    thought, content, calls = whole([*reading.push([], f"a {CALL}"), *reading.finish()])
    assert (thought, content, [call.name for call in calls], reading.num_calls) == ("", "a", ["now"], 1)


def test_the_same_answer_with_and_without_guesses() -> None:
    """The bundled pair, a thought that ends by its budget, and a schema behind it."""
    engine = Engine.load("bundled", speculative={"method": "draft_model", "num_speculative_tokens": 4})
    spec, prompt = engine.model.spec, engine.chat_prompt([USER])
    constraint = Constraints(engine.tokenizer, spec.vocab_size, spec.eos_token_ids).json_schema(SCHEMA)
    thoughts, budget = Thoughts(family_named("think"), engine.tokenizer), 5
    made = []
    for one in (engine, engine.with_method(None)):
        processor = ThinkingProcessor(
            thoughts, len(prompt), "thought", budget, constraint.processor(0), spec.eos_token_ids
        )
        made.append(one.generate(prompt, logits_processor=processor, seed=budget, max_new_tokens=60))
    assert made[0].token_ids == made[1].token_ids
    assert made[0].num_accepted_tokens > 0
    thought, answer, _ = whole(TextReading(Thinking(thoughts, "thought"), None).push(made[0].pieces, made[0].text))
    assert thought
    assert thoughts.count(made[0].token_ids, "thought") == budget
    assert list(json.loads(answer or "")) == ["a"]


def test_budgets_of_requests_that_are_decoded_together(bundled: Service) -> None:
    """Thoughts that the client began, each with its own budget and a schema behind it: as one by one without guesses."""
    shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
    begun = {"role": "assistant", "content": "<think>Let me see"}

    def asked(url: str, budget: int, **more: Any) -> tuple[str, str, int]:
        given = {"messages": [USER, begun], "continue_final_message": True, "response_format": shape, "max_tokens": 40}
        with httpx.Client(base_url=url, timeout=120) as client:
            answer = client.post(CHAT, json={**given, "seed": budget, "thinking_budget": budget, **more}).json()
        message, details = answer["choices"][0]["message"], answer["usage"]["completion_tokens_details"]
        return message.get("reasoning_content", ""), message["content"], details["reasoning_tokens"]

    with live(build_app(bundled, ServerOptions(reasoning_parser="think"))) as url, ThreadPoolExecutor(4) as pool:
        budgets = (0, 2, 5, 9)
        together = list(pool.map(lambda budget: asked(url, budget), budgets))
        assert together == [asked(url, budget, speculative=False) for budget in budgets]
    assert [count for _, _, count in together] == [0, 2, 5, 9]
    assert all(list(json.loads(answer)) == ["a"] for _, answer, _ in together)
