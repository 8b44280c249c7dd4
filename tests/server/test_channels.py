"""Calls as gpt-oss writes them, in both directions: heads of messages, arguments held to a schema, thoughts beside them."""

import json
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from tokenizers import AddedToken

from foretell.engine.request.calls import in_channels, knows_tools
from foretell.engine.request.row import Piece
from foretell.engine.structured.constraint import Constraints
from foretell.engine.structured.thoughts import Thinking, Thoughts, family_named
from foretell.model.load import load_tokenizer
from foretell.server.texts.channels import CONSTRAIN, MARKS, can_call
from foretell.server.texts.reading import TextReading, whole
from foretell.server.texts.tools import ToolUse
from tests.server.conftest import Serve
from tests.server.fake import EOS
from tests.server.test_turns import Asked

SHAPE = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"]}
NOW: Any = {"type": "function", "function": {"name": "now", "description": "the time", "parameters": SHAPE}}
THEN: Any = {"type": "function", "function": {"name": "then", "parameters": {"type": "object", "properties": {}}}}
USER: Any = {"role": "user", "content": "When?"}
TEMPLATE = (
    "{% if tools %}<|start|>developer<|message|>{% for t in tools %}type {{ t.function.name }}{% endfor %}<|end|>"
    "{% endif %}"
    "{% for m in messages %}{% if m.tool_calls %}{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>"
    "{{ m.thinking }}<|end|>{% endif %}<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>"
    "commentary json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% else %}<|start|>{{ m.role }}"
    "<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)  # as OpenAI's does, a turn shows one call, and no text beside it
HEAD = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>"
THOUGHT = "<|channel|>analysis<|message|>Let me see<|end|><|start|>assistant"


def tokenizer() -> Any:
    made = load_tokenizer("bundled")
    marks = (*MARKS, CONSTRAIN, "<|call|>", "<|return|>")
    made.backend_tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    return made


def read(text: str, use: ToolUse) -> Any:
    """(thought, content, [(name, arguments)]) of an output that comes token by token."""
    tokens = tokenizer()
    thoughts = Thoughts(family_named("gpt-oss"), tokens)
    reading, deltas, shown = TextReading(Thinking(thoughts, "before"), use), [], ""
    for token in tokens.encode(text, add_special_tokens=False):
        piece = Piece(token, "", "plain", offset=len(shown))
        more = tokens.decode([token], skip_special_tokens=True)
        shown += more
        deltas += reading.push([piece], more)
    thought, content, calls = whole([*deltas, *reading.finish()])
    assert reading.num_calls == len(calls)
    return thought, content, [(call.name, call.arguments) for call in calls]


def used(choice: Any = "auto", *tools: Any) -> ToolUse:

    return replace(ToolUse.of(tools or (NOW, THEN), choice), channels=True)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (THOUGHT + HEAD + '{"n": 5}', ("Let me see", None, [("now", '{"n": 5}')])),
        (THOUGHT + HEAD + '{"n": 5}<|call|>', ("Let me see", None, [("now", '{"n": 5}')])),
        (" to=functions.now<|channel|>commentary json<|message|>{}", ("", None, [("now", "{}")])),
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + HEAD + "{}",
            ("", "I look.", [("now", "{}")]),
        ),
        (
            HEAD + '{"n": 1}<|end|><|start|>assistant to=functions.then<|channel|>commentary<|message|> {}',
            ("", None, [("now", '{"n": 1}'), ("then", " {}")]),
        ),
        (HEAD + "{}<|end|><|start|>assistant<|channel|>final<|message|>Done.", ("", "Done.", [("now", "{}")])),
        (THOUGHT + "<|channel|>final<|message|>to=functions.now", ("Let me see", "to=functions.now", [])),
        (THOUGHT + "<|channel|>commentary to=functions.now", ("Let me see", "", [])),  # a limit cut the head
        (HEAD, ("", None, [("now", "")])),
        (HEAD + '{"n": ', ("", None, [("now", '{"n": ')])),
    ],
)
def test_messages_to_functions_are_calls(text: str, found: Any) -> None:
    assert read(text, used()) == found


