"""Thoughts apart from answers, on every route: whole and streamed, by template, with a budget and formats behind them."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
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
from foretell.engine.structured.thinking import ThinkingProcessor
from foretell.engine.structured.thoughts import Thoughts, family_named
from foretell.model.load import load_tokenizer
from foretell.server.app import build_app
from foretell.server.options import ServerOptions
from foretell.server.reading import Reading, Thinking, whole
from foretell.server.tools import ToolUse
from foretell.service.service import Service
from tests.server.conftest import Serve
from tests.server.fake import EOS, ByteTokenizer, FakeService
from tests.server.live import live

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
    assert submission.params.logits_processor is not None
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
    reading = Reading(Thinking(thoughts, "before"), None)
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
    assert Reading(None, None).push([], "") == []
    reading = Reading(None, ToolUse.of([NOW]))
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
    thought, answer, _ = whole(Reading(Thinking(thoughts, "thought"), None).push(made[0].pieces, made[0].text))
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
