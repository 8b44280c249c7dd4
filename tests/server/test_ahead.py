"""After an answer what the next prompt begins with is read ahead: as much as all next prompts have in common."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from foretell.model.load import load_tokenizer
from tests.server.conftest import Serve
from tests.server.fake import EOS, ByteTokenizer, FakeService

CALL = '<tool_call>\n{"name": "now",   "arguments": {}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]
SYSTEM = "You are brief, and you call a tool where one helps."


class Template(ByteTokenizer):
    """Writes calls its own way, closes turns, and leaves thoughts out before the last user's turn."""

    chat_template = "<think> and </think>; m.reasoning_content; tools as <tool_call>"

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        last = max((at for at, one in enumerate(messages) if one["role"] == "user"), default=0)
        text = ""
        for at, one in enumerate(messages):
            thought = one.get("reasoning_content")
            inside = f"<think>{thought}</think>" if thought and at > last else ""
            calls = "".join(f"<tool_call>{call['function']}</tool_call>" for call in one.get("tool_calls") or ())
            text += f"<{one['role']}>{inside}{one.get('content') or ''}{calls}<end of turn>\n"
        return text + ("<assistant>" if options.get("add_generation_prompt") else "")


def server(serve: Serve, *texts: str) -> tuple[Any, FakeService]:
    service = FakeService()
    service.engine.tokenizer = Template()
    service.script = lambda _: [*texts[min(len(service.submitted), len(texts)) - 1].encode(), EOS]
    return serve(service), service


def ask(client: Any, messages: list[Any], **more: Any) -> Any:
    answer = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 300, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


def prepared(service: FakeService) -> bytes:
    assert service.was_prepared.wait(10)
    service.was_prepared.clear()
    ids = list(service.prepared[-1].prompt_ids)
    return bytes(ids)


START: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "What time is it?"}]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_read_as_its_template_writes_it(serve: Serve, stream: bool) -> None:
    said = "It is noon, as far as I can tell."
    client, service = server(serve, f"<think>Hm, noon.</think>\n\n{said}")
    if stream:
        body = {"messages": START, "stream": True, "max_tokens": 300}
        assert client.post("/v1/chat/completions", json=body).text.endswith("[DONE]\n\n")
    else:
        assert ask(client, START)["content"] == said
    read = prepared(service)
    for follow in ("And now?", "B"):
        after = [*START, {"role": "assistant", "content": said}, {"role": "user", "content": follow}]
        ask(client, after)
        assert bytes(service.submitted[-1].prompt_ids).startswith(read)
    assert read.decode().endswith(f"<assistant>{said}<end of turn>\n<user>")


JINJA = """{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>
{{ c.function | tojson }}</tool_call>{% endfor %} end of turn
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}{# tools #}"""


@pytest.mark.parametrize("count", [1, 2])
def test_calls_are_read_as_they_come_back(serve: Serve, count: int) -> None:
    """Of several up to the first result."""
    service = FakeService()
    tokenizer = service.engine.tokenizer = load_tokenizer("bundled")
    tokenizer.chat_template = JINJA
    model = service.engine.model
    model.spec = replace(model.spec, vocab_size=8200, eos_token_ids=(EOS, 2))
    said = tokenizer.encode("\n".join([CALL] * count), add_special_tokens=False)
    service.script = lambda _: [*said, EOS]
    client = serve(service)
    calls = ask(client, START, tools=TOOLS)["tool_calls"]
    assert len(calls) == count
    assert service.was_prepared.wait(10)
    read = list(service.prepared[-1].prompt_ids)
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "12:00"} for call in calls]
    ask(client, [*START, {"role": "assistant", "content": None, "tool_calls": calls}, *results], tools=TOOLS)
    assert list(service.submitted[-1].prompt_ids[: len(read)]) == read
    more = tokenizer.decode(read).removeprefix(tokenizer.decode(service.submitted[0].prompt_ids))
    assert more.count("<tool_call>") == count
    assert more.removesuffix("<tool>").endswith("end of turn\n")


def test_nothing_is_read_where_the_answer_says_it_all(serve: Serve) -> None:
    """What was read with the answer, or nearly, and what nobody knows: texts that a limit cut, several, other requests."""
    client, service = server(serve, "A plain answer.")
    ask(client, START, max_tokens=3)
    ask(client, START, n=2)
    ask(client, [*START, {"role": "assistant", "content": "It is"}], continue_final_message=True)
    ask(client, START)  # closes its turn alone: "<end of turn>\n<user>" is more than a few tokens
    assert prepared(service).endswith(b"A plain answer.<end of turn>\n<user>")
    assert len(service.prepared) == 1


def test_the_conversation_is_rendered_once_more(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long one takes tens of milliseconds, of which the next request would wait."""
    client, service = server(serve, "A plain answer, as long as it has to be.")
    rendered, whole = list[Any](), Template.apply_chat_template
    monkeypatch.setattr(
        Template, "apply_chat_template", lambda *given, **how: rendered.append(given[1]) or whole(*given, **how)
    )
    ask(client, START)
    prepared(service)
    before = len(rendered)
    ask(client, START)
    prepared(service)
    assert [len(one) for one in rendered[before:]] == [2, 4]


def test_whose_text_it_is_stays_known(serve: Serve) -> None:
    client, service = server(serve, "A plain answer.")
    client.post(
        "/v1/chat/completions", json={"messages": START, "store": False}, headers={"authorization": "Bearer someone"}
    )
    prepared(service)
    asked, made = service.submitted[-1], service.prepared[-1]
    assert (made.owner, made.store, made.speculative) == (asked.owner, asked.store, asked.speculative)
    assert not made.store