def test_without_tools_they_are_the_answer_as_they_were() -> None:
    tokens = tokenizer()
    reading = TextReading(Thinking(Thoughts(family_named("gpt-oss"), tokens), "before"), None)
    assert whole([*reading.push([], HEAD + '{"n": 5}'), *reading.finish()])[:2] == ("", '{"n": 5}')


def test_however_a_text_is_cut_the_calls_are_the_same() -> None:
    thoughts, rng = Thoughts(family_named("gpt-oss"), tokenizer()), random.Random(1)
    text = THOUGHT + "<|channel|>commentary<|message|>So.<|end|><|start|>assistant" + HEAD + '{"n": 12, "a": "<|en"}'
    for _ in range(60):
        cuts = sorted(rng.sample(range(1, len(text)), rng.randint(0, 12)))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        reading = TextReading(Thinking(thoughts, "before"), used())
        thought, content, calls = whole([d for part in parts for d in reading.push([], part)] + reading.finish())
        assert (thought, content) == ("Let me see", "So.")
        assert [(call.name, call.arguments) for call in calls] == [("now", '{"n": 12, "a": "<|en"}')]


FINAL = "<|channel|>final<|message|>It is late."


@pytest.mark.parametrize(
    ("choice", "text", "permitted"),
    [
        ("auto", THOUGHT + HEAD + '{"n": 5}', True),
        ("auto", THOUGHT + HEAD + '{"n": 500}', False),
        ("auto", THOUGHT + HEAD + '{"n": "x"}', False),
        ("auto", " to=functions.then<|channel|>commentary json<|message|>{}", True),
        ("auto", THOUGHT + "<|channel|>commentary to=functions.other json<|message|>{}", False),
        ("auto", THOUGHT + THOUGHT + FINAL, True),
        ("auto", "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + HEAD + '{"n": 5}', True),
        ("auto", "It is late.", False),
        ("auto", THOUGHT, False),
        ("required", THOUGHT + FINAL, False),
        ("required", THOUGHT + HEAD + '{"n": 5}', True),
        ({"type": "function", "function": {"name": "then"}}, HEAD + '{"n": 5}', False),
    ],
)
def test_outputs_are_held_to_the_form_and_to_the_schema(choice: Any, text: str, permitted: bool) -> None:
    tokens = tokenizer()
    ids = {mark: tokens.convert_tokens_to_ids(mark) for mark in ("<|call|>", "<|return|>")}
    constraint = used(choice).constraint(Constraints(tokens, len(tokens), tuple(ids.values())))
    assert constraint is not None
    assert constraint.permits(tokens.encode(text, add_special_tokens=False)) is permitted


def test_a_format_beside_tools_is_of_the_last_message() -> None:
    tokens = tokenizer()
    constraint = used().constraint(Constraints(tokens, len(tokens), (EOS,)), '("yes" | "no")')
    assert constraint is not None
    for text, permitted in (("yes", True), ("maybe", False)):
        ids = tokens.encode(THOUGHT + "<|channel|>final<|message|>" + text, add_special_tokens=False)
        assert constraint.permits(ids) is permitted


def test_the_template_s_own_form_is_used_where_calls_can_come_so(serve: Serve) -> None:
    assert knows_tools(TEMPLATE)
    assert in_channels(TEMPLATE)
    assert can_call(TEMPLATE, tokenizer())
    assert not can_call(TEMPLATE, load_tokenizer("bundled"))  # which spells the marks
    for options, more, own in (
        ({}, {}, True),
        ({}, {"separate_reasoning": False}, False),
        ({"reasoning_parser": "none"}, {}, False),
    ):
        asked = Asked(serve, TEMPLATE, tokenizer(), **options)
        prompt = asked(USER, tools=[NOW], **more)
        assert ("type now" in prompt, "<tool_call>" in prompt) == (own, not own), more


def test_calls_and_results_of_a_conversation_are_in_the_form(serve: Serve) -> None:
    said = {
        "role": "assistant", "content": None, "reasoning_content": "hm",
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "now", "arguments": '{"n":5}'}}],
    }  # fmt: skip
    prompt = Asked(serve, TEMPLATE, tokenizer())(
        USER, said, {"role": "tool", "tool_call_id": "a", "content": "late"}, tools=[NOW]
    )
    call = 'assistant to=functions.now<|channel|>commentary json<|message|>{"n": 5}<|call|>'
    assert f"analysis<|message|>hm<|end|><|start|>{call}<|start|>tool<|message|>late<|end|>" in prompt


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_budget_ends_the_thought_and_a_call_can_follow(serve: Serve, choice: str) -> None:
    asked = Asked(serve, TEMPLATE, tokenizer())
    assert asked.post(USER, tools=[NOW], tool_choice=choice, thinking_budget=2).status_code == 200
    submission, tokens = asked.service.submitted[-1], asked.tokenizer

    def after(text: str) -> set[str]:
        ids = [*submission.prompt_ids, *tokens.encode(text, add_special_tokens=False)]
        made = submission.params.logits_processor(torch.tensor(ids), torch.zeros(8200))  # type: ignore[misc]
        return set(tokens.convert_ids_to_tokens(torch.nonzero(made > -torch.inf)[:, 0].tolist()))

    opener = "<|channel|>analysis<|message|>"
    assert "<|channel|>" in after("")
    assert len(after(opener)) > 1000
    assert after(opener + "a b c") == {"<|end|>"}
    assert after(opener + "a b c<|end|>") == {"<|start|>"}
    following = after(opener + "a b c<|end|><|start|>assistant")
    assert "<|channel|>" in following
    end = json.dumps({"n": 5})
    assert after(THOUGHT.replace("Let me see", "a") + HEAD + end) <= {"</s>", *tokens.convert_ids_to_tokens([EOS, 2])}


