"""Every field of every request: what it changes, looked at; and what is said where its value cannot be.

A field that a test sends and never looks at may be turned round, or lost, unseen: so the tables here name all fields of all
models, and ``test_every_field_is_in_a_table`` finds one that is missing.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import fields as fields_of, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import httpx
import pytest
import torch
from pydantic import BaseModel

from foretell.core.params import SamplingParams
from foretell.engine.structured.thinking import GOVERNS
from foretell.model.load import load_tokenizer
from foretell.server.app import build_app
from foretell.server.errors import ApiError, parse
from foretell.server.protocol import anthropic, ollama, requests, responses
from tests.server.fake import EOS, FakeService
from tests.server.live import live

CHAT, TEXT, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES, OLLAMA, GENERATE, TOKENIZE = "/v1/responses", "/api/chat", "/api/generate", "/tokenize"
COUNT = MESSAGES + "/count_tokens"
USER: Any = {"role": "user", "content": "a"}
BASE: dict[str, Any] = {
    CHAT: {"messages": [USER]}, TEXT: {"prompt": "a"}, MESSAGES: {"messages": [USER], "max_tokens": 90},
    RESPONSES: {"input": "a"}, OLLAMA: {"messages": [USER], "stream": False},
    GENERATE: {"prompt": "a", "stream": False}, TOKENIZE: {"prompt": "a"}, "/detokenize": {"tokens": [70]},
    "/api/show": {}, COUNT: {"messages": [USER]},
}  # fmt: skip
MODELS: tuple[type[BaseModel], ...] = (
    requests.ChatRequest, requests.CompletionRequest, anthropic.MessagesRequest, responses.ResponsesRequest,
    ollama.OllamaChatRequest, ollama.GenerateRequest, ollama.ShowRequest, ollama.PullRequest, ollama.EmbedRequest,
    ollama.OldEmbedRequest, requests.TokenizeRequest,
    requests.DetokenizeRequest, requests.EmbeddingRequest, requests.ExplainRequest, requests.LearnerRequest,
)  # fmt: skip
THOUGHT = "<think>hm</think>"
SIGNS = 'a1{"<\n'
OBJECT: Any = {"type": "object", "properties": {"q": {"type": "integer"}}, "required": ["q"]}
LEFT_OUT: Any = {"type": "object", "properties": {"q": {"type": "array", "uniqueItems": True}}}
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.name }}{{ m.reasoning_content }}{{ m.content }}{% endfor %}"
    "{% if enable_thinking is defined %}[thinks {{ enable_thinking }}]{% endif %}"
    "{% if reasoning_effort is defined %}[effort {{ reasoning_effort }}]{% endif %}"
    "{% if verbosity is defined %}[words {{ verbosity }}]{% endif %}{{ shout }}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{# <think> #}"
)


class Looking:
    """A server, and what each request changes in what it hands to the engine and answers."""

    def __init__(self, client: httpx.Client, service: FakeService) -> None:
        self.client, self.service = client, service
        self._known: dict[str, dict[str, Any]] = {}

    def __call__(self, path: str, body: Any) -> dict[str, Any]:
        key = path + json.dumps(body, sort_keys=True)
        if key not in self._known:
            self._known[key] = self._look(path, body)
        return self._known[key]

    def _look(self, path: str, body: Any) -> dict[str, Any]:
        before = len(self.service.submitted)
        answer = self.client.post(path, json=body)
        reply = re.sub(r'"seed":\d+|"created\w*":[^,}]*|"[a-z_]*duration":\d+', "", answer.text)
        seen: dict[str, Any] = {
            "status": answer.status_code, "reply": reply, "header": answer.headers.get("x-foretell-without-effect", ""),
            "error": answer.text if answer.status_code >= 400 else "",
        }  # fmt: skip
        made = self.service.submitted[before:]
        seen["count"] = len(made)
        if not made:
            return seen
        first, tokenizer = made[0], self.service.engine.tokenizer
        seen |= {one.name: getattr(first.params, one.name) for one in fields_of(SamplingParams)}
        seen |= {name: getattr(first, name) for name in ("always", "store", "write", "trace", "num_prompt_logprobs")}
        seen["prediction"] = tokenizer.decode(list(first.prediction_ids))
        seen["speculative"] = None if first.speculative is None else str(first.speculative.resolved())
        seen["prompt"] = tokenizer.decode(list(first.prompt_ids))
        seen["prompt_ids"] = list(first.prompt_ids)
        seen["parsed"] = first.thinking is not None
        for name, text in (("begins", ""), ("on", CALL + "\n")):
            seen[name] = self._permitted(first, "" if path == TEXT or "raw" in body else THOUGHT, text)
        seen["in_thought"] = self._permitted(first, "<think>hm")
        return seen

    def _permitted(self, submission: Any, *texts: str) -> str | None:
        """Of SIGNS those that may come after these texts, or the one token that may; None: anything may."""
        processor, tokenizer = submission.params.logits_processor, self.service.engine.tokenizer
        if processor is None:
            return None
        ids = [token for text in texts for token in tokenizer.encode(text, add_special_tokens=False)]
        made = processor(torch.tensor([*submission.prompt_ids, *ids]), torch.zeros(8200))
        if len(forced := torch.nonzero(made > -torch.inf)[:, 0]) == 1:
            return str(tokenizer.decode(forced.tolist()))
        return "".join(one for one in SIGNS if made[tokenizer.encode(one, add_special_tokens=False)[-1]] > -torch.inf)


@pytest.fixture(scope="module")
def looking() -> Iterator[Looking]:
    service = FakeService()
    tokenizer = service.engine.tokenizer = load_tokenizer("bundled")
    tokenizer.chat_template = TEMPLATE
    service.engine.model.spec = replace(service.engine.model.spec, vocab_size=8200, eos_token_ids=(EOS, 2))
    said = [*tokenizer.encode("<think>hm</think>Hi", add_special_tokens=False), EOS]
    service.script = lambda _: said
    with live(build_app(service)) as url, httpx.Client(base_url=url, timeout=60) as client:  # type: ignore[arg-type]
        yield Looking(client, service)


Row = tuple[str, Any, str, Any] | tuple[str, Any, str, Any, Any]
"""(route, what is sent beside its base, what is looked at, what it must be, what the base has beside it): a text is looked
for in texts of answers and of prompts, and ``Not`` one must be gone; everything else must be equal. The base's must be
otherwise."""


class Not(str):
    """A text that is there without the field, and not with it."""


def said(content: Any, **more: Any) -> Any:
    return {"messages": [{"role": "assistant", "content": content, **more}, USER]}


def tool(**more: Any) -> Any:
    return {"tools": [{"type": "function", "function": {"name": "look", **more}}]}


def called(**more: Any) -> Any:
    return {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"q": 1}'}, **more}


def talk(*turns: Any) -> Any:
    return {"messages": list(turns)}


def spec(**more: Any) -> Any:
    return {"speculative": more}


BEGUN: Any = {"role": "assistant", "content": "b"}
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
LOOK, FIND = tool()["tools"][0], {"type": "function", "function": {"name": "find"}}
NAMED: Any = {"type": "function", "function": {"name": "find"}}
ASKED: Any = {"role": "assistant", "content": None, "tool_calls": [called()]}
RESULT: Any = {"role": "tool", "content": "found it", "tool_call_id": "c1"}
SHAPE: Any = {"type": "json_schema", "json_schema": {"schema": OBJECT}}
WRITERS = (CHAT, TEXT, MESSAGES, RESPONSES)
OLD = (OLLAMA, GENERATE)
IMAGE = "reads text only"
ITEM_CALL: Any = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"q": 1}'}
USE: Any = {"type": "tool_use", "id": "c1", "name": "look", "input": {"q": 1}}
A_TOOL: Any = {"name": "look", "input_schema": {"type": "object"}}
F_TOOL: Any = {"type": "function", "name": "look"}
FUNCTION: Any = {"name": "look", "arguments": '{"q": 1}'}
WRITER: Any = {
    "type": "custom", "name": "write", "description": "Writes.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"},
}  # fmt: skip
SPACE: Any = {"type": "namespace", "name": "files", "description": "Of files.", "tools": [WRITER]}
WROTE: Any = {"type": "custom_tool_call", "call_id": "c1", "name": "write", "namespace": "x", "input": "*** Begin"}


def everywhere(routes: tuple[str, ...], sent: Any, key: str, expected: Any) -> list[Row]:
    return [(route, sent, key, expected) for route in routes]


SAMPLING: dict[str, list[Row]] = {
    "model": everywhere(WRITERS, {"model": "other"}, "status", 404),
    "temperature": everywhere(WRITERS, {"temperature": 0.5}, "temperature", 0.5),
    "top_p": everywhere(WRITERS, {"top_p": 0.5}, "top_p", 0.5),
    "top_k": everywhere(WRITERS, {"top_k": 5}, "top_k", 5),
    "min_p": everywhere(WRITERS, {"min_p": 0.5}, "min_p", 0.5),
    "presence_penalty": everywhere(WRITERS, {"presence_penalty": 0.5}, "presence_penalty", 0.5),
    "frequency_penalty": everywhere(WRITERS, {"frequency_penalty": 0.5}, "frequency_penalty", 0.5),
    "repetition_penalty": everywhere(WRITERS, {"repetition_penalty": 1.5}, "repetition_penalty", 1.5),
    "logit_bias": everywhere(WRITERS, {"logit_bias": {"65": 2}}, "logit_bias", {65: 2.0}),
    "seed": everywhere(WRITERS, {"seed": 5}, "seed", 5),
    "n": [
        *everywhere((CHAT, TEXT), {"n": 2}, "count", 2), *everywhere((MESSAGES, RESPONSES), {"n": 2}, "status", 400),
    ],
    "max_tokens": [
        *everywhere(WRITERS, {"max_tokens": 3}, "max_new_tokens", 3), (TEXT, {"max_tokens": 0}, "write", False),
    ],
    "min_tokens": everywhere(WRITERS, {"min_tokens": 2}, "min_new_tokens", 2),
    "stop": everywhere(WRITERS, {"stop": "i"}, "stop", ("i",)),
    "stop_token_ids": everywhere(WRITERS, {"stop_token_ids": [65]}, "stop_token_ids", (65,)),
    "allowed_token_ids": everywhere(WRITERS, {"allowed_token_ids": [65]}, "begins", "^"),
    "ignore_eos": everywhere(WRITERS, {"ignore_eos": True, "max_tokens": 90}, "ignore_eos", True),
    "stream": everywhere(WRITERS, {"stream": True}, "reply", "data: "),
    "stream_options": [(CHAT, {"stream": True, "stream_options": {"include_usage": True}}, "reply", '"choices":[],')],
    "store": everywhere(WRITERS, {"store": False}, "store", False),
    "speculative": everywhere(WRITERS, {"speculative": False}, "speculative", "'method': 'none'"),
    "num_draft_tokens": everywhere(WRITERS, {"num_draft_tokens": 3}, "speculative", "'num_speculative_tokens': 3"),
    "include_metrics": [
        *everywhere((CHAT, TEXT, RESPONSES), {"include_metrics": False}, "reply", Not('"metrics"')),
        (MESSAGES, {"include_metrics": True}, "reply", '"metrics"'),
    ],
    "provenance": [
        *everywhere((CHAT, TEXT), {"provenance": True}, "reply", '"provenance"'),
        *everywhere((MESSAGES, RESPONSES), {"provenance": True}, "status", 400),
    ],
    "trace": [
        *everywhere((CHAT, TEXT), {"trace": True}, "trace", True),
        *everywhere((MESSAGES, RESPONSES), {"trace": True}, "status", 400),
    ],
}  # fmt: skip
FORMATTED: dict[str, list[Row]] = {
    "response_format": everywhere((CHAT, TEXT), {"response_format": SHAPE}, "begins", "{"),
    "regex": everywhere((CHAT, TEXT), {"regex": "a+"}, "begins", "a"),
    "ebnf": everywhere((CHAT, TEXT), {"ebnf": 'root ::= "1"'}, "begins", "1"),
    "grammar": everywhere((CHAT, TEXT), {"grammar": 'root ::= "1"'}, "begins", "1"),
    "json_schema": everywhere((CHAT, TEXT), {"json_schema": OBJECT}, "begins", "{"),
    "guided_json": everywhere((CHAT, TEXT), {"guided_json": OBJECT}, "begins", "{"),
    "guided_regex": everywhere((CHAT, TEXT), {"guided_regex": "a+"}, "begins", "a"),
    "guided_choice": everywhere((CHAT, TEXT), {"guided_choice": ["a1"]}, "begins", "a"),
    "guided_grammar": everywhere((CHAT, TEXT), {"guided_grammar": 'root ::= "1"'}, "begins", "1"),
    "structured_outputs": everywhere((CHAT, TEXT), {"structured_outputs": {"regex": "a+"}}, "begins", "a"),
    "return_token_ids": everywhere((CHAT, TEXT), {"return_token_ids": True}, "reply", '"prompt_token_ids"'),
}
ITEMS: Any = {"input": [{"type": "message", "role": "assistant", "content": "b"}, ITEM_CALL]}


def tagged(**more: Any) -> Any:
    return {"response_format": {"type": "structural_tag", "format": more}}


def answered(call: Any = ITEM_CALL, **more: Any) -> Any:
    return {"input": [call, {"type": "function_call_output", "call_id": "c1", "output": "found it", **more}]}


def thought(**more: Any) -> Any:
    return {"input": [{"type": "reasoning", **more}, {"role": "assistant", "content": "b"}, USER]}


def used(*blocks: Any, **more: Any) -> Any:
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "found it", **more}
    return talk({"role": "assistant", "content": [*blocks, USE]}, {"role": "user", "content": [result]})


TABLE: dict[str, list[Row]] = {
    **{f"{model}.{name}": [row for row in rows if row[0] == route]
       for model, route in (("ChatRequest", CHAT), ("CompletionRequest", TEXT), ("MessagesRequest", MESSAGES),
                            ("ResponsesRequest", RESPONSES))
       for name, rows in SAMPLING.items() if name != "stream_options" or route == CHAT},
    **{f"{model}.{name}": [row for row in rows if row[0] == route]
       for model, route in (("ChatRequest", CHAT), ("CompletionRequest", TEXT)) for name, rows in FORMATTED.items()},
    "CompletionRequest.stream_options": [(TEXT, {"stream": True, "stream_options": {"include_usage": True}}, "reply",
                                          '"choices":[],')],
    "StreamOptions.include_usage": [(TEXT, {"stream": True, "stream_options": {"include_usage": True}}, "reply",
                                     '"choices":[],')],
    "StreamOptions.continuous_usage_stats": [
        (CHAT, {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}, "reply",
         '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"usage":{'),
        (CHAT, {"stream": True, "stream_options": {"continuous_usage_stats": True}}, "status", 400),
    ],
    "MessagesRequest.stream_options": [(MESSAGES, {"stream": True, "stream_options": {"continuous_usage_stats": True}},
                                        "status", 400)],
    "ResponsesRequest.stream_options": [(RESPONSES, {"stream": True, "stream_options": {"continuous_usage_stats": True}},
                                         "status", 400)],
    "ResponseStreamOptions.continuous_usage_stats": [
        (RESPONSES, {"stream": True, "stream_options": {"continuous_usage_stats": True}}, "status", 400)],
    # Chats
    "ChatRequest.messages": [(CHAT, talk({"role": "user", "content": "other"}), "prompt", "<user>other")],
    "ChatRequest.max_completion_tokens": [(CHAT, {"max_completion_tokens": 3}, "max_new_tokens", 3)],
    "ChatRequest.logprobs": [(CHAT, {"logprobs": True}, "reply", '"logprob":-0.5')],
    "ChatRequest.top_logprobs": [(CHAT, {"logprobs": True, "top_logprobs": 2}, "logprobs", 2)],
    "ChatRequest.prompt_logprobs": [(CHAT, {"prompt_logprobs": 1}, "num_prompt_logprobs", 1)],
    "ChatRequest.tools": [(CHAT, {"tools": [LOOK]}, "prompt", '"name": "look"')],
    "ChatRequest.tool_choice": [
        (CHAT, {"tools": [LOOK], "tool_choice": "required"}, "begins", "<"),
        (CHAT, {"tools": [LOOK], "tool_choice": "none"}, "begins", None, {"tools": [LOOK]}),
    ],
    "ChatRequest.parallel_tool_calls": [
        (CHAT, {"tools": [LOOK], "tool_choice": "required", "parallel_tool_calls": False}, "on", "\n"),
        (CHAT, {"tools": [LOOK], "tool_choice": "required", "parallel_tool_calls": True}, "on", "<\n"),
    ],
    "ChatRequest.prediction": [(CHAT, {"prediction": {"type": "content", "content": "guess"}}, "prediction", "guess")],
    "ChatRequest.add_generation_prompt": [(CHAT, {"add_generation_prompt": False}, "prompt", Not("<assistant>"))],
    "ChatRequest.continue_final_message": [
        (CHAT, {**talk(USER, BEGUN), "continue_final_message": True}, "prompt", Not("b<assistant>"), talk(USER, BEGUN))],
    "ChatRequest.reasoning_effort": [
        (CHAT, {"reasoning_effort": "low"}, "prompt", "[effort low]"),
        (CHAT, {"reasoning_effort": "none"}, "prompt", "[thinks False]")],
    "ChatRequest.enable_thinking": [
        (CHAT, {"enable_thinking": False}, "prompt", "[thinks False]"),
        (CHAT, {"enable_thinking": True}, "prompt", "[thinks True]")],
    "ChatRequest.thinking_budget": [(CHAT, {"thinking_budget": 1}, "in_thought", "</")],
    "ChatRequest.separate_reasoning": [
        (CHAT, {"separate_reasoning": False}, "reply", '"content":"<think>hm</think>Hi"'),
        (CHAT, {"separate_reasoning": False}, "parsed", False)],
    "ChatRequest.verbosity": [(CHAT, {"verbosity": "low"}, "prompt", "[words low]")],
    "ChatRequest.chat_template_kwargs": [
        (CHAT, {"chat_template_kwargs": {"shout": "LOUD"}}, "prompt", "LOUD"),
        (CHAT, {"chat_template_kwargs": {"other": 1}}, "header", "chat_template_kwargs.other")],
    "ChatRequest.modalities": [(CHAT, {"modalities": ["audio"]}, "status", 400)],
    # Formats
    "ObjectFormat.schema_": [(CHAT, {"response_format": {"type": "json_object", "schema": {"type": "integer"}}}, "begins",
                              "1")],
    "SchemaFormat.json_schema": [(CHAT, {"response_format": SHAPE}, "begins", "{")],
    "JsonSchema.schema_": [(CHAT, {"response_format": SHAPE}, "begins", "{")],
    "JsonSchema.strict": [
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": LEFT_OUT, "strict": True}}}, "status",
         400),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": LEFT_OUT, "strict": False}}}, "header",
         "uniqueItems")],
    "TagFormat.format": [(CHAT, tagged(type="regex", pattern="a+"), "begins", "a")],
    "ConstantTag.value": [(CHAT, tagged(type="const_string", value="1x"), "begins", "1")],
    "SchemaTag.json_schema": [(CHAT, tagged(type="json_schema", json_schema=OBJECT), "begins", "{")],
    "RegexTag.pattern": [(CHAT, tagged(type="regex", pattern="a+"), "begins", "a")],
    "GrammarTag.grammar": [(CHAT, tagged(type="grammar", grammar='root ::= "1"'), "begins", "1")],
    "StructuredOutputs.json_": [(TEXT, {"structured_outputs": {"json": OBJECT}}, "begins", "{")],
    "StructuredOutputs.regex": [(TEXT, {"structured_outputs": {"regex": "a+"}}, "begins", "a")],
    "StructuredOutputs.choice": [(TEXT, {"structured_outputs": {"choice": ["1"]}}, "begins", "1")],
    "StructuredOutputs.grammar": [(TEXT, {"structured_outputs": {"grammar": 'root ::= "1"'}}, "begins", "1")],
    "StructuredOutputs.json_object": [(TEXT, {"structured_outputs": {"json_object": True}}, "begins", "{")],
    # Messages of chats
    "GivenMessage.role": [(CHAT, talk({"role": "system", "content": "a"}), "prompt", "<system>a")],
    "GivenMessage.content": [(CHAT, talk({"role": "user", "content": "other"}), "prompt", "<user>other")],
    "GivenMessage.name": [(CHAT, talk({**USER, "name": "Ann"}), "prompt", "<user>Ann")],
    "GivenMessage.images": [(CHAT, talk({**USER, "images": ["x"]}), "error", IMAGE)],
    "TextPart.text": [(CHAT, talk({"role": "user", "content": [{"type": "text", "text": "part"}]}), "prompt", "part")],
    "ToolMessage.content": [(CHAT, talk(ASKED, RESULT), "prompt", "found it")],
    "ToolMessage.tool_call_id": [(CHAT, talk(ASKED, {**RESULT, "tool_call_id": "c2"}), "status", 400)],
    "ToolMessage.images": [(CHAT, talk(ASKED, {**RESULT, "images": ["x"]}), "error", IMAGE)],
    "AssistantTurn.content": [(CHAT, said("b"), "prompt", "<assistant>b")],
    "AssistantTurn.name": [(CHAT, said("b", name="Bob"), "prompt", "<assistant>Bob")],
    "AssistantTurn.tool_calls": [(CHAT, talk(ASKED, RESULT), "prompt", '"name": "look"')],
    "AssistantTurn.reasoning_content": [(CHAT, said("b", reasoning_content="why"), "prompt", "whyb")],
    "AssistantTurn.reasoning": [(CHAT, said("b", reasoning="why"), "prompt", "whyb")],
    "AssistantTurn.images": [(CHAT, said("b", images=[{"x": 1}]), "error", IMAGE)],
    "AssistantTurn.audio": [(CHAT, said("b", audio={"id": "x"}), "error", IMAGE)],
    "AssistantTurn.function_call": [
        (CHAT, talk({"role": "assistant", "content": None, "function_call": FUNCTION},
                    {"role": "function", "name": "look", "content": "found it"}), "prompt", '"name": "look"')],
    "ToolMessage.role": [
        (CHAT, talk({"role": "assistant", "content": None, "function_call": FUNCTION},
                    {"role": "function", "name": "look", "content": "found it"}), "prompt", "found it")],
    "ChatRequest.functions": [(CHAT, {"functions": [{"name": "look"}]}, "prompt", '"name": "look"')],
    "ChatRequest.function_call": [
        (CHAT, {"functions": [{"name": "look"}], "function_call": {"name": "look"}}, "begins", "<"),
        (CHAT, {"functions": [{"name": "look"}], "function_call": "none"}, "begins", None,
         {"functions": [{"name": "look"}]}),
        (CHAT, {"function_call": {"name": "look"}}, "error", "no functions were given")],
    "RefusalPart.refusal": [
        (CHAT, said([{"type": "refusal", "refusal": "never"}]), "prompt", "never"),
        (RESPONSES, {"input": said([{"type": "refusal", "refusal": "never"}])["messages"]}, "prompt", "never")],
    "GivenCall.id": [(CHAT, talk({**ASKED, "tool_calls": [called(id="c9")]}, RESULT), "status", 400)],
    "GivenCall.function": [(CHAT, talk(ASKED, RESULT), "prompt", '"name": "look"')],
    "GivenFunctionCall.name": [(CHAT, talk(ASKED, RESULT), "prompt", '"name": "look"')],
    "GivenFunctionCall.arguments": [(CHAT, talk(ASKED, RESULT), "prompt", '{"q": 1}')],
    "Tool.function": [(CHAT, {"tools": [LOOK]}, "prompt", '"name": "look"')],
    "Function.name": [(CHAT, {"tools": [FIND]}, "prompt", '"name": "find"')],
    "Function.description": [(CHAT, tool(description="for eyes"), "prompt", "for eyes")],
    "Function.parameters": [(CHAT, tool(parameters=OBJECT), "prompt", '"required"')],
    "Function.strict": [(CHAT, tool(parameters=LEFT_OUT, strict=True), "status", 400),
                        (CHAT, tool(parameters=LEFT_OUT, strict=False), "header", "uniqueItems")],
    "NamedTool.function": [(CHAT, {"tools": [LOOK, FIND], "tool_choice": NAMED}, "begins", "<")],
    "FunctionName.name": [(CHAT, {"tools": [LOOK], "tool_choice": NAMED}, "error", "find")],
    "AllowedChoice.allowed_tools": [(CHAT, {"tools": [LOOK, FIND], "tool_choice": {
        "type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}}, "begins", "<")],
    "AllowedTools.mode": [(CHAT, {"tools": [LOOK, FIND], "tool_choice": {
        "type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [NAMED]}}}, "begins", expected)
        for mode, expected in (("required", "<"), ("auto", SIGNS))],
    "AllowedTools.tools": [(CHAT, {"tools": [LOOK], "tool_choice": {
        "type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}}, "error", "find")],
    "Prediction.content": [(CHAT, {"prediction": {"type": "content", "content": "guess"}}, "prediction", "guess")],
    # Speculation
    "Speculative.method": [(TEXT, spec(method="suffix"), "speculative", "'method': 'suffix'")],
    "Speculative.num_speculative_tokens": [(TEXT, spec(num_speculative_tokens=3), "speculative",
                                            "'num_speculative_tokens': 3")],
    "Speculative.num_draft_tokens": [(TEXT, spec(num_draft_tokens=3), "speculative", "'num_speculative_tokens': 3"),
                                     (TEXT, spec(num_draft_tokens=0), "speculative", "'method': 'none'")],
    "Speculative.verify": [(TEXT, spec(verify="rejection"), "speculative", "'verify': 'rejection'")],
    "Speculative.shape": [(TEXT, spec(shape="chain"), "speculative", "'shape': 'chain'")],
    "Speculative.draws": [(TEXT, spec(draws="x"), "error", "draws")],
    "Speculative.prompt_lookup_min": [(TEXT, spec(prompt_lookup_min=2), "speculative", "'prompt_lookup_min': 2")],
    "Speculative.prompt_lookup_max": [(TEXT, spec(prompt_lookup_max=7), "speculative", "'prompt_lookup_max': 7")],
    "Speculative.suffix_decoding_min_token_prob": [
        (TEXT, spec(method="suffix", suffix_decoding_min_token_prob=0.25), "speculative",
         "'suffix_decoding_min_token_prob': 0.25")],
    "Speculative.always": [(TEXT, spec(always=True), "always", True)],
    # Texts
    "CompletionRequest.prompt": [(TEXT, {"prompt": "other"}, "prompt", "other"), (TEXT, {"prompt": ["a", "b"]}, "count", 2),
                                 (TEXT, {"prompt": [70, 71]}, "prompt_ids", [70, 71])],
    "CompletionRequest.echo": [(TEXT, {"echo": True}, "reply", '"text":"a<think>')],
    "CompletionRequest.logprobs": [(TEXT, {"logprobs": 2}, "logprobs", 2)],
    "CompletionRequest.prompt_logprobs": [(TEXT, {"prompt_logprobs": 2}, "num_prompt_logprobs", 2)],
    "CompletionRequest.suffix": [(TEXT, {"suffix": "x"}, "error", "not taught to fill gaps")],
    "CompletionRequest.best_of": [(TEXT, {"best_of": 2}, "status", 400), (TEXT, {"best_of": 2, "n": 2}, "count", 2)],
    # Anthropic's
    "MessagesRequest.messages": [(MESSAGES, talk({"role": "user", "content": "other"}), "prompt", "<user>other")],
    "MessagesRequest.system": [(MESSAGES, {"system": "Be."}, "prompt", "<system>Be.")],
    "MessagesRequest.stop_sequences": [(MESSAGES, {"stop_sequences": ["i"]}, "stop", ("i",)),
                                       (MESSAGES, {"stop_sequences": ["i"]}, "reply", '"stop_reason":"stop_sequence"')],
    "MessagesRequest.thinking": [(MESSAGES, {"thinking": {"type": "disabled"}}, "prompt", "[thinks False]")],
    "MessagesRequest.tools": [(MESSAGES, {"tools": [A_TOOL]}, "prompt", '"name": "look"')],
    "MessagesRequest.tool_choice": [(MESSAGES, {"tools": [A_TOOL], "tool_choice": {"type": "any"}}, "begins", "<")],
    "MessagesRequest.output_config": [(MESSAGES, {"output_config": {"effort": "low"}}, "prompt", "[effort low]")],
    "MessagesRequest.context_management": [
        (MESSAGES, {"context_management": {"edits": [{"type": "compact"}]}}, "error", "'compact' is not done")],
    "MessagesRequest.chat_template_kwargs": [(MESSAGES, {"chat_template_kwargs": {"shout": "LOUD"}}, "prompt", "LOUD")],
    "AnthropicMessage.role": [(MESSAGES, talk({"role": "system", "content": "b"}, USER), "prompt", "<system>b")],
    "AnthropicMessage.content": [(MESSAGES, talk({"role": "user", "content": "other"}), "prompt", "<user>other")],
    "ThinkingBlock.thinking": [
        (MESSAGES, said([{"type": "thinking", "thinking": "why"}]), "prompt", "why")],
    "ToolUseBlock.id": [(MESSAGES, talk({"role": "assistant", "content": [{**USE, "id": "c2"}]}, used()["messages"][1]),
                         "error", "c2")],
    "ToolUseBlock.name": [(MESSAGES, used(), "prompt", '"name": "look"')],
    "ToolUseBlock.input": [(MESSAGES, used(), "prompt", '{"q": 1}')],
    "ToolResultBlock.tool_use_id": [(MESSAGES, used(tool_use_id="c2"), "error", "c2")],
    "ToolResultBlock.content": [(MESSAGES, used(), "prompt", "found it")],
    "ToolResultBlock.is_error": [(MESSAGES, used(is_error=True), "prompt", "Error: found it"),
                                 (MESSAGES, used(is_error=False), "prompt", "\nfound it")],
    "ThinkingSettings.type": [
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1}}, "prompt", "[thinks True]"),
        (MESSAGES, {"thinking": {"type": "adaptive"}}, "prompt", "[thinks True]"),
        (MESSAGES, {"thinking": {"type": "disabled"}}, "prompt", "[thinks False]")],
    "ThinkingSettings.budget_tokens": [
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1}}, "in_thought", "</")],
    "ThinkingSettings.display": [(MESSAGES, {"thinking": {"type": "enabled", "display": "omitted"}}, "reply",
                                  Not('"thinking":"hm"'))],
    "AnthropicTool.name": [(MESSAGES, {"tools": [{**A_TOOL, "name": "n" * 128}]}, "prompt", '"name": "' + "n" * 128 + '"')],
    "AnthropicTool.description": [(MESSAGES, {"tools": [{**A_TOOL, "description": "for eyes"}]}, "prompt", "for eyes")],
    "AnthropicTool.input_schema": [(MESSAGES, {"tools": [{**A_TOOL, "input_schema": OBJECT}]}, "prompt", '"required"')],
    "AnthropicTool.strict": [
        (MESSAGES, {"tools": [{**A_TOOL, "input_schema": LEFT_OUT, "strict": True}]}, "status", 400),
        (MESSAGES, {"tools": [{**A_TOOL, "input_schema": LEFT_OUT, "strict": False}]}, "header", "uniqueItems")],
    "AnthropicChoice.type": [
        (MESSAGES, {"tools": [A_TOOL], "tool_choice": {"type": kind, "name": name}}, "begins", expected)
        for kind, name, expected in (("any", None, "<"), ("auto", None, SIGNS), ("tool", "look", "<"))],
    "AnthropicChoice.name": [
        (MESSAGES, {"tools": [A_TOOL], "tool_choice": {"type": "tool", "name": "find"}}, "error", "find")],
    "AnthropicChoice.disable_parallel_tool_use": [
        (MESSAGES, {"tools": [A_TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}, "on", "\n"),
        (MESSAGES, {"tools": [A_TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": False}}, "on", "<\n"),
        (MESSAGES, {"tools": [A_TOOL], "tool_choice": {"type": "any"}}, "on", "<\n")],
    "OutputSettings.effort": [
        (MESSAGES, {"output_config": {"effort": "max"}}, "prompt", "[effort xhigh]"),
        (MESSAGES, {"output_config": {"effort": "low"}, "thinking": {"type": "disabled"}}, "prompt",
         "a[thinks False]<assistant>")],
    "OutputSettings.format": [
        (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": OBJECT}}}, "begins", "{")],
    "AnthropicSchema.schema_": [
        (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": {"type": "integer"}}}}, "begins", "1")],
    "ContextSettings.edits": [
        (MESSAGES, {"context_management": {"edits": [{"type": "compact", "trigger": {}}]}}, "error", "edits.0.type"),
        (MESSAGES, {"context_management": {"edits": [{"type": "compact", "keeps": 1}]}}, "error", "edits.0.type")],
    # Responses
    "ResponsesRequest.input": [(RESPONSES, {"input": "other"}, "prompt", "<user>other")],
    "ResponsesRequest.instructions": [(RESPONSES, {"instructions": "Be."}, "prompt", "<system>Be.")],
    "ResponsesRequest.max_output_tokens": [(RESPONSES, {"max_output_tokens": 3}, "max_new_tokens", 3)],
    "ResponsesRequest.tools": [(RESPONSES, {"tools": [F_TOOL]}, "prompt", '"name": "look"')],
    "ResponsesRequest.tool_choice": [(RESPONSES, {"tools": [F_TOOL], "tool_choice": "required"}, "begins", "<")],
    "ResponsesRequest.parallel_tool_calls": [
        (RESPONSES, {"tools": [F_TOOL], "tool_choice": "required", "parallel_tool_calls": flag}, "on", expected)
        for flag, expected in ((False, "\n"), (True, "<\n"))],
    "ResponsesRequest.text": [(RESPONSES, {"text": {"verbosity": "low"}}, "prompt", "[words low]")],
    "ResponsesRequest.reasoning": [(RESPONSES, {"reasoning": {"effort": "low"}}, "prompt", "[effort low]")],
    "ResponsesRequest.top_logprobs": [
        (RESPONSES, {"top_logprobs": 2, "include": ["message.output_text.logprobs"]}, "logprobs", 2)],
    "ResponsesRequest.include": [(RESPONSES, {"include": ["message.output_text.logprobs"]}, "logprobs", 0)],
    "ResponsesRequest.truncation": [(RESPONSES, {"truncation": "middle"}, "status", 400)],
    "ResponsesRequest.user": [(RESPONSES, {"user": "ann"}, "reply", '"user":"ann"')],
    "ResponsesRequest.background": [(RESPONSES, {"background": True}, "status", 400)],
    "ResponsesRequest.thinking_budget": [(RESPONSES, {"thinking_budget": 1}, "in_thought", "</")],
    "ResponsesRequest.chat_template_kwargs": [(RESPONSES, {"chat_template_kwargs": {"shout": "LOUD"}}, "prompt", "LOUD")],
    "ResponsesRequest.metadata": [(RESPONSES, {"metadata": {"mine": "1"}}, "reply", '"metadata":{"mine":"1"}')],
    "MessageItem.role": [(RESPONSES, {"input": [{"role": "developer", "content": "b"}, USER]}, "prompt", "<system>b")],
    "MessageItem.content": [(RESPONSES, {"input": [{"role": "user", "content": "other"}]}, "prompt", "<user>other")],
    "ItemPart.type": [(RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "x": 1}]}]}, "error",
                       IMAGE)],
    "ItemPart.text": [(RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text", "text": "part"}]}]},
                       "prompt", "part")],
    "CallItem.call_id": [(RESPONSES, answered(call_id="c2"), "error", "c2")],
    "CallItem.name": [(RESPONSES, answered(), "prompt", '"name": "look"')],
    "CallItem.arguments": [(RESPONSES, answered(), "prompt", '{"q": 1}')],
    "CallItem.namespace": [(RESPONSES, answered(call={**ITEM_CALL, "namespace": "x"}), "prompt", '"name": "x__look"')],
    **{f"CustomCallItem.{name}": [(RESPONSES, answered(call=WROTE), "prompt", shown)]
       for name, shown in (("name", 'x__write"'), ("namespace", '"x__'), ("input", '{"input": "*** Begin"}'))},
    "CustomCallItem.call_id": [(RESPONSES, answered(call={**WROTE, "call_id": "c2"}), "error", "c2")],
    "CustomTool.name": [(RESPONSES, {"tools": [WRITER]}, "prompt", '"name": "write"')],
    "CustomTool.description": [(RESPONSES, {"tools": [WRITER]}, "prompt", "Writes.")],
    "CustomTool.format": [(RESPONSES, {"tools": [WRITER]}, "prompt", "start: /a+/")],
    "NamespaceTool.name": [(RESPONSES, {"tools": [SPACE]}, "prompt", '"name": "files__write"')],
    "NamespaceTool.description": [(RESPONSES, {"tools": [SPACE]}, "prompt", "Of files.")],
    "NamespaceTool.tools": [(RESPONSES, {"tools": [SPACE]}, "prompt", "Writes.")],
    "ChosenTool.namespace": [
        (RESPONSES, {"tools": [SPACE], "tool_choice": {"type": "custom", "name": "write", "namespace": "files"}}, "begins",
         "<")],
    "CallOutputItem.call_id": [(RESPONSES, answered(call_id="c2"), "error", "c2")],
    "CallOutputItem.output": [(RESPONSES, answered(), "prompt", "found it")],
    "ReasoningItem.summary": [(RESPONSES, thought(summary=[{"type": "summary_text", "text": "why"}]), "prompt", "why")],
    "ReasoningItem.content": [(RESPONSES, thought(content=[{"type": "reasoning_text", "text": "why"}]), "prompt", "why")],
    "ReasoningItem.encrypted_content": [(RESPONSES, thought(encrypted_content="x"), "error", "cannot be read here")],
    "ThoughtPart.type": [(RESPONSES, thought(content=[{"type": "x", "text": "why"}]), "status", 400)],
    "ThoughtPart.text": [(RESPONSES, thought(content=[{"type": "text", "text": "why"}]), "prompt", "why")],
    "FunctionTool.name": [(RESPONSES, {"tools": [{**F_TOOL, "name": "n" * 128}]}, "prompt", "n" * 128)],
    "FunctionTool.description": [(RESPONSES, {"tools": [{**F_TOOL, "description": "for eyes"}]}, "prompt", "for eyes")],
    "FunctionTool.parameters": [(RESPONSES, {"tools": [{**F_TOOL, "parameters": OBJECT}]}, "prompt", '"required"')],
    "FunctionTool.strict": [(RESPONSES, {"tools": [{**F_TOOL, "parameters": LEFT_OUT, "strict": True}]}, "status", 400),
                            (RESPONSES, {"tools": [{**F_TOOL, "parameters": LEFT_OUT}]}, "header", "uniqueItems")],
    "ChosenTool.name": [(RESPONSES, {"tools": [F_TOOL], "tool_choice": {"type": "function", "name": "find"}}, "error",
                         "find")],
    "AllowedFunctions.mode": [(RESPONSES, {"tools": [F_TOOL], "tool_choice": {
        "type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "look"}]}}, "begins", expected)
        for mode, expected in (("required", "<"), ("auto", SIGNS))],
    "AllowedFunctions.tools": [(RESPONSES, {"tools": [F_TOOL], "tool_choice": {
        "type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "find"}]}}, "error", "find")],
    "TextSettings.format": [(RESPONSES, {"text": {"format": {"type": "json_schema", "schema": OBJECT}}}, "begins", "{")],
    "TextSettings.verbosity": [(RESPONSES, {"text": {"verbosity": "high"}}, "prompt", "[words high]")],
    "NamedSchema.schema_": [
        (RESPONSES, {"text": {"format": {"type": "json_schema", "schema": {"type": "integer"}}}}, "begins", "1")],
    "NamedSchema.strict": [
        (RESPONSES, {"text": {"format": {"type": "json_schema", "schema": LEFT_OUT, "strict": True}}}, "status", 400),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "schema": LEFT_OUT}}}, "header", "uniqueItems")],
    "Reasoning.effort": [(RESPONSES, {"reasoning": {"effort": "low"}}, "prompt", "[effort low]")],
    # Ollama's
    **{f"{model}.{name}": [(route, sent, key, expected)]
       for model, route in (("OllamaChatRequest", OLLAMA), ("GenerateRequest", GENERATE))
       for name, sent, key, expected in (
           ("model", {"model": "other"}, "status", 404), ("stream", {"stream": True}, "reply", '"done":false'),
           ("format", {"format": "json"}, "begins", "{"), ("options", {"options": {"top_k": 5}}, "top_k", 5),
           ("think", {"think": False}, "prompt", "[thinks False]"),
           ("speculative", {"speculative": False}, "speculative", "'method': 'none'"),
           ("logprobs", {"logprobs": True}, "reply", '"logprob":-0.5'),
           ("top_logprobs", {"logprobs": True, "top_logprobs": 2}, "logprobs", 2))},
    "OllamaChatRequest.messages": [(OLLAMA, talk({"role": "user", "content": "other"}), "prompt", "<user>other"),
                                   (OLLAMA, {"messages": []}, "reply", '"done_reason":"load"')],
    "OllamaChatRequest.tools": [(OLLAMA, {"tools": [LOOK]}, "prompt", '"name": "look"')],
    **{f"Options.{name}": [(OLLAMA, {"options": {name: value}}, key, expected)]
       for name, value, key, expected in (
           ("num_predict", 3, "max_new_tokens", 3), ("temperature", 0.5, "temperature", 0.5), ("top_k", 5, "top_k", 5),
           ("top_p", 0.5, "top_p", 0.5), ("min_p", 0.5, "min_p", 0.5), ("repeat_penalty", 1.5, "repetition_penalty", 1.5),
           ("presence_penalty", 0.5, "presence_penalty", 0.5), ("frequency_penalty", 0.5, "frequency_penalty", 0.5),
           ("seed", 5, "seed", 5), ("stop", ["i"], "stop", ("i",)))},
    "Options.repeat_last_n": [(OLLAMA, {"options": {"repeat_last_n": 64, "repeat_penalty": 1.5}}, "status", 400)],
    "OllamaMessage.role": [(OLLAMA, talk({"role": "system", "content": "a"}), "prompt", "<system>a")],
    "OllamaMessage.content": [(OLLAMA, talk({"role": "user", "content": "other"}), "prompt", "<user>other")],
    "OllamaMessage.thinking": [(OLLAMA, said("b", thinking="why"), "prompt", "whyb")],
    "OllamaMessage.images": [(OLLAMA, talk({**USER, "images": ["x"]}), "error", IMAGE)],
    "OllamaMessage.tool_calls": [
        (OLLAMA, talk({"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {"q": 1}}}]},
                      {"role": "tool", "content": "found it"}), "prompt", '"name": "look"')],
    "OllamaMessage.tool_call_id": [
        (OLLAMA, talk(USER, {"role": "tool", "content": "b", "tool_call_id": "c1"}), "error", "c1")],
    "OllamaCall.id": [
        (OLLAMA, talk({"role": "assistant", "tool_calls": [{"id": "c9", "function": {"name": "look", "arguments": {}}}]},
                      {"role": "tool", "content": "b", "tool_call_id": "c1"}), "status", 400)],
    "OllamaCall.function": [
        (OLLAMA, talk({"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {"q": 1}}}]},
                      {"role": "tool", "content": "found it"}), "prompt", '"name": "look"')],
    "OllamaFunction.name": [
        (OLLAMA, talk({"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {"q": 1}}}]},
                      {"role": "tool", "content": "found it"}), "prompt", '"name": "look"')],
    "OllamaFunction.arguments": [
        (OLLAMA, talk({"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {"q": 1}}}]},
                      {"role": "tool", "content": "found it"}), "prompt", '{"q": 1}')],
    "OllamaTool.function": [(OLLAMA, {"tools": [LOOK]}, "prompt", '"name": "look"')],
    "OllamaFunctionTool.name": [(OLLAMA, tool(name="a.b-" + "n" * 124), "prompt", "n" * 124)],
    "OllamaFunctionTool.description": [(OLLAMA, tool(description="for eyes"), "prompt", "for eyes")],
    "OllamaFunctionTool.parameters": [(OLLAMA, tool(parameters=OBJECT), "prompt", '"required"')],
    "OllamaFunctionTool.strict": [(OLLAMA, tool(parameters=LEFT_OUT, strict=True), "status", 400)],
    "GenerateRequest.prompt": [(GENERATE, {"prompt": "other"}, "prompt", "<user>other"),
                               (GENERATE, {"prompt": ""}, "reply", '"done_reason":"load"')],
    "GenerateRequest.system": [(GENERATE, {"system": "Be."}, "prompt", "<system>Be.")],
    "GenerateRequest.raw": [(GENERATE, {"raw": True}, "prompt", Not("<user>"))],
    "GenerateRequest.images": [(GENERATE, {"images": ["x"]}, "error", IMAGE)],
    "GenerateRequest.suffix": [(GENERATE, {"suffix": "x"}, "error", "not taught to fill gaps")],
    "GenerateRequest.template": [(GENERATE, {"template": "x"}, "error", "own template")],
    "GenerateRequest.context": [(GENERATE, {"context": [1]}, "error", "nothing is kept")],
    "ShowRequest.model": [("/api/show", {"model": "other"}, "status", 404)],
    "ShowRequest.name": [("/api/show", {"name": "other"}, "status", 404)],
    # Tokens
    "TokenizeRequest.model": [(TOKENIZE, {"model": "other"}, "status", 404)],
    "TokenizeRequest.prompt": [(TOKENIZE, {"prompt": "a b"}, "reply", '"count":2')],
    "TokenizeRequest.content": [(TOKENIZE, {"prompt": None, "content": "a"}, "reply", Not('"count"'))],
    "TokenizeRequest.messages": [(TOKENIZE, {"prompt": None, "messages": [USER]}, "reply", Not('"count":1'))],
    "TokenizeRequest.tools": [(TOKENIZE, {"prompt": None, "messages": [USER], "tools": [LOOK], "return_token_strs": True},
                               "reply", '"</","to","ol"')],
    "TokenizeRequest.add_generation_prompt": [
        (TOKENIZE, {"prompt": None, "messages": [USER], "add_generation_prompt": False, "return_token_strs": True}, "reply",
         Not('"count":1,'))],
    "TokenizeRequest.continue_final_message": [
        (TOKENIZE, {"prompt": None, "messages": [USER], "continue_final_message": True}, "error", "assistant's")],
    "TokenizeRequest.chat_template_kwargs": [
        (TOKENIZE, {"prompt": None, "messages": [USER], "chat_template_kwargs": {"shout": "LOUD"},
                    "return_token_strs": True}, "reply", '"LO","U","D"')],
    "TokenizeRequest.return_token_strs": [(TOKENIZE, {"return_token_strs": True}, "reply", '"token_strs":["a"]')],
    "TokenizeRequest.with_pieces": [(TOKENIZE, {"prompt": None, "content": "a", "with_pieces": True}, "reply",
                                     '"piece":"a"')],
    "DetokenizeRequest.model": [("/detokenize", {"model": "other"}, "status", 404)],
    "DetokenizeRequest.tokens": [("/detokenize", {"tokens": [9000]}, "status", 400)],
}  # fmt: skip
WITHOUT_EFFECT = {
    "EmbedRequest.options", "OldEmbedRequest.options", "EmbedRequest.truncate",
    "JsonSchema.name", "JsonSchema.description", "NamedSchema.name",
    "NamedSchema.description", "ResponseStreamOptions.include_usage", "ToolMessage.name",
}  # fmt: skip
"""The document says so, or they stand for what is known otherwise: of a result, its call."""
ELSEWHERE = {
    "OllamaMessage.tool_name": "test_turns.py",
    **{f"PullRequest.{name}": "test_ollama.py" for name in ("model", "name", "stream")},
    **{f"{name}.keep_alive": "test_models.py" for name in (
        "OldEmbedRequest", "EmbedRequest", "GenerateRequest", "OllamaChatRequest")},
    **{f"EmbedRequest.{name}": "test_ollama.py" for name in ("model", "input", "dimensions")},
    **{f"OldEmbedRequest.{name}": "test_ollama.py" for name in ("model", "prompt")},
    **{f"EmbeddingRequest.{name}": "test_reading.py" for name in (
        "model", "input", "pooling", "encoding_format", "dimensions")},
    **{f"ExplainRequest.{name}": "test_explain.py" for name in (
        "prompt", "chat", "model", "temperature", "top_p", "seed", "max_tokens", "speculative")},
    **{f"TokenizeRequest.{name}": "test_reading.py" for name in ("add_special_tokens", "add_special", "parse_special")},
    "LearnerRequest.action": "../learn/test_service.py",
}  # fmt: skip
"""Fields of what needs a model, and the tests that send them and look."""


def inner(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for each in get_args(annotation):
        yield from inner(each)


def walked(*models: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """All models of requests, by name."""
    found = dict[str, type[BaseModel]]()
    rest = list(models)
    while rest:
        model = rest.pop()
        found[model.__name__] = model
        for field in model.model_fields.values():
            rest += [one for one in inner(field.annotation) if one.__name__ not in found]
    return found


def test_every_field_is_in_a_table() -> None:
    missing, known = [], TABLE.keys() | WITHOUT_EFFECT | ELSEWHERE.keys()
    every = set()
    for name, model in walked(*MODELS).items():
        for field, told in model.model_fields.items():
            is_kind = get_origin(told.annotation) is Literal and len(get_args(told.annotation)) == 1
            is_ignored = told.exclude or (told.description or "").startswith("Ignored")
            every.add(f"{name}.{field}")
            if not is_kind and not is_ignored and f"{name}.{field}" not in known and field != "type":
                missing.append(f"{name}.{field}")
    assert missing == []
    assert known <= every
    assert len(TABLE) > 250
    for place, file in ELSEWHERE.items():
        assert place.partition(".")[2] in (Path(__file__).parent / file).read_text(encoding="utf-8"), place


@pytest.mark.parametrize("name", sorted(TABLE))
def test_what_a_field_changes(looking: Looking, name: str) -> None:
    assert TABLE[name], name
    for path, sent, key, expected, *beside in TABLE[name]:
        base = {**BASE[path], **(beside[0] if beside else {})}
        before, after = looking(path, base), looking(path, {**base, **sent})
        refused = key in ("status", "error")
        assert (after["status"] >= 400) == refused, (sent, after["reply"])
        now, then = after[key], before.get(key)
        if isinstance(expected, Not):
            assert expected in str(then), (sent, then)
            assert expected not in now, (sent, now)
        elif isinstance(expected, str) and key not in ("begins", "on", "in_thought"):
            assert expected in str(now), (sent, now)
            assert expected not in str(then), (sent, then)
        else:
            assert now == expected, (sent, now)
            assert then != expected, (sent, then)


OF_THE_REQUEST = {
    "model", "n", "stream", "stream_options", "store", "speculative", "num_draft_tokens", "include_metrics", "provenance",
    "trace",
}  # fmt: skip


def test_the_table_of_thoughts_and_answers_has_every_setting_of_a_text() -> None:
    assert GOVERNS.keys() >= SAMPLING.keys() - OF_THE_REQUEST
    assert GOVERNS.keys() <= requests.ChatRequest.model_fields.keys()


# -- values that cannot be ---------------------------------------------------------------------------------------------

WRONG: tuple[Any, ...] = (
    3, -1, 10**400, "x", "", ["x"], [3], [{}], [[]], {"x": 1}, {"type": "x"}, [{"type": "x", "y": 1}], True, 1.5,
    [{"role": "user", "content": [{"type": "image", "source": {"type": "base64"}}]}],
    [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a",
                                   "content": [{"type": "tool_reference", "tool_name": "x"}]}]}],
    [{"role": "user", "images": ["x"], "content": "a"}], {"edits": [{"type": "x", "trigger": {}}]},
)  # fmt: skip
INNER = re.compile(
    r"at most 0|less than or equal to 0$|Value error|value error|discriminator|NoneType|should be None|pydantic"
)


def refusal(model: type[BaseModel], body: Any) -> ApiError | None:
    try:
        parse(model, json.dumps(body).encode())
    except ApiError as error:
        return error
    return None


@pytest.mark.parametrize("model", MODELS[:6], ids=lambda model: model.__name__)
def test_a_value_that_cannot_be_is_told_of_in_words_of_the_request(model: type[BaseModel]) -> None:
    path = (CHAT, TEXT, MESSAGES, RESPONSES, OLLAMA, GENERATE)[MODELS.index(model)]
    refused = 0
    for name, field in model.model_fields.items():
        for value in WRONG:
            error = refusal(model, {**BASE[path], field.alias or name: value})
            if error is not None:
                refused += 1
                assert (error.param or "").split(".")[0] == name, (name, value, error.message)
                assert not INNER.search(error.message), (name, value, error.message)
    assert refused > 10 * len(model.model_fields)


LONG = [{**A_TOOL, "name": f"n{at}"} for at in range(200)]


@pytest.mark.parametrize(
    ("path", "sent", "status"),
    [
        (CHAT, tool(name="n" * 64), 200), (CHAT, tool(name="n" * 65), 400), (CHAT, {"stop": ["x"] * 17}, 400),
        (CHAT, {"tools": [tool(name=f"n{at}")["tools"][0] for at in range(129)]}, 400),
        (MESSAGES, {"tools": [{**A_TOOL, "name": "n" * 65}]}, 200),
        (MESSAGES, {"tools": [{**A_TOOL, "name": "n" * 128}], "tool_choice": {"type": "tool", "name": "n" * 128}}, 200),
        (MESSAGES, {"tools": [{**A_TOOL, "name": "n" * 129}]}, 400), (COUNT, {"tools": LONG}, 200),
        (MESSAGES, {"tools": [{**A_TOOL, "name": "a.b"}]}, 400), (MESSAGES, {"stop_sequences": ["x"] * 100}, 200),
        (MESSAGES, {"metadata": {"user_id": "u" * 300}}, 200),
        (RESPONSES, {"tools": [{**F_TOOL, "name": "n" * 128}]}, 200),
        (RESPONSES, {"tools": [{**F_TOOL, "name": "n" * 129}]}, 400),
        (OLLAMA, tool(name="a.b" + "n" * 125), 200), (OLLAMA, {"options": {"stop": ["x"] * 100}}, 200),
        (GENERATE, {"options": {"stop": ["x"] * 100}}, 200),
    ],
)  # fmt: skip
def test_each_protocol_has_its_own_limits(looking: Looking, path: str, sent: Any, status: int) -> None:
    assert looking(path, {**BASE[path], **sent})["status"] == status


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES, OLLAMA])
def test_a_long_name_is_read_in_calls(looking: Looking, path: str) -> None:
    name, service = "n" * 128, looking.service
    tokenizer, before = service.engine.tokenizer, service.script
    text = CALL.replace("look", name)
    said_ids = [
        *tokenizer.encode(THOUGHT, add_special_tokens=False),
        *tokenizer.encode(text, add_special_tokens=False),
        EOS,
    ]
    service.script = lambda _: said_ids
    try:
        tools = {
            MESSAGES: {**A_TOOL, "name": name},
            RESPONSES: {**F_TOOL, "name": name},
            OLLAMA: tool(name=name)["tools"][0],
        }
        reply = looking.client.post(
            path,
            json={**BASE[path], "tools": [tools[path]], "max_output_tokens": 900}
            if (path == RESPONSES)
            else {**BASE[path], "tools": [tools[path]], **({"max_tokens": 900} if path == MESSAGES else {})},
        )
    finally:
        service.script = before
    assert f'"name":"{name}"' in reply.text.split('"tools":')[0]


def test_an_empty_prompt_begins_as_texts_do(looking: Looking) -> None:
    tokenizer = looking.service.engine.tokenizer
    first = looking(TEXT, {"prompt": ""})
    known = (
        tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.get_vocab().get("<|endoftext|>", 2)
    )
    assert first["prompt_ids"] == [known]
    assert looking(TEXT, {"prompt": ["", "a"], "echo": True})["count"] == 2
    assert looking("/v1/embeddings", {"input": ""})["status"] == 400
    for path in (GENERATE, OLLAMA):
        asked = {"prompt": "", "stream": False} if path == GENERATE else {"messages": [], "stream": False}
        assert '"done_reason":"load"' in looking(path, asked)["reply"]


def test_words_for_a_template_that_does_not_read_them(looking: Looking) -> None:
    tokenizer = looking.service.engine.tokenizer
    tokenizer.chat_template = TEMPLATE.replace("verbosity", "talkative")
    try:
        for level, told in (("low", "verbosity"), ("medium", ""), ("high", "verbosity")):
            for path, sent in ((CHAT, {"verbosity": level}), (RESPONSES, {"text": {"verbosity": level}})):
                answer = looking.client.post(path, json={**BASE[path], **sent})
                assert (answer.status_code, answer.headers.get("x-foretell-without-effect", "")) == (200, told)
    finally:
        tokenizer.chat_template = TEMPLATE
