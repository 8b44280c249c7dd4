"""Random conversations through every door: one conversation is one prompt and one answer, whichever client sends it.

    python -m tests.stress.doors [--cases 10000] [--seed 1] [--decode]
    python -m tests.stress.doors --seed 1 --only 17        # one case again, with all that was sent

A case is a conversation (roles in any order, parts, calls, results in any order, thoughts, tools or none, an adapter) and a
template. The doors that can say it are asked: chat, messages, responses, Ollama's chat and generate, whole and streamed,
both token counts and ``Engine.chat_prompt``. Equal must be: the prompt's ids, the adapter, text, thought, calls, how it
ended; and where one refuses, all do. The service says what a function of the prompt says, or with --decode what the bundled
model does. Of eight cases one is answered; of the others the prompts are compared, without HTTP. Case i is a function of
--seed and i.
"""

import argparse
import json
import random
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import httpx
from pydantic import BaseModel

from foretell import Engine, Service, ServiceOptions
from foretell.core.errors import PromptError
from foretell.model.load import load_tokenizer
from foretell.server.app import build_app
from foretell.server.backend import Backend
from foretell.server.errors import ApiError, parse
from foretell.server.protocol import anthropic, ollama, responses
from foretell.server.protocol.requests import ChatRequest
from foretell.server.routes.chat import prompt_of
from tests.engine.request.test_told import BOTH, END, LOOP, PARTS, QWEN
from tests.server.fake import EOS, FakeService
from tests.server.live import live
from tests.server.test_turns import GEMMA, HERMES, MISTRAL, SILENT
from tests.stress.served import Check, report

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
OLLAMA, GENERATE = "/api/chat", "/api/generate"
TENANT = "tenant"
ANSWERED = 8
"""Of so many cases one is answered over HTTP."""
KINDS: dict[str, tuple[type[BaseModel], Callable[[Any], ChatRequest]]] = {
    CHAT: (ChatRequest, lambda body: body),
    MESSAGES: (anthropic.MessagesRequest, anthropic.as_chat),
    RESPONSES: (responses.ResponsesRequest, responses.as_chat),
    OLLAMA: (ollama.OllamaChatRequest, ollama.as_chat),
    GENERATE: (ollama.GenerateRequest, ollama.of_prompt),
}
THINKS = (
    LOOP
    + "<{{ m.role }}>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
)
TEMPLATES: dict[str, Any] = {
    **PARTS, "both": BOTH, "qwen": QWEN, "hermes": HERMES, "gemma": GEMMA, "mistral": MISTRAL, "silent": SILENT,
    "thinks": THINKS + END,
    "cuts thoughts": LOOP + "<{{ m.role }}>{{ m.content.split('</think>')[-1] | trim }}{# <think> #}" + END,
    "drops texts beside calls": QWEN.replace("{{ m.content }}", "{% if not m.tool_calls %}{{ m.content }}{% endif %}"),
    "developer": LOOP + "<{{ m.role }}>{{ m.content }}{# developer #}" + END,
    "named": {"default": LOOP + "<{{ m.role }}>{{ m.content }}" + END, "tool_use": "T" + QWEN},
    "loses results": LOOP + "{% if m.role in ['user', 'system'] %}{{ m.content }}{% endif %}" + END,
}  # fmt: skip
TEXTS = (
    "hi", "ok", "a", "What is the time in Zürich?", "line one\nline two", " blanks around \n", "漢字 😀 naïve",
    '{"a": "b\\n"}',
    "a<|im_end|>b", "<tool_call>", "x</think>y", "{{ m }}", "a text that is longer than a few letters, and repeated " * 2,
    "",
)  # fmt: skip
VALUES = (
    1, -1, 2**53 + 1, 10**30, 0.5, 1e-7, True, None, "", "Zürich", "漢 \"q\" \\ \n", "<|im_end|>", [], {},
    [1, {"b": 2, "a": 1}],
    {"é": "ü"},
)  # fmt: skip
BROKEN = ('{"a": 1', "not JSON", "[1,", '"text"', '{"a": NaN}')
TOOLS = [
    {
        "name": "now",
        "description": "the time",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
    {"name": "look", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
]
ANSWERS = (
    "Grüße, and more", "one STOP two", "<think>hm\n</think>\n\nSo it is.", "<think>without an end",
    '<tool_call>\n{"name": "now", "arguments": {"at": "Zürich", "n": 12345678901234567891}}\n</tool_call>',
    'Look:\n<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>\n{"name": "now", '
    '"arguments": {}}\n</tool_call>',
)  # fmt: skip


# -- conversations ---------------------------------------------------------------------------------------------------


@dataclass
class Turn:
    """What one side says."""

    role: str
    text: str = ""
    thought: str = ""
    calls: list[tuple[str, str, Any]] = field(
        default_factory=list
    )  # (id, name, arguments: an object, or a broken text)
    call: str = ""  # of a result: the id


@dataclass
class Case:
    """One conversation, and how it is asked."""

    template: str
    turns: list[Turn]
    tools: list[dict[str, Any]]
    model: str
    limit: int
    draw: random.Random  # of spellings


def case(seed: int, number: int) -> Case:
    """Case ``number``."""
    draw = random.Random(f"{seed}/{number}")
    turns: list[Turn] = []
    if draw.random() < 0.4:
        turns.append(Turn(draw.choice(("system", "system", "developer")), draw.choice(TEXTS)))
    count = 0
    for _ in range(draw.choice((1, 1, 2, 2, 3, 5))):
        turns += [Turn("user", draw.choice(TEXTS)) for _ in range(draw.choice((1, 1, 1, 1, 2)))]
        if draw.random() < 0.1:
            turns.append(Turn("system", draw.choice(TEXTS)))
        if draw.random() < 0.3:
            continue
        said = Turn("assistant", draw.choice(TEXTS), draw.choice(("", "", "hm, a thought", "two\nlines")))
        if draw.random() < 0.5:
            for _ in range(draw.choice((1, 1, 2, 3))):
                count += 1
                broken = draw.random() < 0.05
                given = draw.choice(BROKEN) if broken else {
                    draw.choice(("at", "b", "a", "é")): draw.choice(VALUES) for _ in range(draw.choice((0, 1, 2, 4)))
                }  # fmt: skip
                said.calls.append((f"call{count:05}", draw.choice(("now", "look", "other")), given))
            turns.append(said)
            results = [Turn("tool", draw.choice(TEXTS), call=each[0]) for each in said.calls]
            draw.shuffle(results)
            turns += results if draw.random() < 0.95 else results[1:]  # one is missing: refused
        else:
            turns.append(said)
    if turns[-1].role == "assistant" and draw.random() < 0.7:
        turns.append(Turn("user", draw.choice(TEXTS)))
    tools = draw.sample(TOOLS, draw.choice((1, 2))) if draw.random() < 0.4 else []
    return Case(
        draw.choice(list(TEMPLATES)), turns, tools, draw.choice(("", "", TENANT)), draw.choice((3, 40, 200, 200)), draw
    )


def is_object(one: Turn) -> bool:
    """Whether all its calls have objects, which some doors take alone."""
    return all(isinstance(given, dict) for *_, given in one.calls)


def spelt(draw: random.Random, given: Any) -> str:
    """Arguments as a text, in one of its spellings."""
    if not isinstance(given, dict):
        return str(given)
    if not given:
        return draw.choice(("", "{}", "null", " { } "))
    separators = draw.choice(((",", ":"), (", ", ": "), (" ,\n", " : ")))
    return json.dumps(given, ensure_ascii=draw.random() < 0.5, separators=separators)


def in_parts(draw: random.Random, text: str, kind: str = "text", at: str = "") -> Any:
    """A text, or parts of it. at: where it is cut, which the door puts back; anywhere."""
    if draw.random() < 0.6:
        return text
    if at:
        pieces = text.split(at)
    else:
        cut = draw.randrange(len(text) + 1)
        pieces = [text[:cut], text[cut:]]
    return [{"type": kind, "text": piece} for piece in pieces]


def as_chat(one: Case) -> dict[str, Any]:
    """The case for /v1/chat/completions, for /tokenize and for the engine."""
    messages = []
    for turn in one.turns:
        made: dict[str, Any] = {"role": turn.role, "content": in_parts(one.draw, turn.text)}
        if turn.thought:
            made[one.draw.choice(("reasoning_content", "reasoning"))] = turn.thought
        if turn.calls:
            made["tool_calls"] = [
                {"id": name, "type": "function", "function": {"name": called, "arguments": spelt(one.draw, given)}}
                for name, called, given in turn.calls
            ]
            if not turn.text and one.draw.random() < 0.5:
                made["content"] = None
        if turn.role == "tool":
            made["tool_call_id"] = turn.call
        messages.append(made)
    goes_on = one.turns[-1].role == "assistant" and not one.turns[-1].calls
    tools = {"tools": [{"type": "function", "function": tool} for tool in one.tools]} if one.tools else {}
    return {"messages": messages, **tools, **({"continue_final_message": True} if goes_on else {})}


def as_messages(one: Case) -> dict[str, Any] | None:
    """The case for /v1/messages; None where it cannot be said there."""
    roles = [turn.role for turn in one.turns]
    if "developer" in roles or not all(map(is_object, one.turns)):
        return None
    turns, made, system = list(one.turns), list[dict[str, Any]](), {}
    if turns[0].role == "system" and turns[0].text and one.draw.random() < 0.7 and len(turns) > 1:
        system = {"system": in_parts(one.draw, turns.pop(0).text, at="\n")}
    for turn in turns:
        if turn.role == "tool":
            text = in_parts(one.draw, turn.text, at="\n")
            block = {"type": "tool_result", "tool_use_id": turn.call, "content": text}
            if made and made[-1]["role"] == "user" and made[-1]["content"][0]["type"] == "tool_result":
                made[-1]["content"].append(block)
            else:
                made.append({"role": "user", "content": [block]})
        elif turn.role != "assistant":
            made.append({"role": turn.role, "content": in_parts(one.draw, turn.text, at="\n")})
        else:
            thought = [{"type": "thinking", "thinking": turn.thought, "signature": ""}] if turn.thought else []
            calls = [
                {"type": "tool_use", "id": name, "name": called, "input": given} for name, called, given in turn.calls
            ]
            said = in_parts(one.draw, turn.text)
            texts = [{"type": "text", "text": said}] if isinstance(said, str) else said
            made.append({"role": "assistant", "content": [*thought, *texts, *calls]})
    names = {"parameters": "input_schema"}
    tools = [{names.get(key, key): value for key, value in tool.items()} for tool in one.tools]
    return {"messages": made, **system, **({"tools": tools} if tools else {})}


def as_response(one: Case) -> dict[str, Any] | None:
    """The case for /v1/responses."""
    if one.turns[-1].role == "assistant" and not one.turns[-1].calls:
        return None  # nothing is gone on with there
    items: list[dict[str, Any]] = []
    for turn in one.turns:
        if turn.role == "tool":
            output = in_parts(one.draw, turn.text, "input_text")
            items.append({"type": "function_call_output", "call_id": turn.call, "output": output})
            continue
        if turn.thought:
            kind = one.draw.choice(("summary", "content"))
            part = {"type": "summary_text" if kind == "summary" else "reasoning_text", "text": turn.thought}
            items.append({"type": "reasoning", "summary": [], kind: [part]})
        if turn.text or turn.role != "assistant" or not (turn.calls or turn.thought):
            part_type = "output_text" if turn.role == "assistant" else "input_text"
            items.append({"role": turn.role, "content": in_parts(one.draw, turn.text, part_type)})
        items += [
            {"type": "function_call", "call_id": name, "name": called, "arguments": spelt(one.draw, given)}
            for name, called, given in turn.calls
        ]
    return {"input": items, **({"tools": [{"type": "function", **tool} for tool in one.tools]} if one.tools else {})}


def as_ollama(one: Case) -> dict[str, Any] | None:
    """The case for /api/chat."""
    last = one.turns[-1]
    roles = [turn.role for turn in one.turns]
    if "developer" in roles or (last.role == "assistant" and not last.calls) or not all(map(is_object, one.turns)):
        return None
    has_ids = one.draw.random() < 0.5
    names = {name: called for turn in one.turns for name, called, _ in turn.calls}
    messages = []
    for turn in one.turns:
        made: dict[str, Any] = {"role": turn.role, "content": turn.text}
        if turn.thought:
            made["thinking"] = turn.thought
        if turn.calls:
            made["tool_calls"] = [
                {**({"id": name} if has_ids else {}), "function": {"name": called, "arguments": given}}
                for name, called, given in turn.calls
            ]
        if turn.role == "tool":
            made |= {"tool_call_id": turn.call} if has_ids else {"tool_name": names[turn.call]}
        messages.append(made)
    if not has_ids and any(len({called for _, called, _ in turn.calls}) < len(turn.calls) for turn in one.turns):
        return None  # results of calls of one name cannot be told apart
    tools = {"tools": [{"type": "function", "function": tool} for tool in one.tools]} if one.tools else {}
    return {"messages": messages, **tools}


def as_generate(one: Case) -> dict[str, Any] | None:
    """The case for /api/generate: a prompt, and what the system says."""
    roles, texts = [turn.role for turn in one.turns], [turn.text for turn in one.turns]
    if roles not in (["user"], ["system", "user"]) or one.tools or not all(texts):
        return None
    return {"prompt": texts[-1], **({"system": texts[0]} if len(texts) == 2 else {})}


# -- answers ---------------------------------------------------------------------------------------------------------


@dataclass
class Said:
    """What came of a case by one door."""

    status: int = 200
    ids: tuple[int, ...] = ()
    lora: str | None = None
    text: str = ""
    thought: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # (name, arguments: JSON, {} where they were cut off)
    end: str = ""
    why: str = field(default="", compare=False)


def call_of(name: str, arguments: Any) -> tuple[str, str]:
    """A call, whether its arguments came as an object or as a text."""
    try:
        given = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        given = {}
    return name, json.dumps(given)


def of_chat(parts: list[dict[str, Any]], said: Said) -> None:
    """One reply, or the chunks of a stream."""
    calls: dict[int, list[str]] = {}
    for part in parts:
        for choice in part["choices"]:
            given = choice.get("message") or choice["delta"]
            said.text += given.get("content") or ""
            said.thought += given.get("reasoning_content") or ""
            for at, call in enumerate(given.get("tool_calls") or ()):
                made = calls.setdefault(call.get("index", at), ["", ""])
                made[0] += call["function"].get("name") or ""
                made[1] += call["function"].get("arguments") or ""
            said.end = choice.get("finish_reason") or said.end
    said.calls = [call_of(*calls[at]) for at in sorted(calls)]


def of_messages(parts: list[dict[str, Any]], said: Said) -> None:
    blocks: list[dict[str, Any]] = []
    for part in parts:
        kind = part["type"]
        if kind == "message":
            blocks, said.end = part["content"], part["stop_reason"]
        elif kind == "content_block_start":
            blocks.append({**part["content_block"], "json": ""})
        elif kind == "content_block_delta":
            for key in ("text", "thinking", "partial_json"):
                name = "json" if key == "partial_json" else key
                if key in part["delta"]:
                    blocks[part["index"]][name] += part["delta"][key]
        elif kind == "message_delta":
            said.end = part["delta"]["stop_reason"]
    said.text = "".join(one["text"] for one in blocks if one["type"] == "text")
    said.thought = "".join(one["thinking"] for one in blocks if one["type"] == "thinking")
    said.calls = [call_of(one["name"], one.get("json") or one["input"]) for one in blocks if one["type"] == "tool_use"]
    ends = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
    said.end = ends[said.end]


def of_response(parts: list[dict[str, Any]], said: Said) -> None:
    whole = parts[-1].get("response", parts[-1])
    for item in whole["output"]:
        texts = "".join(piece.get("text", "") for piece in item.get("content") or ())
        if item["type"] == "function_call":
            said.calls.append(call_of(item["name"], item["arguments"]))
        elif item["type"] == "reasoning":
            said.thought += texts or "".join(piece["text"] for piece in item["summary"])
        else:
            said.text += texts
    told = "".join(part["delta"] for part in parts if part.get("type") == "response.output_text.delta")
    if len(parts) > 1 and told != said.text:
        said.text += f" [the stream's pieces: {told!r}]"
    said.end = "length" if whole["status"] == "incomplete" else "tool_calls" if said.calls else "stop"


def of_ollama(parts: list[dict[str, Any]], said: Said) -> None:
    for part in parts:
        given = part.get("message", part)
        said.text += given.get("content") or given.get("response") or ""
        said.thought += given.get("thinking") or ""
        said.calls += [
            call_of(one["function"]["name"], one["function"]["arguments"]) for one in given.get("tool_calls", ())
        ]
        said.end = part.get("done_reason") or said.end
    said.end = "tool_calls" if said.calls and said.end == "stop" else said.end


READ = {CHAT: of_chat, MESSAGES: of_messages, RESPONSES: of_response, OLLAMA: of_ollama, GENERATE: of_ollama}


class Doors:
    """A server, and what its service was given."""

    def __init__(self, client: httpx.Client, service: Any, backend: Backend) -> None:
        self.client, self.service, self.tokenizer, self.backend = client, service, service.engine.tokenizer, backend
        self.given: list[Any] = []
        submit = service.submit

        def record(submission: Any, sink: Any) -> None:
            self.given.append(submission)
            submit(submission, sink)

        service.submit = record

    def ask(self, path: str, body: Mapping[str, Any], one: Case, *, stream: bool) -> Said:
        """The answer of one door."""
        limit, stop = one.limit, ["STOP"]
        own: dict[str, Any] = {"stream": stream, "model": one.model or None}
        if path in (OLLAMA, GENERATE):
            own["options"] = {"num_predict": limit, "stop": stop, "seed": 1, "temperature": 0}
        else:
            own |= {"max_tokens": limit, "seed": 1, "temperature": 0, "stop": stop}
        self.given.clear()
        answer = self.client.post(path, json={**body, **own})
        if answer.status_code != 200:
            return Said(answer.status_code, why=answer.text)
        lines = answer.text.splitlines()
        told = [line.removeprefix("data: ") for line in lines if line.startswith(("data: {", "{"))]
        texts = told if stream else [answer.text]
        (given,) = self.given
        said = Said(ids=tuple(given.prompt_ids), lora=given.lora)
        READ[path]([json.loads(text) for text in texts], said)
        return said

    def prompt(self, path: str, body: Mapping[str, Any], one: Case) -> Said:
        """The prompt of one door, as its route makes it."""
        kind, as_chat = KINDS[path]
        try:
            chat = as_chat(parse(kind, json.dumps({**body, "model": one.model or None}).encode()))
            return Said(ids=tuple(prompt_of(self.backend, chat)), lora=self.backend.served(chat.model)[1])
        except ApiError as error:
            return Said(error.status, why=str(error))

    def count(self, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        """(status, the tokens or their number) of a route that counts."""
        answer = self.client.post(path, json=body)
        made = answer.json()
        return answer.status_code, made.get("input_tokens", tuple(made.get("tokens", ())))


def differences(doors: Doors, one: Case, tally: Counter[str], *, answered: bool = True) -> Iterator[str]:
    """Where a door is not as the first one. answered: else prompts alone are compared."""
    doors.tokenizer.chat_template = TEMPLATES[one.template]
    chat = as_chat(one)
    bodies = {
        CHAT: chat, MESSAGES: as_messages(one), RESPONSES: as_response(one), OLLAMA: as_ollama(one),
        GENERATE: as_generate(one),
    }  # fmt: skip
    first: Said | None = None
    for path, body in bodies.items():
        for stream in (False, True) if answered and body is not None else (False,) if body is not None else ():
            got = doors.ask(path, body or {}, one, stream=stream) if answered else doors.prompt(path, body or {}, one)
            tally[path] += 1
            first = first or got
            if got != first:
                shown = f"{_shown(doors, got)} instead of {_shown(doors, first)}"
                yield f"{path}{', streamed' if stream else ''}: {shown}\n{body}"
    tally["served" if first.status == 200 else "refused"] += 1
    if answered:
        tally[f"end {first.end}"] += 1
        tally["thoughts"] += bool(first.thought)
        tally["calls"] += bool(first.calls)
        yield from _counts(doors, bodies, first)
    # What a server alone does aside: tools, thoughts by the template, and results put in order.
    is_plain = not one.tools and not any(turn.thought or len(turn.calls) > 1 for turn in one.turns)
    if is_plain and "continue_final_message" not in chat and first.status == 200:
        tally["Engine.chat_prompt"] += 1
        try:
            ids = tuple(Engine.chat_prompt(cast(Engine, doors.service.engine), chat["messages"]))
        except PromptError as error:
            yield f"Engine.chat_prompt: {error}\n{chat}"
        else:
            if ids != first.ids:
                yield f"Engine.chat_prompt: {doors.tokenizer.decode(ids)!r} instead of {_shown(doors, first)}\n{chat}"


def _counts(doors: Doors, bodies: Mapping[str, Any], first: Said) -> Iterator[str]:
    """Where a route that counts does not count the prompt."""
    told = doors.count("/tokenize", bodies[CHAT])
    if told != (first.status, first.ids):
        yield f"/tokenize: {told}\n{bodies[CHAT]}"
    if bodies[MESSAGES] is not None:
        told = doors.count(f"{MESSAGES}/count_tokens", bodies[MESSAGES])
        if told[0] != first.status or (told[0] == 200 and told[1] != len(first.ids)):
            yield f"count_tokens: {told} instead of {len(first.ids)}\n{bodies[MESSAGES]}"


def _shown(doors: Doors, said: Said) -> str:
    prompt = doors.tokenizer.decode(said.ids)
    return f"{said.status} {said.why or (prompt, said.lora, said.text, said.thought, said.calls, said.end)!r}"


@contextmanager
def opened(*, decode: bool = False) -> Iterator[Doors]:
    """A server in this process."""
    service: Any
    if decode:
        service = Service(Engine.load("bundled"), ServiceOptions(max_num_seqs=4, speculation="off"))
        service.engine.model.loras = ()
        service.start()
    else:
        tokenizer = load_tokenizer("bundled")
        said = [tokenizer.encode(text, add_special_tokens=False) for text in ANSWERS]

        def script(submission: Any) -> list[int]:
            return [*said[zlib.crc32(str(list(submission.prompt_ids)).encode()) % len(said)], EOS]

        service = FakeService(script)
        service.engine.tokenizer = tokenizer
        service.engine.model.loras = (TENANT,)
        model = service.engine.model
        model.spec = replace(model.spec, vocab_size=8200, eos_token_ids=(EOS, 2))
    app = build_app(service)
    with live(app) as url, httpx.Client(base_url=url, timeout=120) as client:
        yield Doors(client, service, app.state.backend)
    if decode:
        service.close()


def differ(doors: Doors, seed: int, numbers: range, tally: Counter[str], *, each: int = 1) -> list[str]:
    """What differs in these cases, in words. each: one of so many is answered."""
    wrong = []
    for number in numbers:
        one = case(seed, number)
        if not doors.service.engine.model.loras:
            one = replace(one, model="")
        tally[f"template {one.template}"] += 1
        for line in differences(doors, one, tally, answered=number % each == 0):
            wrong.append(f"--seed {seed} --only {number}, {one.template}, {line}")
            print(wrong[-1], file=sys.stderr, flush=True)
    return wrong


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, metavar="NUMBER", help="this case alone")
    parser.add_argument("--decode", action="store_true", help="by the bundled model, without adapters")
    args = parser.parse_args(argv)
    numbers, tally = range(args.cases) if args.only is None else range(args.only, args.only + 1), Counter[str]()
    with opened(decode=args.decode) as doors:
        each = 1 if args.decode or args.only is not None else ANSWERED
        wrong = differ(doors, args.seed, numbers, tally, each=each)
    told = ", ".join(f"{count} {name}" for name, count in tally.items())
    checks = [
        Check("most are served", tally["served"] >= 0.5 * len(numbers), told),
        Check("one conversation, one prompt", not wrong, f"{len(wrong)} differ"),
    ]
    return report(checks, {"seed": args.seed, "cases": len(numbers), "counts": dict(tally)})


if __name__ == "__main__":
    sys.exit(main())