def test_a_call_by_http_whole_and_streamed(serve: Serve) -> None:
    """The thought apart, one call, and its finish reason; Anthropic's and OpenAI's newer doors read the same."""
    asked = Asked(serve, TEMPLATE, tokenizer())
    asked.service.script = lambda _: [
        *asked.tokenizer.encode(THOUGHT + HEAD + '{"n": 5}', add_special_tokens=False), EOS,
    ]  # fmt: skip
    choice = asked.post(USER, tools=[NOW]).json()["choices"][0]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"], choice["finish_reason"]) == (
        "Let me see", None, "tool_calls",
    )  # fmt: skip
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "now", "arguments": '{"n": 5}'}]
    lines = asked.post(USER, tools=[NOW], stream=True).text.splitlines()
    deltas = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    parts = [call for each in deltas for call in each["delta"].get("tool_calls") or []]
    assert parts[0]["function"] == {"name": "now", "arguments": ""}
    assert "".join(call["function"]["arguments"] for call in parts) == '{"n": 5}'
    assert "".join(each["delta"].get("reasoning_content") or "" for each in deltas) == "Let me see"
    assert not "".join(each["delta"].get("content") or "" for each in deltas)
    assert [each["finish_reason"] for each in deltas if each["finish_reason"]] == ["tool_calls"]
    tool = {"name": "now", "input_schema": SHAPE}
    given = {"messages": [USER], "tools": [tool], "max_tokens": 99, "model": "fake"}
    blocks = asked.client.post("/v1/messages", json=given).json()["content"]
    assert [block["type"] for block in blocks][-1] == "tool_use"
    assert blocks[-1]["input"] == {"n": 5}
    items = asked.client.post(
        "/v1/responses", json={"input": "When?", "tools": [{"type": "function", "name": "now", "parameters": SHAPE}]}
    ).json()["output"]
    assert items[-1]["type"] == "function_call"
    assert items[-1]["arguments"] == '{"n": 5}'
